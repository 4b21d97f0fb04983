//! Files that hold a secret text: the tokens of invocations, and secrets of handlers.

use std::path::Path;

use anyhow::bail;

use super::private_file::read_private;

/// More than any secret or list of tokens. A large file that was named by mistake is refused.
const FILE_BYTES_MAX: usize = 4 << 10;

/// The text of a file with tokens, one per line, without the last line break.
///
/// # Errors
/// If the file cannot be read, is readable by others, is not text, or is too large.
pub fn read_tokens(path: &Path) -> anyhow::Result<String> {
    read_text(path, "token")
}

/// The trimmed text of a file that only its owner may read.
pub(super) fn read_text(path: &Path, kind: &str) -> anyhow::Result<String> {
    let bytes = read_private(path, kind, FILE_BYTES_MAX)?;
    if bytes.len() > FILE_BYTES_MAX {
        bail!(
            "{} is not a {kind}: it is more than {FILE_BYTES_MAX} bytes long",
            path.display()
        );
    }
    match str::from_utf8(&bytes) {
        Ok(text) => Ok(text.trim().to_string()),
        Err(_) => bail!("{} is not a {kind}: it is not UTF-8", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_token_is_read_without_its_line_break_from_a_private_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let read = |text: &[u8], mode: u32| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            read_tokens(&path).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(
            read(b"open sesame, please\n", 0o600).unwrap(),
            "open sesame, please"
        );
        assert!(read(b"x", 0o640).unwrap_err().contains("chmod 600"));
        assert!(read(b"\xff", 0o600).unwrap_err().contains("not UTF-8"));
        assert!(
            read(&[b'x'; 5000], 0o600)
                .unwrap_err()
                .contains("more than 4096 bytes")
        );
        let nowhere = read_tokens(Path::new("/nowhere/token")).unwrap_err();
        assert!(format!("{nowhere:#}").starts_with("open the token /nowhere/token"));
    }
}
