//! Throughput of an aged queue: many pending jobs, many finished jobs, an open transaction.

mod finished;
mod held;
mod old;
mod partitions;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use rouse_workbench::percentiles::median;

use super::Bench;
use super::backlog::Work;
use super::drained::{self, Drained};
use super::host::HostOptions;
use super::report::{Report, Unit};
use super::server::Server;

/// Jobs per call of `rouse.enqueue_many`.
const FILL_BATCH: i64 = 10_000;

#[derive(Args)]
pub(super) struct Options {
    /// Jobs per drain
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(i64).range(100..=10_000_000))]
    pub(super) jobs: i64,
    /// Drains per state; the median is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(super) runs: u16,
    /// Pending jobs in other lanes
    #[arg(long, default_value_t = 5_000_000, value_parser = clap::value_parser!(i64).range(1_000..=100_000_000))]
    pub(super) pending: i64,
    /// Finished jobs
    #[arg(long, default_value_t = 5_000_000, value_parser = clap::value_parser!(i64).range(1_000..=100_000_000))]
    pub(super) finished: i64,
    /// Jobs drained during an open transaction
    #[arg(long, default_value_t = 400_000, value_parser = clap::value_parser!(i64).range(1_000..=100_000_000))]
    pub(super) held: i64,
    /// Size of the window of first jobs, and of that of last jobs
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(i64).range(100..))]
    pub(super) window: i64,
    /// How long the transaction of `old` stays open, in minutes; one drain per minute
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=1440))]
    pub(super) minutes: u64,
    /// Measure only these states
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = State::SHORT)]
    pub(super) only: Vec<State>,
}

/// The state of the database during the drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum State {
    /// Jobs are pending for a handler that the host does not have
    PendingUnknown,
    /// Jobs are pending for the same handler, in a queue that the host does not serve
    PendingUnserved,
    /// Jobs are pending for the same handler, in a lane of low priority that the host serves too
    PendingLow,
    /// Many jobs have finished, yesterday and today
    Finished,
    /// A transaction that has read the tables is open
    Held,
    /// Partitions are created and dropped during the drain
    Partitions,
    /// All at once: jobs are pending in a queue that the host does not serve, many jobs have finished, and a
    /// transaction is open for `--minutes`
    Old,
}

impl State {
    /// All states except `old`, which takes as long as `--minutes` says.
    const SHORT: [Self; 6] = [
        Self::PendingUnknown,
        Self::PendingUnserved,
        Self::PendingLow,
        Self::Finished,
        Self::Held,
        Self::Partitions,
    ];
}

struct Decay<'a> {
    bench: &'a Bench,
    server: &'a Server,
    options: &'a Options,
    host: HostOptions,
    report: Report,
    /// Jobs per second of the last fresh drains.
    fresh: Vec<f64>,
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut decay = Decay {
            bench,
            server,
            options,
            host: HostOptions::new(&server.handlers(&bench.guests, &["noop"])?),
            report: Report::new("decay"),
            fresh: Vec::new(),
        };
        decay.host.queues = vec!["default".to_owned()];
        decay.report.settings = server.settings();
        let fresh = decay.drains().await?;
        decay.fresh = rates(&fresh);
        let jobs_per_s = median(decay.fresh.clone())?;
        let gap = median(fresh.iter().map(|drained| drained.gap_ms).collect())?;
        decay.figure(
            "fresh.per_s",
            "probe: jobs, fresh",
            jobs_per_s,
            Unit::PerSecond,
        );
        let label = "probe: longest time without a settlement, fresh";
        decay.figure("fresh.gap", label, gap, Unit::Milliseconds);
        for state in &options.only {
            if let Err(error) = decay.in_state(*state).await {
                let name = format!("{state:?}");
                decay
                    .report
                    .failures
                    .push(format!("decay, {name}: {error:#}"));
                decay.clear().await?;
            }
        }
        Ok(decay.report)
    })
    .await
}

impl Decay<'_> {
    async fn in_state(&mut self, state: State) -> Result<()> {
        let pending = self.options.pending;
        match state {
            State::PendingUnknown => {
                let label = format!("{pending} pending for an unknown handler");
                self.fill("nobody.has-this", "default", "normal").await?;
                self.compare_with_fresh("pending_unknown", &label).await
            }
            State::PendingUnserved => {
                let label = format!("{pending} pending in an unserved queue");
                self.fill("noop", "elsewhere", "normal").await?;
                self.compare_with_fresh("pending_unserved", &label).await
            }
            State::PendingLow => {
                let label = format!("{pending} pending with low priority, served");
                self.fill("noop", "default", "low").await?;
                self.compare_with_fresh("pending_low", &label).await
            }
            State::Finished => {
                let label = format!("{} finished, yesterday and today", self.options.finished);
                finished::fill(self.bench, self.server, self.options.finished).await?;
                self.server.checkpoint().await?;
                self.compare_with_fresh("finished", &label).await
            }
            State::Held => held::measure(self).await,
            State::Partitions => partitions::measure(self).await,
            State::Old => old::measure(self).await,
        }
    }

    /// Drains in the current state, then clears the database and drains again: the fresh drains before and
    /// after are the reference.
    async fn compare_with_fresh(&mut self, key: &str, label: &str) -> Result<()> {
        let rate = rates(&self.drains().await?);
        self.clear().await?;
        let after = rates(&self.drains().await?);
        let mut fresh = std::mem::replace(&mut self.fresh, after.clone());
        fresh.extend(after);
        let (rate, fresh) = (median(rate)?, median(fresh)?);
        self.figure(&format!("{key}.per_s"), label, rate, Unit::PerSecond);
        let ratio = rate / fresh;
        self.figure(
            &format!("{key}.ratio"),
            "ratio to fresh",
            ratio,
            Unit::Ratio,
        );
        Ok(())
    }

    async fn drains(&self) -> Result<Vec<Drained>> {
        let mut drains = Vec::new();
        for _ in 0..self.options.runs {
            drains.push(self.drain(self.options.jobs).await?);
        }
        Ok(drains)
    }

    async fn drain(&self, jobs: i64) -> Result<Drained> {
        drained::drain(self.bench, self.server, &self.host, 1, &Work::noop(jobs)).await
    }

    /// Enqueues pending jobs that are not measured.
    async fn fill(&self, handler: &str, queue: &str, priority: &str) -> Result<()> {
        let (client, count) = (&self.server.client, self.options.pending);
        let statement = client
            .prepare(&format!(
                "SELECT count(*) FROM rouse.enqueue_many('{handler}', ARRAY(
                     SELECT {} FROM generate_series($1::bigint, $2::bigint) AS n),
                     queue => '{queue}', priority => '{priority}')",
                super::backlog::PAYLOAD
            ))
            .await?;
        let title = format!("enqueueing {count} jobs for {handler} into {queue} ({priority})");
        self.bench.progress.count(&title, count.unsigned_abs());
        let mut from = 1;
        while from <= count {
            let to = count.min(from + FILL_BATCH - 1);
            client
                .query_one(&statement, &[&from, &to])
                .await
                .context("enqueue a batch")?;
            self.bench.progress.at(to.unsigned_abs());
            from = to + 1;
        }
        client.batch_execute("VACUUM ANALYZE rouse.job").await?;
        self.server.checkpoint().await
    }

    /// Restores the initial state: no pending and no finished jobs.
    async fn clear(&self) -> Result<()> {
        self.server
            .client
            .batch_execute(
                "SELECT rouse.unlock_history('bench'); TRUNCATE rouse.job, rouse.finished",
            )
            .await
            .context("remove all jobs")?;
        self.server.checkpoint().await
    }

    fn figure(&mut self, name: &str, label: &str, value: f64, unit: Unit) {
        self.report.add(format!("decay.{name}"), label, value, unit);
    }
}

fn rates(drains: &[Drained]) -> Vec<f64> {
    drains.iter().map(Drained::jobs_per_s).collect()
}
