//! The rules of jobs: states, outcomes, abort reasons, retry arithmetic.
//!
//! Everything here is pure: no async, no SQL, no WebAssembly, no clock. Decisions are functions over values and get the
//! time and randomness as arguments, so they can be tested exhaustively.

mod abort;
pub mod cron;
pub mod declared;
pub mod declared_gate;
mod dispatch;
mod end;
mod error;
mod fair;
pub mod firing;
mod gate;
mod ids;
mod json;
mod loss;
mod outcome;
mod pattern;
mod result;
mod retry;
mod shard;
mod sql;
mod state;
mod usage;
mod wait;

pub use abort::AbortReason;
pub use dispatch::Dispatch;
pub use end::{Failure, RunEnd};
pub use error::{AttemptError, ErrorKind};
pub use fair::{FairCharge, FairKey, FairPolicy, FairShare};
pub use gate::{ClaimGate, ClaimLimit};
pub use ids::{Attempt, Fence, Incarnation, JobId, LaneId};
pub use json::JsonText;
pub use loss::{AfterLoss, SILENT_FOR, after_loss};
pub use outcome::{Outcome, OwnLimits, Tries, decide};
pub use pattern::{is_pattern, most_specific, most_specific_first, pattern_covers};
pub(crate) use result::{is_readable, json_from};
pub use retry::{NextAttempt, RetryAt, RetryPolicy};
pub use shard::shard_of;
pub use sql::{OnError, SqlCall, SqlErrorClass, SqlFailure, SqlLimits, Statement};
pub use state::{Priority, State};
pub use usage::Usage;
pub use wait::{
    NewJob, NewJobKind, ParentEnd, RecordedStep, RecordedWait, ReturnedCall, Suspension, Wait,
    WaitKind,
};

#[cfg(test)]
mod tests;
