//! Files that only their owner may read.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};

use crate::read_in_time::read_in_time;

/// The bytes of a file that only its owner may read: at most `bytes_max` and one more, which shows that the file is
/// larger. `kind` names it in messages.
///
/// # Errors
/// If it cannot be read, or is readable by others. The source is the error of the system, for instance that the file
/// does not exist.
pub(super) fn read_private(path: &Path, kind: &str, bytes_max: usize) -> anyhow::Result<Vec<u8>> {
    let wanted = path.to_owned();
    let file = read_in_time(move || File::open(wanted))
        .with_context(|| format!("open the {kind} {}", path.display()))?;
    if file.metadata()?.mode() & 0o077 != 0 {
        bail!(
            "others may read the {kind} {}; run `chmod 600` on it",
            path.display()
        );
    }
    read_in_time(move || {
        let mut bytes = Vec::new();
        file.take(bytes_max as u64 + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    })
    .with_context(|| format!("read the {kind} {}", path.display()))
}
