//! What outlives an attempt: the results of its steps, its progress, and the state of its handler.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use tracing::Level;

use super::meter::Meter;

/// The future of a journal's or keeper's call.
pub type Waiting<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Stores what outlives an attempt. The code that runs attempts implements it (`worker/journal.rs`: in Postgres,
/// behind the fence).
///
/// A journal that finds out that the attempt must stop turns its abort signal, and need not return: its callers wait
/// for that signal too.
pub trait Journal: Send + Sync {
    /// The steps that earlier attempts at the job recorded, with the sizes of their results in bytes. The results
    /// stay in the store: those of many attempts together do not fit into a host's memory.
    fn recorded(&self) -> Waiting<'_, HashMap<String, usize>>;

    /// The result of a recorded step, JSON.
    ///
    /// # Errors
    /// When there is none; a message for people.
    fn result<'a>(&'a self, step: &'a str) -> Waiting<'a, Result<Vec<u8>, String>>;

    /// Records the result of a step, JSON. Returns once it is durable.
    ///
    /// # Errors
    /// When it can never be recorded; a message for people.
    fn record<'a>(&'a self, step: &'a str, output: &'a [u8]) -> Waiting<'a, Result<(), String>>;

    /// Receives the attempt's meter, once, before it starts.
    fn meter(&self, _meter: Arc<Meter>) {}

    /// Records a line that the attempt prints or logs; lines are numbered from 1.
    fn say(&self, _line: u32, _level: Level, _text: &str) {}

    /// Records the attempt's progress: 0 to 100, and its current step, one line.
    fn progress(&self, percent: u8, step: &str);

    /// The handler's state store; `None` if there is none.
    fn state(&self) -> Option<&dyn StateKeeper> {
        None
    }
}

/// A stored value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The bytes.
    pub value: Vec<u8>,
    /// Changes with each write, and is never reused.
    pub version: i64,
}

/// A value to store.
#[derive(Debug, Clone, Copy)]
pub struct Keep<'a> {
    /// The key.
    pub key: &'a str,
    /// The bytes.
    pub value: &'a [u8],
    /// The precondition.
    pub expected: Expected,
    /// The maximum number of keys of the handler.
    pub keys_max: u32,
    /// The maximum size of keys and values together, bytes.
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
pub enum Wrote {
    /// The value is durable.
    Done,
    /// Nothing was written: the precondition did not hold.
    Changed,
    /// Nothing was written: the handler has the maximum number of keys.
    TooManyKeys,
    /// Nothing was written: there is no room beside the other keys, which have this many bytes.
    TooManyBytes(u64),
}

/// Stores the state of one handler for the tenant of one job. The code that runs attempts implements it
/// (`worker/state.rs`: in Postgres, behind the fence).
///
/// A keeper that finds out that the attempt must stop turns its abort signal, and need not return: its callers wait
/// for that signal too. Errors mean that a value can never be stored, and are messages for people.
pub trait StateKeeper: Send + Sync {
    /// The value of this key.
    fn get<'a>(&'a self, key: &'a str) -> Waiting<'a, Result<Option<Kept>, String>>;

    /// The keys with this prefix after this key, sorted, at most `max`.
    fn keys<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        max: u32,
    ) -> Waiting<'a, Result<Vec<String>, String>>;

    /// Stores a value. Returns once it is durable.
    fn set<'a>(&'a self, keep: Keep<'a>) -> Waiting<'a, Result<Wrote, String>>;

    /// Removes a key. Returns false if it did not exist.
    fn delete<'a>(&'a self, key: &'a str) -> Waiting<'a, Result<bool, String>>;
}
