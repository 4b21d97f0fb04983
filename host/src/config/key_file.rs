//! The file with a worker's key. A host that was killed needs it to take over its id at once.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::Context as _;

use super::private_file::read_private;

/// Bytes of a key.
const KEY_BYTES: usize = 32;

/// The key in this file. A missing file is created, readable by its owner only.
///
/// # Errors
/// If the file cannot be read or created, is not a key, or is readable by others.
pub fn read_or_make_key(path: &Path) -> anyhow::Result<[u8; KEY_BYTES]> {
    match read(path) {
        Err(error) if is_missing(&error) => {
            let created = create(path);
            let created =
                created.with_context(|| format!("create the worker key {}", path.display()))?;
            // `None`: another start has created it in the meantime.
            created.map_or_else(|| read(path), Ok)
        }
        other => other,
    }
}

fn read(path: &Path) -> anyhow::Result<[u8; KEY_BYTES]> {
    let bytes = read_private(path, "worker key", KEY_BYTES)?;
    let length = bytes.len();
    bytes.try_into().map_err(|_| {
        anyhow::anyhow!(
            "{} is not a worker key: it is {} bytes long, and a key is {KEY_BYTES} bytes long; remove it, and the next start creates a new one",
            path.display(),
            if length > KEY_BYTES {
                format!("more than {KEY_BYTES}")
            } else {
                length.to_string()
            }
        )
    })
}

fn is_missing(error: &anyhow::Error) -> bool {
    let system = error.downcast_ref::<io::Error>();
    system.is_some_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Writes a temporary file and links it, so that no reader sees half a key, and no key replaces another one. `None` if
/// the file exists by now.
fn create(path: &Path) -> anyhow::Result<Option<[u8; KEY_BYTES]>> {
    let key: [u8; KEY_BYTES] = rand::random();
    let mut temporary = path.as_os_str().to_owned();
    // Not the id of this process, which is always the same in a container: a file that an earlier start has left must
    // not be in the way.
    temporary.push(format!(".{:016x}", rand::random::<u64>()));
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)?;
    let written = file
        .write_all(&key)
        .and_then(|()| file.sync_all())
        .and_then(|()| match fs::hard_link(&temporary, path) {
            // The file system has no hard links.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP)) => {
                fs::rename(&temporary, path)
            }
            linked => linked,
        });
    // The result above is the one to report. After a rename, the file is gone.
    let _ = fs::remove_file(&temporary);
    match written {
        Ok(()) => Ok(Some(key)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    #[test]
    fn a_key_is_created_once_and_only_its_owner_can_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let key = read_or_make_key(&path).unwrap();
        assert_eq!(read_or_make_key(&path).unwrap(), key);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            1,
            "no temporary file is left"
        );
    }

    #[test]
    fn starts_that_create_the_file_at_once_use_the_same_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let created = create(&path).unwrap();
        assert!(created.is_some());
        assert_eq!(create(&path).unwrap(), None, "it has been created since");
        assert_eq!(Some(read_or_make_key(&path).unwrap()), created);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_an_earlier_start_has_left_is_not_in_the_way() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        // Half a key, of a process with the same id.
        let left = dir.path().join(format!("key.{}", std::process::id()));
        fs::write(&left, b"half").unwrap();
        let key = read_or_make_key(&path).unwrap();
        assert_eq!(read_or_make_key(&path).unwrap(), key);
    }

    #[test]
    fn an_invalid_key_is_rejected_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let error = |bytes: &[u8], mode: u32| {
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            format!("{:#}", read_or_make_key(&path).unwrap_err())
        };
        assert!(error(b"short", 0o600).contains("it is 5 bytes long"));
        assert!(error(&[0; 33], 0o600).contains("more than 32 bytes"));
        assert!(error(&[0; 32], 0o644).contains("chmod 600"));
        let nowhere = read_or_make_key(Path::new("/nowhere/key")).unwrap_err();
        assert!(format!("{nowhere:#}").starts_with("create the worker key /nowhere/key"));
    }
}
