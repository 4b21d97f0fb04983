//! One file on disk: its metadata and its bytes.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::OFlags;

use crate::sanitize::is_unsafe;

/// A file that was written to this recently may still be written to.
pub(super) const QUIET: Duration = Duration::from_millis(200);

/// Metadata that changes when a file is written to or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified_at: SystemTime,
    changed_at: (i64, i64),
}

impl Stamp {
    fn from_metadata(metadata: &Metadata) -> io::Result<Self> {
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified_at: metadata.modified()?,
            changed_at: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// The identity of the file, which a rename does not change.
    pub(super) fn identity(&self) -> Identity {
        (self.device, self.inode, self.bytes, self.modified_at)
    }

    /// The stamp of the file at this path; `None` if there is no file.
    pub(super) fn at(path: &Path) -> Option<Self> {
        fs::metadata(path)
            .and_then(|metadata| Self::from_metadata(&metadata))
            .ok()
    }

    /// The time since the last write; zero if that is in the future by this host's clock.
    pub(super) fn age(&self) -> Duration {
        self.modified_at.elapsed().unwrap_or(Duration::ZERO)
    }
}

/// Two stamps with the same identity belong to one file that was not visibly written to in between.
pub(super) type Identity = (u64, u64, u64, SystemTime);

/// A file in the folder.
pub(super) struct Listed {
    pub(super) path: PathBuf,
    pub(super) stamp: Stamp,
    /// The stamp of its signature file, if signatures are required and there is one.
    pub(super) signature: Option<Stamp>,
}

/// The path of a file's signature.
pub(super) fn signature_path(path: &Path) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(".sig");
    path.into()
}

/// The name of a file. Bytes that are not UTF-8 become `\xff`, so that no two files share a name.
pub(super) fn name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    match name.to_str() {
        Some(name) => name.into(),
        None => name.as_encoded_bytes().escape_ascii().to_string(),
    }
}

/// The files of a folder that could be modules, by name.
#[derive(Default)]
pub(super) struct Listing {
    pub(super) files: BTreeMap<String, Listed>,
    /// Files that may be there, and the reason why this cannot be determined.
    pub(super) unreadable: BTreeMap<String, Unusable>,
}

impl Listing {
    /// False if there is certainly no file of this name.
    pub(super) fn may_have(&self, name: &str) -> bool {
        self.files.contains_key(name) || self.unreadable.contains_key(name)
    }
}

/// True if a file of this name could be a module. Hidden files are skipped: copy tools write to hidden names before
/// they rename.
fn could_be_module(path: &Path) -> bool {
    let is_wasm = path
        .extension()
        .is_some_and(|end| end == "wasm" || end == "cwasm");
    is_wasm && !name(path).starts_with('.')
}

/// True if a file of this name could be a module, or the signature of one.
pub(super) fn belongs_to_module(path: &Path) -> bool {
    match path.extension().is_some_and(|end| end == "sig") {
        true => could_be_module(&path.with_extension("")),
        false => could_be_module(path),
    }
}

/// Lists the files that could be modules.
///
/// # Errors
/// When the folder cannot be listed.
pub(super) fn list(dir: &Path, signatures: bool) -> Result<Listing, String> {
    let mut listing = Listing::default();
    for entry in fs::read_dir(dir).map_err(|error| error.to_string())? {
        let path = entry.map_err(|error| error.to_string())?.path();
        if !could_be_module(&path) {
            continue;
        }
        let name = name(&path);
        let metadata = match fs::metadata(&path) {
            Ok(metadata) => metadata,
            // The file was removed in the meantime, or is a link whose target does not exist.
            Err(error) if is_missing(&error) => continue,
            Err(error) => {
                let why = Unusable::unreadable("it", &error);
                listing.unreadable.insert(name, why);
                continue;
            }
        };
        if metadata.is_file() {
            let stamp = Stamp::from_metadata(&metadata).map_err(|error| error.to_string())?;
            let signature = match signatures {
                true => Stamp::at(&signature_path(&path)),
                false => None,
            };
            listing.files.insert(
                name,
                Listed {
                    path,
                    stamp,
                    signature,
                },
            );
        }
    }
    Ok(listing)
}

/// True if the error means that there is no file.
fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP)
    )
}

/// Opens a file for reading.
///
/// # Errors
/// Also when it is not a regular file: reading a pipe or a device may never end.
pub(super) fn open(path: &Path) -> io::Result<File> {
    // NONBLOCK: opening a pipe does not wait for its other end.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is not a regular file")),
    }
}

/// Why a file cannot be used: a sentence that starts with "it …" or "its …".
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unusable {
    /// Until the file, its signature or the lock file changes.
    UntilChanged(String),
    /// Because of a system error, which may be temporary.
    ForNow(String),
}

impl Unusable {
    /// `what` cannot be read. Permissions cannot change without a change to the file's stamp.
    pub(super) fn unreadable(what: &str, error: &io::Error) -> Self {
        let why = format!("{what} cannot be read: {error}");
        match error.raw_os_error() {
            None | Some(libc::EACCES) => Self::UntilChanged(why),
            Some(_) => Self::ForNow(why),
        }
    }

    pub(super) fn why(self) -> String {
        match self {
            Self::UntilChanged(why) | Self::ForNow(why) => why,
        }
    }
}

impl From<String> for Unusable {
    fn from(why: String) -> Self {
        Self::UntilChanged(why)
    }
}

/// The bytes of a file; `None` if it changed since it was listed.
///
/// # Errors
/// If the file cannot be used.
pub(super) fn read(listed: &Listed, bytes_max: usize) -> Result<Option<Vec<u8>>, Unusable> {
    let Some(name) = listed.path.file_name().and_then(OsStr::to_str) else {
        return Err("its name is not UTF-8; rename it".to_owned().into());
    };
    // Such a name would be displayed wrongly in a terminal, and would span several lines of a lock file.
    if name.contains(is_unsafe) {
        let why = "its name has control characters or bidirectional marks; rename it";
        return Err(why.to_owned().into());
    }
    if listed.path.extension().is_some_and(|end| end == "cwasm") {
        let why =
            "it is compiled code, which cannot be trusted; use the .wasm that it was compiled from";
        return Err(why.to_owned().into());
    }
    let too_large = || {
        format!(
            "it is {} bytes long; at most {bytes_max} are allowed; build it with optimisation and without \
             debug information",
            listed.stamp.bytes
        )
    };
    if listed.stamp.bytes > bytes_max as u64 {
        return Err(too_large().into());
    }
    let read = || -> io::Result<Option<Vec<u8>>> {
        let file = open(&listed.path)?;
        let mut bytes = Vec::with_capacity(usize::try_from(listed.stamp.bytes).unwrap_or(0));
        (&file).take(bytes_max as u64 + 1).read_to_end(&mut bytes)?;
        let unchanged = Stamp::from_metadata(&file.metadata()?)? == listed.stamp;
        Ok(unchanged.then_some(bytes))
    };
    match read() {
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Unusable::unreadable("it", &error)),
    }
}
