//! Enqueues jobs, and waits until the last of them has finished.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use tokio_postgres::Client;

use super::progress::Progress;

/// SQL over `n`, the number of the job: about 100 bytes of JSON, like a typical payload.
pub(super) const PAYLOAD: &str = "jsonb_build_object('n', n, 'pad', repeat('x', 80))";
const ENQUEUE_BATCH: i64 = 1_000;
/// The maximum number of jobs in a flow.
const FLOW_BATCH: i64 = 10_000;

/// The benchmark fails if no job finishes for this long.
const STALLED_AFTER: Duration = Duration::from_secs(60);
/// The figures come from the database's clock, so that rare polls cost no precision.
const POLL_EVERY: Duration = Duration::from_millis(50);

/// The jobs to enqueue.
#[derive(Clone)]
pub(super) struct Work {
    pub(super) jobs: i64,
    pub(super) handler: &'static str,
    /// SQL over `n`.
    pub(super) payload: String,
    pub(super) priority: &'static str,
    /// `None` uses the queue `default`; otherwise, jobs are enqueued round robin in the queues `q0`, `q1` …
    pub(super) queues: Option<i64>,
    /// The queue of all jobs, and the tenant of each, as SQL over `n`. Takes precedence over `queues`.
    pub(super) tenants: Option<(&'static str, String)>,
    /// How the jobs wait for each other; `None`: they do not wait.
    pub(super) graph: Option<Graph>,
    /// The number of jobs that each enqueued job becomes: itself, and those with which it continues its chain.
    pub(super) chain: i64,
}

/// How the jobs of a flow of up to 10,000 wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Graph {
    /// All jobs but the first and the last wait for the first, and the last waits for all of these.
    FanOutIn,
    /// Each job waits for the one before it, except every tenth.
    Chains,
}

impl Graph {
    /// SQL over `n` and the first and last job of the flow, `$1` and `$2`: what job `n` waits for.
    fn after(self) -> &'static str {
        match self {
            Self::FanOutIn => {
                "CASE n WHEN $1 THEN '[]'
                        WHEN $2 THEN (SELECT jsonb_agg('n' || m) FROM generate_series($1 + 1, $2 - 1) AS m)
                        ELSE jsonb_build_array('n' || $1) END"
            }
            Self::Chains => {
                "CASE WHEN (n - $1) % 10 = 0 THEN '[]' ELSE jsonb_build_array('n' || n - 1) END"
            }
        }
    }
}

impl Work {
    /// Jobs for `noop` with 100 bytes each, in one lane.
    pub(super) fn noop(jobs: i64) -> Self {
        Self {
            jobs,
            handler: "noop",
            payload: PAYLOAD.to_owned(),
            priority: "normal",
            queues: None,
            tenants: None,
            graph: None,
            chain: 1,
        }
    }

    /// Jobs for the flow guests: chains of `chain` jobs each, `jobs` in total.
    pub(super) fn hops(jobs: i64, chain: i64) -> Self {
        Self {
            handler: "flow.hop",
            payload: format!("jsonb_build_object('n', {})", chain - 1),
            chain,
            ..Self::noop(jobs)
        }
    }

    /// Enqueues all jobs, in the open transaction if there is one.
    pub(super) async fn enqueue(&self, client: &Client, progress: &Progress) -> Result<Backlog> {
        if let Some(graph) = self.graph {
            return self.enqueue_flows(client, progress, graph).await;
        }
        let ids = match (self.queues, &self.tenants) {
            (_, Some((queue, tenant))) => format!(
                "(SELECT rouse.enqueue('{}', {}, queue => '{queue}', tenant => {tenant}) AS id
                  FROM generate_series($1::bigint, $2::bigint) AS n)",
                self.handler, self.payload
            ),
            (None, None) => format!(
                "rouse.enqueue_many('{}', ARRAY(SELECT {} FROM generate_series($1::bigint, $2::bigint) AS n),
                                    priority => '{}')",
                self.handler, self.payload, self.priority
            ),
            (Some(queues), None) => format!(
                "(SELECT rouse.enqueue('{}', {}, queue => 'q' || n % {queues}, priority => '{}') AS id
                  FROM generate_series($1::bigint, $2::bigint) AS n)",
                self.handler, self.payload, self.priority
            ),
        };
        if let Some(queues) = self.queues {
            // One lane for each queue, in addition to the existing lanes.
            let raise_limit = format!(
                "UPDATE rouse.limits SET lanes_per_handler_max = greatest(lanes_per_handler_max, {})",
                queues + 100
            );
            client
                .batch_execute(&raise_limit)
                .await
                .context("raise the limit of lanes")?;
        }
        let statement = client
            .prepare(&format!(
                "SELECT min(id), max(id) FROM {ids} AS enqueued(id)"
            ))
            .await
            .context("prepare the enqueueing")?;
        let jobs = self.jobs / self.chain;
        progress.count(&format!("enqueueing {jobs} jobs"), jobs.unsigned_abs());
        let mut backlog = Backlog {
            jobs: jobs * self.chain,
            first: i64::MAX,
            last: 0,
            transactions: 1,
        };
        let mut from = 1;
        while from <= jobs {
            let to = jobs.min(from + ENQUEUE_BATCH - 1);
            let row = client
                .query_one(&statement, &[&from, &to])
                .await
                .context("enqueue a batch")?;
            backlog.first = backlog.first.min(row.get(0));
            backlog.last = backlog.last.max(row.get(1));
            progress.at(to.unsigned_abs());
            from = to + 1;
        }
        if self.chain > 1 {
            // Jobs that continue a chain get their ids later.
            backlog.last = i64::MAX;
        }
        Ok(backlog)
    }

    /// Enqueues all jobs in flows.
    async fn enqueue_flows(
        &self,
        client: &Client,
        progress: &Progress,
        graph: Graph,
    ) -> Result<Backlog> {
        let sql = format!(
            "SELECT rouse.enqueue_flow(jsonb_agg(jsonb_build_object(
                 'name', 'n' || n, 'handler', '{}', 'payload', {}, 'after', {})))
             FROM generate_series($1::bigint, $2::bigint) AS n",
            self.handler,
            self.payload,
            graph.after()
        );
        let label = format!("enqueueing {} jobs in flows", self.jobs);
        progress.count(&label, self.jobs.unsigned_abs());
        let mut backlog = Backlog {
            jobs: self.jobs,
            first: i64::MAX,
            last: 0,
            transactions: 1,
        };
        let mut from = 1;
        while from <= self.jobs {
            let to = self.jobs.min(from + FLOW_BATCH - 1);
            let flow = client.query_one(&sql, &[&from, &to]).await;
            let flow: i64 = flow.context("enqueue a flow")?.get(0);
            let range = "SELECT min(job), max(job) FROM rouse.flow($1)";
            let row = client.query_one(range, &[&flow]).await;
            let row = row.context("read a flow")?;
            backlog.first = backlog.first.min(row.get(0));
            backlog.last = backlog.last.max(row.get(1));
            progress.at(to.unsigned_abs());
            from = to + 1;
        }
        Ok(backlog)
    }
}

/// Jobs whose ids are a range that contains no other job.
pub(super) struct Backlog {
    pub(super) jobs: i64,
    pub(super) first: i64,
    pub(super) last: i64,
    /// Transactions of the commit and of the wait, as the server counts them.
    pub(super) transactions: i64,
}

/// Times from the first claim to the last settlement, according to the database's clock.
pub(super) struct Times {
    pub(super) seconds: f64,
    /// The longest time without a settlement.
    pub(super) gap_ms: f64,
}

impl Backlog {
    /// Waits until all jobs have finished.
    pub(super) async fn until_done(&mut self, client: &Client, progress: &Progress) -> Result<()> {
        self.watch(client, progress, &mut |_share| Ok(())).await
    }

    /// Like [`until_done`](Self::until_done), and calls `on_progress` from time to time with the share of finished
    /// jobs.
    pub(super) async fn watch(
        &mut self,
        client: &Client,
        progress: &Progress,
        on_progress: &mut (dyn FnMut(f64) -> Result<()> + Send),
    ) -> Result<()> {
        progress.count("draining", self.jobs.unsigned_abs());
        // The highest finished id costs one index lookup; the jobs are counted only once they may all have finished.
        let reached = client
            .prepare("SELECT coalesce(max(id), 0) FROM rouse.finished WHERE id BETWEEN $1 AND $2")
            .await?;
        let count = client
            .prepare("SELECT count(*) FROM rouse.finished WHERE id BETWEEN $1 AND $2")
            .await?;
        self.transactions += 2;
        let (mut seen, mut changed) = (0, Instant::now());
        loop {
            let polled = Instant::now();
            let (first, last) = (self.first, self.last);
            let id: i64 = client.query_one(&reached, &[&first, &last]).await?.get(0);
            self.transactions += 1;
            let mut now = id;
            if id - first + 1 >= self.jobs {
                let finished: i64 = client.query_one(&count, &[&first, &last]).await?.get(0);
                self.transactions += 1;
                if finished >= self.jobs {
                    return Ok(());
                }
                now += finished;
            }
            if now != seen {
                (seen, changed) = (now, Instant::now());
            }
            if changed.elapsed() > STALLED_AFTER {
                bail!("no job of the backlog has finished for {STALLED_AFTER:?}");
            }
            let done = (id - first + 1).clamp(0, self.jobs);
            on_progress(done as f64 / self.jobs as f64)?;
            progress.at(done.unsigned_abs());
            // Polls take CPU time from the host, so a slow poll is followed by a longer pause.
            tokio::time::sleep(POLL_EVERY.max(polled.elapsed() * 50)).await;
        }
    }

    /// Reads the times. Fails if a job has failed.
    pub(super) async fn times(&self, client: &Client) -> Result<Times> {
        let row = client
            .query_one(
                "SELECT count(*) FILTER (WHERE state::text = 'succeeded'),
                        extract(epoch FROM max(finished_at) - min(claimed_at))::float8,
                        (SELECT extract(epoch FROM max(gap)) * 1000 FROM (
                            SELECT at - lag(at) OVER (ORDER BY at) AS gap FROM (
                                SELECT DISTINCT finished_at AS at FROM rouse.finished
                                WHERE id BETWEEN $1 AND $2) AS moments) AS gaps)::float8,
                        (SELECT error::text FROM rouse.finished
                         WHERE id BETWEEN $1 AND $2 AND error IS NOT NULL LIMIT 1)
                 FROM rouse.finished WHERE id BETWEEN $1 AND $2",
                &[&self.first, &self.last],
            )
            .await
            .context("read the times of the jobs")?;
        let succeeded: i64 = row.get(0);
        ensure!(
            succeeded == self.jobs,
            "{succeeded} of {} jobs succeeded; the error of another one: {}",
            self.jobs,
            row.get::<_, Option<String>>(3).unwrap_or_default()
        );
        Ok(Times {
            seconds: row.get(1),
            gap_ms: row.get::<_, Option<f64>>(2).unwrap_or(0.0),
        })
    }
}
