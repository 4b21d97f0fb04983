//! Manifests: a valid one with random changes at random places.

use rand::Rng as _;
use rand::rngs::StdRng;
use rouse::sandbox::Manifest;
use serde_json::{Value, json};

use crate::schema;

pub(crate) fn generate(random: &mut StdRng) -> Vec<u8> {
    let mut manifest = json!({"sdk": "rouse-sdk 0.1.0", "handlers": [{
        "name": "text.stats", "version": "0.1.0", "description": "Counts.",
        "input_schema": schema::schema(random, 3), "output_schema": true,
        "max_attempts": 3, "retry_initial_ms": 100, "retry_multiplier": 1.5, "retry_max_ms": 2000, "retry_jitter": 0,
        "lease_ms": 2000, "timeout_ms": 3000, "grace_ms": 0, "concurrency": 2,
        "instances": "reuse", "capabilities": ["dirs"],
        "gates": [
            {"kind": "throttle", "max": 100, "period_ms": 60_000, "burst": 10, "key": ["tenant", "$.api"]},
            {"kind": "singleton", "during": "period", "period_ms": 1000, "on_conflict": "keep"},
            {"kind": "debounce", "period_ms": 1000, "max_wait_ms": 5000, "edge": "trailing"},
        ],
    }]});
    for _ in 0..random.random_range(0..4) {
        change(random, &mut manifest);
    }
    let mut text = manifest.to_string().into_bytes();
    if random.random_ratio(1, 4) {
        let at = random.random_range(0..text.len());
        text[at] = random.random();
    }
    text
}

/// Descends to a random place and replaces the value there.
fn change(random: &mut StdRng, value: &mut Value) {
    let within = match value {
        Value::Object(map) if !map.is_empty() => {
            let some = random.random_range(0..map.len());
            map.values_mut().nth(some)
        }
        Value::Array(list) if !list.is_empty() => {
            let some = random.random_range(0..list.len());
            list.get_mut(some)
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
        Value::Object(_) | Value::Array(_) => None,
    };
    match within {
        Some(within) if random.random_ratio(4, 5) => change(random, within),
        Some(_) | None => *value = schema::value(random, 3),
    }
}

pub(crate) fn run(input: &[u8]) -> &'static str {
    match Manifest::parse(&String::from_utf8_lossy(input)) {
        Ok(_) => "accepted",
        Err(why) => {
            assert!(why.len() < 4 << 10, "a message of {} bytes", why.len());
            "refused"
        }
    }
}
