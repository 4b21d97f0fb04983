//! The file with the token that invocations have to show.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};

/// Longer than any token; whoever names a large file by mistake is told so.
const FILE_BYTES_MAX: u64 = 4 << 10;

/// The token in this file, without the line break behind it.
///
/// # Errors
/// When the file cannot be read, others may read it, or it is no text of such a size.
pub fn read_token(path: &Path) -> anyhow::Result<String> {
    let file = File::open(path).with_context(|| format!("open the token {}", path.display()))?;
    if file.metadata()?.mode() & 0o077 != 0 {
        bail!(
            "others may read the token {}; run `chmod 600` on it",
            path.display()
        );
    }
    let mut token = String::new();
    file.take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut token)
        .with_context(|| format!("read the token {}", path.display()))?;
    if token.len() as u64 > FILE_BYTES_MAX {
        bail!(
            "{} is no token: it has more than {FILE_BYTES_MAX} bytes",
            path.display()
        );
    }
    Ok(token.trim().to_string())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_token_is_read_without_its_line_break_and_only_where_nobody_else_can() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let read = |text: &str, mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            read_token(&path).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(
            read("open sesame, please\n", 0o600).unwrap(),
            "open sesame, please"
        );
        assert!(read("x", 0o640).unwrap_err().contains("chmod 600"));
        assert!(
            read(&"x".repeat(5000), 0o600)
                .unwrap_err()
                .contains("more than 4096 bytes")
        );
        let nowhere = read_token(Path::new("/nowhere/token")).unwrap_err();
        assert!(format!("{nowhere:#}").starts_with("open the token /nowhere/token"));
    }
}
