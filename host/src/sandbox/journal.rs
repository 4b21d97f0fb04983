//! What outlives an attempt: the results of its steps, how far it has come, and what its handler keeps.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use tracing::Level;

use super::{Meter, StateKeeper};

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
