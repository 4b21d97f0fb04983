//! The attempts of a job, and the time until the next one: `2 of 3, next in 8 s`.

use serde_json::Value;

use super::wait;
use crate::cli::ago;

/// The attempts of a job. `max` is their maximum number, from its producer or its last error. `now` is the time of the
/// database's clock, in seconds since 1970.
pub(super) fn attempts(job: &Value, max: Option<u64>, now: f64) -> String {
    let number = |key: &str| job[key].as_u64().unwrap_or_default();
    let attempt = number("attempt");
    // Attempts that were lost, suspended or given back are not counted against the limit.
    let mut text = match max {
        // The maximum may be that of an error, which a worker has reported.
        Some(max) if attempt > 0 => {
            format!("{attempt} of {}", max.saturating_add(number("uncounted")))
        }
        _ => attempt.to_string(),
    };
    let next = job["available_at"].as_str().and_then(ago::epoch);
    let is_queued = state(job) == "queued" && wait::has_end(job);
    if let (true, true, Some(next)) = (attempt > 0, is_queued, next) {
        text += &match next > now {
            true => format!(", next {}", ago::relative(next, now)),
            false => ", next is due".to_owned(),
        };
    }
    text
}

fn state(job: &Value) -> &str {
    job["state"].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_failed_attempt_shows_its_number_the_limit_and_the_time_of_the_next_one() {
        let job = |state, attempt, lost, at| json!({"state": state, "attempt": attempt, "uncounted": lost, "available_at": at});
        let (later, before) = ("1970-01-01T00:00:08+00:00", "1970-01-01T00:00:00+00:00");
        for (job, max, text) in [
            (job("queued", 2, 0, later), Some(3), "2 of 3, next in 8 s"),
            (job("queued", 2, 0, before), Some(3), "2 of 3, next is due"),
            (job("queued", 2, 0, later), None, "2, next in 8 s"),
            // Two of its attempts ended in an error, and one was lost.
            (job("queued", 3, 1, later), Some(3), "3 of 4, next in 8 s"),
            (job("running", 2, 0, before), Some(3), "2 of 3"),
            (
                job("running", 2, 1, before),
                Some(u64::MAX),
                "2 of 18446744073709551615",
            ),
            (job("failed", 3, 0, before), Some(3), "3 of 3"),
            (job("queued", 0, 0, later), Some(3), "0"),
        ] {
            assert_eq!(attempts(&job, max, 0.0), text);
        }
    }
}
