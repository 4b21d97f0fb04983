//! Runs one handler once, without the queue: `rouse invoke` and `POST /invoke/{handler}`.
//!
//! This is for callers that need a result while the database is unreachable, or do not want it stored. Nothing is
//! written: no job, no lease, no record, no retry. The outcome is decided as for a job: an invocation is attempt 1 of 1
//! of a job that does not exist in any database, and goes through [`job::decide`](crate::job::decide) like the attempts
//! of the queue.

mod invoker;
mod once;
mod share;

pub use invoker::{Invocation, Invoker, Refusal};
pub use once::{Call, InvokeOutcome, Invoked, once};
pub use share::Share;
