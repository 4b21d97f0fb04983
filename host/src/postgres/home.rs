//! The data directory: its layout, its permissions, and its lock.
//!
//! `cluster/` belongs to the server. Next to it are files of the host: `lock`, `password`, `server.log`, `binaries/`.
//! If the host runs as root, the directory itself stays owned by root, so that the server's user cannot replace these
//! files with links.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{Read, Seek, SeekFrom, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use sha2::{Digest, Sha256};

use super::{StartError, account::Account, error::Trying};

/// The folder for data whose own directory the server's user cannot reach.
const FALLBACK_ROOT: &str = "/var/lib/rouse";

/// A data directory that this process has locked.
#[derive(Debug)]
pub(super) struct Home {
    pub(super) dir: PathBuf,
    pub(super) account: Account,
    /// Locked until it is dropped.
    lock: File,
}

impl Home {
    /// Creates the directory if needed, determines the user that will run the server, and takes the lock.
    pub(super) fn open(wanted: &Path) -> Result<Self, StartError> {
        let wanted = std::path::absolute(wanted).trying(|| "find the current directory".into())?;
        make_dir(&wanted)?;
        let wanted = fs::canonicalize(&wanted)
            .trying(|| format!("resolve the path {}", wanted.display()))?;
        let account = Account::choose(&wanted.join("cluster"))?;
        if account.can_enter(&wanted) {
            return Self::lock(wanted, account);
        }
        let dir = fallback(&wanted);
        make_dir(&dir)?;
        tracing::info!(
            "the user {} cannot access {}: using {} for the data",
            account.name,
            wanted.display(),
            dir.display()
        );
        let account = Account::choose(&dir.join("cluster"))?;
        Self::lock(dir, account)
    }

    fn lock(dir: PathBuf, account: Account) -> Result<Self, StartError> {
        let path = dir.join("lock");
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .trying(|| format!("open {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // The content is for the error message only: if the file is unreadable, the holder stays unnamed.
                let _ = file.read_to_string(&mut holder);
                let holder = match holder.trim() {
                    "" => "unknown process".to_owned(),
                    pid => format!("pid {pid}"),
                };
                return Err(StartError::Locked {
                    data_dir: dir,
                    holder,
                });
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).trying(|| format!("lock {}", path.display()));
            }
        }
        let written = file
            .set_len(0)
            .and_then(|()| file.seek(SeekFrom::Start(0)))
            .and_then(|_| writeln!(file, "{}", std::process::id()));
        written.trying(|| format!("write {}", path.display()))?;
        Ok(Self {
            dir,
            account,
            lock: file,
        })
    }

    pub(super) fn cluster(&self) -> PathBuf {
        self.dir.join("cluster")
    }

    pub(super) fn log_path(&self) -> PathBuf {
        self.dir.join("server.log")
    }

    pub(super) fn password_path(&self) -> PathBuf {
        self.dir.join("password")
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // Closing the file is not enough: a child that another thread has just forked holds it open, and with it the
        // lock, until exec. Unlocking fails only if there is no lock.
        let _ = self.lock.unlock();
    }
}

/// The replacement for a directory that the server's user cannot reach.
pub(super) fn fallback(wanted: &Path) -> PathBuf {
    Path::new(FALLBACK_ROOT).join(short_hash(wanted))
}

impl Account {
    /// True if this account can enter a directory. This is tried, not computed, so that access control lists and mount
    /// options count too.
    fn can_enter(&self, dir: &Path) -> bool {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", ":"])
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.run_as(&mut command);
        command.status().is_ok_and(|status| status.success())
    }
}

/// Creates a directory and its missing parents. The directory gets mode 0711 if this process runs as root, because the
/// server's user has to get through to `cluster/`, and mode 0700 otherwise.
fn make_dir(dir: &Path) -> Result<(), StartError> {
    if dir.is_dir() {
        return Ok(());
    }
    let operation = || format!("create the directory {}", dir.display());
    let root = rustix::process::geteuid().is_root();
    if let Some(parent) = dir.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(parent)
            .trying(operation)?;
    }
    DirBuilder::new()
        .recursive(true)
        .create(dir)
        .and_then(|()| {
            // Set separately, because the umask would restrict the builder's mode.
            let mode = if root { 0o711 } else { 0o700 };
            fs::set_permissions(dir, fs::Permissions::from_mode(mode))
        })
        .trying(operation)
}

/// Twelve hexadecimal digits of a path's hash.
pub(super) fn short_hash(path: &Path) -> String {
    let digest = Sha256::digest(path.as_os_str().as_encoded_bytes());
    digest[..6]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
