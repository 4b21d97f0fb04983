//! Describes what a suspended job waits for.

use serde_json::Value;

use crate::cli::attempt_error::cell;
use crate::cli::text::plain;

/// What the job waits for: `the signal approved`; `None` if it is not suspended.
pub(super) fn waits_for(job: &Value) -> Option<String> {
    let wait = job.get("wait").filter(|wait| !wait.is_null())?;
    let text = |key: &str| plain(wait[key].as_str().unwrap_or_default());
    Some(match wait["kind"].as_str() {
        Some("sleep") => format!("the end of its sleep ({})", text("step")),
        Some("signal") => match wait["until_ms"].is_null() {
            true => format!("the signal {}", text("name")),
            false => format!("the signal {}, or its timeout", text("name")),
        },
        Some("call") => {
            let jobs: Vec<String> = wait["jobs"]
                .as_array()
                .into_iter()
                .flatten()
                .map(cell)
                .collect();
            match &jobs[..] {
                [one] => format!("job {one}, which it has called"),
                [first, .., last] => {
                    format!("{} jobs that it has called ({first} to {last})", jobs.len())
                }
                [] => "jobs that it has called".to_owned(),
            }
        }
        Some(_) | None => cell(wait),
    })
}

/// True if the end of the wait has a time: `available_at`.
pub(super) fn has_end(job: &Value) -> bool {
    job["wait"].is_null() || !job["wait"]["until_ms"].is_null()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_wait_is_described_by_its_kind() {
        for (wait, words, has_an_end) in [
            (json!(null), None, true),
            (
                json!({"kind": "sleep", "step": "sleep:nap", "until_ms": 7}),
                Some("the end of its sleep (sleep:nap)"),
                true,
            ),
            (
                json!({"kind": "signal", "step": "s", "name": "approved"}),
                Some("the signal approved"),
                false,
            ),
            (
                json!({"kind": "signal", "step": "s", "name": "approved", "until_ms": 7}),
                Some("the signal approved, or its timeout"),
                true,
            ),
            (
                json!({"kind": "call", "step": "c", "jobs": [17]}),
                Some("job 17, which it has called"),
                false,
            ),
            (
                json!({"kind": "call", "step": "c", "jobs": [17, 18, 19]}),
                Some("3 jobs that it has called (17 to 19)"),
                false,
            ),
        ] {
            let job = json!({ "wait": wait });
            assert_eq!(waits_for(&job).as_deref(), words);
            assert_eq!(has_end(&job), has_an_end);
        }
    }
}
