//! What is done to jobs from outside while they wait and run.

use anyhow::Result;
use serde_json::json;
use tokio_postgres::types::Json;

use super::calls::Caller;
use super::faults::Faults;
use super::ledger::{Ask, now_us};
use super::plan::{Fault, Planned};
use super::random::Random;

impl Faults {
    /// Ends, retries or moves a job, over a connection of its own.
    pub(super) async fn ask(&self, planned: &Planned, mut random: Random) -> Result<()> {
        let job = match planned.fault {
            Fault::Retry => self.recent.finished(&mut random),
            Fault::Reschedule => self.recent.scheduled(),
            _ => self.recent.live(&mut random),
        };
        let Some(job) = job else {
            return self.skipped(planned.fault, "no job for it");
        };
        let mut caller = Caller::new(&self.server.url, &self.ledger);
        let mark = format!("by hand {}", planned.draw);
        let answer = match planned.fault {
            Fault::Complete => {
                let result = Json(json!({ "by_admin": mark }));
                let sql = "SELECT rouse.complete($1, $2)::int::bigint";
                let ask = Ask::Complete { job, mark };
                caller.call(ask, sql, &[&job, &result]).await?
            }
            Fault::Fail => {
                let ask = Ask::Fail {
                    job,
                    mark: mark.clone(),
                };
                let sql = "SELECT rouse.fail($1, $2)::int::bigint";
                caller.call(ask, sql, &[&job, &mark]).await?
            }
            Fault::Retry => {
                let ask = Ask::Retry { job };
                caller.call(ask, "SELECT rouse.retry($1)", &[&job]).await?
            }
            Fault::Reschedule => {
                let run_in = random.below(4_000) as i64 * 1000;
                let run_at_us = random.per_mille(700).then(|| now_us() + run_in);
                let sql = "SELECT rouse.reschedule($1, to_timestamp($2::bigint / 1000000.0))::int::bigint";
                let ask = Ask::Reschedule { job, run_at_us };
                caller.call(ask, sql, &[&job, &run_at_us]).await?
            }
            _ => {
                let sql = "SELECT rouse.cancel($1)::int::bigint";
                caller.call(Ask::Cancel { job }, sql, &[&job]).await?
            }
        };
        match answer {
            Some(_) => Ok(()),
            None => self.skipped(planned.fault, "the server is down"),
        }
    }
}
