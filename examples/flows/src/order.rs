//! An order: charge, reserve, ship. If a part fails, the parts before it are undone.

use rouse_sdk::{Ctx, Error, Job, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Deserialize, Serialize, JsonSchema)]
pub(crate) struct Order {
    id: u64,
    cents: u64,
    pieces: u32,
}

#[derive(Deserialize, Serialize, JsonSchema)]
pub(crate) struct Receipt {
    order: u64,
    cents: u64,
}

/// Processes an order.
///
/// Each call is a job of its own, with its own retries and its own result. The order is suspended while it waits, and
/// holds neither a slot nor memory. If its host dies, the order continues after the last call that has ended.
#[handler(
    name = "shop.order",
    capabilities = ["enqueue:shop.*"]
)]
pub(crate) fn order(ctx: &Ctx, order: Order) -> Result<String, Error> {
    let receipt = ctx.call(Job::of::<charge>(&order))?;
    let mut undo = vec![Job::of::<refund>(&receipt)];
    let shipped = match ctx.try_call(Job::of::<reserve>(&order))? {
        Ok(()) => {
            undo.push(Job::of::<release>(&order));
            ctx.try_call(Job::of::<ship>(&order))?
        }
        Err(failure) => Err(failure),
    };
    let failure = match shipped {
        Ok(parcel) => return Ok(parcel),
        Err(failure) => failure,
    };
    for undone in ctx.call_all(undo)? {
        undone?;
    }
    let why = format_args!("order {} was refunded: {}", order.id, failure.message);
    Err(Error::permanent(why).kind("refunded"))
}

/// Stands in for a request to a payment provider, with the job's id as its idempotency key.
#[handler(name = "shop.charge")]
pub(crate) fn charge(order: Order) -> Result<Receipt, Error> {
    if order.cents > 100_000 {
        return Err(Error::permanent("the card was declined").kind("card_declined"));
    }
    Ok(Receipt {
        order: order.id,
        cents: order.cents,
    })
}

#[handler(name = "shop.refund")]
pub(crate) fn refund(ctx: &Ctx, receipt: Receipt) {
    ctx.info(format_args!("refunded {} cents", receipt.cents));
}

/// Stands in for a request to a warehouse.
#[handler(name = "shop.reserve")]
pub(crate) fn reserve(order: Order) -> Result<(), Error> {
    match order.pieces {
        0..=100 => Ok(()),
        _ => Err(Error::permanent("only 100 pieces are left").kind("no_stock")),
    }
}

#[handler(name = "shop.release")]
pub(crate) fn release(ctx: &Ctx, order: Order) {
    ctx.info(format_args!("released {} pieces", order.pieces));
}

#[handler(name = "shop.ship")]
pub(crate) fn ship(order: Order) -> Result<String, Error> {
    match order.pieces {
        0 => Err(Error::permanent("there is nothing to ship").kind("empty")),
        pieces => Ok(format!("{pieces} pieces of order {}", order.id)),
    }
}

#[cfg(test)]
mod tests {
    use rouse_sdk::{Attempt, TestCtx, Wait};
    use serde_json::{Value, json};

    use super::*;

    /// Runs an order with the real handlers; each call suspends it. Returns its end, and the handlers that it called.
    fn run(order: &Value) -> (Result<String, Error>, Vec<String>) {
        let mut ctx = TestCtx::new();
        ctx.on_call(|job| {
            let called = TestCtx::new();
            let payload = job.payload.clone();
            match job.handler.as_str() {
                "shop.charge" => called.run::<charge>(payload),
                "shop.refund" => called.run::<refund>(payload),
                "shop.reserve" => called.run::<reserve>(payload),
                "shop.release" => called.run::<release>(payload),
                "shop.ship" => called.run::<ship>(payload),
                other => panic!("{other} was called"),
            }
        });
        let end = loop {
            let order = serde_json::from_value(order.clone()).unwrap();
            match ctx.attempt(|ctx| super::order(ctx, order)) {
                Attempt::Ended(end) => break end,
                Attempt::Suspended(_) => ctx = ctx.resumed(),
            }
        };
        let mut called = Vec::new();
        for wait in ctx.waits() {
            if let Wait::Calls(jobs) = wait {
                called.extend(jobs.into_iter().map(|job| job.handler));
            }
        }
        (end, called)
    }

    #[test]
    fn an_order_is_charged_reserved_and_shipped() {
        let (end, called) = run(&json!({"id": 17, "cents": 1250, "pieces": 3}));
        assert_eq!(end.unwrap(), "3 pieces of order 17");
        assert_eq!(called, ["shop.charge", "shop.reserve", "shop.ship"]);
    }

    #[test]
    fn an_order_that_cannot_be_reserved_is_refunded() {
        let (end, called) = run(&json!({"id": 17, "cents": 1250, "pieces": 101}));
        assert_eq!(end.unwrap_err().kind, "refunded");
        assert_eq!(called, ["shop.charge", "shop.reserve", "shop.refund"]);
    }

    #[test]
    fn an_order_that_cannot_be_shipped_is_refunded_and_released() {
        let (end, called) = run(&json!({"id": 17, "cents": 1250, "pieces": 0}));
        assert_eq!(end.unwrap_err().kind, "refunded");
        assert_eq!(
            called[2..],
            ["shop.ship", "shop.refund", "shop.release"].map(String::from)
        );
    }

    #[test]
    fn an_order_that_cannot_be_charged_undoes_nothing() {
        let (end, called) = run(&json!({"id": 17, "cents": 999_999, "pieces": 3}));
        assert_eq!(end.unwrap_err().kind, "call_failed");
        assert_eq!(called, ["shop.charge"]);
    }
}
