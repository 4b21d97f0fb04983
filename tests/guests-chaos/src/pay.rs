//! A handler whose effects move money between accounts in the database.

use std::time::Duration;

use rouse_sdk::{Ctx, Error, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use crate::Witness;

/// The task of a job.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct Payment {
    /// The job's number in the ledger.
    n: i64,
    from: i64,
    to: i64,
    amount: i64,
    /// It moves the money with a step, before it sleeps; otherwise with its outcome.
    staged: bool,
    sleep_ms: u64,
    /// Attempts up to this one fail at the end.
    fail_attempts: u32,
}

/// Moves an amount between two accounts, and writes a line in each of its transactions.
#[handler(
    name = "chaos.pay",
    capabilities = ["dirs"],
    sql(
        add = "UPDATE bank.account SET balance = balance + $2 WHERE id = $1",
        rows = 1
    ),
    sql(
        line = "INSERT INTO bank.line (job, attempt, part, amount) VALUES ($1, $2, $3, $4)",
        rows = 1
    )
)]
pub(crate) async fn pay(ctx: &Ctx, payment: Payment) -> Result<Value, Error> {
    let Payment {
        from, to, amount, ..
    } = payment;
    let (job, attempt) = (ctx.job().id, ctx.job().attempt);
    let witness = Witness::start(ctx)?;
    let mut result = witness.to_json();
    result["n"] = payment.n.into();
    if payment.staged {
        let first: String = ctx.step_with("first", |tx| {
            tx.sql("line", (job, attempt, "step", amount))?;
            tx.sql("add", (from, -amount))?;
            tx.sql("add", (to, amount))?;
            Ok(witness.nonce.clone())
        })?;
        if first == witness.nonce {
            witness.leave("step")?;
        }
        result["first"] = first.into();
        ctx.sql("line", (job, attempt, "end", 0))?;
    } else {
        ctx.sql("line", (job, attempt, "end", amount))?;
        ctx.sql("add", (from, -amount))?;
        ctx.sql("add", (to, amount))?;
    }
    rouse_sdk::sleep(Duration::from_millis(payment.sleep_ms)).await;
    witness.leave("end")?;
    if attempt <= payment.fail_attempts {
        return Err(Error::retryable("as the payload requests")
            .kind("flaky")
            .details(witness.to_json()));
    }
    Ok(result)
}
