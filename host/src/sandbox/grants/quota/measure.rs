//! Measures a directory by walking its tree.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::Weak;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;

use super::size::Size;

/// The maximum number of files that a quota may set; walking this many entries takes a second or two.
const ENTRIES_MAX: u64 = 1_000_000;

/// The maximum depth of a tree: each level keeps a directory open.
const DEPTH_MAX: usize = 128;

/// Adds up apparent file sizes, so the holes of sparse files are counted. A file with several names counts once for
/// each.
pub(super) fn walk(dir: &File) -> Result<Size, String> {
    let mut found = Size::default();
    let root = openat(
        dir,
        c".",
        OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let root = root.map_err(|error| error.to_string())?;
    add(root, 1, &mut found)?;
    Ok(found)
}

fn add(dir: OwnedFd, depth: usize, found: &mut Size) -> Result<(), String> {
    if depth > DEPTH_MAX {
        return Err(format!("it is more than {DEPTH_MAX} directories deep"));
    }
    let entries = Dir::read_from(&dir).map_err(|error| error.to_string())?;
    for entry in entries {
        let entry = entry.map_err(|error| error.to_string())?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        found.files += 1;
        if found.files > ENTRIES_MAX {
            return Err(format!("it has more than {ENTRIES_MAX} entries"));
        }
        // Guests may replace an entry during the walk, so links are never followed.
        let stat = match statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(error.to_string()),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                match openat(dir.as_fd(), name, flags, Mode::empty()) {
                    Ok(subdir) => add(subdir, depth + 1, found)?,
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
                    Err(error) => return Err(error.to_string()),
                }
            }
            FileType::RegularFile => {
                let bytes = u64::try_from(stat.st_size).unwrap_or(0);
                found.bytes = found.bytes.saturating_add(bytes);
            }
            FileType::Symlink
            | FileType::Fifo
            | FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown => {}
        }
    }
    Ok(())
}

/// The size of removed files that are still open.
pub(super) fn unlinked(opened: &[Weak<File>]) -> Size {
    let mut seen = HashSet::new();
    let mut found = Size::default();
    for file in opened.iter().filter_map(Weak::upgrade) {
        if let Ok(metadata) = file.metadata()
            && metadata.nlink() == 0
            && seen.insert((metadata.dev(), metadata.ino()))
        {
            found.bytes = found.bytes.saturating_add(metadata.len());
        }
    }
    found
}
