//! Settings: as written, then checked.
