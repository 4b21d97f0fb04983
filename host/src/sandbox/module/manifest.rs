//! What a module says of its handlers.

mod capability;
mod keys;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::time::Duration;

use rouse_schema::{PatternBytes, Schema};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::harmless::printable;
use crate::job::RetryPolicy;

pub use self::capability::Capability;
use self::capability::{NAME_CHARS_MAX, is_name};

/// A manifest with all its schemas; a hundred handlers have some 100 KiB.
const MANIFEST_BYTES_MAX: usize = 1 << 20;

/// More handlers than that in one file are a mistake.
const HANDLERS_MAX: usize = 1_000;

const VERSION_BYTES_MAX: usize = 64;
const DESCRIPTION_BYTES_MAX: usize = 4 << 10;
/// What is wrong with a manifest, which may quote it.
const WHY_BYTES_MAX: usize = 4 << 10;
const CAPABILITIES_MAX: usize = 64;
/// Keys that the host does not know and that are named, and the size of one: a misspelt one is among the first.
const UNKNOWN_MAX: usize = 16;
const UNKNOWN_BYTES_MAX: usize = 256;
const ATTEMPTS_MAX: u32 = 1_000;
const MULTIPLIER_MAX: f64 = 1_000.0;

const DAY_MS: u64 = 24 * 60 * 60 * 1_000;
/// No lease is longer than this, as in the database (`migrations/functions/claim.sql`).
const LEASE_MS_MAX: u64 = DAY_MS;
/// No wait or run is longer than this.
const WAIT_MS_MAX: u64 = 365 * DAY_MS;
/// A host that shuts down waits for no guest longer than this.
const GRACE_MS_MAX: u64 = 10 * 60 * 1_000;

/// What a module says of itself, checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// What it was built with, for instance `rouse-sdk 0.1.0`.
    pub sdk: Option<String>,
    /// Its handlers; at least one.
    pub handlers: Vec<HandlerManifest>,
    /// Keys that this host does not know and ignores, for people: misspelt ones, and those of later versions. Some of them,
    /// where there are many.
    pub unknown: Vec<String>,
}

/// What a module says of one of its handlers, with defaults where it says nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct HandlerManifest {
    /// Its name, for instance `text.stats`.
    pub name: String,
    /// Its version; `0.0.0` when the module has none.
    pub version: String,
    /// What it does, for people.
    pub description: String,
    /// What payloads have to fit; `true` (anything) by default.
    pub input_schema: Schema,
    /// The keys that payloads may have, where that schema names all that may be meant.
    pub payload_keys: Option<Vec<String>>,
    /// What results have to fit; `true` (anything) by default.
    pub output_schema: Schema,
    /// When to try again.
    pub retry: RetryPolicy,
    /// How long a claim holds without renewal. Default: 1 minute.
    pub lease: Duration,
    /// How long one attempt may run. Default: 1 hour.
    pub timeout: Duration,
    /// From the abort signal to the hard stop. Default: 5 s.
    pub grace: Duration,
    /// Whether it bears that its instances serve many jobs. Default: fresh ones.
    pub instances: Instances,
    /// What it would like to be granted.
    pub capabilities: Vec<Capability>,
}

impl HandlerManifest {
    /// Its lease, where the module says nothing of it.
    pub const LEASE: Duration = Duration::from_secs(60);
    /// Its run timeout, the same.
    pub const TIMEOUT: Duration = Duration::from_secs(60 * 60);
    /// Its grace, the same.
    pub const GRACE: Duration = Duration::from_secs(5);
}

/// How many jobs one instance of a handler may serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Instances {
    /// One: each attempt has a fresh instance.
    #[default]
    Fresh,
    /// Many, of one tenant, one after the other. What a job leaves in memory is there for the next.
    Reuse,
}

#[derive(Deserialize)]
struct WrittenManifest<'a> {
    sdk: Option<String>,
    #[serde(borrow)]
    handlers: Vec<&'a RawValue>,
}

/// For the name alone, by which other mistakes are told.
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
    #[serde(default, deserialize_with = "null_is_default")]
    retry: WrittenRetry,
    lease_ms: Option<u64>,
    timeout_ms: Option<u64>,
    grace_ms: Option<u64>,
    /// Null, until a host keeps to it.
    #[serde(borrow)]
    concurrency: Option<&'a RawValue>,
    #[serde(default, deserialize_with = "null_is_default")]
    instances: Instances,
    #[serde(default, deserialize_with = "null_is_default")]
    capabilities: Vec<String>,
}

#[derive(Deserialize, Default)]
struct WrittenRetry {
    max_attempts: Option<u32>,
    initial_ms: Option<u64>,
    multiplier: Option<f64>,
    max_ms: Option<u64>,
    jitter: Option<f64>,
}

fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl Manifest {
    /// Reads what `describe` returned.
    ///
    /// # Errors
    /// A sentence for the author of the module, in one line.
    pub fn parse(text: &str) -> Result<Self, String> {
        Self::read(text).map_err(|why| printable(&why, WHY_BYTES_MAX))
    }

    fn read(text: &str) -> Result<Self, String> {
        if text.len() > MANIFEST_BYTES_MAX {
            return Err(format!("has {} bytes; 1 MiB is allowed", text.len()));
        }
        let mut unknown = Vec::new();
        let mut json = serde_json::Deserializer::from_str(text);
        let written: WrittenManifest<'_> = serde_ignored::deserialize(&mut json, |key| {
            note(&mut unknown, &key, "");
        })
        .and_then(|written| json.end().map(|()| written))
        .map_err(|error| format!("does not parse: {error}"))?;
        if written.handlers.is_empty() {
            return Err(
                "lists no handlers; its \"handlers\" is a list of objects, each with a \"name\""
                    .into(),
            );
        }
        if written.handlers.len() > HANDLERS_MAX {
            return Err(format!(
                "lists {} handlers; {HANDLERS_MAX} are allowed",
                written.handlers.len()
            ));
        }
        let mut patterns = PatternBytes::of_a_module();
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

/// Notes a key that the host does not know, while there is room.
fn note(unknown: &mut Vec<String>, key: &serde_ignored::Path<'_>, of: &str) {
    if unknown.len() < UNKNOWN_MAX {
        // A question mark stands for a table that may be left out.
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
        // A list would be read as its fields in their order.
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
        let ignored = |key: serde_ignored::Path<'_>| note(unknown, &key, &of_handler);
        serde_ignored::deserialize(&mut serde_json::Deserializer::from_str(written), ignored)
            .map_err(|error: serde_json::Error| error.to_string())
            .and_then(|written| Self::check_named(written, patterns))
            .map_err(|why| format!("is wrong about the handler `{name}`: {why}"))
    }

    fn check_named(
        written: WrittenHandler<'_>,
        patterns: &mut PatternBytes,
    ) -> Result<Self, String> {
        if written.concurrency.is_some() {
            return Err(
                "it limits its concurrency, and no host enforces that yet; take `concurrency` out (`slots` in rouse.toml limits the attempts of a host)"
                    .into(),
            );
        }
        if written.capabilities.len() > CAPABILITIES_MAX {
            return Err("capabilities are at most 64 words like `dirs`, or `dirs:/photos`".into());
        }
        let capabilities = written.capabilities.iter().map(|word| word.parse());
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
            retry: written.retry.check()?,
            lease: between("lease_ms", written.lease_ms, 1, LEASE_MS_MAX)?
                .unwrap_or(HandlerManifest::LEASE),
            timeout: between("timeout_ms", written.timeout_ms, 1, WAIT_MS_MAX)?
                .unwrap_or(HandlerManifest::TIMEOUT),
            // No grace at all is a choice.
            grace: between("grace_ms", written.grace_ms, 0, GRACE_MS_MAX)?
                .unwrap_or(HandlerManifest::GRACE),
            instances: written.instances,
            capabilities: capabilities.collect::<Result<_, _>>()?,
        })
    }
}

impl WrittenRetry {
    fn check(self) -> Result<RetryPolicy, String> {
        let default = RetryPolicy::default();
        let max_attempts = self.max_attempts.unwrap_or(default.max_attempts);
        if !(1..=ATTEMPTS_MAX).contains(&max_attempts) {
            return Err(format!(
                "retry.max_attempts is {max_attempts}; it is 1 to {ATTEMPTS_MAX}"
            ));
        }
        let multiplier = self.multiplier.unwrap_or(default.multiplier);
        if !(1.0..=MULTIPLIER_MAX).contains(&multiplier) {
            return Err(format!("retry.multiplier is {multiplier}; it is 1 to 1000"));
        }
        let jitter = self.jitter.unwrap_or(default.jitter);
        if !(0.0..=1.0).contains(&jitter) {
            return Err(format!("retry.jitter is {jitter}; it is 0 to 1"));
        }
        let initial = between("retry.initial_ms", self.initial_ms, 1, WAIT_MS_MAX)?
            .unwrap_or(default.initial);
        let max = between("retry.max_ms", self.max_ms, 1, WAIT_MS_MAX)?
            // An author who only sets a long first wait means it.
            .unwrap_or(default.max.max(initial));
        if max < initial {
            return Err("retry.max_ms is less than retry.initial_ms".into());
        }
        Ok(RetryPolicy {
            max_attempts,
            initial,
            multiplier,
            max,
            jitter,
        })
    }
}

fn between(
    what: &str,
    milliseconds: Option<u64>,
    least: u64,
    most: u64,
) -> Result<Option<Duration>, String> {
    match milliseconds {
        Some(ms) if !(least..=most).contains(&ms) => {
            Err(format!("{what} is {ms}; it is {least} to {most}"))
        }
        Some(ms) => Ok(Some(Duration::from_millis(ms))),
        None => Ok(None),
    }
}

fn schema(
    what: &str,
    written: Option<&RawValue>,
    patterns: &mut PatternBytes,
) -> Result<Schema, String> {
    match written {
        None => Ok(Schema::open()),
        Some(written) => {
            Schema::parse(written, patterns, printable).map_err(|why| format!("{what}: {why}"))
        }
    }
}
