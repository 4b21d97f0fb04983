//! The only room that speaks SQL: one file per verb.

pub mod connect;
