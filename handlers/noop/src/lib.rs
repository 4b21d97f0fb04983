//! Echoes a number: the smallest handler that reads and writes JSON, for benchmarks.

use rouse_sdk::{export, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The payload and the result of `noop`.
#[derive(Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct Number {
    /// Any number; 0 by default.
    #[serde(default)]
    pub n: i64,
}

/// Returns the number in its payload.
#[handler(name = "noop", instances = "reuse")]
pub fn noop(number: Number) -> Number {
    number
}

export!(noop);

#[cfg(test)]
mod tests {
    use rouse_sdk::TestCtx;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_number_is_returned() {
        assert_eq!(noop(Number { n: 7 }), Number { n: 7 });
        let result = TestCtx::new().run::<noop>(json!({"n": -1})).unwrap();
        assert_eq!(result, json!({"n": -1}));
        let result = TestCtx::new().run::<noop>(json!({})).unwrap();
        assert_eq!(result, json!({"n": 0}));
    }
}
