//! The interfaces that the host offers to guests: one file for each capability.

mod batch;
mod context;
mod files;
mod http;
mod jobs;
mod log;
mod output;
mod pace;
mod parents;
mod secrets;
mod sockets;
mod sql;
mod state;
mod steps;
mod waits;

pub use self::http::{Addresses, HttpSettings, Resolver, SystemResolver};
pub(super) use self::http::{FIELDS_BYTES_MAX, Http, HttpAccess, Net, link_http};
pub(super) use batch::Batch;
pub(super) use files::{Closings, Fds, OutsidePaths, guard_files, open_granted};
pub(super) use jobs::NewJobs;
pub(super) use log::{GuestLog, LogSource, Stream};
pub(super) use output::GuestOutput;
pub(super) use sockets::guard_sockets;
pub(super) use sql::{Sql, SqlAccess};
pub(super) use state::HandlerState;
pub(super) use steps::{StepSpans, Steps};
