//! What the tests stand on: a private Postgres, a database per test, the `rouse` binary as a child.

mod attempt;
pub(crate) mod claims;
mod cluster;
pub(crate) mod database;
mod host;

pub(crate) mod worker;

pub(crate) use attempt::attempt;
pub(crate) use cluster::{free_port, postgres_settings, scratch};
pub(crate) use database::{TestDb, connect};
pub(crate) use host::{Host, rouse_binary};
