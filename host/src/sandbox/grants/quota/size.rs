//! The size of a directory's contents.

use crate::sandbox::grants::Quota;

/// Bytes and entries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::sandbox) struct Size {
    pub(in crate::sandbox) bytes: u64,
    pub(in crate::sandbox) files: u64,
}

impl Size {
    /// A directory that cannot be measured counts as full.
    pub(super) const FULL: Self = Self {
        bytes: u64::MAX,
        files: u64::MAX,
    };

    pub(in crate::sandbox) fn bytes(bytes: u64) -> Self {
        Self { bytes, files: 0 }
    }

    pub(in crate::sandbox) fn one_file() -> Self {
        Self { bytes: 0, files: 1 }
    }

    pub(in crate::sandbox) fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            files: self.files.saturating_add(other.files),
        }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(other.bytes),
            files: self.files.saturating_sub(other.files),
        }
    }

    /// True if this exceeds the quota after `more` has been added: bytes that were written, or files.
    pub(super) fn exceeds(self, more: Self, quota: Quota) -> bool {
        match more.files {
            0 => self.bytes > quota.bytes_max,
            _ => self.files > quota.files_max,
        }
    }
}
