//! The gates that a handler declares. Their rules and bounds are those of the database (`rouse._gate_problem`).

use serde::Deserialize;

use crate::job::declared_gate::{DeclaredGate, During, Edge, GateLimit, OnConflict};
use crate::sanitize::printable;

/// More gates than this are a mistake: one gate has a limit for each key.
pub(super) const GATES_MAX: usize = 8;

/// The maximum number of running jobs, of starts in a period, and of jobs in a burst.
pub(super) const COUNT_MAX: u64 = 1_000_000;
/// The maximum number of starts in a period without a burst: the database keeps the time of each.
pub(super) const STARTS_MAX: u64 = 1_000;
/// The maximum number of jobs in a batch.
pub(super) const BATCH_MAX: u64 = 1_000;
/// 30 days.
pub(super) const PERIOD_MS_MAX: u64 = 30 * super::DAY_MS;

/// The maximum length of a key of a gate that is quoted in full.
const KEY_CHARS_SHOWN: usize = 140;

/// A gate as written. A setting without an effect is an error, as in the database: it is meant to limit something.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WrittenGate {
    kind: Kind,
    key: Option<Vec<String>>,
    max: Option<u64>,
    period_ms: Option<u64>,
    burst: Option<u64>,
    during: Option<During>,
    on_conflict: Option<OnConflict>,
    edge: Option<Edge>,
    max_wait_ms: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    MaxConcurrent,
    Throttle,
    Batch,
    Singleton,
    Debounce,
}

/// Checks the gates of a handler, and fills in defaults.
pub(super) fn check(gates: Vec<WrittenGate>) -> Result<Vec<DeclaredGate>, String> {
    if gates.len() > GATES_MAX {
        return Err(format!(
            "at most {GATES_MAX} gates are allowed; there are {}",
            gates.len()
        ));
    }
    let gates = gates.into_iter().enumerate();
    gates
        .map(|(at, gate)| gate.check().map_err(|why| format!("gates[{at}]: {why}")))
        .collect()
}

impl WrittenGate {
    fn check(self) -> Result<DeclaredGate, String> {
        self.check_effects()?;
        let limit = match self.kind {
            Kind::MaxConcurrent => GateLimit::MaxConcurrent {
                max: count("max", self.max, COUNT_MAX)?,
            },
            Kind::Throttle => {
                let burst = self
                    .burst
                    .map(|burst| count("burst", Some(burst), COUNT_MAX));
                let burst = burst.transpose()?;
                let max = match burst {
                    Some(_) => count("max", self.max, COUNT_MAX)?,
                    None => count("max", self.max, STARTS_MAX)
                        .map_err(|why| format!("{why} for a throttle without a burst"))?,
                };
                GateLimit::Throttle {
                    max,
                    period_ms: period(self.period_ms)?,
                    burst,
                }
            }
            Kind::Batch => GateLimit::Batch {
                max: count("max", self.max, BATCH_MAX)?,
                period_ms: self.period_ms.map(|ms| period(Some(ms))).transpose()?,
            },
            Kind::Singleton => {
                let during = self.during.unwrap_or_default();
                GateLimit::Singleton {
                    during,
                    period_ms: match during {
                        During::Queued | During::Running => None,
                        During::Period => Some(period(self.period_ms)?),
                    },
                    on_conflict: self.on_conflict.unwrap_or_default(),
                }
            }
            Kind::Debounce => {
                let period_ms = period(self.period_ms)?;
                let max_wait_ms = self.max_wait_ms;
                if let Some(max_wait) = max_wait_ms
                    && !(period_ms..=PERIOD_MS_MAX).contains(&max_wait)
                {
                    return Err(format!(
                        "max_wait_ms is {max_wait}; expected {period_ms} (period_ms) to {PERIOD_MS_MAX} (30 days)"
                    ));
                }
                GateLimit::Debounce {
                    period_ms,
                    max_wait_ms,
                    edge: self.edge.unwrap_or_default(),
                }
            }
        };
        let mut key = self.key.unwrap_or_default();
        // All jobs of a batch belong to one tenant.
        if self.kind == Kind::Batch && key.iter().all(|by| by != "tenant") {
            key.insert(0, "tenant".into());
        }
        check_key(&key)?;
        Ok(DeclaredGate { limit, key })
    }

    /// Rejects settings that have no effect on a gate of this kind.
    fn check_effects(&self) -> Result<(), String> {
        use Kind::{Batch, Debounce, MaxConcurrent, Singleton, Throttle};
        if self.kind == Singleton && self.period_ms.is_some() && self.during != Some(During::Period)
        {
            return Err("a singleton has a period_ms only with \"during\": \"period\"".into());
        }
        if self.on_conflict == Some(OnConflict::Replace)
            && self.during.is_some_and(|during| during != During::Queued)
        {
            return Err("a job is replaced only while it is queued: remove during".into());
        }
        let (kind, word, others) = match self.kind {
            MaxConcurrent => (MaxConcurrent, "max_concurrent", "max"),
            Throttle => (Throttle, "throttle", "max, period_ms and burst"),
            Batch => (Batch, "batch", "max and period_ms"),
            Singleton => (Singleton, "singleton", "during, on_conflict and period_ms"),
            Debounce => (Debounce, "debounce", "period_ms, max_wait_ms and edge"),
        };
        for (setting, is_set, kinds) in [
            (
                "max",
                self.max.is_some(),
                &[MaxConcurrent, Throttle, Batch][..],
            ),
            (
                "period_ms",
                self.period_ms.is_some(),
                &[Throttle, Batch, Singleton, Debounce],
            ),
            ("burst", self.burst.is_some(), &[Throttle]),
            ("during", self.during.is_some(), &[Singleton]),
            ("on_conflict", self.on_conflict.is_some(), &[Singleton]),
            ("edge", self.edge.is_some(), &[Debounce]),
            ("max_wait_ms", self.max_wait_ms.is_some(), &[Debounce]),
        ] {
            if is_set && !kinds.contains(&kind) {
                return Err(format!(
                    "a gate of kind {word} has no {setting}; it has key, {others}"
                ));
            }
        }
        Ok(())
    }
}

fn count(field: &str, count: Option<u64>, max: u64) -> Result<u32, String> {
    match count {
        Some(count) if (1..=max).contains(&count) => {
            Ok(u32::try_from(count).expect("the maximum fits"))
        }
        Some(count) => Err(format!("{field} is {count}; expected 1 to {max}")),
        None => Err(format!("{field} is missing; expected 1 to {max}")),
    }
}

fn period(period: Option<u64>) -> Result<u64, String> {
    match period {
        Some(ms) if (1..=PERIOD_MS_MAX).contains(&ms) => Ok(ms),
        Some(ms) => Err(format!(
            "period_ms is {ms}; expected 1 to {PERIOD_MS_MAX} (30 days)"
        )),
        None => Err(format!(
            "period_ms is missing; expected 1 to {PERIOD_MS_MAX} (30 days)"
        )),
    }
}

/// Rejects a key that is not one or two different values by which jobs can be divided.
fn check_key(key: &[String]) -> Result<(), String> {
    if let Some(invalid) = key.iter().find(|by| !divides(by)) {
        return Err(format!(
            "key: `{}` must be tenant, source, handler, queue, or a path of the payload such as $.customer.id",
            printable(invalid, KEY_CHARS_SHOWN)
        ));
    }
    match key {
        [] | [_] => Ok(()),
        [first, second] if first == second => Err(format!("key has {first} twice")),
        [_, _] => Ok(()),
        _ => Err(format!(
            "key has {} values; at most 2 are allowed",
            key.len()
        )),
    }
}

/// True for a value by which jobs can be divided.
fn divides(by: &str) -> bool {
    let is_word = |word: &str| {
        (1..=64).contains(&word.len())
            && word
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
    };
    match by.strip_prefix("$.") {
        Some(path) => path.split('.').count() <= 8 && path.split('.').all(is_word),
        None => matches!(by, "tenant" | "source" | "handler" | "queue"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn one(gate: Value) -> Result<Value, String> {
        let gate: WrittenGate = serde_json::from_value(gate).map_err(|error| error.to_string())?;
        let gates = check(vec![gate])?;
        Ok(serde_json::to_value(&gates[0]).expect("a gate is JSON"))
    }

    #[test]
    fn defaults_are_filled_in() {
        for (written, with_defaults) in [
            (
                json!({"kind": "max_concurrent", "max": 1_000_000, "key": ["tenant", "$.a.b-c.D_0"]}),
                json!({}),
            ),
            (
                json!({"kind": "throttle", "max": 1000, "period_ms": 60_000}),
                json!({"key": []}),
            ),
            (
                json!({"kind": "throttle", "max": 1_000_000, "period_ms": 1, "burst": 10, "key": ["queue"]}),
                json!({}),
            ),
            (
                json!({"kind": "batch", "max": 1000}),
                json!({"key": ["tenant"]}),
            ),
            (
                json!({"kind": "batch", "max": 1, "period_ms": 500, "key": ["$.list"]}),
                json!({"key": ["tenant", "$.list"]}),
            ),
            (
                json!({"kind": "singleton"}),
                json!({"key": [], "during": "queued", "on_conflict": "keep"}),
            ),
            (
                json!({"kind": "singleton", "during": "period", "period_ms": 2_592_000_000_u64, "on_conflict": "refuse", "key": ["source"]}),
                json!({}),
            ),
            (
                json!({"kind": "debounce", "period_ms": 5000, "max_wait_ms": 5000, "key": null}),
                json!({"key": [], "edge": "trailing"}),
            ),
        ] {
            let mut expected = written.clone();
            for (key, value) in with_defaults.as_object().unwrap() {
                expected[key] = value.clone();
            }
            assert_eq!(one(written), Ok(expected));
        }
    }

    #[test]
    fn refuse_gates_that_the_database_would_refuse() {
        let word = "a".repeat(65);
        let (long, deep) = (format!("$.{word}"), format!("${}", ".a".repeat(9)));
        for (gate, part) in [
            (json!({"max": 1}), "missing field `kind`"),
            (json!({"kind": "merge"}), "unknown variant `merge`"),
            (json!({"kind": "batch"}), "max is missing"),
            (json!({"kind": "batch", "max": 1001}), "expected 1 to 1000"),
            (
                json!({"kind": "batch", "max": 10, "period_ms": 0}),
                "period_ms is 0",
            ),
            (
                json!({"kind": "batch", "max": 10, "burst": 1}),
                "a gate of kind batch has no burst; it has key, max and period_ms",
            ),
            (
                json!({"kind": "batch", "max": 10, "key": ["source", "queue"]}),
                "key has 3 values",
            ),
            (
                json!({"kind": "throttle", "limit": 1}),
                "unknown field `limit`, expected one of `kind`, `key`, `max`",
            ),
            (
                json!({"kind": "max_concurrent"}),
                "gates[0]: max is missing; expected 1 to 1000000",
            ),
            (
                json!({"kind": "max_concurrent", "max": 0}),
                "max is 0; expected 1 to 1000000",
            ),
            (
                json!({"kind": "max_concurrent", "max": 1_000_001}),
                "max is 1000001; expected 1 to 1000000",
            ),
            (
                json!({"kind": "throttle", "max": 1001, "period_ms": 1}),
                "max is 1001; expected 1 to 1000 for a throttle without a burst",
            ),
            (
                json!({"kind": "throttle", "max": 1, "period_ms": 1, "burst": 0}),
                "burst is 0; expected 1 to 1000000",
            ),
            (
                json!({"kind": "throttle", "max": 1}),
                "period_ms is missing",
            ),
            (
                json!({"kind": "throttle", "max": 1, "period_ms": 0}),
                "period_ms is 0; expected 1 to 2592000000 (30 days)",
            ),
            (
                json!({"kind": "debounce", "period_ms": 2_592_000_001_u64}),
                "period_ms is 2592000001; expected",
            ),
            (
                json!({"kind": "debounce", "period_ms": 10, "max_wait_ms": 9}),
                "max_wait_ms is 9; expected 10 (period_ms) to 2592000000 (30 days)",
            ),
            (
                json!({"kind": "debounce", "period_ms": 10, "max_wait_ms": 2_592_000_001_u64}),
                "max_wait_ms is 2592000001",
            ),
            (
                json!({"kind": "debounce", "period_ms": 1, "edge": "both"}),
                "unknown variant `both`",
            ),
            (
                json!({"kind": "singleton", "during": "period"}),
                "period_ms is missing",
            ),
            (
                json!({"kind": "singleton", "period_ms": 5}),
                "only with \"during\": \"period\"",
            ),
            (
                json!({"kind": "singleton", "during": "running", "period_ms": 5}),
                "only with \"during\"",
            ),
            (
                json!({"kind": "singleton", "during": "ever"}),
                "unknown variant `ever`",
            ),
            (
                json!({"kind": "singleton", "on_conflict": "replace", "during": "running"}),
                "a job is replaced only while it is queued",
            ),
            (
                json!({"kind": "singleton", "on_conflict": "drop"}),
                "unknown variant `drop`",
            ),
            (
                json!({"kind": "max_concurrent", "max": 1, "period_ms": 1}),
                "a gate of kind max_concurrent has no period_ms; it has key, max",
            ),
            (
                json!({"kind": "singleton", "max": 1}),
                "singleton has no max",
            ),
            (
                json!({"kind": "debounce", "period_ms": 1, "burst": 1}),
                "debounce has no burst; it has key, period_ms, max_wait_ms and edge",
            ),
            (
                json!({"kind": "throttle", "max": 1, "period_ms": 1, "during": "queued"}),
                "throttle has no during",
            ),
            (
                json!({"kind": "debounce", "period_ms": 1, "on_conflict": "keep"}),
                "debounce has no on_conflict",
            ),
            (
                json!({"kind": "singleton", "edge": "leading"}),
                "singleton has no edge",
            ),
            (
                json!({"kind": "singleton", "max_wait_ms": 1}),
                "singleton has no max_wait_ms",
            ),
            (
                json!({"kind": "singleton", "key": ["tenants"]}),
                "key: `tenants` must be tenant, source, handler, queue, or a path",
            ),
            (
                json!({"kind": "singleton", "key": ["$"]}),
                "key: `$` must be",
            ),
            (
                json!({"kind": "singleton", "key": ["$.a..b"]}),
                "key: `$.a..b` must be",
            ),
            (
                json!({"kind": "singleton", "key": ["$.a[0]"]}),
                "key: `$.a[0]` must be",
            ),
            (
                json!({"kind": "singleton", "key": [long]}),
                "must be tenant",
            ),
            (
                json!({"kind": "singleton", "key": [deep]}),
                "must be tenant",
            ),
            (
                json!({"kind": "singleton", "key": ["tenant", "tenant"]}),
                "key has tenant twice",
            ),
            (
                json!({"kind": "singleton", "key": ["tenant", "source", "queue"]}),
                "key has 3 values; at most 2 are allowed",
            ),
            (
                json!({"kind": "singleton", "key": "tenant"}),
                "expected a sequence",
            ),
        ] {
            let why = one(gate.clone()).expect_err(&gate.to_string());
            assert!(why.contains(part), "{gate}: {why}");
        }
    }
}
