//! The manifest: a module's description of its handlers.

mod capability;
mod gates;
mod keys;
mod statements;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::time::Duration;

use rouse_schema::{PatternBytes, Schema};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::job::cron::DueTimes;
use crate::job::declared::DeclaredSchedule;
use crate::job::declared_gate::{DeclaredGate, GateLimit};
use crate::job::{RetryPolicy, Statement};
use crate::sanitize::printable;

pub use self::capability::Capability;
use self::capability::{NAME_CHARS_MAX, is_name};
use self::gates::WrittenGate;

/// The maximum size of a manifest with all its schemas; a hundred handlers take about 100 KiB.
const MANIFEST_BYTES_MAX: usize = 1 << 20;

/// More handlers than this in one file are a mistake.
const HANDLERS_MAX: usize = 1_000;

const VERSION_BYTES_MAX: usize = 64;
const DESCRIPTION_BYTES_MAX: usize = 4 << 10;
/// The maximum size of an error message, which may quote the manifest.
const WHY_BYTES_MAX: usize = 4 << 10;
const CAPABILITIES_MAX: usize = 64;
/// The maximum number of unknown keys that are reported, and the maximum length of each: a misspelt key is among the
/// first.
const UNKNOWN_MAX: usize = 16;
const UNKNOWN_BYTES_MAX: usize = 256;
const ATTEMPTS_MAX: u32 = 1_000;
const MULTIPLIER_MAX: f64 = 1_000.0;

const DAY_MS: u64 = 24 * 60 * 60 * 1_000;
/// The maximum of `concurrency`, as in `rouse.toml` (`worker/policy.rs`).
const CONCURRENCY_MAX: u64 = 1_000_000;

/// A module's description of itself, validated.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// The SDK that it was built with, for instance `rouse-sdk 0.1.0`.
    pub sdk: Option<String>,
    /// Its handlers; at least one.
    pub handlers: Vec<HandlerManifest>,
    /// Keys that this host does not know and ignores: misspelt keys, and those of later versions. If there are many,
    /// only the first ones.
    pub unknown: Vec<String>,
}

/// A module's description of one of its handlers, with defaults filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct HandlerManifest {
    /// Its name, for instance `text.stats`.
    pub name: String,
    /// Its version; `0.0.0` when the module has none.
    pub version: String,
    /// A human-readable description.
    pub description: String,
    /// The schema of payloads; `true` (anything) by default.
    pub input_schema: Schema,
    /// The keys that payloads may have, if the schema lists them all.
    pub payload_keys: Option<Vec<String>>,
    /// The schema of results; `true` (anything) by default.
    pub output_schema: Schema,
    /// The retry policy.
    pub retry: RetryPolicy,
    /// The time for which a claim is valid without renewal. Default: 1 minute.
    pub lease: Duration,
    /// The run timeout of an attempt. Default: 1 hour.
    pub timeout: Duration,
    /// The time from the abort signal to the hard stop. Default: 5 s.
    pub grace: Duration,
    /// The number of its attempts that may run at the same time on one host. `None`: as many as there are slots.
    pub concurrency: Option<u32>,
    /// Whether its instances may serve many jobs. Default: fresh ones.
    pub instances: Instances,
    /// The schedule that it declares.
    pub schedule: Option<DeclaredSchedule>,
    /// The gates that it declares, at most 8.
    pub gates: Vec<DeclaredGate>,
    /// The SQL statements that it declares.
    pub statements: Vec<Statement>,
    /// The capabilities that it declares, including those for a schedule or statements that it declares.
    pub capabilities: Vec<Capability>,
}

impl HandlerManifest {
    /// The default lease.
    pub const LEASE: Duration = Duration::from_secs(60);
    /// The default run timeout.
    pub const TIMEOUT: Duration = Duration::from_secs(60 * 60);
    /// The default grace.
    pub const GRACE: Duration = Duration::from_secs(5);

    /// The minimum lease, the same as for one job (`rouse._time_ms`): a renewal is sent before half of it has passed,
    /// and needs a round trip.
    pub const LEASE_MS_MIN: u64 = 2_000;
    /// The maximum lease, the same as for one job (`rouse._time_ms`).
    pub const LEASE_MS_MAX: u64 = DAY_MS;
    /// The maximum wait and run timeout, the same as for one job (`rouse._time_ms`).
    pub const WAIT_MS_MAX: u64 = 30 * DAY_MS;
    /// The maximum grace, because a host that shuts down waits this long for guests.
    pub const GRACE_MS_MAX: u64 = 10 * 60 * 1_000;

    /// True if an attempt can process several jobs: it declares a gate of kind `batch`.
    pub fn takes_batches(&self) -> bool {
        let mut limits = self.gates.iter().map(|gate| &gate.limit);
        limits.any(|limit| matches!(limit, GateLimit::Batch { .. }))
    }
}

/// The number of jobs that one instance of a handler may serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Instances {
    /// One job: each attempt has a fresh instance.
    #[default]
    Fresh,
    /// Many jobs of one tenant, one after another. Data that one job leaves in memory is visible to the next.
    Reuse,
}

#[derive(Deserialize)]
struct WrittenManifest<'a> {
    sdk: Option<String>,
    #[serde(borrow)]
    handlers: Vec<&'a RawValue>,
}

/// Reads the name alone, so that other errors can name the handler.
#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
struct WrittenHandler<'a> {
    name: String,
    version: Option<String>,
    description: Option<String>,
    #[serde(borrow)]
    input_schema: Option<&'a RawValue>,
    #[serde(borrow)]
    output_schema: Option<&'a RawValue>,
    max_attempts: Option<u32>,
    retry_initial_ms: Option<u64>,
    retry_multiplier: Option<f64>,
    retry_max_ms: Option<u64>,
    retry_jitter: Option<f64>,
    lease_ms: Option<u64>,
    timeout_ms: Option<u64>,
    grace_ms: Option<u64>,
    concurrency: Option<u64>,
    #[serde(default, deserialize_with = "null_is_default")]
    instances: Instances,
    schedule: Option<DeclaredSchedule>,
    #[serde(default, deserialize_with = "null_is_default")]
    gates: Vec<WrittenGate>,
    #[serde(default, deserialize_with = "null_is_default")]
    statements: Vec<Statement>,
    #[serde(default, deserialize_with = "null_is_default")]
    capabilities: Vec<String>,
}

fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl Manifest {
    /// Parses the return value of `describe`.
    ///
    /// # Errors
    /// The rest of a sentence that starts with "its manifest …", for the author of the module, on one line.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::read(text).map_err(|why| printable(&why, WHY_BYTES_MAX))
    }

    fn read(text: &str) -> Result<Self, String> {
        if text.len() > MANIFEST_BYTES_MAX {
            return Err(format!(
                "is {} bytes long; at most 1 MiB is allowed",
                text.len()
            ));
        }
        let mut unknown = Vec::new();
        let mut json = serde_json::Deserializer::from_str(text);
        let written: WrittenManifest<'_> = serde_ignored::deserialize(&mut json, |key| {
            record_unknown(&mut unknown, &key, "");
        })
        .and_then(|written| json.end().map(|()| written))
        .map_err(|error| format!("does not parse: {error}"))?;
        if written.handlers.is_empty() {
            return Err(
                "lists no handlers; \"handlers\" must be an array of objects, each with a \"name\""
                    .into(),
            );
        }
        if written.handlers.len() > HANDLERS_MAX {
            return Err(format!(
                "lists {} handlers; at most {HANDLERS_MAX} are allowed",
                written.handlers.len()
            ));
        }
        let mut patterns = PatternBytes::for_module();
        let handlers = written
            .handlers
            .into_iter()
            .map(|written| HandlerManifest::check(written, &mut patterns, &mut unknown))
            .collect::<Result<Vec<_>, _>>()?;
        let mut names = HashSet::new();
        if let Some(twice) = handlers.iter().find(|h| !names.insert(h.name.as_str())) {
            return Err(format!("lists the handler `{}` twice", twice.name));
        }
        Ok(Self {
            sdk: written.sdk.map(|sdk| printable(&sdk, VERSION_BYTES_MAX)),
            handlers,
            unknown,
        })
    }
}

/// Records an unknown key, up to a maximum.
fn record_unknown(unknown: &mut Vec<String>, key: &serde_ignored::Path<'_>, of: &str) {
    if unknown.len() < UNKNOWN_MAX {
        // `serde_ignored` writes a question mark for an optional table.
        let key = key.to_string().replace("?.", "");
        unknown.push(format!("`{}`{of}", printable(&key, UNKNOWN_BYTES_MAX)));
    }
}

impl HandlerManifest {
    fn check(
        written: &RawValue,
        patterns: &mut PatternBytes,
        unknown: &mut Vec<String>,
    ) -> Result<Self, String> {
        let written = written.get();
        // Serde would read a list as the fields in order.
        let named = written
            .starts_with('{')
            .then(|| serde_json::from_str(written));
        let Some(Ok(Named { name })) = named else {
            return Err("has a handler without a name".into());
        };
        if !is_name(&name) {
            return Err(format!(
                "has a handler named `{}`; a name is 1 to {NAME_CHARS_MAX} of a-z, 0-9, - and _, \
                 in words that start with a letter or digit, with dots between them",
                printable(&name, NAME_CHARS_MAX)
            ));
        }
        let of_handler = format!(" of the handler `{name}`");
        let ignored = |key: serde_ignored::Path<'_>| record_unknown(unknown, &key, &of_handler);
        serde_ignored::deserialize(&mut serde_json::Deserializer::from_str(written), ignored)
            .map_err(|error: serde_json::Error| error.to_string())
            .and_then(|written| Self::check_named(written, patterns))
            .map_err(|why| format!("is invalid for the handler `{name}`: {why}"))
    }

    fn check_named(
        written: WrittenHandler<'_>,
        patterns: &mut PatternBytes,
    ) -> Result<Self, String> {
        if written.capabilities.len() > CAPABILITIES_MAX {
            return Err(format!("it has more than {CAPABILITIES_MAX} capabilities"));
        }
        let retry = retry_policy(&written)?;
        let capabilities = written.capabilities.iter().map(|word| word.parse());
        let mut capabilities: Vec<Capability> = capabilities.collect::<Result<_, _>>()?;
        if written.schedule.is_some() && !capabilities.contains(&Capability::Schedule) {
            capabilities.push(Capability::Schedule);
        }
        let statements = statements::check(written.statements)?;
        for Statement { name, .. } in &statements {
            let declared = Capability::Sql(Some(name.clone()));
            if !capabilities.contains(&declared) {
                capabilities.push(declared);
            }
        }
        let input_schema = schema("input_schema", written.input_schema, patterns)?;
        Ok(Self {
            name: written.name,
            version: printable(
                written.version.as_deref().unwrap_or("0.0.0"),
                VERSION_BYTES_MAX,
            ),
            description: printable(
                written.description.as_deref().unwrap_or_default(),
                DESCRIPTION_BYTES_MAX,
            ),
            payload_keys: keys::payload_keys(input_schema.written()),
            input_schema,
            output_schema: schema("output_schema", written.output_schema, patterns)?,
            retry,
            lease: between(
                "lease_ms",
                written.lease_ms,
                HandlerManifest::LEASE_MS_MIN,
                HandlerManifest::LEASE_MS_MAX,
            )?
            .unwrap_or(HandlerManifest::LEASE),
            timeout: between(
                "timeout_ms",
                written.timeout_ms,
                1,
                HandlerManifest::WAIT_MS_MAX,
            )?
            .unwrap_or(HandlerManifest::TIMEOUT),
            // A grace of zero is valid.
            grace: between(
                "grace_ms",
                written.grace_ms,
                0,
                HandlerManifest::GRACE_MS_MAX,
            )?
            .unwrap_or(HandlerManifest::GRACE),
            concurrency: concurrency(written.concurrency)?,
            instances: written.instances,
            schedule: written.schedule.map(schedule).transpose()?,
            gates: gates::check(written.gates)?,
            statements,
            capabilities,
        })
    }
}

fn concurrency(written: Option<u64>) -> Result<Option<u32>, String> {
    match written {
        Some(count) if !(1..=CONCURRENCY_MAX).contains(&count) => Err(format!(
            "concurrency is {count}; expected 1 to {CONCURRENCY_MAX}"
        )),
        Some(count) => Ok(Some(u32::try_from(count).expect("the maximum fits"))),
        None => Ok(None),
    }
}

/// Checks the expression and the time zone of a schedule.
fn schedule(written: DeclaredSchedule) -> Result<DeclaredSchedule, String> {
    let DeclaredSchedule { cron, time_zone } = written;
    DueTimes::parse(&cron, &time_zone).map_err(|why| format!("schedule: {why}"))?;
    let fields: Vec<&str> = cron.split_ascii_whitespace().collect();
    Ok(DeclaredSchedule {
        cron: fields.join(" "),
        time_zone,
    })
}

fn retry_policy(written: &WrittenHandler<'_>) -> Result<RetryPolicy, String> {
    let default = RetryPolicy::default();
    let max_attempts = written.max_attempts.unwrap_or(default.max_attempts);
    if !(1..=ATTEMPTS_MAX).contains(&max_attempts) {
        return Err(format!(
            "max_attempts is {max_attempts}; expected 1 to {ATTEMPTS_MAX}"
        ));
    }
    let multiplier = written.retry_multiplier.unwrap_or(default.multiplier);
    if !(1.0..=MULTIPLIER_MAX).contains(&multiplier) {
        return Err(format!(
            "retry_multiplier is {multiplier}; expected 1 to 1000"
        ));
    }
    let jitter = written.retry_jitter.unwrap_or(default.jitter);
    if !(0.0..=1.0).contains(&jitter) {
        return Err(format!("retry_jitter is {jitter}; expected 0 to 1"));
    }
    let initial = between(
        "retry_initial_ms",
        written.retry_initial_ms,
        1,
        HandlerManifest::WAIT_MS_MAX,
    )?
    .unwrap_or(default.initial);
    let max = between(
        "retry_max_ms",
        written.retry_max_ms,
        1,
        HandlerManifest::WAIT_MS_MAX,
    )?
    // If only the initial wait is set, and is long, it raises the maximum.
    .unwrap_or(default.max.max(initial));
    if max < initial {
        return Err("retry_max_ms is less than retry_initial_ms".into());
    }
    Ok(RetryPolicy {
        max_attempts,
        initial,
        multiplier,
        max,
        jitter,
    })
}

fn between(
    field: &str,
    milliseconds: Option<u64>,
    min: u64,
    max: u64,
) -> Result<Option<Duration>, String> {
    match milliseconds {
        Some(ms) if !(min..=max).contains(&ms) => {
            Err(format!("{field} is {ms}; expected {min} to {max}"))
        }
        Some(ms) => Ok(Some(Duration::from_millis(ms))),
        None => Ok(None),
    }
}

fn schema(
    field: &str,
    written: Option<&RawValue>,
    patterns: &mut PatternBytes,
) -> Result<Schema, String> {
    match written {
        None => Ok(Schema::open()),
        Some(written) => {
            Schema::parse(written, patterns, printable).map_err(|why| format!("{field}: {why}"))
        }
    }
}
