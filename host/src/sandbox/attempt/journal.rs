//! What outlives an attempt: the results of its steps, how far it has come, and what its handler keeps.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use tracing::Level;

use super::meter::Meter;

/// Something that a journal takes its time for.
pub type Waiting<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Where an attempt leaves what is to outlive it. Whoever runs the attempt implements it
/// (`worker/journal.rs`: in Postgres, behind the fence).
///
/// A journal that finds out that the attempt may go on no more turns its abort signal, and need not return:
/// whoever waits for it waits for that signal too.
pub trait Journal: Send + Sync {
    /// The steps that earlier attempts at the job have recorded, with the bytes of their results. The results themselves
    /// stay where they are: those of many attempts together are more than a host can hold.
    fn recorded(&self) -> Waiting<'_, HashMap<String, usize>>;

    /// The result of one of them, or of one that was recorded since, JSON.
    ///
    /// # Errors
    /// Where there is none, in words for people.
    fn result<'a>(&'a self, step: &'a str) -> Waiting<'a, Result<Vec<u8>, String>>;

    /// Records the result of a step, JSON. Returns once it is there to stay.
    ///
    /// # Errors
    /// What cannot be recorded at all, in words for people.
    fn record<'a>(&'a self, step: &'a str, output: &'a [u8]) -> Waiting<'a, Result<(), String>>;

    /// Is handed what the attempt uses, counted while it runs; once, before it starts.
    fn meter(&self, _meter: Arc<Meter>) {}

    /// Takes note of what the attempt prints or logs: the lines of an attempt are numbered from 1.
    fn say(&self, _line: u32, _level: Level, _text: &str) {}

    /// Takes note of how far the attempt is: 0 to 100, and the step it is in, one line.
    fn progress(&self, percent: u8, step: &str);

    /// What the handler keeps between its jobs; none: it has no such place.
    fn state(&self) -> Option<&dyn StateKeeper> {
        None
    }
}

/// What is kept under a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The bytes.
    pub value: Vec<u8>,
    /// Another one with each write, and none comes back.
    pub version: i64,
}

/// A value that is to be kept.
#[derive(Debug, Clone, Copy)]
pub struct Keep<'a> {
    /// Under this key.
    pub key: &'a str,
    /// The bytes.
    pub value: &'a [u8],
    /// Only where this is there.
    pub expected: Expected,
    /// The most that the handler may keep.
    pub keys_max: u32,
    /// The same in bytes.
    pub bytes_max: u64,
}

/// What has to be under a key before it is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// Whatever is there.
    Anything,
    /// Nothing.
    Nothing,
    /// This version.
    Version(i64),
}

/// What has come of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrote {
    /// It is there to stay.
    Done,
    /// Nothing was written: what is there is not what was expected.
    Changed,
    /// Nothing was written: that would be one key too many.
    TooManyKeys,
    /// Nothing was written: all other keys have so many bytes, and there is no room for these.
    TooManyBytes(u64),
}

/// What one handler keeps for the tenant of one job. Whoever runs the attempt implements it (`worker/state.rs`: in Postgres,
/// behind the fence).
///
/// One that finds out that the attempt may go on no more turns its abort signal, and need not return: whoever waits for it
/// waits for that signal too. The errors are of what cannot be kept at all, in words for people.
pub trait StateKeeper: Send + Sync {
    /// What is kept under this key.
    fn get<'a>(&'a self, key: &'a str) -> Waiting<'a, Result<Option<Kept>, String>>;

    /// The keys that start so, in order, after this one, at most so many.
    fn keys<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        most: u32,
    ) -> Waiting<'a, Result<Vec<String>, String>>;

    /// Keeps a value. Returns once it is there to stay.
    fn set<'a>(&'a self, keep: Keep<'a>) -> Waiting<'a, Result<Wrote, String>>;

    /// Forgets what is kept under this key; false where there was nothing.
    fn delete<'a>(&'a self, key: &'a str) -> Waiting<'a, Result<bool, String>>;
}
