//! `rouse:handler/jobs`: jobs that an attempt enqueues. They are collected here, and committed with the outcome.

mod options;

use std::sync::Arc;

use serde::Deserialize;

use self::options::{Options, check_handler, check_size};
use super::batch::NO_JOBS;
use crate::job::{JsonText, NewJob, NewJobKind, json_from};
use crate::sandbox::Limits;
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::rouse::handler::jobs::{Host, JobError, NewJob as GuestJob};
use crate::sandbox::grants::{Granted, lines};
use crate::sanitize::printable;

/// The jobs that an attempt has enqueued so far.
#[derive(Default)]
pub(in crate::sandbox) struct NewJobs {
    jobs: Vec<NewJob>,
    /// The number of children.
    children: usize,
    bytes: usize,
    count_max: usize,
    bytes_max: usize,
    /// True unless the handler was invoked without a queue.
    has_queue: bool,
    /// The handler takes batches.
    takes_batches: bool,
}

/// An entry of `after` that is an object: the job, and other keys, which the database checks.
#[derive(Deserialize)]
struct After {
    job: i64,
}

impl NewJobs {
    pub(in crate::sandbox) fn new(has_queue: bool, limits: &Limits) -> Self {
        Self {
            count_max: limits.jobs,
            bytes_max: limits.jobs_bytes,
            has_queue,
            ..Self::default()
        }
    }

    /// Refuses all jobs if the handler takes batches.
    pub(in crate::sandbox) fn unless_batches(self, takes_batches: bool) -> Self {
        Self {
            takes_batches,
            ..self
        }
    }

    /// The maximum number of jobs.
    pub(super) fn count_max(&self) -> usize {
        self.count_max
    }

    /// Takes all jobs. The caller drops them unless the attempt has succeeded or is suspended.
    pub(in crate::sandbox) fn take(&mut self) -> Vec<NewJob> {
        std::mem::take(&mut self.jobs)
    }

    /// Keeps only the calls: the attempt is suspended, and a later one enqueues the other jobs again.
    pub(super) fn keep_calls(&mut self) {
        self.jobs
            .retain(|job| matches!(job.kind, NewJobKind::Call { .. }));
    }

    /// The number of jobs.
    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Keeps only the first `len` jobs, because one of several calls was refused.
    pub(super) fn take_back(&mut self, len: usize) {
        let taken = self.jobs.drain(len..);
        self.bytes -= taken.map(|job| job.bytes()).sum::<usize>();
    }

    /// Adds a job. Returns the number of children so far.
    pub(super) fn add(&mut self, job: GuestJob, kind: NewJobKind) -> Result<usize, String> {
        if !self.has_queue {
            return Err(
                "a handler that is invoked without the queue cannot enqueue jobs; enqueue a job for it instead"
                    .into(),
            );
        }
        if self.takes_batches {
            return Err(NO_JOBS.into());
        }
        if kind == NewJobKind::Next && self.jobs.iter().any(|job| job.kind == NewJobKind::Next) {
            return Err("an attempt can continue its chain with one job only".into());
        }
        if self.jobs.len() >= self.count_max {
            return Err(format!(
                "an attempt may enqueue at most {} jobs (limits.jobs in rouse.toml)",
                self.count_max
            ));
        }
        let options_bytes = job.options.as_ref().map_or(0, Vec::len);
        let bytes = job.handler.len() + job.payload.len() + options_bytes;
        let bytes = self.bytes.saturating_add(bytes);
        if bytes > self.bytes_max {
            return Err(format!(
                "the jobs that an attempt enqueues may take at most {} bytes together (limits.jobs_bytes in rouse.toml)",
                self.bytes_max
            ));
        }
        check_handler(&job.handler)?;
        let what = |why: String| format!("the job for {}: {why}", job.handler);
        let payload = json_from("payload", job.payload).map_err(what)?;
        let options = job.options.map(|options| self.options(options, &kind));
        let job = NewJob {
            options: options.transpose().map_err(what)?,
            kind,
            handler: job.handler,
            payload,
        };
        self.bytes = bytes;
        self.children += usize::from(job.kind == NewJobKind::Child);
        self.jobs.push(job);
        Ok(self.children)
    }

    /// Checks the options of a job.
    fn options(&self, options: Vec<u8>, kind: &NewJobKind) -> Result<JsonText, String> {
        check_size(options.len(), self.children)?;
        let options = json_from("options object", options)?;
        let read: Options<'_> = serde_json::from_str(&options.0)
            .map_err(|error| format!("the options are invalid: {error}"))?;
        read.check()?;
        if read.run_at.is_some() && read.delay_ms.is_some() {
            return Err("the options have both run_at and delay_ms".into());
        }
        let Some(after) = &read.after else {
            return Ok(options);
        };
        if matches!(kind, NewJobKind::Call { .. }) {
            return Err("the options of a call cannot have `after`".into());
        }
        // Any other job could belong to another tenant, and the new job would get its results.
        let children = i64::try_from(self.children).unwrap_or(i64::MAX);
        for (name, entry) in after {
            let job = serde_json::from_str(entry.get())
                .or_else(|_| serde_json::from_str(entry.get()).map(|After { job }| job));
            if !job.is_ok_and(|job| (-children..0).contains(&job)) {
                let numbers: String = match children {
                    0 => "it has enqueued none so far".into(),
                    1 => "-1".into(),
                    _ => format!("-1 to -{children}"),
                };
                let entry = printable(entry.get(), 200);
                return Err(format!(
                    "`after` of the options: {name:?} must be the number of a job that this attempt has enqueued ({numbers}), not {entry}"
                ));
            }
        }
        Ok(options)
    }
}

impl AttemptState {
    /// Adds a job, if the operator lets the handler enqueue it.
    pub(super) fn add_job(&mut self, job: GuestJob, kind: NewJobKind) -> Result<usize, JobError> {
        if self.abort.reason().is_some() {
            return Err(JobError::Aborted);
        }
        if !self.granted.may_enqueue(&job.handler) {
            let denial = denial(&self.granted, &job.handler);
            let why = denial.lines().next().unwrap_or_default().to_owned();
            self.denial = Some(denial);
            return Err(JobError::NotGranted(why));
        }
        self.jobs.add(job, kind).map_err(JobError::Refused)
    }
}

impl Host for AttemptState {
    fn enqueue(&mut self, job: GuestJob) -> wasmtime::Result<Result<i64, JobError>> {
        self.meter.count_host_call();
        let nth = self.add_job(job, NewJobKind::Child);
        Ok(nth.map(|nth| -i64::try_from(nth).unwrap_or(i64::MAX)))
    }

    fn continue_with(&mut self, job: GuestJob) -> wasmtime::Result<Result<(), JobError>> {
        self.meter.count_host_call();
        Ok(self.add_job(job, NewJobKind::Next).map(drop))
    }
}

/// The denial: what the handler tried, and the lines of rouse.toml that would allow it.
fn denial(granted: &Arc<Granted>, to: &str) -> String {
    let handler = &granted.handler;
    let to = printable(to, 128);
    if granted.enqueue_is_attenuated {
        return format!(
            "the handler {handler} tried to enqueue a job for {to}, which the grants of this job leave out (\"enqueue\")"
        );
    }
    format!(
        "the handler {handler} tried to enqueue a job for {to}, which is not granted to it; to grant it, add these lines to rouse.toml:\n{}",
        lines::to_paste(
            handler,
            &lines::enqueue(handler, Some(&to)),
            &granted.config
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(handler: &str, payload: &str, options: Option<&str>) -> GuestJob {
        GuestJob {
            handler: handler.into(),
            payload: payload.into(),
            options: options.map(Into::into),
        }
    }

    fn jobs() -> NewJobs {
        NewJobs::new(true, &Limits::default())
    }

    #[test]
    fn number_children_and_let_later_ones_wait_for_them() {
        let mut jobs = jobs();
        fn child(jobs: &mut NewJobs, options: Option<&str>) -> Result<usize, String> {
            jobs.add(job("a", "{}", options), NewJobKind::Child)
        }
        for early in ["1", "-1", "0"] {
            let options = format!(r#"{{"after": {{"x": {early}}}}}"#);
            let refused = child(&mut jobs, Some(&options)).unwrap_err();
            let end = format!("(it has enqueued none so far), not {early}");
            assert!(refused.ends_with(&end), "{refused}");
        }
        assert_eq!(child(&mut jobs, None), Ok(1));
        let refused = child(&mut jobs, Some(r#"{"after": {"x": -2}}"#)).unwrap_err();
        assert!(refused.ends_with("(-1), not -2"), "{refused}");
        assert_eq!(child(&mut jobs, Some(r#"{"after": {"first": -1}}"#)), Ok(2));
        let both =
            r#"{"after": {"a": {"job": -1, "on_failure": "run"}, "b": -2}, "priority": "low"}"#;
        assert_eq!(child(&mut jobs, Some(both)), Ok(3));
        for foreign in ["17", "0", "-4", "\"17\"", "{\"job\": 17}", "null"] {
            let options = format!(r#"{{"after": {{"x": {foreign}}}}}"#);
            let refused = child(&mut jobs, Some(&options)).unwrap_err();
            assert!(refused.contains("-1 to -3"), "{refused}");
        }
        assert_eq!(jobs.take().len(), 3);
    }

    #[test]
    fn refuse_invalid_jobs_with_their_reason() {
        for (payload, options, why) in [
            ("{", None, "not JSON"),
            ("\"\\u0000\"", None, "NUL"),
            ("{}", Some("[]"), "options are invalid"),
            ("{}", Some("{"), "the options object is not JSON"),
            (
                "{}",
                Some(r#"{"unique_key": "a\u0000b"}"#),
                "the options object has a NUL character",
            ),
            ("{}", Some(r#"{"tenant": "other"}"#), "tenant"),
            ("{}", Some(r#"{"source": "s"}"#), "source"),
            ("{}", Some(r#"{"max_attempts": "3"}"#), "expected u32"),
            ("{}", Some(r#"{"priority": "top"}"#), "expected one of"),
            ("{}", Some(r#"{"max_attempts": 0}"#), "between 1 and 1000"),
            (
                "{}",
                Some(r#"{"run_at": "2030-01-01", "delay_ms": 1}"#),
                "both",
            ),
        ] {
            let refused = jobs().add(job("a.b", payload, options), NewJobKind::Child);
            let refused = refused.unwrap_err();
            assert!(
                refused.contains(why) || refused.contains("unknown"),
                "{refused}"
            );
            assert!(refused.starts_with("the job for a.b: "), "{refused}");
        }
        let refused = jobs().add(job("A b", "1", None), NewJobKind::Child);
        assert_eq!(refused.unwrap_err(), "'A b' is not a handler name");
        let after = Some(r#"{"after": {}}"#);
        let call = NewJobKind::Call { step: "s".into() };
        let refused = jobs().add(job("a", "1", after), call).unwrap_err();
        assert!(refused.contains("call"), "{refused}");
    }

    #[test]
    fn refuse_large_options_before_they_are_read() {
        let tags = format!(r#"{{"tags": [{}""]}}"#, r#""","#.repeat(1 << 20));
        let refused = jobs().add(job("a", "1", Some(&tags)), NewJobKind::Child);
        let why = refused.unwrap_err();
        assert!(why.contains("at most 65536 are allowed"), "{why}");

        // A name has at most 200 characters, and may be that of each child.
        const CHILDREN: usize = 1_000;
        let (mut jobs, mut after) = (jobs(), Vec::new());
        for nth in 1..CHILDREN {
            let child = jobs.add(job("a", "1", None), NewJobKind::Child);
            assert_eq!(child, Ok(nth));
            let name = format!("{nth:🦀>200}");
            after.push(format!(
                r#""{name}":{{"job":-{nth},"on_failure":"cancel"}}"#
            ));
        }
        let after = format!(r#"{{"after":{{{}}}}}"#, after.join(","));
        let last = jobs.add(job("a", "1", Some(&after)), NewJobKind::Child);
        assert_eq!(last, Ok(CHILDREN));
    }

    #[test]
    fn limit_their_number_and_their_size() {
        let limits = Limits {
            jobs: 2,
            jobs_bytes: 100,
            ..Limits::default()
        };
        let mut jobs = NewJobs::new(true, &limits);
        let large = format!("\"{}\"", "x".repeat(100));
        let refused = jobs.add(job("a", &large, None), NewJobKind::Child);
        assert!(refused.unwrap_err().contains("limits.jobs_bytes"));
        let mut jobs = NewJobs::new(true, &limits);
        assert!(jobs.add(job("a", "1", None), NewJobKind::Next).is_ok());
        let twice = jobs.add(job("a", "1", None), NewJobKind::Next);
        assert!(twice.unwrap_err().contains("one job only"));
        assert!(jobs.add(job("a", "1", None), NewJobKind::Child).is_ok());
        let third = jobs.add(job("a", "1", None), NewJobKind::Child);
        assert!(third.unwrap_err().contains("limits.jobs "));
        let mut none = NewJobs::new(false, &limits);
        let without = none.add(job("a", "1", None), NewJobKind::Child);
        assert!(without.unwrap_err().contains("without the queue"));
        let mut batches = NewJobs::new(true, &limits).unless_batches(true);
        let refused = batches.add(job("a", "1", None), NewJobKind::Child);
        assert!(refused.unwrap_err().contains("takes batches"));
    }

    #[test]
    fn a_refused_job_leaves_the_limits_as_they_were() {
        let limits = Limits {
            jobs: 3,
            jobs_bytes: 30,
            ..Limits::default()
        };
        let mut jobs = NewJobs::new(true, &limits);
        let call = || NewJobKind::Call { step: "s".into() };
        let large = format!("\"{}\"", "x".repeat(40));
        assert!(jobs.add(job("a", "1", None), call()).is_ok());
        assert!(jobs.add(job("a", &large, None), call()).is_err());
        let fits = format!("\"{}\"", "x".repeat(20));
        assert!(jobs.add(job("a", &fits, None), call()).is_ok());
        jobs.take_back(1);
        assert!(jobs.add(job("a", &fits, None), call()).is_ok());
        assert_eq!(jobs.len(), 2);
    }

    #[test]
    fn a_suspended_attempt_keeps_only_its_calls() {
        let mut jobs = jobs();
        let call = NewJobKind::Call { step: "s".into() };
        for kind in [NewJobKind::Child, NewJobKind::Next, call.clone()] {
            jobs.add(job("a", "1", None), kind).unwrap();
        }
        jobs.keep_calls();
        let kinds: Vec<_> = jobs.take().into_iter().map(|job| job.kind).collect();
        assert_eq!(kinds, [call]);
    }
}
