//! Jobs as the payloads of these guests describe them.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use rouse_sdk::{Child, Error, Job, OnFailure, Priority, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

/// A job, with all options of the SDK.
#[derive(Deserialize, JsonSchema, Clone)]
#[serde(deny_unknown_fields)]
pub(crate) struct Spec {
    handler: String,
    #[serde(default)]
    payload: Value,
    queue: Option<String>,
    priority: Option<String>,
    delay_ms: Option<u64>,
    run_at_unix_ms: Option<u64>,
    max_attempts: Option<u32>,
    unique_key: Option<String>,
    tags: Option<Vec<String>>,
    grants: Option<Value>,
    lease_ms: Option<u64>,
    timeout_ms: Option<u64>,
    job_timeout_ms: Option<u64>,
    /// Jobs that the attempt has already enqueued, by name.
    #[serde(default)]
    after: BTreeMap<String, After>,
}

#[derive(Deserialize, JsonSchema, Clone)]
struct After {
    /// 0: the first job that the attempt has enqueued.
    child: usize,
    on_failure: Option<String>,
}

impl Spec {
    pub(crate) fn job(&self, children: &[Child]) -> Result<Job> {
        let mut job = Job::new(&self.handler, &self.payload);
        if let Some(queue) = &self.queue {
            job = job.queue(queue);
        }
        if let Some(priority) = &self.priority {
            job = job.priority(match priority.as_str() {
                "high" => Priority::High,
                "normal" => Priority::Normal,
                "low" => Priority::Low,
                other => return Err(unknown("priority", other)),
            });
        }
        if let Some(ms) = self.delay_ms {
            job = job.delay(Duration::from_millis(ms));
        }
        if let Some(ms) = self.run_at_unix_ms {
            job = job.run_at(SystemTime::UNIX_EPOCH + Duration::from_millis(ms));
        }
        if let Some(max_attempts) = self.max_attempts {
            job = job.max_attempts(max_attempts);
        }
        if let Some(key) = &self.unique_key {
            job = job.unique_key(key);
        }
        if let Some(tags) = &self.tags {
            job = job.tags(tags);
        }
        if let Some(grants) = &self.grants {
            job = job.grants(grants.clone());
        }
        if let Some(ms) = self.lease_ms {
            job = job.lease(Duration::from_millis(ms));
        }
        if let Some(ms) = self.timeout_ms {
            job = job.timeout(Duration::from_millis(ms));
        }
        if let Some(ms) = self.job_timeout_ms {
            job = job.job_timeout(Duration::from_millis(ms));
        }
        for (name, after) in &self.after {
            let Some(child) = children.get(after.child) else {
                let why = format_args!("there is no child {} yet", after.child);
                return Err(Error::permanent(why));
            };
            job = match after.on_failure.as_deref() {
                None => job.after(name, child),
                Some("cancel") => job.after_or(name, child, OnFailure::Cancel),
                Some("run") => job.after_or(name, child, OnFailure::Run),
                Some("wait") => job.after_or(name, child, OnFailure::Wait),
                Some(other) => return Err(unknown("on_failure", other)),
            };
        }
        Ok(job)
    }
}

fn unknown(option: &str, value: &str) -> Error {
    Error::permanent(format_args!("unknown {option} {value:?} in the payload"))
}

/// The default of fields that count repetitions.
pub(crate) fn once() -> u32 {
    1
}
