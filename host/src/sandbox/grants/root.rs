//! Granted directories, opened once. A path can later lead to another directory; an open directory always stays the
//! same.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{CWD, Mode as FileMode, OFlags, openat};
use wasmtime_wasi::filesystem::Dir;
use wasmtime_wasi::{FsPerms, OpenMode};

use super::{Grants, Mode};

/// The granted directories of a host, by path.
pub(in crate::sandbox) struct Roots(HashMap<PathBuf, Arc<Root>>);

impl Roots {
    /// Opens all directories. A failure is logged; attempts that need the directory try again.
    pub(in crate::sandbox) fn open(grants: &Grants) -> Self {
        let mut roots = HashMap::new();
        for grant in &grants.0 {
            let root = roots.entry(grant.dir.clone());
            let root = root.or_insert_with(|| Root::new(&grant.dir));
            if let Err(error) = root.opened() {
                tracing::warn!(
                    handler = grant.handler,
                    "{}",
                    grant.cannot_be_opened(&error)
                );
            }
        }
        Self(roots)
    }

    /// The directory of one of the grants that these were opened with.
    pub(in crate::sandbox) fn get(&self, dir: &Path) -> Arc<Root> {
        let root = self.0.get(dir);
        root.expect("every granted directory has a root").clone()
    }
}

/// One granted directory, opened as soon as it exists.
pub(in crate::sandbox) struct Root {
    path: PathBuf,
    opened: OnceLock<Dir>,
}

impl Root {
    pub(in crate::sandbox) fn new(path: &Path) -> Arc<Self> {
        Arc::new(Self {
            path: path.into(),
            opened: OnceLock::new(),
        })
    }

    /// Its path in the grant.
    pub(in crate::sandbox) fn path(&self) -> &Path {
        &self.path
    }

    /// True if it was opened before.
    pub(in crate::sandbox) fn is_open(&self) -> bool {
        self.opened.get().is_some()
    }

    /// The directory that existed when it was first opened.
    pub(in crate::sandbox) fn opened(&self) -> io::Result<&File> {
        self.dir().map(|dir| &*dir.dir)
    }

    /// The directory with a guest's access.
    pub(in crate::sandbox) fn with(&self, mode: Mode) -> io::Result<Dir> {
        let mut dir = self.dir()?.clone();
        (dir.perms, dir.open_mode) = match mode {
            Mode::Read => (FsPerms::ReadOnly, OpenMode::READ),
            Mode::ReadWrite => (FsPerms::ReadWrite, OpenMode::READ | OpenMode::WRITE),
        };
        Ok(dir)
    }

    fn dir(&self) -> io::Result<&Dir> {
        if let Some(dir) = self.opened.get() {
            return Ok(dir);
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = File::from(openat(CWD, &self.path, flags, FileMode::empty())?);
        // If two threads open the directory at once, both use one result. Guests use it only on threads that may block,
        // hence `true`.
        let new = || Dir::new(dir, FsPerms::ReadOnly, OpenMode::READ, true);
        Ok(self.opened.get_or_init(new))
    }
}

impl fmt::Debug for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Root").field(&self.path).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_open_a_later_replacement_of_a_directory() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let root = Root::new(&at("in"));
        assert!(root.opened().is_err(), "it does not exist");
        std::fs::create_dir(at("in")).unwrap();
        let is_empty = |root: &Root| {
            let mut dir = rustix::fs::Dir::read_from(root.opened().unwrap()).unwrap();
            dir.all(|entry| entry.unwrap().file_name().to_bytes().starts_with(b"."))
        };
        assert!(is_empty(&root), "it was created since");

        std::fs::create_dir(at("other")).unwrap();
        std::fs::write(at("other/secret"), "").unwrap();
        std::fs::rename(at("in"), at("moved")).unwrap();
        std::os::unix::fs::symlink(at("other"), at("in")).unwrap();
        assert!(is_empty(&root) && !is_empty(&Root::new(&at("in"))));
    }

    #[test]
    fn a_pipe_instead_of_a_directory_fails_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let mode = FileMode::from_raw_mode(0o600);
        rustix::fs::mknodat(CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(Root::new(&pipe).opened().is_err());
    }
}
