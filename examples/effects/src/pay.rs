//! Pays an order: the order, the ledger and the outcome of the job are committed together.

use std::time::Duration;

use rouse_sdk::{Ctx, Error, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Pay {
    order: i64,
    /// The duration of the payment in seconds, during which the host can be killed.
    #[serde(default)]
    seconds: u64,
}

#[derive(Serialize, JsonSchema, Debug, PartialEq)]
pub(crate) struct Paid {
    cents: i64,
}

#[derive(Deserialize)]
struct Order {
    cents: i64,
}

/// Marks an order as paid, and books the amount.
#[handler(
    name = "shop.pay",
    lease = "10s",
    sql(order = "SELECT cents FROM orders WHERE id = $1"),
    sql(
        mark_paid = "UPDATE orders SET paid_at = now() WHERE id = $1 AND cents = $2 AND paid_at IS NULL",
        rows = 1
    ),
    sql(book = "INSERT INTO ledger (order_id, cents) VALUES ($1, $2)")
)]
pub(crate) async fn pay(ctx: &Ctx, payload: Pay) -> Result<Paid, Error> {
    let orders: Vec<Order> = ctx.query("order", (payload.order,))?;
    let Some(Order { cents }) = orders.first() else {
        return Err(Error::permanent(format_args!(
            "there is no order {}",
            payload.order
        )));
    };
    // Neither statement runs before the handler has returned. No matter when the host is killed, both are committed
    // once, with the outcome of the job.
    ctx.sql("mark_paid", (payload.order, cents))?;
    ctx.sql("book", (payload.order, cents))?;
    rouse_sdk::sleep(Duration::from_secs(payload.seconds)).await;
    Ok(Paid { cents: *cents })
}

#[cfg(test)]
mod tests {
    use rouse_sdk::TestCtx;
    use serde_json::json;

    use super::*;

    #[test]
    fn an_order_is_marked_and_booked() {
        let ctx = TestCtx::new();
        ctx.on_query(|_| Ok(vec![json!({"cents": 1250})]));
        let paid = ctx.run::<pay>(json!({"order": 17})).expect("it is paid");
        assert_eq!(paid, json!({"cents": 1250}));
        let effects = ctx.effects();
        let names: Vec<&str> = effects.iter().map(|it| it.statement.as_str()).collect();
        assert_eq!(names, ["mark_paid", "book"]);
        assert_eq!(effects[1].params, json!([17, 1250]));
    }

    #[test]
    fn an_unknown_order_fails_without_effects() {
        let ctx = TestCtx::new();
        ctx.on_query(|_| Ok(Vec::new()));
        let error = ctx
            .run::<pay>(json!({"order": 18}))
            .expect_err("there is none");
        assert!(error.permanent);
        assert_eq!(ctx.effects(), []);
    }
}
