//! Human-readable output: sanitized text, times, counts, and the pages of the dashboard.
//!
//! Everything here is pure: values in, text out. The host reads the database, checks access and sends the pages.

pub mod flow;
pub mod gate;
pub mod pages;
pub mod plural;
pub mod sanitize;
pub mod when;
