//! Echoes a number: the smallest handler that reads and writes JSON, for benchmarks.

use rouse_sdk::{export, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What `noop` takes, and gives back.
#[derive(Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct Number {
    /// Any number; 0 where it is left out.
    #[serde(default)]
    pub n: i64,
}

/// Gives back the number that it was given.
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
    fn the_number_comes_back() {
        assert_eq!(noop(Number { n: 7 }), Number { n: 7 });
        let result = TestCtx::new().run::<noop>(json!({"n": -1})).unwrap();
        assert_eq!(result, json!({"n": -1}));
        let result = TestCtx::new().run::<noop>(json!({})).unwrap();
        assert_eq!(result, json!({"n": 0}));
    }
}
