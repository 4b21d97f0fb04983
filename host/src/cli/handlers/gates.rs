//! The gates that a module declares for a handler.

use std::time::Duration;

use serde_json::{Value, json};

use crate::cli::list::List;
use crate::duration::shown;
use crate::job::declared_gate::{DeclaredGate, Edge, GateLimit, Lasts, Newcomer, names};

/// The gates as in the manifest, with their defaults and the names that they get in the database.
pub(super) fn json(handler: &str, gates: &[DeclaredGate]) -> Vec<Value> {
    let named = names(handler, gates).into_iter().zip(gates);
    let named = named.map(|(name, gate)| {
        let mut gate = serde_json::to_value(gate).expect("a gate is JSON");
        gate["name"] = json!(name);
        gate
    });
    named.collect()
}

/// A line for each gate; empty if there are none.
pub(super) fn table(handler: &str, gates: &[DeclaredGate]) -> String {
    let mut table = List::plain();
    for (name, gate) in names(handler, gates).into_iter().zip(gates) {
        let key = match gate.key.is_empty() {
            true => "for all jobs together".to_owned(),
            false => format!("for each {}", gate.key.join(" and ")),
        };
        table.row([name, format!("{}, {key}", limit(&gate.limit))]);
    }
    table.text()
}

/// What a gate does, in words.
fn limit(limit: &GateLimit) -> String {
    let time = |ms: u64| shown(Duration::from_millis(ms));
    match limit {
        GateLimit::MaxConcurrent { most } => format!("at most {most} run at the same time"),
        GateLimit::Throttle {
            most,
            period_ms,
            burst,
        } => match burst {
            None => format!("at most {most} start in {}", time(*period_ms)),
            Some(burst) => format!(
                "on average {most} start in {}, at most {burst} at once",
                time(*period_ms)
            ),
        },
        GateLimit::Singleton {
            lasts,
            period_ms,
            newcomer,
        } => {
            let until = match (lasts, period_ms) {
                (Lasts::Queued, _) => "until it has started".to_owned(),
                (Lasts::Running, _) => "until it has ended".to_owned(),
                (Lasts::Period, period) => format!("for {}", time(period.unwrap_or_default())),
            };
            let newcomer = match newcomer {
                Newcomer::Keep => "keeps out further ones",
                Newcomer::Replace => "takes the payload of further ones",
                Newcomer::Refuse => "makes the enqueue of further ones an error",
            };
            format!("a job {newcomer} {until}")
        }
        GateLimit::Debounce {
            period_ms,
            longest_ms,
            edge,
        } => {
            let which = match edge {
                Edge::Trailing => "last",
                Edge::Leading => "first",
            };
            let longest = longest_ms.map(|ms| format!(" or after {}", time(ms)));
            format!(
                "the {which} job of a burst runs; a burst ends after {} without another{}",
                time(*period_ms),
                longest.unwrap_or_default()
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Manifest;

    #[test]
    fn each_gate_is_a_line_with_its_name() {
        let manifest = Manifest::parse(
            &json!({"handlers": [{"name": "a", "gates": [
                {"kind": "max_concurrent", "most": 5, "key": ["tenant"]},
                {"kind": "throttle", "most": 100, "period_ms": 60_000, "burst": 10, "key": ["tenant", "$.api"]},
                {"kind": "throttle", "most": 3, "period_ms": 1500},
                {"kind": "singleton", "key": ["$.doc"]},
                {"kind": "singleton", "lasts": "running", "newcomer": "replace"},
                {"kind": "singleton", "lasts": "period", "period_ms": 3_600_000, "newcomer": "refuse"},
                {"kind": "debounce", "period_ms": 5000, "longest_ms": 60_000},
                {"kind": "debounce", "period_ms": 5000, "edge": "leading"},
            ]}]})
            .to_string(),
        )
        .unwrap();
        let gates = &manifest.handlers[0].gates;
        let expected = "
a/max_concurrent at most 5 run at the same time, for each tenant
a/throttle on average 100 start in 1m, at most 10 at once, for each tenant and $.api
a/throttle.2 at most 3 start in 1s 500ms, for all jobs together
a/singleton a job keeps out further ones until it has started, for each $.doc
a/singleton.2 a job takes the payload of further ones until it has ended, for all jobs together
a/singleton.3 a job makes the enqueue of further ones an error for 1h, for all jobs together
a/debounce the last job of a burst runs; a burst ends after 5s without another or after 1m, for all jobs together
a/debounce.2 the first job of a burst runs; a burst ends after 5s without another, for all jobs together";
        let lines = table("a", gates);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<String> = lines.lines().map(words).collect();
        assert_eq!(lines.join("\n"), expected.trim_start());
        assert_eq!(
            json("a", gates)[2],
            json!({"name": "a/throttle.2", "kind": "throttle", "most": 3, "period_ms": 1500, "key": []})
        );
        assert_eq!(table("a", &[]), "");
    }
}
