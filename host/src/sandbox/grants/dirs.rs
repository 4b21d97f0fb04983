//! Which handler may use which directory.

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

    /// The path and, where one stands behind it, the mode: `/out:read-write`.
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

/// How much a directory may hold before its handlers can make nothing larger in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// The sizes of its files together, bytes.
    pub bytes_max: u64,
    /// Files, directories and links in it and beneath.
    pub files_max: u64,
}

/// One directory, given to one handler or to a family of handlers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// A handler's name, or a pattern: `image.*` is every handler whose name starts with
    /// `image.`, and `*` is every handler.
    pub handler: String,
    /// The directory on the host. A relative one counts from the host's working directory.
    pub dir: PathBuf,
    /// The path under which the guest sees it, for instance `/photos`.
    pub at: String,
    /// Whether the guest may change what is in it.
    pub mode: Mode,
    /// How much it may hold; none: as much as the disk does.
    pub quota: Option<Quota>,
}

impl Grant {
    /// What is said wherever the directory is missed: at the start, in listings, of an attempt.
    pub(crate) fn cannot_be_opened(&self, why: &dyn fmt::Display) -> String {
        format!(
            "{} is granted the directory {} at {}, which cannot be opened: {why}; attempts of the handler fail until you create it or change the grant",
            self.handler,
            self.dir.display(),
            self.at
        )
    }
}

/// All grants of a host. Nothing is granted that is not in this list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Grants(pub Vec<Grant>);

impl Grants {
    /// The grants of one handler.
    pub fn of(&self, handler: &str) -> Vec<Grant> {
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
    fn a_name_covers_that_handler_alone() {
        assert!(pattern_covers("image.thumbnail", "image.thumbnail"));
        assert!(!pattern_covers("image.thumbnail", "image.thumbnails"));
        assert!(!pattern_covers("image", "image.thumbnail"));
    }

    #[test]
    fn a_pattern_covers_what_comes_after_its_dot() {
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
