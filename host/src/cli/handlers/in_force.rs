//! What holds for a handler, and which table of `rouse.toml` says so.

use std::time::Duration;

use humantime::format_duration;
use serde_json::{Map, Value, json};

use super::origin::Tables;
use crate::cli::list::List;
use crate::job::RetryPolicy;
use crate::sandbox::{Handler, HandlerManifest, Instances, Settings};
use crate::worker::Policy;

/// One setting.
pub(super) struct Setting {
    /// Where it is in the JSON: `limits`, `state`, or among the handler's own.
    group: Option<&'static str>,
    /// In `rouse.toml`.
    key: &'static str,
    /// In the JSON, with its unit.
    name: &'static str,
    value: Value,
    /// As one would write it in `rouse.toml`.
    text: String,
    from: String,
}

/// Where something is from that no table sets.
const DEFAULT: &str = "default";
/// Where something is from that its manifest says.
const MODULE: &str = "module";

/// All of them, in the order of the documentation, but for those that are grants (`fine_clocks`).
pub(super) fn settings(
    handler: &Handler,
    policy: &Policy,
    settings: &Settings,
    tables: &Tables,
) -> Vec<Setting> {
    let mut all = own(handler, policy, settings, tables);
    all.extend(limits(handler, tables));
    all.extend(state(handler, tables));
    all
}

fn own(handler: &Handler, policy: &Policy, settings: &Settings, tables: &Tables) -> Vec<Setting> {
    let name = &handler.manifest.name;
    let retry = &policy.retry;
    let usual = RetryPolicy::default();
    let own =
        |key: &'static str, json_name, value: Value, text: String, is_default: bool| Setting {
            group: None,
            key,
            name: json_name,
            value,
            text,
            from: tables
                .of_key(name, key)
                .unwrap_or_else(|| if is_default { DEFAULT } else { MODULE }.into()),
        };
    let time = |key: &'static str, json_name, time: Duration, default: Duration| {
        own(key, json_name, ms(time), quoted(time), time == default)
    };
    let number = |key: &'static str, value: Value, is_default: bool| {
        let text = value.to_string();
        own(key, key, value, text, is_default)
    };
    let mut job_delay = time(
        "job_delay",
        "job_delay_ms",
        policy.job_delay.unwrap_or_default(),
        Duration::ZERO,
    );
    // No module says anything of it.
    if job_delay.from == MODULE {
        job_delay.from = "rouse.toml".into();
    }
    vec![
        time("lease", "lease_ms", policy.lease, HandlerManifest::LEASE),
        time(
            "timeout",
            "timeout_ms",
            policy.timeout,
            HandlerManifest::TIMEOUT,
        ),
        time("grace", "grace_ms", policy.grace, HandlerManifest::GRACE),
        number(
            "max_attempts",
            json!(retry.max_attempts),
            retry.max_attempts == usual.max_attempts,
        ),
        time(
            "retry_initial",
            "retry_initial_ms",
            retry.initial,
            usual.initial,
        ),
        number(
            "retry_multiplier",
            json!(retry.multiplier),
            retry.multiplier.to_bits() == usual.multiplier.to_bits(),
        ),
        time("retry_max", "retry_max_ms", retry.max, usual.max),
        number(
            "retry_jitter",
            json!(retry.jitter),
            retry.jitter.to_bits() == usual.jitter.to_bits(),
        ),
        job_delay,
        instances(handler, settings, tables),
    ]
}

fn instances(handler: &Handler, settings: &Settings, tables: &Tables) -> Setting {
    let name = &handler.manifest.name;
    let word = if handler.reuses { "reuse" } else { "fresh" };
    let wanted = settings.instances_of(name) == Instances::Reuse;
    let from = match tables.of_key(name, "instances") {
        None => DEFAULT.into(),
        Some(table) if wanted && !handler.reuses => {
            format!("module, which does not declare that it bears the reuse of {table}")
        }
        Some(table) => table,
    };
    Setting {
        group: None,
        key: "instances",
        name: "instances",
        value: json!(word),
        text: format!("\"{word}\""),
        from,
    }
}

fn limits(handler: &Handler, tables: &Tables) -> Vec<Setting> {
    let limits = &handler.limits;
    let name = &handler.manifest.name;
    let limit =
        |key: &'static str, json_name, value: Value, text: String, from: Option<String>| Setting {
            group: Some("limits"),
            key,
            name: json_name,
            value,
            text,
            from: from.unwrap_or_else(|| DEFAULT.into()),
        };
    let number = |key: &'static str, value: Value| {
        let text = value.to_string();
        limit(key, key, value, text, tables.of_limit(name, key))
    };
    let retry_mb = json!(limits.memory_retry_bytes.max(limits.memory_bytes) >> 20);
    vec![
        number("memory_mb", json!(limits.memory_bytes >> 20)),
        limit(
            "memory_retry_mb",
            "memory_retry_mb",
            retry_mb.clone(),
            retry_mb.to_string(),
            tables.of_memory_retry(name),
        ),
        limit(
            "cpu",
            "cpu_ms",
            ms(limits.cpu),
            quoted(limits.cpu),
            tables.of_limit(name, "cpu"),
        ),
        number("result_bytes", json!(limits.result_bytes)),
        number("log_bytes", json!(limits.log_bytes)),
        number("log_lines_per_second", json!(limits.log_lines_per_second)),
        number("table_elements", json!(limits.table_elements)),
        number("hostcall_bytes", json!(limits.hostcall_bytes)),
        number("files", json!(limits.files)),
        number("resources", json!(limits.resources)),
        number("handles", json!(limits.handles)),
        number("random_bytes", json!(limits.random_bytes)),
        number("steps", json!(limits.steps)),
        number("step_bytes", json!(limits.step_bytes)),
        number("steps_bytes", json!(limits.steps_bytes)),
        number("http_requests", json!(limits.http_requests)),
        number("http_bytes", json!(limits.http_bytes)),
        number("http_body_bytes", json!(limits.http_body_bytes)),
        number("state_calls", json!(limits.state_calls)),
        number("state_bytes", json!(limits.state_bytes)),
    ]
}

/// Where it may keep some.
fn state(handler: &Handler, tables: &Tables) -> Vec<Setting> {
    let name = &handler.manifest.name;
    let Some(quota) = handler.state else {
        return Vec::new();
    };
    let sizes = [
        ("keys_max", json!(quota.keys_max)),
        ("bytes_max", json!(quota.bytes_max)),
        ("value_bytes_max", json!(quota.value_bytes_max)),
    ];
    let setting = |(key, value): (&'static str, Value)| Setting {
        group: Some("state"),
        key,
        name: key,
        text: value.to_string(),
        value,
        from: tables
            .of_table(name, "state", key)
            .unwrap_or_else(|| DEFAULT.into()),
    };
    sizes.map(setting).into()
}

fn ms(time: Duration) -> Value {
    json!(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

fn quoted(time: Duration) -> String {
    format!("\"{}\"", format_duration(time))
}

/// Puts them into the JSON of a handler, and under `from` which table each is from.
pub(super) fn add_to(manifest: &mut Map<String, Value>, settings: &[Setting]) {
    let mut from = Map::new();
    manifest.insert("limits".into(), json!({}));
    manifest.insert("state".into(), Value::Null);
    for setting in settings {
        let (name, value) = (setting.name.to_owned(), setting.value.clone());
        match setting.group {
            None => manifest.insert(name, value),
            Some(group) => {
                let inner = manifest.entry(group).or_insert(Value::Null);
                if inner.is_null() {
                    *inner = json!({});
                }
                inner
                    .as_object_mut()
                    .and_then(|inner| inner.insert(name, value))
            }
        };
        from.insert(setting.path(), json!(setting.from));
    }
    manifest.insert("from".into(), from.into());
}

impl Setting {
    /// For instance `limits.memory_mb`.
    fn path(&self) -> String {
        match self.group {
            None => self.key.to_owned(),
            Some(group) => format!("{group}.{}", self.key),
        }
    }

    /// True for what the manifest has of it.
    pub(super) fn is_named(&self, key: &str) -> bool {
        self.group.unwrap_or(self.name) == key
    }
}

/// A line for each: what is set for this handler, then, if that is wished for, what is as it is for all.
pub(super) fn table(settings: &[Setting], with_defaults: bool) -> String {
    let mut table = List::new(["setting", "value", "from"]);
    let (usual, set): (Vec<&Setting>, Vec<&Setting>) =
        settings.iter().partition(|setting| setting.from == DEFAULT);
    let (shown, hidden) = match with_defaults {
        true => (usual, 0),
        false => (Vec::new(), usual.len()),
    };
    for setting in set.into_iter().chain(shown) {
        table.row([setting.path(), setting.text.clone(), setting.from.clone()]);
    }
    let text = table.text();
    match hidden {
        0 => text,
        hidden => {
            format!("{text}\n{hidden} more are as for every handler (--defaults prints them)")
        }
    }
}
