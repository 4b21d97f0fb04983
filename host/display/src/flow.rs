//! The states of the jobs of a flow and its edges, from the rows of `rouse.flow`.

use std::cmp::Reverse;

use serde_json::Value;

/// The state of a job. A queued job that waits for others is `waiting`; if one of these has failed, and the job waits
/// for its retry, it is `stuck`.
pub fn state(job: &Value) -> &str {
    match job["state"].as_str().unwrap_or_default() {
        "queued" if job["is_stuck"] == true => "stuck",
        "queued" if !job["waits_for"].is_null() => "waiting",
        state => state,
    }
}

/// The chain that an entry of `after` names, with its `on_failure` unless that is the default.
pub fn chain(entry: &Value) -> Option<(Option<&str>, i64)> {
    match entry.as_i64() {
        Some(chain) => Some((None, chain)),
        None => Some((entry["on_failure"].as_str(), entry["job"].as_i64()?)),
    }
}

/// The chains that a job waits or waited for, each once, in the order of their ids, each with its `on_failure` unless
/// that is the default. If a chain has several names, the strictest applies, as in Postgres: `cancel` (the default),
/// then `wait`, then `run`.
pub fn chains(job: &Value) -> impl Iterator<Item = (Option<&str>, i64)> {
    let mut chains: Vec<_> = job["after"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(_, entry)| chain(entry))
        .collect();
    // In this order, the strictest entry of a chain comes first: `None` (the default), then `wait`, then `run`.
    chains.sort_by_key(|&(on_failure, chain)| (chain, on_failure.map(Reverse)));
    chains.dedup_by_key(|&mut (_, chain)| chain);
    chains.into_iter()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_queued_job_that_waits_for_a_failed_one_is_stuck() {
        for (job, shown) in [
            (
                json!({"state": "queued", "waits_for": null, "is_stuck": false}),
                "queued",
            ),
            (
                json!({"state": "queued", "waits_for": [1], "is_stuck": false}),
                "waiting",
            ),
            (
                json!({"state": "queued", "waits_for": [1], "is_stuck": true}),
                "stuck",
            ),
            (
                json!({"state": "failed", "waits_for": null, "is_stuck": false}),
                "failed",
            ),
        ] {
            assert_eq!(state(&job), shown, "{job}");
        }
    }
}
