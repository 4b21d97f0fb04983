//! Filters of `rouse job ls`, `retry`, `cancel` and `delete`.

use std::time::{Duration, UNIX_EPOCH};

use clap::Args as ClapArgs;
use clap::builder::NonEmptyStringValueParser;
use serde_json::{Map, Value, json};

use crate::cli::used::{warn_of_unused_handler, warn_of_unused_queue};
use crate::store::{Store, StoreError};

/// Conditions on a job, which must all match.
#[derive(Debug, Clone, Default, ClapArgs)]
pub(super) struct Filter {
    /// Only jobs of this queue
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    queue: Option<String>,

    /// Only jobs for this handler
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    handler: Option<String>,

    /// Only jobs in this state (repeat, or separate with commas, for several)
    #[arg(long = "state", value_name = "STATE", value_delimiter = ',',
          value_parser = ["queued", "running", "succeeded", "failed", "timed_out", "cancelled"])]
    states: Vec<String>,

    /// Only jobs of this tenant
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    tenant: Option<String>,

    /// Only jobs of this source
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    source: Option<String>,

    /// Only jobs that require this tag
    #[arg(long, value_name = "TAG", value_parser = NonEmptyStringValueParser::new())]
    tag: Option<String>,

    /// Only jobs with this unique key, of any tenant
    #[arg(long, value_name = "KEY", value_parser = NonEmptyStringValueParser::new())]
    unique_key: Option<String>,

    /// Only jobs that ended with an error whose message contains this text, ignoring case
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    error: Option<String>,

    /// Only jobs that ended with an error of this kind, for instance timed_out or denied, or the handler's own
    /// (guest_kind)
    #[arg(long, value_name = "KIND", value_parser = NonEmptyStringValueParser::new())]
    kind: Option<String>,

    /// Only jobs whose payload has this value at this JSON pointer, for instance /customer/id=42; a value that is not
    /// JSON is a string
    #[arg(long, value_name = "POINTER=VALUE", value_parser = pointer)]
    payload: Vec<(String, Value)>,

    /// Only jobs that ended or, if live, were enqueued since this time: a time such as 2027-01-31T08:00Z, or an age
    /// such as 2h
    #[arg(long, value_name = "TIME", value_parser = TimeOrAge::read)]
    since: Option<TimeOrAge>,

    /// Only jobs that ended or, if live, were enqueued before this time, in the same form
    #[arg(long, value_name = "TIME", value_parser = TimeOrAge::read)]
    until: Option<TimeOrAge>,
}

/// A point in time, or an age.
#[derive(Debug, Clone)]
enum TimeOrAge {
    Ago(Duration),
    /// As Postgres parses it.
    At(String),
}

impl TimeOrAge {
    /// Never fails: the database refuses an invalid time, and it accepts more forms.
    #[expect(clippy::unnecessary_wraps, reason = "clap wants a Result")]
    fn read(text: &str) -> Result<Self, String> {
        Ok(match humantime::parse_duration(text) {
            Ok(ago) => Self::Ago(ago),
            Err(_) => Self::At(text.to_owned()),
        })
    }

    /// A fixed time, so that all calls of a search use the same time. `now` is the database's clock.
    fn at(&self, now: Duration) -> String {
        match self {
            Self::Ago(ago) => timestamp(now.saturating_sub(*ago)),
            Self::At(text) => text.clone(),
        }
    }
}

/// `since_1970` as Postgres parses it.
fn timestamp(since_1970: Duration) -> String {
    humantime::format_rfc3339_micros(UNIX_EPOCH + since_1970).to_string()
}

fn pointer(text: &str) -> Result<(String, Value), String> {
    let wanted = "expected a JSON pointer and a value, such as /customer/id=42";
    let (pointer, value) = text.split_once('=').ok_or(wanted)?;
    if !pointer.is_empty() && !pointer.starts_with('/') {
        return Err(wanted.to_owned());
    }
    let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    Ok((pointer.to_owned(), value))
}

impl Filter {
    /// True if it has no conditions.
    pub(super) fn is_empty(&self) -> bool {
        self.json(Duration::ZERO) == json!({})
    }

    /// True if it names states.
    pub(super) fn names_states(&self) -> bool {
        !self.states.is_empty()
    }

    /// The states that it names.
    pub(super) fn states(&self) -> &[String] {
        &self.states
    }

    /// Names these states if it names none.
    pub(super) fn default_states(&mut self, states: &[&str]) {
        if self.states.is_empty() {
            self.states = states.iter().map(|&state| state.to_owned()).collect();
        }
    }

    /// True if it names no other states.
    pub(super) fn has_only_states(&self, states: &[&str]) -> bool {
        self.states
            .iter()
            .all(|state| states.contains(&state.as_str()))
    }

    /// The filter of `rouse.search_jobs`. `now_secs` is the database's clock.
    pub(super) fn at(&self, now_secs: f64) -> Value {
        self.json(Duration::try_from_secs_f64(now_secs).unwrap_or_default())
    }

    /// The filter for a fixed set of jobs: those that have ended by now, and live ones that were enqueued by now.
    pub(super) fn until_now(&self, now_secs: f64) -> Value {
        let now = Duration::try_from_secs_f64(now_secs).unwrap_or_default();
        let mut filter = self.json(now);
        if self.until.is_none() {
            filter["until"] = timestamp(now).into();
        }
        filter
    }

    fn json(&self, now: Duration) -> Value {
        let mut filter = Map::new();
        for (key, name) in [
            ("queue", &self.queue),
            ("handler", &self.handler),
            ("tenant", &self.tenant),
            ("source", &self.source),
            ("tag", &self.tag),
            ("unique_key", &self.unique_key),
            ("error", &self.error),
            ("kind", &self.kind),
        ] {
            if let Some(name) = name {
                filter.insert(key.to_owned(), name.as_str().into());
            }
        }
        if self.names_states() {
            filter.insert("state".to_owned(), json!(self.states));
        }
        if !self.payload.is_empty() {
            let payload: Map<String, Value> = self.payload.iter().cloned().collect();
            filter.insert("payload".to_owned(), payload.into());
        }
        for (key, time) in [("since", &self.since), ("until", &self.until)] {
            if let Some(time) = time {
                filter.insert(key.to_owned(), time.at(now).into());
            }
        }
        filter.into()
    }

    /// Warns about names that no lane has; for searches that find nothing.
    pub(super) async fn warn_of_unused_names(&self, store: &Store) -> Result<(), StoreError> {
        if let Some(queue) = &self.queue {
            warn_of_unused_queue(store, queue).await?;
        }
        if let Some(handler) = &self.handler {
            warn_of_unused_handler(store, handler).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    #[test]
    fn an_empty_value_is_refused() {
        let command = Filter::augment_args(Command::new("ls"));
        for name in [
            "--queue",
            "--handler",
            "--tenant",
            "--source",
            "--tag",
            "--unique-key",
            "--error",
            "--kind",
        ] {
            let parsed = |value| command.clone().try_get_matches_from(["ls", name, value]);
            assert!(parsed("x").is_ok(), "{name}");
            let error = parsed("").unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn a_value_that_is_not_json_is_a_string_and_a_pointer_starts_with_a_slash() {
        for (text, value) in [
            ("/id=42", json!(42)),
            ("/id=\"42\"", json!("42")),
            ("/id=a=b", json!("a=b")),
            ("/id=", json!("")),
        ] {
            assert_eq!(pointer(text), Ok(("/id".to_owned(), value)), "{text}");
        }
        for text in ["id=42", "/id", ""] {
            assert!(pointer(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_duration_is_an_age_and_the_database_parses_other_times() {
        let filter = Filter {
            since: TimeOrAge::read("2h").ok(),
            until: TimeOrAge::read("yesterday").ok(),
            ..Filter::default()
        };
        let expected = json!({"since": "1970-01-01T01:00:00.000000Z", "until": "yesterday"});
        assert_eq!(filter.at(10_800.0), expected);
        assert_eq!(filter.until_now(10_800.0), expected);
        let all = Filter::default();
        assert!(all.is_empty());
        let until = json!({"until": "1970-01-01T03:00:00.000000Z"});
        assert_eq!(all.until_now(10_800.0), until);
    }
}
