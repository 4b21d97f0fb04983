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

/// Creates `/tmp/rouse-<hash of the data directory>`, or reuses the one of an earlier start.
///
/// It is not in the data directory, because the path of a socket is limited to 107 bytes and Postgres splits its list
/// of directories at commas. It is the same at each start, so that connection strings stay valid. Its mode, 0700, and
/// its owner, the server's user, restrict who may connect.
pub(super) fn directory(home: &Home) -> Result<PathBuf, StartError> {
    let path = PathBuf::from(format!("/tmp/rouse-{}", short_hash(&home.dir)));
    match DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => home.account.own(&path)?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            take_over(&path, &home.account)?;
        }
        Err(error) => {
            return Err(error).trying(|| format!("create the directory {}", path.display()));
        }
    }
    Ok(path)
}

/// Any user can create a directory in /tmp, so an existing one is used only if no other user can access it.
fn take_over(path: &PathBuf, account: &Account) -> Result<(), StartError> {
    let found = fs::symlink_metadata(path)
        .trying(|| format!("read the owner and mode of {}", path.display()))?;
    if !found.is_dir() || found.mode() & 0o077 != 0 {
        let error = io::Error::other("it is not a directory of mode 0700: remove it");
        return Err(error).trying(|| format!("use {} for the socket", path.display()));
    }
    // Owned by root: an earlier start ended between creating it and changing its owner.
    if found.uid() == rustix::process::geteuid().as_raw() {
        account.own(path)?;
    }
    account.must_own(path)
}
