//! SQL statements that the handler has declared.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Ctx;
use crate::host::{Sql as _, SqlCall};
use crate::{Error, Result};

impl Ctx {
    /// Adds an effect: a statement that the handler has declared (`#[handler(sql(…))]`), with its parameters as a tuple
    /// or a list. If this attempt succeeds, the effect and the outcome are committed in one transaction: both or
    /// neither, exactly once. Effects run after the handler has returned, in the order of the calls. An attempt that
    /// fails, is lost or is suspended has no effects, because a later attempt makes the same calls again.
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Result, TestCtx, handler, serde_json::json};
    ///
    /// /// Marks an order as paid.
    /// #[handler(
    ///     name = "shop.pay",
    ///     sql(mark_paid = "UPDATE orders SET paid_at = now() WHERE id = $1 AND paid_at IS NULL", rows = 1)
    /// )]
    /// fn pay(ctx: &Ctx, order: i64) -> Result<()> {
    ///     ctx.sql("mark_paid", (order,))
    /// }
    ///
    /// let ctx = TestCtx::new();
    /// pay(&ctx, 17).unwrap();
    /// assert_eq!(ctx.effects()[0].statement, "mark_paid");
    /// assert_eq!(ctx.effects()[0].params, json!([17]));
    /// ```
    ///
    /// A parameter of type `json` or `jsonb` takes the value as JSON, and one of an array type takes a list. Parameters
    /// of all other types take a number, a boolean, or text in the input syntax of Postgres (`"2026-01-31"`,
    /// `"\\x00ff"`); `None` is NULL.
    ///
    /// # Errors
    /// Permanent ones: if the operator has not granted the statement (kind `denied`), if the host refuses the call
    /// (kind `sql_refused`), and within a step (kind `in_step`; see [`step_with`](Self::step_with)). An error of kind
    /// `aborted` if the attempt has to stop.
    pub fn sql(&self, statement: impl AsRef<str>, params: impl Serialize) -> Result<()> {
        self.outside_steps("sql")?;
        self.world.execute(call(statement.as_ref(), &params)?)
    }

    /// Runs a query that the handler has declared, at once, in a read-only transaction of its own. Each row is read
    /// from a JSON object with a key for each column.
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Result, TestCtx, handler, serde_json::json};
    /// use serde::Deserialize;
    ///
    /// #[derive(Deserialize)]
    /// struct Line {
    ///     article: String,
    ///     cents: i64,
    /// }
    ///
    /// #[handler(name = "shop.total", sql(lines = "SELECT article, cents FROM lines WHERE order_id = $1"))]
    /// fn total(ctx: &Ctx, order: i64) -> Result<i64> {
    ///     let lines: Vec<Line> = ctx.query("lines", (order,))?;
    ///     Ok(lines.iter().map(|line| line.cents).sum())
    /// }
    ///
    /// let ctx = TestCtx::new();
    /// ctx.on_query(|_| Ok(vec![json!({"article": "tea", "cents": 350})]));
    /// assert_eq!(total(&ctx, 17).unwrap(), 350);
    /// ```
    ///
    /// The rows may change before the effects of the attempt are committed: have a statement check that they have not
    /// changed, for instance with a version in its WHERE clause and `rows = 1`.
    ///
    /// # Errors
    /// If Postgres refuses the query, or it returns another number of rows than the statement declares (kind
    /// `sql_failed`, permanent unless the statement has `on_error = "retry"`), if a row does not match `T` (kind
    /// `result_mismatch`, permanent); otherwise as for [`sql`](Self::sql), except within a step.
    pub fn query<T: DeserializeOwned>(
        &self,
        statement: impl AsRef<str>,
        params: impl Serialize,
    ) -> Result<Vec<T>> {
        let statement = statement.as_ref();
        let rows = self.world.query(call(statement, &params)?)?;
        let rows = rows.iter().map(|row| {
            serde_json::from_slice(row).map_err(|error| {
                Error::permanent(format_args!(
                    "a row of the statement {statement} does not match what the handler expects: {error}"
                ))
                .kind("result_mismatch")
            })
        });
        rows.collect()
    }

    /// A [`step`](Self::step) with effects: the result of the step and its effects are committed in one transaction, in
    /// the middle of the attempt. A later attempt gets the result, and the effects are not repeated.
    ///
    /// ```
    /// use rouse_sdk::{Ctx, Result, TestCtx, handler};
    ///
    /// #[handler(
    ///     name = "shop.reserve",
    ///     sql(reserve = "UPDATE stock SET count = count - 1 WHERE article = $1 AND count > 0", rows = 1),
    /// )]
    /// fn reserve(ctx: &Ctx, article: String) -> Result<String> {
    ///     ctx.step_with("reserve", |tx| {
    ///         tx.sql("reserve", (&article,))?;
    ///         Ok(format!("reserved {article}"))
    ///     })
    /// }
    ///
    /// let ctx = TestCtx::new();
    /// reserve(&ctx, "tea".into()).unwrap();
    /// // The second attempt does not reserve again.
    /// let second = ctx.next_attempt();
    /// assert_eq!(reserve(&second, "tea".into()).unwrap(), "reserved tea");
    /// assert!(second.effects().is_empty());
    /// ```
    ///
    /// # Errors
    /// If Postgres refuses an effect (kind `sql_failed`, as for [`query`](Self::query)), neither the effects nor the
    /// step is committed; otherwise as for [`step`](Self::step) and [`sql`](Self::sql).
    pub fn step_with<T: Serialize + DeserializeOwned>(
        &self,
        name: impl AsRef<str>,
        work: impl FnOnce(&mut Tx) -> Result<T>,
    ) -> Result<T> {
        let started = self.start_step(name.as_ref())?;
        let output = match self.recorded(&started.name)? {
            Some(recorded) => recorded,
            None => {
                let mut tx = Tx {
                    effects: Vec::new(),
                };
                let output = self.within_step(|| work(&mut tx))?;
                let json = serde_json::to_vec(&output)?;
                self.world
                    .complete_step_with(&started.name, json, tx.effects)?;
                output
            }
        };
        started.done();
        Ok(output)
    }
}

/// The effects of a step, from [`Ctx::step_with`]. They run after the work of the step, in order.
pub struct Tx {
    effects: Vec<SqlCall>,
}

impl Tx {
    /// Adds an effect, like [`Ctx::sql`].
    ///
    /// # Errors
    /// If the parameters are neither a tuple nor a list (kind `sql_refused`, permanent). The host checks them at the
    /// end of the step.
    pub fn sql(&mut self, statement: impl AsRef<str>, params: impl Serialize) -> Result<()> {
        self.effects.push(call(statement.as_ref(), &params)?);
        Ok(())
    }
}

impl fmt::Debug for Tx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tx")
            .field("effects", &self.effects.len())
            .finish()
    }
}

fn call(statement: &str, params: &impl Serialize) -> Result<SqlCall> {
    let params = match serde_json::to_value(params)? {
        Value::Null => Value::Array(Vec::new()),
        params @ Value::Array(_) => params,
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => {
            let why = format_args!(
                "the parameters of the statement {statement} must be a tuple or a list, for instance `(id,)`"
            );
            return Err(Error::permanent(why).kind("sql_refused"));
        }
    };
    Ok(SqlCall {
        statement: statement.to_owned(),
        params: params.to_string().into_bytes(),
    })
}
