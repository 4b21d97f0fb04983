//! The pages of the dashboard: rows of the database in, HTML out.
//!
//! The functions get rows as `rouse … --json` prints them, and the time by the database's clock. Everything in a row is
//! untrusted text (payloads, errors, logs, names): [`maud`] escapes it, and control characters and marks that change
//! the text direction are made visible. There is no inline script and no inline style, so that the host can forbid both
//! (`Content-Security-Policy`).

mod audit;
mod bulk;
mod cells;
mod chart;
mod filter;
mod flow_graph;
mod flows;
mod handlers;
mod job;
mod jobs;
mod layout;
mod overview;
mod queues;
mod schedules;
mod sign_in;
mod timeline;
mod why;
mod workers;

pub use audit::{AuditNext, AuditQuery, audit};
pub use bulk::{Bulk, bulk, bulk_question};
pub use chart::Sample;
pub use filter::{JobFilter, Pairs};
pub use flows::{flow, flows, jobs_of_flow};
pub use handlers::{HandlerPage, Loaded, handler, handlers};
pub use job::{Job, LogRow, job};
pub use jobs::{Found, Live, jobs};
pub use layout::{Chrome, NavPage, Notice, Role, Tone, live_main, message, page};
pub use maud::Markup;
pub use overview::{Overview, overview};
pub use queues::{queue, queues};
pub use schedules::{schedule, schedules};
pub use sign_in::sign_in;
pub use workers::{RunningAttempts, worker, workers};

/// The style sheet.
pub const STYLE: &str = include_str!("pages/assets/rouse.css");
/// The script: live updates, selections, keyboard shortcuts. Pages can be read, and forms sent, without it.
pub const SCRIPT: &str = include_str!("pages/assets/rouse.js");
/// The icon of the browser's tab.
pub const ICON: &str = include_str!("pages/assets/icon.svg");
