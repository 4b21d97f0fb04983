//! Where store and sandbox meet.
