//! Tests of rouse.toml: which keys it may have, and what they mean.

mod dirs;
mod host;
mod in_force;
mod mistakes;
mod modules;
mod page;
mod requests;

use super::File;

fn read(text: &str) -> Result<File, String> {
    let dir = std::env::temp_dir().join(format!("rouse-config-{}", rand::random::<u64>()));
    std::fs::create_dir(&dir).unwrap();
    let path = dir.join("rouse.toml");
    std::fs::write(&path, text).unwrap();
    let read = File::read(Some(&path))
        .map(|(file, _)| file)
        .map_err(|e| e.to_string());
    std::fs::remove_dir_all(&dir).unwrap();
    read
}
