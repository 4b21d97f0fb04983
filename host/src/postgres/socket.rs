//! The directory of the Unix socket.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::PathBuf,
};

use super::{
    StartError,
    account::Account,
    error::Trying,
    home::{Home, short_hash},
};

/// Makes `/tmp/rouse-<hash of the data directory>`, or takes it over from an earlier life.
///
/// It is not in the data directory, because a socket's path ends at 107 bytes and Postgres splits
/// its list of directories at commas. It is the same at each start, so that a connection string
/// stays good. Who may connect is decided by its mode: 0700, and owned by the server's user.
pub(super) fn directory(home: &Home) -> Result<PathBuf, StartError> {
    let path = PathBuf::from(format!("/tmp/rouse-{}", short_hash(&home.dir)));
    match DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => home.account.own(&path)?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            take_over(&path, &home.account)?;
        }
        Err(error) => {
            return Err(error).trying(|| format!("make the directory {}", path.display()));
        }
    }
    Ok(path)
}

/// Anybody can make a directory in /tmp, so one that is there already is only used where nobody
/// else can get at it.
fn take_over(path: &PathBuf, account: &Account) -> Result<(), StartError> {
    let found = fs::symlink_metadata(path).trying(|| format!("look at {}", path.display()))?;
    if !found.is_dir() || found.mode() & 0o077 != 0 {
        let error = io::Error::other("it is not a directory of mode 0700: remove it");
        return Err(error).trying(|| format!("use {} for the socket", path.display()));
    }
    // Root's own: an earlier start ended between making it and giving it away.
    if found.uid() == rustix::process::geteuid().as_raw() {
        account.own(path)?;
    }
    account.must_own(path)
}
