//! A cache of machine code that survives restarts, and of notes that need the same trust.
//!
//! Machine code is trusted like the host itself: anyone who can write it here can run anything. So the directory must
//! belong to the host's user, and no other user may write to it; otherwise there is no cache. An entry is read only if
//! it is a regular file of that user whose own digest covers its code and its module's name. A damaged, truncated,
//! misplaced or foreign entry is removed, and its module is compiled again. Errors with entries are only warnings. A
//! note cannot be recreated: its readers get an error if it cannot be used.

use std::fs::{DirBuilder, File, TryLockError};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use ring::digest::{Context, SHA256};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, fstat, fsync,
    futimens, openat, renameat, statat, unlinkat,
};
use rustix::process::geteuid;
use wasmtime::Engine;

use super::digest::Digest;

/// An entry that has been unused for this long is removed at the next start: its module no longer exists, or its host
/// was replaced.
const UNUSED_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The maximum size of all entries together, in bytes; the least recently used entries are removed first. The code of a
/// Rust guest takes 1 to 10 MiB, of a Python guest about 150 MiB: this holds several versions of all of them.
const CACHE_BYTES_MAX: u64 = 2 << 30;

/// The cache is trimmed after this much has been added, not after each entry: a host may add thousands of entries when
/// it starts.
const TRIM_EVERY_BYTES: u64 = CACHE_BYTES_MAX / 16;

/// A partial file older than this was left by a host that died.
const WRITING_MAX: Duration = Duration::from_secs(60 * 60);

/// The start of an entry, before its digest. It changes with the entry format, and with the preprocessing of modules:
/// the adapter around modules of wasm32-wasip1 is not part of the key.
const MAGIC: &[u8; 16] = b"rouse code 0002\n";

/// The maximum size of a note, which is text.
pub(in crate::sandbox) const NOTE_BYTES_MAX: u64 = 64 << 20;

/// The suffixes of entries, and of files that are being written.
const ENTRY: &str = ".code";
const WRITING: &str = ".part";

/// A directory with machine code.
pub(in crate::sandbox) struct CodeCache {
    /// Kept open, so that it stays the directory that was checked, regardless of what happens to its path.
    dir: OwnedFd,
    path: PathBuf,
    /// A hash of wasmtime's version and settings, the processor, and the entry format.
    engine: u64,
    /// Bytes that have been added since the cache was last trimmed.
    put_bytes: AtomicU64,
}

impl CodeCache {
    /// Opens the directory at this path, and creates it if needed; `None`, with a warning, if it cannot be trusted.
    pub(in crate::sandbox) fn open(path: &Path, engine: &Engine) -> Option<Self> {
        let mut hasher = DefaultHasher::new();
        engine.precompile_compatibility_hash().hash(&mut hasher);
        (env!("CARGO_PKG_VERSION"), std::env::consts::ARCH, MAGIC).hash(&mut hasher);
        match open_dir(path) {
            Ok(dir) => {
                let cache = Self {
                    dir,
                    path: path.to_owned(),
                    engine: hasher.finish(),
                    put_bytes: AtomicU64::new(0),
                };
                cache.trim();
                Some(cache)
            }
            Err(why) => {
                tracing::warn!(
                    dir = %path.display(),
                    "machine code and the owners of handler names are not saved, so each start compiles every module and does not know the owners: {why}"
                );
                None
            }
        }
    }

    /// The cached code of the module with this digest.
    pub(in crate::sandbox) fn get(&self, module: Digest) -> Option<Vec<u8>> {
        let name = self.name(module);
        match self.read(&name) {
            Ok(code) => code,
            Err(error) => {
                self.remove(module, &error.to_string());
                None
            }
        }
    }

    /// Caches the code of a module. Readers see all of it or nothing.
    pub(in crate::sandbox) fn put(&self, module: Digest, code: &[u8]) {
        let name = self.name(module);
        let put = self.replace(&name, |file| {
            file.write_all(&header(&name, code))?;
            file.write_all(code)
        });
        if let Err(error) = put {
            tracing::warn!(dir = %self.path.display(), "the code of a module cannot be cached: {error}");
        }
        let bytes = code.len() as u64;
        if self.put_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes >= TRIM_EVERY_BYTES {
            self.put_bytes.store(0, Ordering::Relaxed);
            self.trim();
        }
    }

    /// Removes an unusable entry.
    pub(in crate::sandbox) fn remove(&self, module: Digest, why: &str) {
        let name = self.name(module);
        tracing::warn!(
            dir = %self.path.display(),
            entry = name,
            "cached code cannot be used; its module is compiled again: {why}"
        );
        if let Err(error) = unlinkat(&self.dir, &name, AtFlags::empty()) {
            tracing::warn!(
                entry = name,
                "the unusable cached code cannot be removed: {error}"
            );
        }
    }

    /// The path of a note.
    pub(in crate::sandbox) fn note_path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Reads a note; `None` if there is no such file.
    ///
    /// # Errors
    /// When the note cannot be read or trusted.
    pub(in crate::sandbox) fn note(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let Some(file) = self.open_file(name)? else {
            return Ok(None);
        };
        let mut text = Vec::new();
        file.take(NOTE_BYTES_MAX + 1).read_to_end(&mut text)?;
        fits(&text)?;
        Ok(Some(text))
    }

    /// Saves a note. Readers see all of it or the previous one, even after a power failure.
    ///
    /// # Errors
    /// When it is not saved; the previous note is then still in place.
    pub(in crate::sandbox) fn set_note(&self, name: &str, text: &[u8]) -> io::Result<()> {
        fits(text)?;
        self.replace(name, |file| {
            file.write_all(text)?;
            file.sync_all()
        })?;
        Ok(fsync(&self.dir)?)
    }

    /// Prevents other hosts from writing this note until the file is dropped; `None` while another host holds the
    /// lock.
    ///
    /// # Errors
    /// When it cannot be locked.
    pub(in crate::sandbox) fn lock_note(&self, name: &str) -> io::Result<Option<File>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = File::from(openat(&self.dir, format!("{name}.lock"), flags, mode)?);
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn name(&self, module: Digest) -> String {
        format!("{module}-{:016x}{ENTRY}", self.engine)
    }

    /// Opens a regular file that no other user can have written.
    fn open_file(&self, name: &str) -> io::Result<Option<File>> {
        // Follows no link, and does not wait for the other end of a pipe.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&self.dir, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(rustix::io::Errno::LOOP) => return Err(io::Error::other("it is a link")),
            Err(error) => return Err(error.into()),
        };
        let stat = fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("it is not a regular file"));
        }
        check_owner(&stat).map_err(io::Error::other)?;
        Ok(Some(File::from(file)))
    }

    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let Some(file) = self.open_file(name)? else {
            return Ok(None);
        };
        // Marks the entry as used now. If that fails, the only effect is that the entry is removed too early.
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        };
        let _ = futimens(
            &file,
            &Timestamps {
                last_access: now,
                last_modification: now,
            },
        );

        let mut file = file.take(CACHE_BYTES_MAX);
        let mut head = [0; MAGIC.len() + 32];
        let mut code = Vec::new();
        file.read_exact(&mut head)?;
        file.read_to_end(&mut code)?;
        match head == header(name, &code) {
            true => Ok(Some(code)),
            false => Err(io::Error::other(
                "it is damaged, or is the code of another module",
            )),
        }
    }

    /// Replaces a file atomically.
    fn replace(
        &self,
        name: &str,
        write: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> io::Result<()> {
        let part = format!(
            ".{}-{:016x}{WRITING}",
            std::process::id(),
            rand::random::<u64>()
        );
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(&self.dir, &part, flags, Mode::RUSR | Mode::WUSR)?);
        let replaced =
            write(&mut file).and_then(|()| Ok(renameat(&self.dir, &part, &self.dir, name)?));
        if replaced.is_err() {
            // If this fails, the partial file is removed after an hour.
            let _ = unlinkat(&self.dir, &part, AtFlags::empty());
        }
        replaced
    }

    fn trim(&self) {
        let listed = self.list().unwrap_or_else(|error| {
            tracing::warn!(dir = %self.path.display(), "cached code cannot be listed: {error}");
            Vec::new()
        });
        for name in to_remove(listed, SystemTime::now()) {
            // Another host may have removed it.
            let _ = unlinkat(&self.dir, &name, AtFlags::empty());
        }
    }

    /// Lists entries and partial files; other files are ignored.
    fn list(&self) -> io::Result<Vec<CachedFile>> {
        let mut files = Vec::new();
        for entry in Dir::read_from(&self.dir)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_entry = name.ends_with(ENTRY);
            let is_being_written = name.starts_with('.') && name.ends_with(WRITING);
            if !is_entry && !is_being_written {
                continue;
            }
            // Another host may have removed it.
            let Ok(stat) = statat(&self.dir, &*name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            let used_at = u64::try_from(stat.st_mtime).unwrap_or(0);
            files.push(CachedFile {
                name,
                bytes: u64::try_from(stat.st_size).unwrap_or(0),
                used_at: SystemTime::UNIX_EPOCH + Duration::from_secs(used_at),
            });
        }
        Ok(files)
    }
}

fn fits(note: &[u8]) -> io::Result<()> {
    match note.len() as u64 <= NOTE_BYTES_MAX {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "it is larger than {} MiB",
            NOTE_BYTES_MAX >> 20
        ))),
    }
}

/// A file of the cache.
struct CachedFile {
    name: String,
    bytes: u64,
    used_at: SystemTime,
}

/// The files to remove: those that have been unused for too long, and then the oldest, until the rest fits.
fn to_remove(mut files: Vec<CachedFile>, now: SystemTime) -> Vec<String> {
    // A time in the future counts as now.
    let unused = |file: &CachedFile| now.duration_since(file.used_at).unwrap_or_default();
    files.sort_by_key(unused);
    let mut bytes = 0;
    let mut remove = Vec::new();
    for file in files {
        let unused_max = match file.name.ends_with(WRITING) {
            true => WRITING_MAX,
            false => UNUSED_MAX,
        };
        bytes += file.bytes;
        if unused(&file) > unused_max || bytes > CACHE_BYTES_MAX {
            remove.push(file.name);
        }
    }
    remove
}

/// The header that identifies the code and proves that it is complete.
fn header(name: &str, code: &[u8]) -> [u8; MAGIC.len() + 32] {
    // Not `sha2`, which is four times slower on processors without SHA instructions: half of the startup time.
    let mut digest = Context::new(&SHA256);
    digest.update(name.as_bytes());
    digest.update(&[0]);
    digest.update(code);
    let mut header = [0; MAGIC.len() + 32];
    header[..MAGIC.len()].copy_from_slice(MAGIC);
    header[MAGIC.len()..].copy_from_slice(digest.finish().as_ref());
    header
}

fn open_dir(path: &Path) -> Result<OwnedFd, String> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder
        .create(path)
        .map_err(|error| format!("it cannot be created: {error}"))?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = openat(CWD, path, flags, Mode::empty())
        .map_err(|error| format!("it cannot be opened: {error}"))?;
    let stat = fstat(&dir).map_err(|error| error.to_string())?;
    check_owner(&stat).map_err(|why| {
        format!("{why}; run `chmod 700` on it, or name another directory in rouse.toml (cache_dir)")
    })?;
    Ok(dir)
}

/// Checks that only this user (and root) can have written a file.
fn check_owner(stat: &Stat) -> Result<(), String> {
    let user = geteuid().as_raw();
    if stat.st_uid != user {
        return Err(format!(
            "it belongs to user {}, and this host runs as user {user}",
            stat.st_uid
        ));
    }
    match stat.st_mode & 0o022 {
        0 => Ok(()),
        _ => Err("other users can write to it".into()),
    }
}

#[cfg(test)]
mod tests;
