//! What people read: text made harmless, times in words, and the pages of the dashboard.
//!
//! Everything here is pure: values in, text out. What reads the database, checks who asks, and sends pages is in the host.

pub mod gate;
pub mod harmless;
pub mod pages;
pub mod when;
