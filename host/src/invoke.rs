//! One handler, once, without the queue: `rouse invoke` and `POST /invoke/{handler}`.
//!
//! For whoever needs an answer while the database is away, or does not want one kept. Nothing is
//! written down: no job, no lease, no record, and no second try. How a run is judged is not decided
//! here: it is attempt 1 of 1 of a job that is in no database, and goes through
//! [`job::decide`](crate::job::decide) like the attempts of the queue.

mod invoker;
mod once;
mod share;

pub use invoker::{Invocation, Invoker, Refusal};
pub use once::{Answer, Call, Invoked, once};
pub use share::Share;
