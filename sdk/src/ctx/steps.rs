//! Steps: their names within an attempt, and their recorded results.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::pin::pin;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Ctx;
use crate::host::Host as _;
use crate::{Error, Result};

impl Ctx {
    /// Does a piece of work once per job: its result is committed at once, and a later attempt gets the result instead
    /// of doing the work again.
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Error, TestCtx};
    ///
    /// fn order(ctx: &Ctx) -> Result<u64, Error> {
    ///     let charge: u64 = ctx.step("charge", || Ok(17))?;
    ///     ctx.step("ship", || match ctx.job().attempt {
    ///         1 => Err(Error::retryable("no parcel service today")),
    ///         _ => Ok(charge),
    ///     })
    /// }
    ///
    /// let first = TestCtx::new();
    /// assert!(order(&first).is_err());
    /// // The second attempt does not charge again.
    /// let second = first.next_attempt();
    /// assert_eq!(order(&second).unwrap(), 17);
    /// assert_eq!(second.steps_done(), ["ship"]);
    /// ```
    ///
    /// The name is 1 to 200 printable characters long, without `#`. The second step of the same name within an attempt
    /// is a different step (unless the first has failed or was dropped: then it is the same step). So a step may be in
    /// a loop, as long as each attempt goes through the loop in the same order. By default, a job may have up to 1,000
    /// steps, each with a result of at most 256 KiB, and 8 MiB in total.
    ///
    /// The work cannot wait with [`sleep`](Self::sleep), [`call`](Self::call) and so on, enqueue jobs, add effects, or
    /// have steps of its own (kind `in_step`): a later attempt skips the work, and would lose all of these.
    ///
    /// The work may still be done twice, because an attempt can be lost after the work and before its result is
    /// recorded. External effects of the work should be idempotent (with an idempotency key, for instance
    /// `format!("{}-charge", ctx.job().id)`).
    ///
    /// # Errors
    /// Errors of the work, whose result is then not recorded; if a recorded result no longer matches `T` (kind
    /// `step_changed`); if the host refuses the step (kind `step_refused`); and if the attempt has to stop (kind
    /// `aborted`).
    pub fn step<T: Serialize + DeserializeOwned>(
        &self,
        name: impl AsRef<str>,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let started = self.start_step(name.as_ref())?;
        let output = match self.recorded(&started.name)? {
            Some(recorded) => recorded,
            None => {
                let output = self.within_step(work)?;
                self.record(&started.name, output)?
            }
        };
        started.done();
        Ok(output)
    }

    /// A [`step`](Self::step) for asynchronous work: the future is only awaited if there is no result yet.
    ///
    /// # Errors
    /// As for [`step`](Self::step).
    pub async fn step_async<T: Serialize + DeserializeOwned>(
        &self,
        name: impl AsRef<str>,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let started = self.start_step(name.as_ref())?;
        let output = match self.recorded(&started.name)? {
            Some(recorded) => recorded,
            None => {
                let mut work = pin!(work);
                let output =
                    poll_fn(|context| self.within_step(|| work.as_mut().poll(context))).await?;
                self.record(&started.name, output)?
            }
        };
        started.done();
        Ok(output)
    }

    pub(super) fn start_step(&self, name: &str) -> Result<StartedStep<'_>> {
        self.outside_steps("step")?;
        if name.contains('#') {
            let why = format_args!("the name of a step must not contain #: {name:?}");
            return Err(Error::permanent(why).kind("step_refused"));
        }
        Ok(self.start(name))
    }

    /// Takes the first free name: `name`, `name#2`, `name#3` …
    pub(super) fn start(&self, name: &str) -> StartedStep<'_> {
        let mut started = self.started.borrow_mut();
        let taken = started.entry(name.to_owned()).or_default();
        let nth = first_free(taken);
        taken.insert(nth);
        StartedStep {
            ctx: self,
            base: name.to_owned(),
            nth,
            name: match nth {
                1 => name.to_owned(),
                nth => format!("{name}#{nth}"),
            },
        }
    }

    pub(super) fn recorded<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let Some(bytes) = self.world.start_step(name)? else {
            return Ok(None);
        };
        serde_json::from_slice(&bytes).map(Some).map_err(|error| {
            Error::retryable(format_args!(
                "the recorded result of the step {name} does not match what this version of the handler expects: {error}"
            ))
            .kind("step_changed")
        })
    }

    fn record<T: Serialize>(&self, name: &str, output: T) -> Result<T> {
        self.world
            .complete_step(name, serde_json::to_vec(&output)?)?;
        Ok(output)
    }

    /// Runs the work of a step.
    pub(super) fn within_step<T>(&self, work: impl FnOnce() -> T) -> T {
        self.in_step.set(true);
        let _within = Within(self);
        work()
    }
}

/// The lowest number that is not taken. The usual case, without a gap, costs no search: a handler may start the same
/// step a thousand times in each of its attempts.
fn first_free(taken: &BTreeSet<u32>) -> u32 {
    let last = taken.last().copied().unwrap_or(0);
    if u32::try_from(taken.len()) == Ok(last) {
        return last.saturating_add(1);
    }
    (1..).find(|nth| !taken.contains(nth)).unwrap_or(u32::MAX)
}

/// A running step. If it is dropped before it is done, it releases its name: starting it again in this attempt starts
/// the same step.
pub(super) struct StartedStep<'a> {
    ctx: &'a Ctx,
    base: String,
    nth: u32,
    pub(super) name: String,
}

impl StartedStep<'_> {
    pub(super) fn done(mut self) {
        // No step has this number, so `drop` does not release the name.
        self.nth = 0;
    }
}

impl Drop for StartedStep<'_> {
    fn drop(&mut self) {
        if let Some(taken) = self.ctx.started.borrow_mut().get_mut(&self.base) {
            taken.remove(&self.nth);
        }
    }
}

/// When it is dropped, marks that the work of a step has ended, even if the work has panicked.
struct Within<'a>(&'a Ctx);

impl Drop for Within<'_> {
    fn drop(&mut self) {
        self.0.in_step.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_free_number_fills_gaps() {
        for (taken, free) in [(&[] as &[u32], 1), (&[1, 2], 3), (&[1, 3], 2), (&[2], 1)] {
            assert_eq!(
                first_free(&taken.iter().copied().collect()),
                free,
                "{taken:?}"
            );
        }
    }
}
