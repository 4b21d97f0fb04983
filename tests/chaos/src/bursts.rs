//! Faults that enqueue their own jobs.

use std::time::Duration;

use anyhow::{Result, bail};
use rouse_workbench::database;
use tokio::time::Instant;
use tokio_postgres::Client;
use tokio_postgres::types::Json;

use super::calls::Caller;
use super::faults::Faults;
use super::ledger::{Event, Request, Response, now_us};
use super::load::{FAULT_JOBS_START, JobSpec, Kind, LINE, PATIENT, QUEUES, WORK};
use super::plan::Fault;
use super::random::Random;
use super::settings::{LEASE, LINE_SLOTS};

const ENQUEUE: &str = "SELECT id FROM rouse.enqueue_many($1, $2, queue => $3, tags => $4) WITH ORDINALITY AS made(id, n) ORDER BY n";
const CANCEL: &str = "SELECT rouse.cancel(id)::int::bigint FROM unnest($1::bigint[]) WITH ORDINALITY AS requested(id, n) ORDER BY n";
/// How long a burst is retried while the server is down.
const ENQUEUE_TIMEOUT: Duration = Duration::from_secs(10);
const RETRY_AFTER: Duration = Duration::from_millis(500);
const POLL_EVERY: Duration = Duration::from_millis(20);

/// Many times the number of slots.
const LINE_JOBS: usize = 150;
/// All slots become free together, so the host claims ahead, and then no slot becomes free for this long. A claim waits
/// in line for at most 1 s.
const LINE_SLEEPS_MS: u64 = 800;
/// By then, without other faults, all jobs of the burst have been cancelled or have ended.
const LINE_LASTS: Duration = Duration::from_secs(6);

/// Several per host.
const PATIENT_JOBS: usize = 12;
/// They end before the first renewal of their lease, 8 s after the claim.
const PATIENT_SLEEPS_MS: u64 = 7_000;
const START_TIMEOUT: Duration = Duration::from_secs(3);

/// 4 MiB in all: far more than the buffers of a connection hold.
const LARGE_JOBS: usize = 64;
const LARGE_BYTES: usize = 64 << 10;
/// A claim of these jobs takes a few milliseconds.
const CLAIM_TIMEOUT: Duration = Duration::from_millis(500);
/// By then, the other hosts have claimed the remaining jobs.
const CANCEL_AFTER: Duration = Duration::from_secs(1);
/// Longer than a call may take, so that a hanging call is noticed, and shorter than the freeze.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(3);

/// The job runs until its host is killed.
const CRASHED_SLEEPS_MS: u64 = 120_000;
const CRASH_POLL_EVERY: Duration = Duration::from_millis(250);
/// Long enough for three leases, the wait of 10 s after the second crash, outages, and hosts that other faults use.
const CRASH_TIMEOUT: Duration = Duration::from_secs(150);

impl Faults {
    /// `count` jobs that differ only in their number.
    fn specs(&self, count: usize, like: &JobSpec) -> Vec<JobSpec> {
        let first = self
            .fault_jobs
            .fetch_add(count as i64, std::sync::atomic::Ordering::Relaxed);
        (0..count as i64)
            .map(|offset| JobSpec {
                n: FAULT_JOBS_START + first + offset,
                kind: Kind::FromFault,
                priority: "normal".into(),
                ..like.clone()
            })
            .collect()
    }

    /// Enqueues `count` jobs in one statement. `None` if the server stays down.
    async fn enqueue_burst(
        &self,
        caller: &mut Caller<'_>,
        count: usize,
        like: &JobSpec,
    ) -> Result<Option<Vec<i64>>> {
        let started = Instant::now();
        while started.elapsed() < ENQUEUE_TIMEOUT {
            let specs = self.specs(count, like);
            let payloads: Vec<_> = specs.iter().map(|spec| Json(spec.payload())).collect();
            let requests = specs.into_iter().map(|spec| Request::Enqueue {
                spec,
                run_at_us: None,
            });
            let responses = caller
                .call_together(
                    requests.collect(),
                    ENQUEUE,
                    &[&like.handler, &payloads, &like.queue, &like.tags],
                )
                .await?;
            let ids = responses
                .into_iter()
                .flatten()
                .map(|response| match response {
                    Response::Ok(id) => Ok(Some(id)),
                    Response::Unknown(_) => Ok(None),
                    Response::Refused(why) => bail!("a burst was refused: {why}"),
                });
            let ids: Vec<i64> = ids.filter_map(Result::transpose).collect::<Result<_>>()?;
            if ids.len() == count {
                return Ok(Some(ids));
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
        Ok(None)
    }

    /// Enqueues a burst for hosts with few slots, and cancels the claims beyond these slots for [`LINE_LASTS`].
    pub(super) async fn cancel_line(&self) -> Result<()> {
        let from_us = now_us();
        let mut caller = Caller::new(&self.server.url, &self.ledger);
        let like = JobSpec {
            handler: WORK.into(),
            queue: LINE.into(),
            tags: vec![LINE.into()],
            sleep_ms: LINE_SLEEPS_MS,
            ..JobSpec::default()
        };
        let Some(jobs) = self.enqueue_burst(&mut caller, LINE_JOBS, &like).await? else {
            return self.skipped(Fault::CancelLine, "the server is down");
        };
        // The newest claims of each host that has more claims than slots.
        let in_line = "SELECT id FROM (
                SELECT j.id, row_number() OVER (PARTITION BY j.worker ORDER BY j.claimed_at, j.turn) AS n
                FROM rouse.job AS j WHERE j.id = ANY ($1) AND j.state = 'running') AS held
            WHERE n > $2";
        let mut count = 0;
        let until = Instant::now() + LINE_LASTS;
        let slots = LINE_SLOTS as i64;
        while Instant::now() < until {
            let found = self.ids(in_line, &[&jobs, &slots]).await;
            if let Ok(waiting) = found
                && !waiting.is_empty()
            {
                let requests = waiting
                    .iter()
                    .map(|job| Request::Cancel { job: *job })
                    .collect();
                let responses = caller.call_together(requests, CANCEL, &[&waiting]).await?;
                let done = responses.into_iter().flatten();
                count += done.filter(|response| *response == Response::Ok(1)).count() as u64;
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
        self.ledger
            .happened(from_us, Event::LineCancelled { count })
    }

    /// Cuts all listening connections, and cancels running jobs before and after hosts listen again.
    pub(super) async fn cut_listeners(&self, mut random: Random) -> Result<()> {
        let mut caller = Caller::new(&self.server.url, &self.ledger);
        let like = JobSpec {
            handler: PATIENT.into(),
            queue: (*random.pick(&QUEUES)).into(),
            sleep_ms: PATIENT_SLEEPS_MS,
            ticks: true,
            ..JobSpec::default()
        };
        let Some(jobs) = self.enqueue_burst(&mut caller, PATIENT_JOBS, &like).await? else {
            return self.skipped(Fault::CutListeners, "the server is down");
        };
        let started = Instant::now();
        let queued = "SELECT id FROM rouse.job WHERE id = ANY ($1) AND state = 'queued'";
        while started.elapsed() < START_TIMEOUT
            && self
                .ids(queued, &[&jobs])
                .await
                .is_ok_and(|queued| !queued.is_empty())
        {
            tokio::time::sleep(POLL_EVERY).await;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        let from_us = now_us();
        let cut = "SELECT pid::bigint FROM pg_stat_activity
            WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND query LIKE 'LISTEN %' AND pg_terminate_backend(pid)";
        match self.ids(cut, &[]).await {
            Ok(ended) => {
                let count = ended.len() as u64;
                self.ledger
                    .happened(from_us, Event::ListenersCut { count })?;
            }
            Err(error) => return self.skipped(Fault::CutListeners, &format!("{error:#}")),
        }
        for job in jobs {
            caller
                .call(Request::Cancel { job }, CANCEL, &[&vec![job]])
                .await?;
            tokio::time::sleep(Duration::from_millis(random.below(220))).await;
        }
        Ok(())
    }

    /// Enqueues a long job, and kills each host that runs it until it has failed as lost.
    pub(super) async fn crash_job(&self, mut random: Random) -> Result<()> {
        let from_us = now_us();
        let mut caller = Caller::new(&self.server.url, &self.ledger);
        let like = JobSpec {
            handler: WORK.into(),
            queue: (*random.pick(&QUEUES)).into(),
            sleep_ms: CRASHED_SLEEPS_MS,
            ..JobSpec::default()
        };
        let until = Instant::now() + CRASH_TIMEOUT;
        // A run has this fault only once or twice, so it waits until an outage has ended.
        let job = loop {
            match self.enqueue_burst(&mut caller, 1, &like).await?.as_deref() {
                Some([job]) => break *job,
                _ if Instant::now() < until => {}
                _ => return self.skipped(Fault::CrashJob, "the server is down"),
            }
        };
        // A claim that was committed a second ago has started.
        let runs_on = "SELECT w.worker_id FROM rouse.job AS j JOIN rouse.worker AS w ON w.incarnation = j.worker
            WHERE j.id = $1 AND j.state = 'running' AND j.claimed_at < clock_timestamp() - interval '1 s' AND j.lease_until > clock_timestamp()";
        let has_ended =
            "SELECT (error ->> 'kind' = 'lost')::int::bigint FROM rouse.finished WHERE id = $1";
        let mut kills = 0;
        while Instant::now() < until {
            tokio::time::sleep(CRASH_POLL_EVERY).await;
            let Ok(client) = database::connect(&self.server.url).await else {
                continue;
            };
            match client.query_opt(has_ended, &[&job]).await {
                Ok(Some(row)) if row.get::<_, Option<i64>>(0) == Some(1) => {
                    let event = Event::JobCrashed { job, kills };
                    return self.ledger.happened(from_us, event);
                }
                Ok(Some(_)) => break,
                Ok(None) | Err(_) => {}
            }
            if let Ok(Some(row)) = client.query_opt(runs_on, &[&job]).await {
                kills += u64::from(self.hosts.kill_now(row.get(0)).await?);
            }
        }
        self.skipped(Fault::CrashJob, "the job has not failed as lost in time")
    }

    /// Enqueues 4 MiB of jobs, and freezes the host that claims them.
    pub(super) async fn freeze_in_claim(&self, mut random: Random) -> Result<()> {
        let length = LEASE + Duration::from_millis(random.between(4_500, 6_500));
        let skipped = |why: &str| self.skipped(Fault::FreezeInClaim, why);
        if !self.hosts.wait_until_settled().await {
            return skipped("too few hosts");
        }
        let Ok(client) = database::connect(&self.server.url).await else {
            return skipped("the server is down");
        };
        let mut caller = Caller::new(&self.server.url, &self.ledger);
        let like = JobSpec {
            handler: WORK.into(),
            queue: (*random.pick(&QUEUES)).into(),
            pad_bytes: LARGE_BYTES,
            ..JobSpec::default()
        };
        let Some(jobs) = self.enqueue_burst(&mut caller, LARGE_JOBS, &like).await? else {
            return skipped("the server is down");
        };
        let worker = claiming_host(&client, &jobs).await;
        // If another fault uses that host, or it was too fast, another host is frozen instead.
        let draw = random.next();
        let frozen = match self.hosts.freeze_now(worker.as_deref(), draw)? {
            Some(frozen) => Some(frozen),
            None => self.hosts.freeze_now(None, draw)?,
        };
        let Some(frozen) = frozen else {
            return skipped("too few hosts");
        };
        let thaws = Instant::now() + length;
        tokio::time::sleep(CANCEL_AFTER).await;
        // Jobs that the frozen host holds, and jobs claimed by a transaction that is still open.
        let held = "SELECT j.id FROM rouse.job AS j LEFT JOIN rouse.worker AS w ON w.incarnation = j.worker
            WHERE j.id = ANY ($1) AND (j.state = 'queued' OR w.worker_id = $2) ORDER BY j.id LIMIT 2";
        let mut cancelled = Ok(());
        for job in self
            .ids(held, &[&jobs, &frozen.worker()])
            .await
            .unwrap_or_default()
        {
            caller.options.timeout = CANCEL_TIMEOUT;
            let response = caller
                .call(Request::Cancel { job }, CANCEL, &[&vec![job]])
                .await;
            cancelled = cancelled.and(response.map(drop));
        }
        tokio::time::sleep_until(thaws).await;
        frozen.thaw(&self.hosts, jobs)?;
        cancelled
    }

    /// The first column of all rows.
    async fn ids(
        &self,
        sql: &str,
        params: &[&(dyn tokio_postgres::types::ToSql + Sync)],
    ) -> Result<Vec<i64>> {
        let client = database::connect(&self.server.url).await?;
        let rows = client.query(sql, params).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}

/// The host that has claimed any of these jobs, or is claiming at this moment.
async fn claiming_host(client: &Client, jobs: &[i64]) -> Option<String> {
    let sql =
        "SELECT w.worker_id FROM rouse.job AS j JOIN rouse.worker AS w ON w.incarnation = j.worker
        WHERE j.id = ANY ($1) AND j.state = 'running'
        UNION ALL
        SELECT a.application_name FROM pg_stat_activity AS a
        WHERE a.state = 'active' AND a.query LIKE '%FROM rouse.claim%'
          AND a.query_start < clock_timestamp() - interval '5 ms'
        LIMIT 1";
    let started = Instant::now();
    while started.elapsed() < CLAIM_TIMEOUT {
        // On an error the server is down, and no host claims.
        let row = client.query_opt(sql, &[&jobs]).await.ok()?;
        if let Some(row) = row {
            return Some(row.get(0));
        }
    }
    None
}
