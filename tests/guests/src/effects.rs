//! A guest that keeps using everything that it is granted, whatever happens.

use std::fs::OpenOptions;
use std::io::Write as _;

use rouse_sdk::{Ctx, Result, handler, http};
use schemars::JsonSchema;
use serde::Deserialize;

/// The targets of its effects.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct Effects {
    /// Requests go to `URL/ATTEMPT/N`, with the secret KEY.
    url: String,
    /// A file to which it appends `ATTEMPT N`.
    file: String,
    /// Whether it writes `[ATTEMPT, N]` to its state, under the key `last`.
    keeps: bool,
}

/// Repeats its effects endlessly in its first attempt, and has them once in a later one; errors do not stop it.
#[handler(name = "test.effects", max_attempts = 3, grace = "2s", capabilities = ["http", "secrets", "dirs", "state"])]
pub(crate) async fn effects(ctx: &Ctx, payload: Effects) -> Result<u64> {
    let attempt = ctx.job().attempt;
    let mut n = 0_u64;
    loop {
        let key = ctx.secret("KEY").unwrap_or_default();
        let url = format!("{}/{attempt}/{n}", payload.url);
        let request = http::Request::new("GET", url).header("authorization", key);
        let _ = request.send(ctx).await;
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&payload.file);
        let _ = file.and_then(|mut file| writeln!(file, "{attempt} {n}"));
        if payload.keeps {
            let _ = ctx.state().set("last", &[u64::from(attempt), n]);
        }
        if attempt > 1 {
            return Ok(n);
        }
        n += 1;
    }
}
