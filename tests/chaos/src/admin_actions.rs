//! Admin actions on jobs that wait, run or have ended.

use anyhow::Result;
use serde_json::json;
use tokio_postgres::types::Json;

use super::calls::Caller;
use super::faults::Faults;
use super::ledger::{Request, now_us};
use super::plan::{Fault, Planned};
use super::random::Random;

impl Faults {
    /// Ends, retries or reschedules a job, over its own connection.
    pub(super) async fn admin_action(&self, planned: &Planned, mut random: Random) -> Result<()> {
        let job = match planned.fault {
            Fault::Retry => self.recent.finished(&mut random),
            Fault::Reschedule => self.recent.scheduled(),
            _ => self.recent.live(&mut random),
        };
        let Some(job) = job else {
            return self.skipped(planned.fault, "there is no suitable job");
        };
        let mut caller = Caller::new(&self.server.url, &self.ledger);
        let mark = format!("by hand {}", planned.draw);
        let response = match planned.fault {
            Fault::Complete => {
                let result = Json(json!({ "by_admin": mark }));
                let sql = "SELECT rouse.complete($1, $2)::int::bigint";
                let request = Request::Complete { job, mark };
                caller.call(request, sql, &[&job, &result]).await?
            }
            Fault::Fail => {
                let request = Request::Fail {
                    job,
                    mark: mark.clone(),
                };
                let sql = "SELECT rouse.fail($1, $2)::int::bigint";
                caller.call(request, sql, &[&job, &mark]).await?
            }
            Fault::Retry => {
                let request = Request::Retry { job };
                caller
                    .call(request, "SELECT rouse.retry($1)", &[&job])
                    .await?
            }
            Fault::Reschedule => {
                let run_in = random.below(4_000) as i64 * 1000;
                let run_at_us = random.per_mille(700).then(|| now_us() + run_in);
                let sql = "SELECT rouse.reschedule($1, to_timestamp($2::bigint / 1000000.0))::int::bigint";
                let request = Request::Reschedule { job, run_at_us };
                caller.call(request, sql, &[&job, &run_at_us]).await?
            }
            _ => {
                let sql = "SELECT rouse.cancel($1)::int::bigint";
                caller.call(Request::Cancel { job }, sql, &[&job]).await?
            }
        };
        match response {
            Some(_) => Ok(()),
            None => self.skipped(planned.fault, "the server is down"),
        }
    }
}
