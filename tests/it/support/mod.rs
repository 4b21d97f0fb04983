//! The foundation of the tests: a private Postgres, a database per test, the `rouse` binary as a child process.

mod attempt;
pub(crate) mod browser;
pub(crate) mod claims;
mod cluster;
pub(crate) mod collector;
mod command_output;
pub(crate) mod database;
pub(crate) mod held_ends;
pub(crate) mod held_up;
mod host;
pub(crate) mod libraries;
pub(crate) mod old_versions;
pub(crate) mod page;
pub(crate) mod proxy;
pub(crate) mod refusals;
mod repeat;
mod skip;
mod terminal;
pub(crate) mod web;
pub(crate) mod worker;

pub(crate) use attempt::{Progress, attempt, attempt_with};
pub(crate) use cluster::{
    code_cache, free_port, postgres_bin, postgres_major, postgres_settings, scratch,
};
pub(crate) use command_output::{
    CommandOutput, command, command_without_database, folder, folder_of, rouse_in,
    rouse_without_database, run_rouse, set_mail, show_handler,
};
pub(crate) use database::{TestDb, connect, cut_all_others};
pub(crate) use host::{Host, built, rouse, rouse_binary};
pub(crate) use repeat::until_quicker_than;
pub(crate) use skip::skip;
pub(crate) use terminal::{on_terminal, on_terminal_until};
