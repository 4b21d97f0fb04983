//! Handlers that behave badly on purpose, one behaviour each.

use rouse_sdk::{Ctx, Error, export, handler};
use serde_json::Value;

/// Gives its payload back.
#[handler(name = "test.echo")]
fn echo(ctx: &Ctx, payload: Value) -> Result<Value, Error> {
    ctx.info(format_args!("attempt {}", ctx.job().attempt));
    Ok(payload)
}

export!(echo);
