//! Output for people: harmless text, times in words, and the pages of the dashboard.
//!
//! Everything here is pure: values in, text out. The host reads the database, checks access and sends the pages.

pub mod flow;
pub mod gate;
pub mod harmless;
pub mod pages;
pub mod when;
