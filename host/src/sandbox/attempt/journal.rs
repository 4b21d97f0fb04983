//! The data that outlives an attempt: the results of its steps, its progress, and the state of its handler.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use tracing::Level;

use super::meter::Meter;
use crate::job::{ParentEnd, RecordedStep, ReturnedCall, SqlCall, SqlFailure};

/// The future of a call to a [`Journal`] or [`StateStore`].
pub type JournalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Stores the data that outlives an attempt. The code that runs attempts implements it (`worker/journal.rs`: in
/// Postgres, behind the fence).
///
/// A journal that finds out that the attempt has to stop aborts it, and need not return: its callers also wait for the
/// abort.
pub trait Journal: Send + Sync {
    /// The steps that earlier attempts at the job recorded, with small results. Larger ones stay in the store, because
    /// those of many attempts together do not fit into a host's memory.
    fn recorded(&self) -> JournalFuture<'_, Arc<HashMap<String, RecordedStep>>>;

    /// The result of a recorded step, JSON.
    ///
    /// # Errors
    /// When there is no result; the error is a human-readable message.
    fn result<'a>(&'a self, step: &'a str) -> JournalFuture<'a, Result<Vec<u8>, String>>;

    /// Records the result of a step, JSON. Returns once it is durable.
    ///
    /// # Errors
    /// When the result can never be recorded; the error is a human-readable message.
    fn record<'a>(
        &'a self,
        step: &'a str,
        output: &'a [u8],
    ) -> JournalFuture<'a, Result<(), String>>;

    /// Receives the attempt's meter, once, before it starts.
    fn meter(&self, _meter: Arc<Meter>) {}

    /// Records a line that the attempt prints or logs. Lines are numbered from 1.
    fn log_line(&self, _line: u32, _level: Level, _text: &str) {}

    /// Records the attempt's progress: a percentage, and its current step on one line.
    fn progress(&self, percent: u8, step: &str);

    /// The store of the handler's state; `None` if it has no state.
    fn state(&self) -> Option<&dyn StateStore> {
        None
    }

    /// The store that runs the handler's statements; `None` if it cannot run any.
    fn sql(&self) -> Option<&dyn SqlStore> {
        None
    }

    /// The store from which signals and the ends of other jobs are read; `None` if the attempt cannot wait for them.
    fn waits(&self) -> Option<&dyn WaitStore> {
        None
    }
}

/// Signals of a job, and the ends of jobs that it has called or waited for. The code that runs attempts implements it
/// (`worker/suspensions.rs`: in Postgres, behind the fence).
///
/// A store that finds out that the attempt has to stop aborts it, and need not return, like a [`StateStore`].
pub trait WaitStore: Send + Sync {
    /// Takes the oldest signal with this name, and records it as the result of the step: JSON, `{"payload": …}`. If
    /// there is none at `until`, records and returns `{"timed_out": true}`; before that time, returns `None`.
    fn take_signal<'a>(
        &'a self,
        step: &'a str,
        name: &'a str,
        until: Option<SystemTime>,
    ) -> JournalFuture<'a, Result<Option<Vec<u8>>, String>>;

    /// The ends of the calls of these steps, recorded as their results. A step whose call has not been made yet is left
    /// out.
    ///
    /// # Errors
    /// If the results are longer than `bytes_max` bytes.
    fn returned_calls<'a>(
        &'a self,
        steps: &'a [String],
        bytes_max: usize,
    ) -> JournalFuture<'a, Result<HashMap<String, ReturnedCall>, String>>;

    /// One page of the ends of the chains that the job has waited for, sorted by name: those after this name, or the
    /// first ones.
    fn parents<'a>(
        &'a self,
        after: Option<&'a str>,
    ) -> JournalFuture<'a, Result<Vec<ParentEnd>, String>>;
}

/// Runs the statements of a handler. The code that runs attempts implements it (`worker/effects.rs`: in Postgres, in
/// sessions of the handler's login).
///
/// A store that finds out that the attempt has to stop aborts it, and need not return, like a [`StateStore`].
pub trait SqlStore: Send + Sync {
    /// Checks the number and the kinds of parameters.
    ///
    /// # Errors
    /// A human-readable message, without the name of the statement.
    fn check(&self, call: &SqlCall) -> Result<(), String>;

    /// Runs a query in a read-only transaction. Each row is a JSON object.
    fn query<'a>(
        &'a self,
        call: &'a SqlCall,
    ) -> JournalFuture<'a, Result<Vec<Vec<u8>>, SqlRefusal>>;

    /// Records the result of a step, JSON, and commits effects with it.
    fn complete_step<'a>(
        &'a self,
        step: &'a str,
        output: &'a [u8],
        effects: &'a [SqlCall],
    ) -> JournalFuture<'a, Result<(), SqlRefusal>>;
}

/// Why a statement did not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SqlRefusal {
    /// The call is invalid; a human-readable message.
    Refused(String),
    /// Postgres has refused it.
    Failed(SqlFailure),
    /// The statement does not match the database, and the handler is parked; or a new version of the module has
    /// replaced it. The attempt ends.
    Parked,
}

/// A stored value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredValue {
    /// The bytes.
    pub value: Vec<u8>,
    /// Changes with each write, and is never reused.
    pub version: i64,
}

/// A value to store.
#[derive(Debug, Clone, Copy)]
pub struct NewValue<'a> {
    /// The key.
    pub key: &'a str,
    /// The bytes.
    pub value: &'a [u8],
    /// The precondition.
    pub expected: Expected,
    /// The maximum number of keys of the handler.
    pub keys_max: u32,
    /// The maximum size of keys and values together, in bytes.
    pub bytes_max: u64,
}

/// The precondition of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// Any value, or none.
    Anything,
    /// The key must not exist.
    Nothing,
    /// The key must have this version.
    Version(i64),
}

/// The outcome of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The value is durable.
    Done,
    /// Nothing was written: the precondition did not hold.
    Changed,
    /// Nothing was written: the handler has the maximum number of keys.
    TooManyKeys,
    /// Nothing was written: together with the other keys, which take this many bytes, the value exceeds the maximum.
    TooManyBytes(u64),
}

/// Stores the state of one handler for the tenant of one job. The code that runs attempts implements it
/// (`worker/state.rs`: in Postgres, behind the fence).
///
/// A store that finds out that the attempt has to stop aborts it, and need not return: its callers also wait for the
/// abort. An error is a human-readable message, and means that the value can never be stored.
pub trait StateStore: Send + Sync {
    /// The value of this key.
    fn get<'a>(&'a self, key: &'a str) -> JournalFuture<'a, Result<Option<StoredValue>, String>>;

    /// The keys with this prefix after this key, sorted, at most `max`.
    fn keys<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        max: u32,
    ) -> JournalFuture<'a, Result<Vec<String>, String>>;

    /// Stores a value. Returns once it is durable.
    fn set<'a>(&'a self, new: NewValue<'a>) -> JournalFuture<'a, Result<WriteOutcome, String>>;

    /// Removes a key. Returns false if it did not exist, or if an earlier try, whose response was lost, has removed it.
    fn delete<'a>(&'a self, key: &'a str) -> JournalFuture<'a, Result<bool, String>>;
}
