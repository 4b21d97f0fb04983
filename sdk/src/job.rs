//! Jobs that a handler enqueues, with their options.

use std::fmt;
use std::marker::PhantomData;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{Error, Handler, Result};

/// The last second that RFC 3339 can express, 9999-12-31T23:59:59Z, in seconds since 1970.
const LAST_SECOND: u64 = 253_402_300_799;

/// A job for another handler, or for the same handler, to be passed to [`Ctx::enqueue`](crate::Ctx::enqueue),
/// [`Ctx::continue_with`](crate::Ctx::continue_with) and [`Ctx::call`](crate::Ctx::call).
///
/// [`Job::of`] is for a handler of the same crate, or of one that this crate depends on; the compiler checks the type
/// of the payload. [`Job::new`] is for any handler, by its name.
///
/// ```
/// use std::time::Duration;
/// use rouse_sdk::{Ctx, Job, Priority, Result, handler};
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Deserialize, Serialize, JsonSchema)]
/// struct Photo {
///     path: String,
/// }
///
/// #[handler(name = "photo.resize")]
/// fn resize(photo: Photo) -> String {
///     photo.path + ".small"
/// }
///
/// #[handler(name = "photo.import", capabilities = ["enqueue:photo.*", "enqueue:mail.send"])]
/// fn import(ctx: &Ctx, photos: Vec<Photo>) -> Result<()> {
///     for photo in &photos {
///         ctx.enqueue(Job::of::<resize>(photo).queue("bulk").priority(Priority::Low))?;
///     }
///     let mail = Job::new("mail.send", &"the photos are here").delay(Duration::from_secs(60));
///     ctx.enqueue(mail)?;
///     Ok(())
/// }
/// # let ctx = rouse_sdk::TestCtx::new();
/// # import(&ctx, vec![Photo { path: "a".into() }]).unwrap();
/// # assert_eq!(ctx.enqueued().len(), 2);
/// ```
///
/// A payload of another type does not compile:
///
/// ```compile_fail,E0308
/// # use rouse_sdk::{Ctx, Job, Result, handler};
/// #[handler(name = "photo.resize")]
/// fn resize(path: String) -> String {
///     path + ".small"
/// }
///
/// fn import(ctx: &Ctx) -> Result<()> {
///     ctx.enqueue(Job::of::<resize>(&17))?;
///     Ok(())
/// }
/// ```
///
/// The job is enqueued in the queue of the current job, with its priority and its tenant, unless options change the
/// queue or the priority. Its grants are at most those that the attenuation of the current job leaves. `T` is the type
/// of its result, for [`Ctx::call`](crate::Ctx::call).
///
/// When the job is passed to `Ctx`, the host checks the grant (kind `denied`), the names of handler and queue,
/// `max_attempts`, the unique key, tags, durations, whether Postgres can store the payload, and the number and size of
/// the attempt's jobs (kind `job_refused`). Postgres checks the rest when the attempt is settled, after the handler has
/// returned: the size of one payload, `run_at`, grants, and the names of [`after`](Self::after). If Postgres refuses
/// one of the jobs, the job of the attempt fails with an error of the kind `invalid_result`, without a retry, and none
/// of the new jobs is enqueued.
#[must_use = "pass it to Ctx::enqueue, Ctx::continue_with or Ctx::call"]
pub struct Job<T = Value> {
    handler: String,
    payload: Result<Vec<u8>>,
    options: Map<String, Value>,
    result: PhantomData<fn() -> T>,
}

impl Job {
    /// A job for the handler with this function: `Job::of::<resize>(&photo)`. The payload type has to implement
    /// `Serialize`, in addition to the traits that a handler needs.
    pub fn of<H: Handler>(payload: &H::Input) -> Job<H::Output>
    where
        H::Input: Serialize,
    {
        Job::new(H::DEFINITION.name, payload).returning()
    }

    /// A job for the handler of this name, with any payload.
    ///
    /// A payload that cannot be written as JSON is reported when the job is enqueued (kind `job_refused`).
    pub fn new<P: Serialize + ?Sized>(handler: impl Into<String>, payload: &P) -> Self {
        let handler = handler.into();
        let payload = serde_json::to_vec(payload).map_err(|error| {
            let why = format_args!("the payload for {handler} cannot be written as JSON: {error}");
            Error::permanent(why).kind("job_refused")
        });
        Self {
            handler,
            payload,
            options: Map::new(),
            result: PhantomData,
        }
    }
}

impl<T> Job<T> {
    /// Sets the type of the result that [`Ctx::call`](crate::Ctx::call) returns: `Job::new("mail.send",
    /// &mail).returning::<Receipt>()`. Without it, the result of `Job::new` is a [`Value`].
    pub fn returning<U>(self) -> Job<U> {
        Job {
            handler: self.handler,
            payload: self.payload,
            options: self.options,
            result: PhantomData,
        }
    }

    /// The queue; by default that of the current job.
    pub fn queue(self, queue: impl Into<String>) -> Self {
        self.with("queue", queue.into())
    }

    /// The priority within the queue; by default that of the current job.
    pub fn priority(self, priority: Priority) -> Self {
        self.with("priority", priority.as_str())
    }

    /// Starts the job this long after it is enqueued, rounded up to milliseconds. Replaces [`run_at`](Self::run_at).
    pub fn delay(mut self, delay: Duration) -> Self {
        self.options.remove("run_at");
        // Postgres reads it as a bigint.
        let ms = i64::try_from(milliseconds(delay)).unwrap_or(i64::MAX);
        self.with("delay_ms", ms)
    }

    /// Starts the job at this time, rounded up to milliseconds, according to the database's clock; a time in the past
    /// means at once. Replaces [`delay`](Self::delay).
    pub fn run_at(mut self, time: SystemTime) -> Self {
        self.options.remove("delay_ms");
        self.with("run_at", rfc3339(time))
    }

    /// The maximum number of attempts, 1 to 1,000; by default the handler's.
    pub fn max_attempts(self, max_attempts: u32) -> Self {
        self.with("max_attempts", max_attempts)
    }

    /// While a job for this handler with this key is queued or running, no other job is enqueued: the existing job
    /// takes the place of this one.
    pub fn unique_key(self, key: impl Into<String>) -> Self {
        self.with("unique_key", key.into())
    }

    /// Tags: only workers that have all of them run the job.
    pub fn tags<I: Into<String>>(self, tags: impl IntoIterator<Item = I>) -> Self {
        let tags = tags.into_iter().map(|tag| Value::String(tag.into()));
        self.with("tags", tags.collect::<Vec<_>>())
    }

    /// The attenuation of the job, as for `rouse.enqueue`: it gets only these grants of its handler, as far as the
    /// attenuation of the current job leaves them. For instance `json!({"http": []})`.
    pub fn grants(self, grants: impl Into<Value>) -> Self {
        self.with("grants", grants)
    }

    /// The lease of an attempt: how long a claim lasts without renewal. By default the handler's.
    pub fn lease(self, lease: Duration) -> Self {
        self.with("lease", interval(lease))
    }

    /// The run timeout of an attempt; by default the handler's.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.with("timeout", interval(timeout))
    }

    /// The job timeout: the time within which the job has to end, with all its attempts, retries and waits. It counts
    /// from the time at which the job is enqueued, or from [`run_at`](Self::run_at) if that is later. A job that has not
    /// ended by then fails, with an error of the kind `job_timeout`. By default there is none.
    pub fn job_timeout(self, timeout: Duration) -> Self {
        self.with("job_timeout", interval(timeout))
    }

    /// Starts the job when the chain of this other job, which the same attempt has enqueued, has succeeded; if that
    /// chain fails, the job is cancelled. In the job, the result of the chain is `ctx.results()?.get(name)`. Names are
    /// 1 to 200 characters long, and unique within a job; a job that uses the same name twice is refused when it is
    /// enqueued (kind `job_refused`).
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Job, OnFailure, Result};
    ///
    /// fn order(ctx: &Ctx, id: u64) -> Result<()> {
    ///     let charge = ctx.enqueue(Job::new("shop.charge", &id))?;
    ///     let reserve = ctx.enqueue(Job::new("shop.reserve", &id))?;
    ///     let ship = Job::new("shop.ship", &id)
    ///         .after("charge", &charge)
    ///         .after("reserve", &reserve);
    ///     let ship = ctx.enqueue(ship)?;
    ///     // Runs in any case, after the end of `ship`.
    ///     ctx.enqueue(Job::new("shop.report", &id).after_or("ship", &ship, OnFailure::Run))?;
    ///     Ok(())
    /// }
    /// # let ctx = rouse_sdk::TestCtx::new();
    /// # order(&ctx, 7).unwrap();
    /// # assert_eq!(ctx.enqueued()[2].options["after"]["reserve"]["job"], -2);
    /// ```
    pub fn after(self, name: impl Into<String>, job: &Child) -> Self {
        self.after_or(name, job, OnFailure::Cancel)
    }

    /// [`after`](Self::after), with the action to take if that chain fails.
    pub fn after_or(mut self, name: impl Into<String>, job: &Child, on_failure: OnFailure) -> Self {
        let name = name.into();
        let parent = json!({"job": job.number, "on_failure": on_failure.as_str()});
        let after = self.options.entry("after").or_insert_with(|| json!({}));
        if after.get(&name).is_none() {
            after[name] = parent;
        } else if self.payload.is_ok() {
            let why = format_args!(
                "a job for {} cannot start after two jobs that are both named {name:?}",
                self.handler
            );
            self.payload = Err(Error::permanent(why).kind("job_refused"));
        }
        self
    }

    fn with(mut self, option: &str, value: impl Into<Value>) -> Self {
        self.options.insert(option.to_owned(), value.into());
        self
    }

    /// The handler's name.
    pub(crate) fn handler(&self) -> &str {
        &self.handler
    }

    pub(crate) fn into_new(self) -> Result<NewJob> {
        Ok(NewJob {
            payload: self.payload?,
            options: (!self.options.is_empty())
                .then(|| Value::Object(self.options).to_string().into_bytes()),
            handler: self.handler,
        })
    }
}

impl<T> fmt::Debug for Job<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("handler", &self.handler)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// A job as the host receives it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NewJob {
    pub(crate) handler: String,
    /// JSON.
    pub(crate) payload: Vec<u8>,
    /// A JSON object.
    pub(crate) options: Option<Vec<u8>>,
}

/// A job that this attempt has enqueued: others of the same attempt can wait for it, with [`Job::after`].
///
/// It does not have an id yet; it gets one when the attempt has succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Child {
    /// Below 0: -1 for the first job that an attempt enqueues.
    pub(crate) number: i64,
}

/// The priority of a job within its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Before the others.
    High,
    /// The default of `rouse.enqueue`.
    Normal,
    /// After the others.
    Low,
}

impl Priority {
    /// The name of this priority in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }
}

/// What happens to a job if a chain that it waits for fails, that is, ends as failed, timed out or cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OnFailure {
    /// The job is cancelled.
    Cancel,
    /// The job runs, and finds the failure in [`Ctx::results`](crate::Ctx::results).
    Run,
    /// The job waits until the failed chain has been retried and has succeeded.
    Wait,
}

impl OnFailure {
    /// The name in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Run => "run",
            Self::Wait => "wait",
        }
    }
}

/// Rounded up: a wait is never shorter than requested.
pub(crate) fn milliseconds(wait: Duration) -> u64 {
    u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Milliseconds since 1970, rounded up; 0 for earlier times.
pub(crate) fn unix_ms(at: SystemTime) -> i64 {
    i64::try_from(ms_since_1970(at)).unwrap_or(i64::MAX)
}

fn ms_since_1970(at: SystemTime) -> u64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH);
    milliseconds(since.unwrap_or_default())
}

/// The text of an interval, as Postgres reads it.
fn interval(time: Duration) -> String {
    format!("{} milliseconds", milliseconds(time))
}

/// In UTC, rounded up to milliseconds. Times before 1970 count as 1970, and times after 9999 as the end of 9999.
fn rfc3339(time: SystemTime) -> String {
    let latest = Duration::from_secs(LAST_SECOND);
    let since = Duration::from_millis(ms_since_1970(time)).min(latest);
    humantime::format_rfc3339_millis(SystemTime::UNIX_EPOCH + since).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options<T>(job: Job<T>) -> Value {
        let options = job.into_new().expect("the payload is valid").options;
        options.map_or(Value::Null, |bytes| {
            serde_json::from_slice(&bytes).expect("options are JSON")
        })
    }

    #[test]
    fn a_job_without_options_sends_none() {
        let job = Job::new("a.b", &[1, 2]).into_new().expect("it is valid");
        assert_eq!((job.payload, job.options), (b"[1,2]".to_vec(), None));
    }

    #[test]
    fn options_are_arguments_of_enqueue() {
        let first = Child { number: -1 };
        let second = Child { number: -2 };
        let job = Job::new("a.b", &())
            .queue("bulk")
            .priority(Priority::High)
            .run_at(SystemTime::UNIX_EPOCH)
            .delay(Duration::from_micros(1500))
            .max_attempts(3)
            .unique_key("k")
            .tags(["gpu", "eu"])
            .grants(json!({"http": []}))
            .lease(Duration::from_secs(90))
            .timeout(Duration::from_millis(1500))
            .job_timeout(Duration::from_secs(3 * 86_400))
            .after("left", &first)
            .after_or("right", &second, OnFailure::Run);
        assert_eq!(
            options(job),
            json!({
                "queue": "bulk", "priority": "high", "delay_ms": 2, "max_attempts": 3, "unique_key": "k",
                "tags": ["gpu", "eu"], "grants": {"http": []},
                "lease": "90000 milliseconds", "timeout": "1500 milliseconds",
                "job_timeout": "259200000 milliseconds",
                "after": {
                    "left": {"job": -1, "on_failure": "cancel"},
                    "right": {"job": -2, "on_failure": "run"},
                },
            })
        );
    }

    #[test]
    fn a_time_is_text_in_utc() {
        let at = |time| options(Job::new("a", &()).delay(Duration::ZERO).run_at(time));
        let day = SystemTime::UNIX_EPOCH + Duration::from_millis(951_782_400_250);
        assert_eq!(at(day), json!({"run_at": "2000-02-29T00:00:00.250Z"}));
        let later = day + Duration::from_nanos(1);
        assert_eq!(at(later), json!({"run_at": "2000-02-29T00:00:00.251Z"}));
        let early = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
        assert_eq!(at(early), json!({"run_at": "1970-01-01T00:00:00.000Z"}));
        let late = SystemTime::UNIX_EPOCH + Duration::from_secs(LAST_SECOND + 86_400);
        assert_eq!(at(late), json!({"run_at": "9999-12-31T23:59:59.000Z"}));
    }

    #[test]
    fn a_time_is_never_earlier_than_requested() {
        let at = |nanos| unix_ms(SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos));
        let times = [0, 1, 1_000_000, 1_000_001, 1_999_999];
        assert_eq!(times.map(at), [0, 1, 1, 2, 2]);
        let early = SystemTime::UNIX_EPOCH - Duration::from_nanos(1);
        assert_eq!(unix_ms(early), 0);
    }

    #[test]
    fn an_endless_delay_fits_into_a_bigint() {
        let job = Job::new("a", &()).delay(Duration::MAX);
        assert_eq!(options(job), json!({"delay_ms": i64::MAX}));
    }

    #[test]
    fn a_name_for_two_jobs_to_wait_for_is_reported_on_enqueue() {
        let (first, second) = (Child { number: -1 }, Child { number: -2 });
        let job = Job::new("a.b", &())
            .after("it", &first)
            .after("it", &second);
        let error = job.into_new().expect_err("two jobs have one name");
        assert_eq!((&*error.kind, error.permanent), ("job_refused", true));
        assert!(error.message.contains("a.b") && error.message.contains("\"it\""));
    }

    #[test]
    fn a_payload_that_json_cannot_hold_is_reported_on_enqueue() {
        let map = std::collections::BTreeMap::from([(vec![1], 1)]);
        let error = Job::new("a.b", &map)
            .into_new()
            .expect_err("keys are strings");
        assert_eq!(error.kind, "job_refused");
        assert!(error.permanent && error.message.contains("a.b"), "{error}");
    }
}
