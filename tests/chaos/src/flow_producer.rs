//! A task that enqueues flows, and a task for each flow that cancels, retries and deletes it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tokio_postgres::types::Json;

use super::calls::{CallOptions, Caller};
use super::flows::{FlowSpec, Plan};
use super::ledger::{Ledger, Request, Response, now_us};
use super::random::Random;

const ENQUEUE: &str = "SELECT rouse.enqueue_flow($1)";
const CANCEL: &str = "SELECT rouse.cancel_flow($1, $2)::bigint";
const RETRY: &str = "SELECT rouse.retry_flow($1, $2, to_timestamp($3::bigint / 1000000.0))::bigint";
const DELETE: &str = "SELECT rouse.delete_flow($1)::bigint";
/// Whether a job of the flow failed or was cancelled; no row while jobs run, or will run without a retry.
const RESTS: &str = "SELECT failed + cancelled > 0 FROM rouse.flows
    WHERE id = $1 AND scheduled + ready + running = 0 AND (waiting = 0 OR stuck > 0)";
/// The mean interval between flows.
const EVERY: Duration = Duration::from_millis(1_500);
const POLL_EVERY: Duration = Duration::from_millis(300);
/// A flow that takes longer may wait for a job of another flow, which waits for a retry until the end.
const REST_TIMEOUT: Duration = Duration::from_secs(30);
const AGAIN_AFTER: Duration = Duration::from_millis(100);
/// The checker must know that a job had failed before the retry of its flow: a settlement takes effect when it commits,
/// a moment after the time that it records.
const RETRIED_AFTER: Duration = Duration::from_millis(1_200);

pub(super) struct FlowProducer {
    pub(super) seed: u64,
    pub(super) url: String,
    pub(super) ledger: Arc<Ledger>,
}

impl FlowProducer {
    /// Enqueues flows until `until`. Actions on them that have not happened by then are left out.
    pub(super) async fn run(self, until: Instant) -> Result<()> {
        let mut random = Random::new(self.seed, "pace of flows");
        let mut lives = JoinSet::new();
        for index in 0.. {
            let next = Instant::now() + EVERY * random.between(50, 150) as u32 / 100;
            if next >= until {
                break;
            }
            tokio::time::sleep_until(next).await;
            let spec = FlowSpec::nth(self.seed, index, now_us());
            let plan = Plan::nth(self.seed, index);
            let (url, ledger) = (self.url.clone(), self.ledger.clone());
            lives.spawn(async move { live(&url, &ledger, spec, &plan, until).await });
            while let Some(done) = lives.try_join_next() {
                done??;
            }
        }
        while let Some(done) = lives.join_next().await {
            done??;
        }
        Ok(())
    }
}

/// Enqueues a flow and performs the planned actions on it.
async fn live(
    url: &str,
    ledger: &Ledger,
    spec: FlowSpec,
    plan: &Plan,
    until: Instant,
) -> Result<()> {
    let mut caller = Caller::new(url, ledger);
    let Some(flow) = enqueue(&mut caller, spec).await? else {
        return Ok(());
    };
    caller.options = CallOptions::default();
    let mut life = Life {
        caller,
        flow,
        until,
        rest_timeout: REST_TIMEOUT,
    };
    if let Some(cancel_ms) = plan.cancel_ms {
        tokio::time::sleep(Duration::from_millis(cancel_ms)).await;
        life.cancel(plan).await?;
    }
    for _ in 0..plan.retries {
        match life.has_failed().await {
            Some(true) => {}
            Some(false) => break,
            None => return Ok(()),
        }
        tokio::time::sleep(RETRIED_AFTER).await;
        life.retry(plan).await?;
    }
    if plan.deletes && life.has_failed().await.is_some() {
        life.delete().await?;
    }
    Ok(())
}

/// Returns the id of the flow, if it was accepted.
async fn enqueue(caller: &mut Caller<'_>, spec: FlowSpec) -> Result<Option<i64>> {
    caller.options = CallOptions::of_enqueue(spec.rolled_back, spec.hangs_up_us);
    let argument = Json(spec.argument());
    let request = Request::EnqueueFlow { spec };
    match caller.call(request, ENQUEUE, &[&argument]).await? {
        Some(Response::Ok(flow)) => Ok(Some(flow)),
        Some(Response::Refused(_) | Response::Unknown(_)) | None => Ok(None),
    }
}

/// A flow that was accepted.
struct Life<'a> {
    caller: Caller<'a>,
    flow: i64,
    until: Instant,
    /// How long to wait before each retry, and before the deletion.
    rest_timeout: Duration,
}

impl Life<'_> {
    /// Waits until the flow has ended, or only waits for a retry. True: one of its jobs has not succeeded. `None`: it
    /// takes too long, or the load ends before that.
    async fn has_failed(&mut self) -> Option<bool> {
        let deadline = self.until.min(Instant::now() + self.rest_timeout);
        timeout_at(deadline, self.rests()).await.ok()
    }

    /// Polls over the connection of the calls, so that a flow needs only one connection.
    async fn rests(&mut self) -> bool {
        loop {
            tokio::time::sleep(POLL_EVERY).await;
            let Some(client) = self.caller.connected().await else {
                continue;
            };
            // The server may be down: that is one of the faults.
            if let Ok(Some(row)) = client.query_opt(RESTS, &[&self.flow]).await {
                return row.get(0);
            }
        }
    }

    /// Calls until no job is live.
    async fn cancel(&mut self, plan: &Plan) -> Result<()> {
        while Instant::now() < self.until {
            let request = Request::CancelFlow { flow: self.flow };
            let args: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&self.flow, &plan.max];
            match self.caller.call(request, CANCEL, &args).await? {
                Some(Response::Ok(0)) => break,
                Some(Response::Ok(_)) => {}
                Some(Response::Refused(_) | Response::Unknown(_)) | None => {
                    tokio::time::sleep(AGAIN_AFTER).await;
                }
            }
        }
        Ok(())
    }

    /// Calls until nothing is left to retry. Jobs that fail again in the meantime are not retried again.
    async fn retry(&mut self, plan: &Plan) -> Result<()> {
        let before_us = now_us();
        if let Some(us) = plan.hangs_up_us {
            self.caller.options.timeout = Duration::from_micros(us);
        }
        while Instant::now() < self.until {
            let request = Request::RetryFlow {
                flow: self.flow,
                before_us,
            };
            let args: [&(dyn tokio_postgres::types::ToSql + Sync); 3] =
                [&self.flow, &plan.max, &before_us];
            let response = self.caller.call(request, RETRY, &args).await?;
            self.caller.options = CallOptions::default();
            match response {
                Some(Response::Ok(0)) => break,
                Some(Response::Ok(_)) => {}
                Some(Response::Refused(_) | Response::Unknown(_)) | None => {
                    tokio::time::sleep(AGAIN_AFTER).await;
                }
            }
        }
        Ok(())
    }

    async fn delete(&mut self) -> Result<()> {
        let request = Request::DeleteFlow { flow: self.flow };
        // The deletion is refused while another flow waits for a job that both have.
        self.caller.call(request, DELETE, &[&self.flow]).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_flow_that_does_not_rest_is_given_up() {
        let scratch = tempfile::tempdir().unwrap();
        let ledger = Ledger::create(&scratch.path().join("ledger")).unwrap();
        let mut life = Life {
            caller: Caller::new("not a URL", &ledger),
            flow: 1,
            until: Instant::now() + Duration::from_secs(3_600),
            rest_timeout: Duration::from_millis(1),
        };
        assert_eq!(life.has_failed().await, None);
    }
}
