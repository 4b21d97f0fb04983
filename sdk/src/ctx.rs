//! The context of a running attempt: its job, and the functions of the host.

mod flow;
mod sql;
mod steps;

pub use self::sql::Tx;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;

use serde::de::DeserializeOwned;

use crate::host::{Host as _, PendingResponse};
use crate::http::Request;
use crate::state::State;
use crate::{AbortSignal, Error, Level, Result, World};

/// One attempt at one job.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobInfo {
    /// The job's id, the same for all its attempts. Negative if the handler was invoked without the queue; each
    /// invocation has its own number.
    pub id: i64,
    /// The name under which the job was enqueued.
    pub handler: String,
    /// The queue that the job is in.
    pub queue: String,
    /// The tenant that the job belongs to.
    pub tenant: Option<String>,
    /// What triggered the job.
    pub source: Option<String>,
    /// The number of this attempt, starting at 1.
    pub attempt: u32,
    /// The maximum number of attempts.
    pub max_attempts: u32,
    /// When the job was enqueued: milliseconds since 1970-01-01 UTC, by the database's clock.
    pub requested_at_ms: i64,
}

/// The context of an attempt, as its handler sees it.
///
/// In native tests `TestCtx` replaces it: `&TestCtx` is accepted as `&Ctx`.
pub struct Ctx {
    job: JobInfo,
    world: Rc<World>,
    /// The numbers of the steps of each name that are running or done in this attempt. An ordered map, because the
    /// first hash table of an attempt would request a random seed from the host.
    started: RefCell<BTreeMap<String, BTreeSet<u32>>>,
    /// True while the work of a step runs.
    in_step: Cell<bool>,
}

/// A context, and another one that has taken over its steps. Dropping this gives them back, even if a wait or a panic
/// unwinds.
#[cfg(not(target_family = "wasm"))]
struct Swapped<'a>(&'a Ctx, Ctx);

#[cfg(not(target_family = "wasm"))]
impl Drop for Swapped<'_> {
    fn drop(&mut self) {
        self.1.started.swap(&self.0.started);
    }
}

impl Ctx {
    pub(crate) fn new(job: JobInfo, world: Rc<World>) -> Self {
        Self {
            job,
            world,
            started: RefCell::default(),
            in_step: Cell::new(false),
        }
    }

    /// Runs part of this attempt with another description of its job, in tests.
    #[cfg(not(target_family = "wasm"))]
    pub(crate) fn with_job<T>(&self, job: JobInfo, run: impl FnOnce(&Self) -> T) -> T {
        let other = Self::new(job, Rc::clone(&self.world));
        other.started.swap(&self.started);
        other.in_step.set(self.in_step.get());
        let both = Swapped(self, other);
        run(&both.1)
    }

    pub(crate) fn world(&self) -> &World {
        &self.world
    }

    /// The job and the number of this attempt.
    pub fn job(&self) -> &JobInfo {
        &self.job
    }

    /// Writes one line to the host's log, with the job's id.
    pub fn log(&self, level: Level, message: impl fmt::Display) {
        self.world.log(level, message.to_string());
    }

    /// [`log`](Self::log) at [`Level::Trace`].
    pub fn trace(&self, message: impl fmt::Display) {
        self.log(Level::Trace, message);
    }

    /// [`log`](Self::log) at [`Level::Debug`].
    pub fn debug(&self, message: impl fmt::Display) {
        self.log(Level::Debug, message);
    }

    /// [`log`](Self::log) at [`Level::Info`].
    pub fn info(&self, message: impl fmt::Display) {
        self.log(Level::Info, message);
    }

    /// [`log`](Self::log) at [`Level::Warn`].
    pub fn warn(&self, message: impl fmt::Display) {
        self.log(Level::Warn, message);
    }

    /// [`log`](Self::log) at [`Level::Error`].
    pub fn error(&self, message: impl fmt::Display) {
        self.log(Level::Error, message);
    }

    /// Reports the progress of the attempt, 0 to 100 (more counts as 100), with the current step.
    pub fn progress(&self, percent: u8, step: impl AsRef<str>) {
        self.world.progress(percent.min(100), step.as_ref());
    }

    /// A placeholder for a secret, to be used in a header or the body of a request. The host replaces it with the
    /// secret, if `rouse.toml` grants that for the server. The handler never holds the secret itself, so it cannot leak
    /// it.
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Error, http};
    ///
    /// async fn send(ctx: &Ctx) -> Result<(), Error> {
    ///     let key = ctx.secret("MAIL_KEY")?;
    ///     let mail = http::post("https://api.mail.example/v1/send").bearer(key);
    ///     mail.body("hello").send(ctx).await?.error_for_status()?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// Permanent, if the operator has not granted the secret to this handler (kind `denied`).
    pub fn secret(&self, name: impl AsRef<str>) -> Result<String> {
        self.world.secret(name.as_ref())
    }

    /// The operator's settings for this handler, from `[handlers.NAME.settings]` in `rouse.toml`. Optional fields need
    /// a default (`#[serde(default)]`).
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Error, TestCtx, serde_json::json};
    /// use serde::Deserialize;
    ///
    /// #[derive(Deserialize)]
    /// struct Settings {
    ///     threshold: u32,
    /// }
    ///
    /// fn is_many(ctx: &Ctx, count: u32) -> Result<bool, Error> {
    ///     Ok(count > ctx.settings::<Settings>()?.threshold)
    /// }
    ///
    /// let ctx = TestCtx::new();
    /// ctx.set_settings(json!({"threshold": 3}));
    /// assert!(is_many(&ctx, 4).unwrap());
    /// ```
    ///
    /// # Errors
    /// Permanent, if they do not match `T` (kind `invalid_settings`); the message names the setting and its table.
    pub fn settings<T: DeserializeOwned>(&self) -> Result<T> {
        let json = self.world.settings();
        let json = &mut serde_json::Deserializer::from_slice(&json);
        serde_path_to_error::deserialize(json).map_err(|error| {
            let handler = &self.job.handler;
            let path = match error.path().to_string().as_str() {
                "." => String::new(),
                path => format!("{path}: "),
            };
            Error::permanent(format_args!(
                "invalid settings of the handler {handler}: {path}{}; correct them in rouse.toml, under [handlers.\"{handler}\".settings] or a matching pattern",
                error.inner()
            ))
            .kind("invalid_settings")
        })
    }

    /// The handler's state, for the tenant of this job.
    pub fn state(&self) -> State<'_> {
        State::new(&self.world)
    }

    /// The HMAC-SHA256 of a message, 32 bytes. The key is a secret that `rouse.toml` grants for signing (`sign =
    /// true`). The host computes it, so that the handler never holds the key. A secret that starts with `whsec_`
    /// contains the key in base64, as in [Standard Webhooks](https://www.standardwebhooks.com).
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Error};
    ///
    /// fn signature(ctx: &Ctx, message: &str) -> Result<String, Error> {
    ///     let tag = ctx.hmac_sha256("SIGNING_KEY", message)?;
    ///     Ok(tag.iter().map(|byte| format!("{byte:02x}")).collect())
    /// }
    /// ```
    ///
    /// In native tests it returns 32 bytes that depend on the name and the message, but are not an HMAC.
    ///
    /// # Errors
    /// Permanent, if the operator has not granted the secret to this handler (kind `denied`).
    pub fn hmac_sha256(&self, name: impl AsRef<str>, message: impl AsRef<[u8]>) -> Result<Vec<u8>> {
        self.world.hmac_sha256(name.as_ref(), message.as_ref())
    }

    pub(crate) fn http<'a>(&'a self, request: &'a Request) -> PendingResponse<'a> {
        self.world.http(request)
    }

    /// This attempt's abort signal.
    pub fn abort(&self) -> AbortSignal {
        AbortSignal::new(Rc::clone(&self.world))
    }
}

impl fmt::Debug for Ctx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ctx").field("job", &self.job).finish()
    }
}
