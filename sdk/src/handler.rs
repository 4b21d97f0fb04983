//! The traits and types behind `#[handler]`.

use schemars::{JsonSchema, Schema, generate::SchemaSettings};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Ctx, Error};

/// The number of jobs that an instance of a handler may serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instances {
    /// One job: no state of an earlier job remains.
    Fresh,
    /// Many jobs of one tenant, one after another, if the operator allows it. Statics keep the values that the last job
    /// left in them.
    Reuse,
}

/// A SQL statement that a handler declares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statement {
    /// Its name: letters, digits and underscores.
    pub name: &'static str,
    /// The text: one SELECT, INSERT, UPDATE, DELETE, MERGE or VALUES, with parameters `$1`, `$2` …
    pub sql: &'static str,
    /// The number of rows that it has to affect or return. `None`: any number.
    pub rows: Option<u64>,
    /// What happens to the job if Postgres refuses the statement's data.
    pub on_error: OnError,
}

/// What happens to a job if Postgres refuses the data of a statement, or its number of rows is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnError {
    /// It fails.
    Fail,
    /// It is tried again after the backoff.
    Retry,
}

/// A gate: a limit on how many jobs of a handler run, how often they start, or which are enqueued at all. Hosts set it
/// in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gate {
    /// The limit.
    pub limit: GateLimit,
    /// The scope of each limit: up to two of `tenant`, `source`, `handler`, `queue` and paths of the payload such as
    /// `$.customer.id`. Empty: one limit for all jobs of the handler.
    pub key: &'static [&'static str],
}

/// The kind of limit that a gate sets, with its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateLimit {
    /// The number of jobs of a key that run at the same time, across all workers.
    MaxConcurrent {
        /// The maximum.
        max: u32,
    },
    /// The number of jobs of a key that start in a period.
    Throttle {
        /// The maximum; with a burst, on average.
        max: u32,
        /// The period, in milliseconds.
        period_ms: u64,
        /// The number that may start at once after a pause. `None`: never more than `max` in any period.
        burst: Option<u32>,
    },
    /// Jobs of a key start together: the handler takes batches ([`BatchJob`](crate::BatchJob)).
    Batch {
        /// The maximum number of jobs in a batch.
        max: u32,
        /// The time for which the first job waits for others, in milliseconds. `None`: it does not wait.
        period_ms: Option<u64>,
    },
    /// While there is a job of a key, no other is enqueued.
    Singleton {
        /// The time during which the job keeps out others.
        during: During,
        /// The period of [`During::Period`], in milliseconds.
        period_ms: Option<u64>,
        /// What happens to an enqueue during this time.
        on_conflict: OnConflict,
    },
    /// A burst of jobs of a key becomes one.
    Debounce {
        /// The pause that ends a burst, in milliseconds.
        period_ms: u64,
        /// The maximum duration of a burst, in milliseconds. `None`: no maximum.
        max_wait_ms: Option<u64>,
        /// Which job of a burst runs.
        edge: Edge,
    },
}

/// The time during which a job keeps out other jobs of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum During {
    /// Until it has started.
    Queued,
    /// Until it has ended.
    Running,
    /// For a period after its enqueue.
    Period,
}

/// What happens to an enqueue while a job of its key keeps out other jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnConflict {
    /// Nothing is enqueued: the earlier job is kept.
    Keep,
    /// The earlier job gets the payload of the new job, unless it has started.
    Replace,
    /// The enqueue is an error.
    Refuse,
}

/// Which job of a burst runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edge {
    /// The last one, after the burst.
    Trailing,
    /// The first one, at once.
    Leading,
}

/// The options that a handler declares. Unset fields use the host's defaults; the operator can override all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Definition {
    /// The name that jobs are enqueued under, for instance `email.send`.
    pub name: &'static str,
    /// The handler's version; by default the crate's.
    pub version: &'static str,
    /// A description; by default the function's doc comment.
    pub description: &'static str,
    /// The maximum number of attempts, including the first.
    pub max_attempts: Option<u32>,
    /// The wait after the first failed attempt, in milliseconds.
    pub retry_initial_ms: Option<u64>,
    /// The longest wait between attempts, in milliseconds.
    pub retry_max_ms: Option<u64>,
    /// The factor by which each further wait grows.
    pub retry_multiplier: Option<f64>,
    /// The random share of the wait, 0 to 1.
    pub retry_jitter: Option<f64>,
    /// The duration of a claim without renewal, in milliseconds.
    pub lease_ms: Option<u64>,
    /// The run timeout of an attempt, in milliseconds.
    pub timeout_ms: Option<u64>,
    /// The time from the abort signal to the hard stop, in milliseconds.
    pub grace_ms: Option<u64>,
    /// The number of attempts of the handler that may run at the same time on one host.
    pub concurrency: Option<u32>,
    /// Whether an instance may serve many jobs.
    pub instances: Instances,
    /// The times at which it runs, if the operator allows it: a cron expression.
    pub schedule: Option<&'static str>,
    /// The time zone of the schedule; UTC by default.
    pub schedule_time_zone: Option<&'static str>,
    /// Its gates, at most 8.
    pub gates: &'static [Gate],
    /// The SQL statements that it may run, if the operator grants them.
    pub statements: &'static [Statement],
    /// The capabilities that the handler requests from the operator, for instance `dirs:/photos`.
    pub capabilities: &'static [&'static str],
}

/// A function with [`#[handler]`](macro@crate::handler). The attribute implements it for a type with the name of the
/// function.
pub trait Handler {
    /// The type of the payload.
    type Input;

    /// The type of the result.
    type Output;

    /// The options that the handler declares.
    const DEFINITION: Definition;

    /// The JSON Schema of the payload.
    fn input_schema() -> Schema;

    /// The JSON Schema of the result.
    fn output_schema() -> Schema;

    /// Runs one attempt, from JSON to JSON.
    ///
    /// # Errors
    /// Errors of the handler. A payload that does not match the input type is a permanent error of kind
    /// `invalid_payload`; a result that cannot be written as JSON is a permanent error of kind `invalid_result`.
    fn run(ctx: &Ctx, payload: &[u8]) -> Result<Vec<u8>, Error>;
}

/// An exported handler with erased types.
#[derive(Clone, Copy)]
pub struct Entry {
    /// The options that it declares.
    pub definition: Definition,
    /// The schema of its payload.
    pub input_schema: fn() -> Schema,
    /// The schema of its result.
    pub output_schema: fn() -> Schema,
    /// Runs one attempt.
    pub run: fn(&Ctx, &[u8]) -> Result<Vec<u8>, Error>,
}

impl Entry {
    /// The entry of a handler.
    pub const fn of<H: Handler>() -> Self {
        Self {
            definition: H::DEFINITION,
            input_schema: H::input_schema,
            output_schema: H::output_schema,
            run: H::run,
        }
    }
}

/// Reads a payload. An error contains the location in the payload.
pub fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, Error> {
    // Tracking the location costs several times as much as reading, so the payload is read again to find the location
    // only after an error.
    serde_json::from_slice(payload)
        .or_else(|error| decode_missing(payload).ok_or(error))
        .or_else(|_| decode_with_path(payload))
}

/// Reads `{}`, the payload of a job that was enqueued without one, as `null`. The host accepts it for each handler that
/// accepts `null`: one without input (`()`), or with an optional input (`Option<T>`).
fn decode_missing<T: DeserializeOwned>(payload: &[u8]) -> Option<T> {
    match payload.trim_ascii() {
        b"{}" => serde_json::from_str("null").ok(),
        _ => None,
    }
}

fn decode_with_path<T: DeserializeOwned>(payload: &[u8]) -> Result<T, Error> {
    let json = &mut serde_json::Deserializer::from_slice(payload);
    let value = serde_path_to_error::deserialize(&mut *json).map_err(|error| {
        let path = error.path().to_string();
        let message = error.inner();
        invalid_payload(if path == "." {
            format!("the payload does not match the input type: {message}")
        } else {
            format!("the payload does not match the input type: {path}: {message}")
        })
    })?;
    json.end()
        .map_err(|error| invalid_payload(format!("the payload is not valid JSON: {error}")))?;
    Ok(value)
}

fn invalid_payload(message: String) -> Error {
    Error::permanent(message).kind("invalid_payload")
}

/// Writes a result.
pub fn encode<T: Serialize>(output: &T) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(output).map_err(|error| {
        Error::permanent(format!("the result cannot be written as JSON: {error}"))
            .kind("invalid_result")
    })
}

/// The schema of the input.
pub fn input_schema<T: JsonSchema>() -> Schema {
    SchemaSettings::draft2020_12()
        .for_deserialize()
        .into_generator()
        .into_root_schema_for::<T>()
}

/// The schema of the output.
pub fn output_schema<T: JsonSchema>() -> Schema {
    SchemaSettings::draft2020_12()
        .for_serialize()
        .into_generator()
        .into_root_schema_for::<T>()
}

/// True if the names are distinct. Evaluated at compile time, in `export!`.
pub const fn distinct(names: &[&str]) -> bool {
    let mut i = 0;
    while i < names.len() {
        let mut j = i + 1;
        while j < names.len() {
            if same(names[i].as_bytes(), names[j].as_bytes()) {
                return false;
            }
            j += 1;
        }
        i += 1;
    }
    true
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}
