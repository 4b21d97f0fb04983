//! Guests that read the ends of the chains that they have waited for.

use rouse_sdk::{Ctx, Result, handler};
use serde_json::{Value, json};

/// Returns all ends, in the order in which the host lists them.
#[handler(name = "flow.results", max_attempts = 1)]
pub(crate) fn results(ctx: &Ctx, _payload: Value) -> Result<Vec<Value>> {
    let results = ctx.results()?;
    let ends = results.iter().map(|parent| {
        Ok(match parent.failure() {
            None => json!({
                "name": parent.name(),
                "job": parent.job(),
                "end": parent.end().as_str(),
                "output": parent.output::<Value>()?,
            }),
            Some(failure) => json!({
                "name": parent.name(),
                "job": parent.job(),
                "end": parent.end().as_str(),
                "failure": {"kind": failure.kind, "message": failure.message},
            }),
        })
    });
    ends.collect()
}

/// Returns the result of the chain with this name, or fails with its failure.
#[handler(name = "flow.result", max_attempts = 1)]
pub(crate) fn result(ctx: &Ctx, name: String) -> Result<Value> {
    ctx.results()?.get(name)
}
