//! An approval: requests a decision, and waits up to three days for the answer.

use std::time::Duration;

use rouse_sdk::{Ctx, Error, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const THREE_DAYS: Duration = Duration::from_secs(3 * 24 * 60 * 60);

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Expense {
    cents: u64,
}

/// The payload of the signal `answer`.
#[derive(Deserialize)]
struct Answer {
    by: String,
    approved: bool,
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "decision")]
pub(crate) enum Decision {
    Approved { by: String },
    Rejected { by: String },
    Expired,
}

/// Waits for an answer: `SELECT rouse.signal(ID, 'answer', '{"by": "Ada", "approved": true}')`.
///
/// The question is a step, so it is recorded before the wait, and the attempt after the wait does not ask again.
#[handler(name = "expense.approve")]
pub(crate) fn approve(ctx: &Ctx, expense: Expense) -> Result<Decision, Error> {
    ctx.step("ask", || {
        ctx.info(format_args!("please approve {} cents", expense.cents));
        Ok(())
    })?;
    let answer = ctx.wait_signal::<Answer>("answer", THREE_DAYS)?;
    Ok(match answer {
        Some(Answer { by, approved: true }) => Decision::Approved { by },
        Some(Answer { by, .. }) => Decision::Rejected { by },
        None => Decision::Expired,
    })
}

#[cfg(test)]
mod tests {
    use rouse_sdk::{TestCtx, Wait};
    use serde_json::{Value, json, to_value};

    use super::*;

    /// Runs an approval until it waits, resumes it, and returns the decision. Without an answer, three days pass.
    fn decide(answer: Option<Value>) -> Value {
        let attempt =
            |ctx: &TestCtx| ctx.attempt(|ctx| super::approve(ctx, Expense { cents: 1_250 }));
        let ctx = TestCtx::new();
        let wait = attempt(&ctx).suspended();
        assert!(matches!(
            wait,
            Wait::Signal {
                timeout: Some(THREE_DAYS),
                ..
            }
        ));
        if let Some(answer) = answer {
            ctx.send_signal("answer", answer);
        }
        let resumed = ctx.resumed();
        let decision = attempt(&resumed).ended().unwrap();
        assert!(resumed.logs().is_empty(), "it asks once");
        to_value(decision).unwrap()
    }

    #[test]
    fn an_answer_decides() {
        assert_eq!(
            decide(Some(json!({"by": "Ada", "approved": true}))),
            json!({"decision": "approved", "by": "Ada"})
        );
        assert_eq!(
            decide(Some(json!({"by": "Ada", "approved": false}))),
            json!({"decision": "rejected", "by": "Ada"})
        );
    }

    #[test]
    fn after_three_days_without_an_answer_it_expires() {
        assert_eq!(decide(None), json!({"decision": "expired"}));
    }
}
