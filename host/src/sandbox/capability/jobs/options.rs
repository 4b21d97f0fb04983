//! The handler and the options of a job that an attempt enqueues, checked as far as possible when the job is passed to
//! the host, by the rules of `rouse.enqueue` and with its messages (migrations/functions/lanes.sql, enqueue.sql,
//! logins.sql).
//!
//! Postgres checks all of them when the outcome is settled. Only Postgres checks times in forms other than a number of
//! milliseconds, grants, the names in `after`, and the queue's maximum payload size.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::job::is_pattern;
use crate::sandbox::HandlerManifest;
use crate::sanitize::printable;

/// The maximum number of bytes of an invalid value that an error message shows.
const SHOWN_BYTES: usize = 140;

/// The maximum size of the options of a job, in bytes. Parsed options take up to 24 times as much memory, which the
/// host does not count. Without `after`, valid options have at most 16 KiB, 8 KiB of which are grants.
const OPTIONS_BYTES_MAX: usize = 64 << 10;

/// The additional bytes for each job that `after` may name: a name has at most 200 characters.
const AFTER_BYTES_MAX: usize = 1 << 10;

/// Checks the size of options before they are read. `children`: the number of jobs that `after` may name.
pub(super) fn check_size(bytes: usize, children: usize) -> Result<(), String> {
    let bytes_max = OPTIONS_BYTES_MAX.saturating_add(children.saturating_mul(AFTER_BYTES_MAX));
    match bytes <= bytes_max {
        true => Ok(()),
        false => Err(format!(
            "the options are {bytes} bytes long; at most {bytes_max} are allowed"
        )),
    }
}

/// The arguments of `rouse.enqueue` that a guest may give.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "of some only the names and types are checked")]
pub(super) struct Options<'a> {
    queue: Option<String>,
    priority: Option<Priority>,
    pub(super) run_at: Option<String>,
    pub(super) delay_ms: Option<u64>,
    max_attempts: Option<u32>,
    unique_key: Option<String>,
    tags: Option<Vec<String>>,
    grants: Option<IgnoredAny>,
    lease: Option<String>,
    timeout: Option<String>,
    job_timeout: Option<String>,
    // Kept as text: parsed values take up to 100 times as much memory.
    #[serde(borrow)]
    pub(super) after: Option<BTreeMap<String, &'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Priority {
    High,
    Normal,
    Low,
}

impl Options<'_> {
    /// Checks the values of the options.
    pub(super) fn check(&self) -> Result<(), String> {
        if let Some(queue) = &self.queue
            && !is_queue_name(queue)
        {
            let queue = printable(queue, SHOWN_BYTES);
            return Err(format!("'{queue}' is not a queue name"));
        }
        if let Some(attempts) = self.max_attempts
            && !(1..=1000).contains(&attempts)
        {
            return Err(format!(
                "max_attempts must be between 1 and 1000, not {attempts}"
            ));
        }
        if let Some(key) = &self.unique_key
            && (key.is_empty() || key.len() > 1024 || key.chars().count() > 512)
        {
            return Err(
                "unique_key must have 1 to 512 characters and at most 1024 bytes, or be left out"
                    .into(),
            );
        }
        if let Some(tags) = &self.tags
            && (tags.len() > 16 || !tags.iter().all(|tag| is_tag(tag)))
        {
            let tags = printable(&tags.join(","), SHOWN_BYTES);
            return Err(format!(
                "tags must be a list of at most 16 tags, not {{{tags}}}"
            ));
        }
        let (lease_min, lease_max) = (HandlerManifest::LEASE_MS_MIN, HandlerManifest::LEASE_MS_MAX);
        check_time("lease", &self.lease, lease_min, lease_max)?;
        check_time("timeout", &self.timeout, 1, 2_592_000_000)?;
        check_time("job_timeout", &self.job_timeout, 1, 316_224_000_000)
    }
}

/// Checks the name of the handler.
pub(super) fn check_handler(name: &str) -> Result<(), String> {
    match name.len() <= 128 && !name.ends_with('*') && is_pattern(name) {
        true => Ok(()),
        false => {
            let name = printable(name, SHOWN_BYTES);
            Err(format!("'{name}' is not a handler name"))
        }
    }
}

/// Checks a time in the form that the SDK writes.
fn check_time(
    option: &str,
    time: &Option<String>,
    least_ms: u64,
    most_ms: u64,
) -> Result<(), String> {
    let ms = time
        .as_ref()
        .and_then(|time| time.strip_suffix(" milliseconds"));
    match ms.and_then(|ms| ms.parse::<u64>().ok()) {
        Some(ms) if !(least_ms..=most_ms).contains(&ms) => Err(format!(
            "{option} must be between {least_ms} and {most_ms} milliseconds, not {ms}"
        )),
        Some(_) | None => Ok(()),
    }
}

fn is_queue_name(name: &str) -> bool {
    name.len() <= 128 && is_word(name)
}

fn is_tag(tag: &str) -> bool {
    let is_value =
        |value: &str| !value.is_empty() && value.bytes().all(|b| is_inner(b) || b == b'/');
    tag.len() <= 128
        && match tag.split_once('=') {
            Some((key, value)) => is_word(key) && is_value(value),
            None => is_word(tag),
        }
}

fn is_word(word: &str) -> bool {
    let first = word.bytes().next();
    first.is_some_and(|b| b.is_ascii_alphanumeric()) && word.bytes().all(is_inner)
}

fn is_inner(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte)
}

/// The same rules in the SDK, for native tests.
#[cfg(test)]
#[path = "../../../../../sdk/src/testing/job_rules.rs"]
mod sdk;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(options: Value) -> Result<(), String> {
        let text = options.to_string();
        let read: Options<'_> = serde_json::from_str(&text).expect("known options");
        let checked = read.check();
        assert_eq!(sdk::check_options(&options), checked, "{text}");
        checked
    }

    fn check_name(name: &str) -> Result<(), String> {
        let checked = check_handler(name);
        assert_eq!(sdk::check_handler(name), checked, "{name}");
        checked
    }

    #[test]
    fn values_at_their_limits_are_accepted() {
        let longest = "q".repeat(128);
        let name = longest.as_str();
        for options in [
            json!({}),
            json!({"queue": null, "max_attempts": null, "unique_key": null, "tags": null, "lease": null}),
            json!({"queue": name, "max_attempts": 1000, "unique_key": "é".repeat(512), "tags": vec![name; 16]}),
            json!({"queue": "A-1:x_y.z", "tags": ["gpu", "zone=eu/west-1", "a.b:c"], "max_attempts": 1}),
            json!({"lease": "2000 milliseconds", "timeout": "1 milliseconds", "job_timeout": "316224000000 milliseconds"}),
            // Only Postgres knows.
            json!({"lease": "1 second", "timeout": "soon", "run_at": "soon", "grants": 1, "after": {"": -1}}),
        ] {
            assert_eq!(check(options.clone()), Ok(()), "{options}");
        }
        for name in ["x", "email.send", "a-b.c_d", name] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
    }

    #[test]
    fn refuse_invalid_values_with_the_messages_of_postgres() {
        let long = "q".repeat(129);
        for queue in ["", "no queue", "-a", "a/b", "ä", &long] {
            let refused = check(json!({ "queue": queue })).unwrap_err();
            assert!(refused.contains("' is not a queue name"), "{refused}");
        }
        for attempts in [0, 1001, u32::MAX] {
            let refused = check(json!({ "max_attempts": attempts })).unwrap_err();
            let expected = format!("max_attempts must be between 1 and 1000, not {attempts}");
            assert_eq!(refused, expected);
        }
        for key in [String::new(), "k".repeat(513), "🦀".repeat(257)] {
            let refused = check(json!({ "unique_key": key })).unwrap_err();
            assert!(
                refused.starts_with("unique_key must have 1 to 512"),
                "{refused}"
            );
        }
        for tag in ["", "a b", "=eu", "zone=", "zone=a=b", "a/b", &long] {
            let refused = check(json!({ "tags": ["gpu", tag] })).unwrap_err();
            let expected = "tags must be a list of at most 16 tags, not {gpu,";
            assert!(refused.starts_with(expected), "{refused}");
        }
        assert!(check(json!({ "tags": vec!["gpu"; 17] })).is_err());
        for (option, ms) in [
            ("lease", 1999_u64),
            ("lease", 86_400_001),
            ("timeout", 0),
            ("timeout", 2_592_000_001),
            ("job_timeout", 316_224_000_001),
        ] {
            let refused = check(json!({ option: format!("{ms} milliseconds") })).unwrap_err();
            let expected = format!("{option} must be between ");
            assert!(refused.starts_with(&expected), "{refused}");
        }
        for name in ["", "Email.send", "a..b", "a.*", "*", ".a", "a b", &long] {
            let refused = check_name(name).unwrap_err();
            assert!(refused.contains("' is not a handler name"), "{refused}");
        }
    }
}
