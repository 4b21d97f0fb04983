//! The functions of the host that an attempt calls.

use std::pin::Pin;
use std::time::Duration;

use crate::http::{Request, Response};
use crate::job::NewJob;
use crate::results::Parent;
use crate::task::Source;
use crate::{AbortReason, JobInfo, Result};

/// The severity of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// The finest details.
    Trace,
    /// Information for debugging.
    Debug,
    /// Normal events of interest.
    Info,
    /// Problems that may need attention.
    Warn,
    /// Failures.
    Error,
}

/// The environment of an attempt: the host's imports in a module, a recorder in native tests.
pub(crate) trait Host {
    fn log(&self, level: Level, message: String);
    fn progress(&self, percent: u8, step: &str);
    fn abort_reason(&self) -> Option<AbortReason>;
    fn grace_remaining(&self) -> Option<Duration>;
    fn abort_source(&self) -> Source;
    /// The recorded result of a step, JSON; `None` if it is not recorded.
    fn start_step(&self, name: &str) -> Result<Option<Vec<u8>>>;
    fn complete_step(&self, name: &str, output: Vec<u8>) -> Result<()>;
    fn secret(&self, name: &str) -> Result<String>;
    /// A JSON object.
    fn settings(&self) -> Vec<u8>;
    /// The value under a key, with its version.
    fn state_get(&self, key: &str) -> Result<Option<(Vec<u8>, i64)>>;
    /// A page of keys; an empty page ends the listing.
    fn state_keys(&self, prefix: &str, after: Option<&str>) -> Result<Vec<String>>;
    fn state_set(&self, key: &str, value: Vec<u8>) -> Result<()>;
    /// False if the current version is a different one; if the expected version is `None` or 0, false if any value
    /// exists.
    fn state_compare_and_set(
        &self,
        key: &str,
        version: Option<i64>,
        value: Vec<u8>,
    ) -> Result<bool>;
    fn state_delete(&self, key: &str) -> Result<bool>;
    fn hmac_sha256(&self, name: &str, message: &[u8]) -> Result<Vec<u8>>;
    /// Sends one request; redirects, timeouts and the abort are handled by the caller.
    fn http<'a>(&'a self, request: &'a Request) -> PendingResponse<'a>;
}

/// The functions of the host for jobs, chains and waits.
pub(crate) trait Flow {
    /// A number for `after`, below 0.
    fn enqueue(&self, job: NewJob) -> Result<i64>;
    fn continue_with(&self, job: NewJob) -> Result<()>;
    /// A page of the chains that the job has waited for, in the order of their names; an empty page ends the listing.
    fn parents(&self, after: Option<&str>) -> Result<Vec<Parent>>;
    /// Does not return if the wait suspends the attempt, like the other waits.
    fn sleep(&self, step: &str, duration_ms: u64) -> Result<()>;
    fn sleep_until(&self, step: &str, unix_ms: i64) -> Result<()>;
    /// The payload, JSON; `None` after the timeout.
    fn signal(&self, step: &str, name: &str, timeout_ms: Option<u64>) -> Result<Option<Vec<u8>>>;
    /// Calls jobs, each with the name of its step. Returns their results or errors, JSON.
    fn call(&self, calls: Vec<(String, NewJob)>) -> Result<Vec<Result<Vec<u8>, Vec<u8>>>>;
}

/// The functions of the host for batches.
pub(crate) trait Batch {
    /// All jobs of the attempt, with their payloads; empty if there is only one.
    fn batch(&self) -> Vec<(JobInfo, Vec<u8>)>;
    /// Gives a job its outcome.
    fn settle(&self, job: i64, outcome: Result<Vec<u8>>) -> Result<()>;
}

/// A call to a statement that the handler has declared.
pub(crate) struct SqlCall {
    pub(crate) statement: String,
    /// A JSON array.
    pub(crate) params: Vec<u8>,
}

/// The functions of the host for SQL statements.
pub(crate) trait Sql {
    fn execute(&self, effect: SqlCall) -> Result<()>;
    /// Each row is a JSON object.
    fn query(&self, query: SqlCall) -> Result<Vec<Vec<u8>>>;
    /// Records the result of a step, and commits these effects with it.
    fn complete_step_with(&self, name: &str, output: Vec<u8>, effects: Vec<SqlCall>) -> Result<()>;
}

/// A pending response.
pub(crate) type PendingResponse<'a> = Pin<Box<dyn Future<Output = Result<Response>> + 'a>>;
