//! Describes gates: what each limits, in one sentence, and to which jobs it applies.

use std::time::Duration;

use serde_json::Value;

use crate::sanitize::lines as plain;
use crate::when;

/// Describes what a gate limits, without its handler and queue.
pub fn describe(gate: &Value) -> String {
    let each = of_each(gate);
    let max = gate["max"].as_u64().unwrap_or_default();
    let (jobs, start) = match max {
        1 => ("job", "starts"),
        _ => ("jobs", "start"),
    };
    let period = time(&gate["period_ms"]);
    let word = |key: &str| gate[key].as_str().unwrap_or_default();
    match word("kind") {
        "max_concurrent" => format!("at most {max} running {jobs}{each}"),
        "throttle" => match gate["burst"].as_u64() {
            None => format!("at most {max} {jobs}{each} {start} in any {period}"),
            Some(burst) => {
                format!(
                    "{max} {jobs}{each} {start} in {period} on average, at most {burst} at once"
                )
            }
        },
        "batch" => {
            let wait = match &gate["period_ms"] {
                Value::Null => String::new(),
                _ => format!(", once {max} are waiting or the first has waited for {period}"),
            };
            format!("up to {max} {jobs}{each} in one attempt{wait}")
        }
        "singleton" => {
            let one = match word("during") {
                "queued" => format!("one queued job{each}"),
                "running" => format!("one queued or running job{each}"),
                _ => format!("one job{each} in {period}"),
            };
            let later = match word("on_conflict") {
                "keep" => "later ones are not enqueued",
                "replace" => "later ones replace it",
                _ => "later ones are refused",
            };
            format!("{one}; {later}")
        }
        "debounce" => {
            let ends = match &gate["max_wait_ms"] {
                Value::Null => format!("once none has been enqueued for {period}"),
                max_wait => format!(
                    "once none has been enqueued for {period}, or {} after the first",
                    time(max_wait)
                ),
            };
            let jobs = match each.as_str() {
                "" => String::new(),
                each => format!(" of jobs{each}"),
            };
            match word("edge") {
                "leading" => format!("the first job of a burst{jobs}; the burst ends {ends}"),
                _ => format!("the last job of a burst{jobs}, {ends}"),
            }
        }
        // From a newer database.
        other => plain(other),
    }
}

/// The jobs to which a gate applies.
pub fn scope(gate: &Value) -> String {
    let handler = match gate["handler"].as_str() {
        Some(handler) => format!("handler {}", plain(handler)),
        None => "all handlers".to_owned(),
    };
    match gate["queue"].as_str() {
        Some(queue) => format!("{handler}, queue {}", plain(queue)),
        None => format!("{handler}, all queues"),
    }
}

/// The scope of each limit: ` of each tenant`; empty if all jobs share one limit. Gates on enqueues keep tenants apart.
fn of_each(gate: &Value) -> String {
    let listed = gate["key"].as_array().into_iter().flatten();
    let mut by: Vec<String> = listed.filter_map(Value::as_str).map(plain).collect();
    let is_in_enqueues = gate["kind"] == "singleton" || gate["kind"] == "debounce";
    if is_in_enqueues && by.iter().all(|by| by != "tenant") {
        by.insert(0, "tenant".to_owned());
    }
    match by.is_empty() {
        true => String::new(),
        false => format!(" of each {}", by.join(" and ")),
    }
}

fn time(ms: &Value) -> String {
    when::in_days(Duration::from_millis(ms.as_u64().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn limits_are_sentences() {
        for (gate, words) in [
            (
                json!({"kind": "max_concurrent", "key": ["tenant"], "max": 5}),
                "at most 5 running jobs of each tenant",
            ),
            (
                json!({"kind": "max_concurrent", "key": [], "max": 1}),
                "at most 1 running job",
            ),
            (
                json!({"kind": "throttle", "key": ["source", "$.a.b"], "max": 10, "period_ms": 90_000}),
                "at most 10 jobs of each source and $.a.b start in any 1m 30s",
            ),
            (
                json!({"kind": "throttle", "key": [], "max": 1, "period_ms": 250, "burst": 20}),
                "1 job starts in 250ms on average, at most 20 at once",
            ),
            (
                json!({"kind": "batch", "key": ["tenant"], "max": 100, "period_ms": 500}),
                "up to 100 jobs of each tenant in one attempt, once 100 are waiting or the first has waited for 500ms",
            ),
            (
                json!({"kind": "batch", "key": ["tenant", "$.list"], "max": 10, "period_ms": null}),
                "up to 10 jobs of each tenant and $.list in one attempt",
            ),
            (
                json!({"kind": "singleton", "key": ["tenant"], "during": "queued", "on_conflict": "keep"}),
                "one queued job of each tenant; later ones are not enqueued",
            ),
            (
                json!({"kind": "singleton", "key": [], "during": "running", "on_conflict": "keep"}),
                "one queued or running job of each tenant; later ones are not enqueued",
            ),
            (
                json!({"kind": "singleton", "key": [], "during": "queued", "on_conflict": "replace"}),
                "one queued job of each tenant; later ones replace it",
            ),
            (
                json!({"kind": "singleton", "key": ["$.id"], "during": "period", "period_ms": 86_400_000, "on_conflict": "refuse"}),
                "one job of each tenant and $.id in 1day; later ones are refused",
            ),
            (
                json!({"kind": "debounce", "key": ["$.id"], "edge": "trailing", "period_ms": 5_000, "max_wait_ms": 60_000}),
                "the last job of a burst of jobs of each tenant and $.id, once none has been enqueued for 5s, or 1m after the first",
            ),
            (
                json!({"kind": "debounce", "key": [], "edge": "leading", "period_ms": 5_000}),
                "the first job of a burst of jobs of each tenant; the burst ends once none has been enqueued for 5s",
            ),
        ] {
            assert_eq!(describe(&gate), words);
        }
    }

    #[test]
    fn the_scope_names_handler_and_queue() {
        let all = json!({"handler": null, "queue": null});
        assert_eq!(scope(&all), "all handlers, all queues");
        let one = json!({"handler": "a.b", "queue": "q"});
        assert_eq!(scope(&one), "handler a.b, queue q");
    }
}
