//! Grants of directories to handlers.

use std::fmt;
use std::path::PathBuf;

use crate::job::pattern_covers;

/// Whether a handler may change what is in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Read files and list directories.
    Read,
    /// Read, create, change and delete.
    ReadWrite,
}

impl Mode {
    /// As in `rouse.toml`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::ReadWrite => "read-write",
        }
    }

    /// Splits a path from an optional mode: `/out:read-write`.
    pub(in crate::sandbox) fn split(text: &str) -> (&str, Option<Self>) {
        [Self::Read, Self::ReadWrite]
            .into_iter()
            .find_map(|mode| {
                let path = text.strip_suffix(mode.as_str())?.strip_suffix(':')?;
                Some((path, Some(mode)))
            })
            .unwrap_or((text, None))
    }
}

/// Counting this many files takes 0.1 to 0.2 s.
const FILES_MAX: u64 = 100_000;

/// The maximum contents of a directory; once it is reached, handlers cannot add anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// The maximum total size of its files, in bytes. Default: no limit.
    pub bytes_max: u64,
    /// The maximum number of files, directories and links in its tree. Default: 100,000.
    pub files_max: u64,
}

impl Default for Quota {
    /// The quota of a directory for which the operator sets only one of the two.
    fn default() -> Self {
        Self {
            bytes_max: u64::MAX,
            files_max: FILES_MAX,
        }
    }
}

/// A grant of one directory to a handler or a family of handlers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// A handler's name, or a pattern: `image.*` means every handler whose name starts with `image.`, and `*` means
    /// every handler.
    pub handler: String,
    /// The directory on the host. A relative path is relative to the host's working directory.
    pub dir: PathBuf,
    /// The path under which the guest sees it, for instance `/photos`.
    pub at: String,
    /// Whether the guest may change its contents.
    pub mode: Mode,
    /// The limit on its contents; `None` means that only the disk limits them.
    pub quota: Option<Quota>,
}

impl Grant {
    /// The message for a missing directory: at startup, in listings, and in attempts.
    pub(crate) fn cannot_be_opened(&self, why: &dyn fmt::Display) -> String {
        format!(
            "{} is granted the directory {} at {}, which cannot be opened: {why}; attempts of the handler fail until you create it or change the grant",
            self.handler,
            self.dir.display(),
            self.at
        )
    }
}

/// All directory grants of a host. Directories that are not in this list are not granted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Grants(pub Vec<Grant>);

impl Grants {
    /// The grants of one handler.
    pub fn for_handler(&self, handler: &str) -> Vec<Grant> {
        self.0
            .iter()
            .filter(|grant| pattern_covers(&grant.handler, handler))
            .cloned()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_covers_exactly_that_handler() {
        assert!(pattern_covers("image.thumbnail", "image.thumbnail"));
        assert!(!pattern_covers("image.thumbnail", "image.thumbnails"));
        assert!(!pattern_covers("image", "image.thumbnail"));
    }

    #[test]
    fn a_pattern_covers_names_under_its_prefix() {
        assert!(pattern_covers("image.*", "image.thumbnail"));
        assert!(pattern_covers("image.*", "image.exif.strip"));
        assert!(!pattern_covers("image.*", "imagery.thumbnail"));
        assert!(!pattern_covers("image.*", "image."));
        assert!(pattern_covers("*", "image.thumbnail"));
    }

    #[test]
    fn a_star_in_the_middle_or_after_a_letter_covers_nothing() {
        assert!(!pattern_covers("ima*", "image.thumbnail"));
        assert!(!pattern_covers("*.thumbnail", "image.thumbnail"));
    }
}
