//! The gates that a module declares for a handler.

use rouse_display::gate::describe;
use serde_json::{Value, json};

use crate::cli::list::List;
use crate::job::declared_gate::{DeclaredGate, names};

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
    for gate in json(handler, gates) {
        let name = gate["name"].as_str().unwrap_or_default().to_owned();
        table.row([name, describe(&gate)]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Manifest;

    #[test]
    fn each_gate_is_a_line_with_its_name() {
        let manifest = Manifest::parse(
            &json!({"handlers": [{"name": "a", "gates": [
                {"kind": "max_concurrent", "max": 5, "key": ["tenant"]},
                {"kind": "throttle", "max": 100, "period_ms": 60_000, "burst": 10, "key": ["tenant", "$.api"]},
                {"kind": "throttle", "max": 3, "period_ms": 1500},
                {"kind": "singleton", "key": ["$.doc"]},
                {"kind": "singleton", "during": "running"},
                {"kind": "singleton", "during": "period", "period_ms": 3_600_000, "on_conflict": "refuse"},
                {"kind": "debounce", "period_ms": 5000, "max_wait_ms": 60_000},
                {"kind": "debounce", "period_ms": 5000, "edge": "leading"},
            ]}]})
            .to_string(),
        )
        .unwrap();
        let gates = &manifest.handlers[0].gates;
        let expected = "
a/max_concurrent at most 5 running jobs of each tenant
a/throttle 100 jobs of each tenant and $.api start in 1m on average, at most 10 at once
a/throttle.2 at most 3 jobs start in any 1s 500ms
a/singleton one queued job of each tenant and $.doc; later ones are not enqueued
a/singleton.2 one queued or running job of each tenant; later ones are not enqueued
a/singleton.3 one job of each tenant in 1h; later ones are refused
a/debounce the last job of a burst of jobs of each tenant, once none has been enqueued for 5s, or 1m after the first
a/debounce.2 the first job of a burst of jobs of each tenant; the burst ends once none has been enqueued for 5s";
        let lines = table("a", gates);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<String> = lines.lines().map(words).collect();
        assert_eq!(lines.join("\n"), expected.trim_start());
        assert_eq!(
            json("a", gates)[2],
            json!({"name": "a/throttle.2", "kind": "throttle", "max": 3, "period_ms": 1500, "key": []})
        );
        assert_eq!(table("a", &[]), "");
    }
}
