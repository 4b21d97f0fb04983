//! What outlives an attempt: the results of its steps, and how far it has come.

use std::collections::HashMap;
use std::pin::Pin;

/// Something that a journal takes its time for.
pub type Waiting<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Where an attempt leaves what is to outlive it. Whoever runs the attempt implements it
/// (`worker/journal.rs`: in Postgres, behind the fence).
///
/// A journal that finds out that the attempt may go on no more turns its abort signal, and need not return:
/// whoever waits for it waits for that signal too.
pub trait Journal: Send + Sync {
    /// The results of the steps that earlier attempts at the job have recorded, by name.
    fn recorded(&self) -> Waiting<'_, HashMap<String, Vec<u8>>>;

    /// Records the result of a step, JSON. Returns once it is there to stay.
    ///
    /// # Errors
    /// What cannot be recorded at all, in words for people.
    fn record<'a>(&'a self, step: &'a str, output: &'a [u8]) -> Waiting<'a, Result<(), String>>;

    /// Takes note of how far the attempt is: 0 to 100, and the step it is in, one line.
    fn progress(&self, percent: u8, step: &str);
}
