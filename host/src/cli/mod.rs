//! One file per command.

pub mod new;
