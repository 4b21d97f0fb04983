//! Enqueues jobs, continues chains, reads results, and waits.

use std::time::{Duration, SystemTime};

use serde::de::DeserializeOwned;

use super::Ctx;
use super::steps::StartedStep;
use crate::host::Flow as _;
use crate::job::{milliseconds, unix_ms};
use crate::results::read;
use crate::{Child, Error, Failure, Job, Result, Results};

impl Ctx {
    /// Enqueues a job. It is committed with the outcome of this attempt if the attempt succeeds. If the attempt fails,
    /// is lost or is suspended, none of its jobs is enqueued: a later attempt makes the same calls again.
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Job, Result, TestCtx, handler};
    ///
    /// #[handler(name = "shop.receipt")]
    /// fn receipt(cents: u64) -> String {
    ///     format!("paid {cents}")
    /// }
    ///
    /// #[handler(name = "shop.charge", capabilities = ["enqueue:shop.receipt"])]
    /// fn charge(ctx: &Ctx, cents: u64) -> Result<()> {
    ///     ctx.enqueue(Job::of::<receipt>(&cents).queue("mail"))?;
    ///     Ok(())
    /// }
    ///
    /// let ctx = TestCtx::new();
    /// charge(&ctx, 1700).unwrap();
    /// assert_eq!(ctx.enqueued()[0].handler, "shop.receipt");
    /// ```
    ///
    /// # Errors
    /// Permanent ones: if the operator does not let this handler enqueue jobs for the other one (kind `denied`); if an
    /// option is invalid, Postgres could not store the payload, or the attempt enqueues too many jobs or too large ones
    /// (kind `job_refused`); and within a step (kind `in_step`). An error of kind `aborted` if the attempt has to stop.
    /// [`Job`] lists what is checked only when the attempt is settled.
    pub fn enqueue<T>(&self, job: Job<T>) -> Result<Child> {
        self.outside_steps("enqueue")?;
        let number = self.world.enqueue(job.into_new()?)?;
        Ok(Child { number })
    }

    /// Continues the chain of this job with another job. That job is committed with the outcome of this attempt if the
    /// attempt succeeds. Jobs that wait for this job wait for the end of its chain, and get the result of its last job.
    /// This method may be called once in an attempt.
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Job, Result, TestCtx, handler};
    ///
    /// #[handler(name = "shop.ship")]
    /// fn ship(order: u64) -> String {
    ///     format!("order {order} is on its way")
    /// }
    ///
    /// #[handler(name = "shop.pack", capabilities = ["enqueue:shop.ship"])]
    /// fn pack(ctx: &Ctx, order: u64) -> Result<()> {
    ///     ctx.info("packed");
    ///     ctx.continue_with(Job::of::<ship>(&order))
    /// }
    ///
    /// let ctx = TestCtx::new();
    /// pack(&ctx, 17).unwrap();
    /// assert_eq!(ctx.continued_with().unwrap().payload, 17);
    /// ```
    ///
    /// # Errors
    /// As for [`enqueue`](Self::enqueue).
    pub fn continue_with<T>(&self, job: Job<T>) -> Result<()> {
        self.outside_steps("continue_with")?;
        self.world.continue_with(job.into_new()?)
    }

    /// The ends of the chains that this job has waited for (`after` of `rouse.enqueue`, or [`Job::after`]). All of them
    /// are read, in pages.
    ///
    /// # Errors
    /// If the host cannot read them (kind `results_refused`, permanent), and if the attempt has to stop (kind
    /// `aborted`).
    pub fn results(&self) -> Result<Results> {
        let mut parents: Vec<crate::Parent> = Vec::new();
        loop {
            let after = parents.last().map(crate::Parent::name);
            let page = self.world.parents(after)?;
            if page.is_empty() {
                return Ok(Results::new(parents));
            }
            parents.extend(page);
        }
    }

    /// Sleeps durably: the attempt is suspended. During the sleep, the job occupies neither a slot nor memory, and the
    /// suspended attempt does not count towards the job's attempts. After this time, an attempt starts from the top; it
    /// gets recorded steps from the database, and this call then returns at once. A sleep of less than two seconds does
    /// not suspend the attempt.
    ///
    /// ```
    /// use std::time::Duration;
    /// use rouse_sdk::{Ctx, Result, TestCtx};
    ///
    /// fn remind(ctx: &Ctx) -> Result<()> {
    ///     for _ in 0..3 {
    ///         ctx.step("mail", || Ok(()))?;
    ///         ctx.sleep("a day", Duration::from_secs(24 * 3600))?;
    ///     }
    ///     Ok(())
    /// }
    ///
    /// let ctx = TestCtx::new();
    /// remind(&ctx).unwrap();
    /// assert_eq!(ctx.steps_done(), ["mail", "mail#2", "mail#3"]);
    /// assert_eq!(ctx.waits().len(), 3);
    /// ```
    ///
    /// # Waits
    /// These rules apply to all waits: `sleep`, [`sleep_until`](Self::sleep_until),
    /// [`wait_signal`](Self::wait_signal), [`call`](Self::call), [`try_call`](Self::try_call) and
    /// [`call_all`](Self::call_all).
    ///
    /// - When a wait suspends the attempt, the host does not return from the call: destructors do not run, and
    ///   variables are lost. Everything before the wait runs again, so effects belong in a [`step`](Self::step).
    /// - Each attempt has to go through its waits in the same order, as with steps.
    /// - A wait is a step: `sleep:a day`, `signal:approved`, `call:photo.resize`; the second wait of the same name in
    ///   an attempt gets a number, as in `sleep:a day#2`. A name is 1 to 190 printable characters long, without `#`.
    ///   Waits count towards the limits of a job's steps.
    /// - They cannot be within the work of a step (kind `in_step`, permanent).
    /// - They block, including in an `async fn`: [`race`](crate::race) cannot end them. For a short wait alongside
    ///   other futures, use [`rouse_sdk::sleep`](crate::sleep).
    ///
    /// # Errors
    /// If the host refuses the wait, or its name is invalid (kind `wait_refused`, permanent), within a step (kind
    /// `in_step`, permanent), and if the attempt has to stop (kind `aborted`).
    pub fn sleep(&self, name: impl AsRef<str>, duration: Duration) -> Result<()> {
        let wait = self.wait("sleep", name.as_ref())?;
        self.world.sleep(&wait.name, milliseconds(duration))?;
        wait.done();
        Ok(())
    }

    /// Sleeps durably until this time, rounded up to milliseconds, according to the database's clock; returns at once if
    /// it has passed. See [`sleep`](Self::sleep).
    ///
    /// Later attempts keep the time of the first call.
    ///
    /// # Errors
    /// As for [`sleep`](Self::sleep).
    pub fn sleep_until(&self, name: impl AsRef<str>, time: SystemTime) -> Result<()> {
        let wait = self.wait("sleep", name.as_ref())?;
        self.world.sleep_until(&wait.name, unix_ms(time))?;
        wait.done();
        Ok(())
    }

    /// Waits durably for a signal with this name (`rouse.signal(id, name, payload)`), and returns its payload; `None`
    /// after the timeout (a [`Duration`]; with `None`, it waits without a timeout). Each signal ends one wait. A signal
    /// that arrives before the wait is kept until then. A wait with a timeout of zero does not suspend the attempt. See
    /// [`sleep`](Self::sleep) for the rules of waits.
    ///
    /// ```
    /// use std::time::Duration;
    /// use rouse_sdk::{Ctx, Result, TestCtx, Wait, serde_json::json};
    ///
    /// const THREE_DAYS: Duration = Duration::from_secs(3 * 24 * 3600);
    ///
    /// fn approval(ctx: &Ctx) -> Result<String> {
    ///     match ctx.wait_signal::<String>("approved", THREE_DAYS)? {
    ///         Some(by) => Ok(format!("approved by {by}")),
    ///         None => Ok("nobody has responded".to_owned()),
    ///     }
    /// }
    ///
    /// let ctx = TestCtx::new();
    /// let wait = ctx.attempt(|ctx| approval(ctx)).suspended();
    /// assert_eq!(wait, Wait::Signal { name: "approved".into(), timeout: Some(THREE_DAYS) });
    ///
    /// ctx.send_signal("approved", json!("Ada"));
    /// let resumed = ctx.resumed();
    /// assert_eq!(resumed.attempt(|ctx| approval(ctx)).ended().unwrap(), "approved by Ada");
    /// ```
    ///
    /// # Errors
    /// As for [`sleep`](Self::sleep), and if the payload does not match `T` (kind `result_mismatch`).
    pub fn wait_signal<T: DeserializeOwned>(
        &self,
        name: impl AsRef<str>,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Option<T>> {
        let name = name.as_ref();
        let wait = self.wait("signal", name)?;
        let timeout_ms = timeout.into().map(milliseconds);
        let payload = self.world.signal(&wait.name, name, timeout_ms)?;
        let payload = payload
            .map(|json| read(format_args!("the payload of the signal {name:?}"), &json))
            .transpose()?;
        wait.done();
        Ok(payload)
    }

    /// Calls another handler: enqueues a job, waits durably for the end of its chain, and returns its result. See
    /// [`sleep`](Self::sleep) for the rules of waits.
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Job, Result, TestCtx, handler, serde_json::json};
    ///
    /// #[handler(name = "shop.charge")]
    /// fn charge(cents: u64) -> String {
    ///     format!("paid {cents}")
    /// }
    ///
    /// #[handler(name = "shop.order", capabilities = ["enqueue:shop.charge"])]
    /// fn order(ctx: &Ctx, cents: u64) -> Result<String> {
    ///     let receipt = ctx.call(Job::of::<charge>(&cents))?;
    ///     Ok(receipt + ", shipped")
    /// }
    ///
    /// let ctx = TestCtx::new();
    /// ctx.on_call(|job| Ok(json!(format!("paid {}", job.payload))));
    /// assert_eq!(order(&ctx, 17).unwrap(), "paid 17, shipped");
    /// ```
    ///
    /// A result of another type does not compile:
    ///
    /// ```compile_fail,E0308
    /// # use rouse_sdk::{Ctx, Job, Result, handler};
    /// #[handler(name = "shop.charge")]
    /// fn charge(cents: u64) -> String {
    ///     format!("paid {cents}")
    /// }
    ///
    /// fn order(ctx: &Ctx) -> Result<u64> {
    ///     ctx.call(Job::of::<charge>(&17))
    /// }
    /// ```
    ///
    /// # Errors
    /// If the called job has not succeeded (kind `call_failed`, permanent; its error is in the details), and if its
    /// result does not match `T` (kind `result_mismatch`) or is missing (kind `no_result`, permanent); otherwise as for
    /// [`enqueue`](Self::enqueue). [`Job::after`] is refused.
    pub fn call<T: DeserializeOwned>(&self, job: Job<T>) -> Result<T> {
        Ok(self.try_call(job)??)
    }

    /// Like [`call`](Self::call), but returns the failure of the called job as a value, for instance so that the
    /// handler can compensate for it.
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Error, Job, Result, TestCtx};
    ///
    /// fn order(ctx: &Ctx, cents: u64) -> Result<String> {
    ///     match ctx.try_call(Job::new("shop.charge", &cents).returning::<String>())? {
    ///         Ok(receipt) => Ok(receipt),
    ///         Err(failure) if failure.kind == "card_declined" => Ok("cancelled".to_owned()),
    ///         Err(failure) => Err(failure.into()),
    ///     }
    /// }
    ///
    /// let ctx = TestCtx::new();
    /// ctx.on_call(|_| Err(Error::permanent("no money").kind("card_declined")));
    /// assert_eq!(order(&ctx, 17).unwrap(), "cancelled");
    /// ```
    ///
    /// # Errors
    /// As for [`call`](Self::call), without `call_failed`.
    pub fn try_call<T: DeserializeOwned>(&self, job: Job<T>) -> Result<Result<T, Failure>> {
        let end = self.call_all([job])?.pop();
        Ok(end.expect("each job has an end, or there is an error"))
    }

    /// Like [`try_call`](Self::try_call), for several jobs that run in parallel: waits until all of them have ended,
    /// and returns their ends in the order of the jobs. Jobs for handlers with different results need a type that fits
    /// all, for instance `.returning::<Value>()`.
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Job, Result};
    ///
    /// fn prices(ctx: &Ctx, shops: &[String]) -> Result<Vec<u64>> {
    ///     let calls = shops.iter().map(|shop| Job::new("shop.price", shop).returning::<u64>());
    ///     // Without those that have failed.
    ///     Ok(ctx.call_all(calls)?.into_iter().flatten().collect())
    /// }
    /// # use rouse_sdk::{TestCtx, serde_json::json};
    /// # let ctx = TestCtx::new();
    /// # ctx.on_call(|job| Ok(json!(job.payload.to_string().len())));
    /// # assert_eq!(prices(&ctx, &["a".into(), "bc".into()]).unwrap(), [3, 4]);
    /// ```
    ///
    /// # Errors
    /// As for [`try_call`](Self::try_call).
    pub fn call_all<T: DeserializeOwned>(
        &self,
        jobs: impl IntoIterator<Item = Job<T>>,
    ) -> Result<Vec<Result<T, Failure>>> {
        self.outside_steps("call")?;
        let mut waits = Vec::new();
        let mut calls = Vec::new();
        let mut handlers = Vec::new();
        for job in jobs {
            let wait = self.wait("call", job.handler())?;
            handlers.push(job.handler().to_owned());
            calls.push((wait.name.clone(), job.into_new()?));
            waits.push(wait);
        }
        if calls.is_empty() {
            return Ok(Vec::new());
        }
        let ends = read_ends(handlers, self.world.call(calls)?)?;
        waits.into_iter().for_each(StartedStep::done);
        Ok(ends)
    }

    /// Starts the step of a wait.
    fn wait(&self, kind: &'static str, name: &str) -> Result<StartedStep<'_>> {
        self.outside_steps(kind)?;
        if name.is_empty() || name.contains('#') {
            let why = format_args!(
                "the name of a wait must not be empty, and must not contain #: {name:?}"
            );
            return Err(Error::permanent(why).kind("wait_refused"));
        }
        Ok(self.start(&format!("{kind}:{name}")))
    }

    /// Refuses this call within a step: a later attempt skips a recorded step, and would lose the call.
    pub(super) fn outside_steps(&self, what: &str) -> Result<()> {
        if !self.in_step.get() {
            return Ok(());
        }
        let why = format_args!(
            "{what} is not allowed within a step, because later attempts skip the step; call it after the step"
        );
        Err(Error::permanent(why).kind("in_step"))
    }
}

/// The ends of the calls to these handlers, in the same order.
fn read_ends<T: DeserializeOwned>(
    handlers: Vec<String>,
    ends: Vec<Result<Vec<u8>, Vec<u8>>>,
) -> Result<Vec<Result<T, Failure>>> {
    if ends.len() != handlers.len() {
        return Err(no_result(ends.len(), handlers.len()));
    }
    ends.into_iter()
        .zip(handlers)
        .map(|(end, handler)| match end {
            Ok(json) => read(format_args!("the result of {handler}"), &json).map(Ok),
            Err(error) => Ok(Err(Failure::from_call(handler, &error))),
        })
        .collect()
}

/// The error if the host does not return one result for each call.
fn no_result(results: usize, calls: usize) -> Error {
    let why = format_args!("the host returned {results} results for {calls} calls");
    Error::permanent(why).kind("no_result")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_needs_a_result() {
        let handlers = || vec!["shop.price".to_owned(), "shop.charge".to_owned()];
        let end = |json: &str| Ok(json.as_bytes().to_vec());
        let ends = read_ends::<u64>(handlers(), vec![end("1"), end("2")]).unwrap();
        assert_eq!(ends, [Ok(1), Ok(2)]);
        for ends in [vec![], vec![end("1")], vec![end("1"), end("2"), end("3")]] {
            let error = read_ends::<u64>(handlers(), ends).unwrap_err();
            assert_eq!((&*error.kind, error.permanent), ("no_result", true));
        }
    }
}
