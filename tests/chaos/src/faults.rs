//! Injects the faults of the plan, each in its own task.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use anyhow::{Result, ensure};
use rouse_workbench::database;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::calls::Caller;
use super::hosts::Hosts;
use super::ledger::{Event, Ledger, Request, Response, now_us};
use super::load::QUEUES;
use super::module::Module;
use super::plan::{Fault, Planned};
use super::producers::Recent;
use super::random::Random;
use super::server::Server;
use super::settings::LEASE;

/// The pause before a queue that could not be resumed is resumed again.
const RESUME_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// A queue that cannot be resumed in this many tries ends the run.
const REFUSALS_MAX: u32 = 100;

/// The targets of faults.
pub(super) struct Faults {
    pub(super) server: Arc<Server>,
    pub(super) hosts: Arc<Hosts>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) recent: Arc<Recent>,
    pub(super) module: Module,
    /// The number of jobs that faults have enqueued.
    pub(super) fault_jobs: AtomicI64,
}

impl Faults {
    /// Injects all faults of the plan, and returns when the last one has ended.
    pub(super) async fn run(self: Arc<Self>, plan: Vec<Planned>, started: Instant) -> Result<()> {
        let mut running = JoinSet::new();
        for planned in plan {
            tokio::time::sleep_until(started + Duration::from_millis(planned.at_ms)).await;
            let faults = self.clone();
            running.spawn(async move { faults.inject(&planned).await });
            while let Some(done) = running.try_join_next() {
                done??;
            }
        }
        while let Some(done) = running.join_next().await {
            done??;
        }
        Ok(())
    }

    async fn inject(&self, planned: &Planned) -> Result<()> {
        let mut random = Random::new(planned.draw, "fault");
        let draw = random.next();
        let done = match planned.fault {
            Fault::KillHost => self.hosts.kill(draw).await?,
            Fault::FreezeHost => {
                let beyond = Duration::from_millis(random.between(1_000, 4_000));
                self.hosts.freeze(draw, LEASE + beyond).await?
            }
            Fault::StopHost => self.hosts.restart(draw).await?,
            Fault::CrashServer | Fault::KillBackend => {
                return self.crash(planned.fault, random).await;
            }
            Fault::ReplaceModule => {
                let from_us = now_us();
                let sha256 = self.module.place(draw)?;
                let event = Event::ModuleReplaced { sha256 };
                return self.ledger.happened(from_us, event);
            }
            Fault::TerminateBackends => return self.terminate(random).await,
            Fault::ForgetSleepers => return self.forget_sleepers().await,
            Fault::PauseQueue => return self.pause(random).await,
            Fault::CancelLine => return self.cancel_line().await,
            Fault::CutListeners => return self.cut_listeners(random).await,
            Fault::FreezeInClaim => return self.freeze_in_claim(random).await,
            Fault::CrashJob => return self.crash_job(random).await,
            Fault::CutEffects => return self.cut_effects(random).await,
            Fault::SameId => {
                return match self.hosts.share_an_id().await? {
                    true => Ok(()),
                    false => self.skipped(Fault::SameId, "the server is down"),
                };
            }
            Fault::Cancel | Fault::Complete | Fault::Fail | Fault::Retry | Fault::Reschedule => {
                return self.admin_action(planned, random).await;
            }
        };
        match done {
            true => Ok(()),
            false => self.skipped(planned.fault, "too few hosts"),
        }
    }

    pub(super) fn skipped(&self, fault: Fault, why: &str) -> Result<()> {
        let why = why.into();
        self.ledger
            .happened(now_us(), Event::Skipped { fault, why })
    }

    async fn crash(&self, how: Fault, mut random: Random) -> Result<()> {
        let down = Duration::from_millis(random.between(0, 3_000));
        let done = match how {
            Fault::KillBackend => self.server.kill_backend(random.next()).await,
            _ => self.server.crash(down).await,
        };
        match done {
            Ok(from_us) => self.ledger.happened(from_us, Event::ServerCrashed { how }),
            // The server may be down already. If it does not come back, the run fails here.
            Err(error) => {
                self.server.answers().await?;
                self.skipped(how, &format!("{error:#}"))
            }
        }
    }

    async fn terminate(&self, mut random: Random) -> Result<()> {
        let from_us = now_us();
        let (salt, max) = (random.next().to_string(), random.between(1, 4) as i64);
        let sql = "SELECT count(*) FILTER (WHERE done) FROM (
                SELECT pg_terminate_backend(pid) AS done FROM (
                    SELECT pid FROM pg_stat_activity
                    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
                    ORDER BY md5(pid::text || $1::text) LIMIT $2) AS chosen) AS ended";
        match self.scalar(sql, &[&salt, &max]).await {
            Ok(count) => {
                let count = count as u64;
                self.ledger
                    .happened(from_us, Event::BackendsTerminated { count })
            }
            Err(error) => self.skipped(Fault::TerminateBackends, &format!("{error:#}")),
        }
    }

    async fn forget_sleepers(&self) -> Result<()> {
        let from_us = now_us();
        let sql = "WITH gone AS (DELETE FROM rouse.sleeper RETURNING 1) SELECT count(*) FROM gone";
        match self.scalar(sql, &[]).await {
            Ok(rows) => {
                let rows = rows as u64;
                self.ledger
                    .happened(from_us, Event::SleepersForgotten { rows })
            }
            Err(error) => self.skipped(Fault::ForgetSleepers, &format!("{error:#}")),
        }
    }

    async fn scalar(
        &self,
        sql: &str,
        params: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<i64> {
        let client = database::connect(&self.server.url).await?;
        Ok(client.query_one(sql, params).await?.get(0))
    }

    async fn pause(&self, mut random: Random) -> Result<()> {
        let queue = (*random.pick(&QUEUES)).to_owned();
        let length = Duration::from_millis(random.between(500, 3_000));
        let mut caller = Caller::new(&self.server.url, &self.ledger);
        let request = Request::Pause {
            queue: queue.clone(),
        };
        let sql = "SELECT (rouse.pause_queue($1) IS NOT NULL)::int::bigint";
        if caller.call(request, sql, &[&queue]).await?.is_none() {
            return self.skipped(Fault::PauseQueue, "the server is down");
        }
        tokio::time::sleep(length).await;
        self.resume(&queue).await
    }

    /// Retries until the queue is resumed: a queue that stays paused would be an error of this program.
    pub(super) async fn resume(&self, queue: &str) -> Result<()> {
        let mut caller = Caller::new(&self.server.url, &self.ledger);
        let sql = "SELECT rouse.resume_queue($1)::int::bigint";
        let mut refusals = 0;
        loop {
            let request = Request::Resume {
                queue: queue.to_owned(),
            };
            let response = caller.call(request, sql, &[&queue]).await?;
            if is_resumed(queue, response, &mut refusals)? {
                return Ok(());
            }
            tokio::time::sleep(RESUME_AGAIN_AFTER).await;
        }
    }
}

/// True if the queue is resumed according to this response. Counts refusals, and fails after too many of them.
fn is_resumed(queue: &str, response: Option<Response>, refusals: &mut u32) -> Result<bool> {
    match response {
        Some(Response::Ok(_)) => Ok(true),
        Some(Response::Refused(why)) => {
            *refusals += 1;
            ensure!(*refusals < REFUSALS_MAX, "resume queue {queue}: {why}");
            Ok(false)
        }
        // The server is down for a moment.
        Some(Response::Unknown(_)) | None => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_that_is_refused_again_and_again_ends_the_run() {
        let mut refusals = 0;
        let mut after = |response| is_resumed("q", response, &mut refusals);
        let refused = || Some(Response::Refused("no".into()));
        for _ in 1..REFUSALS_MAX {
            assert!(!after(refused()).unwrap());
            assert!(!after(None).unwrap());
        }
        assert!(after(Some(Response::Ok(1))).unwrap());
        assert_eq!(
            after(refused()).unwrap_err().to_string(),
            "resume queue q: no"
        );
    }
}
