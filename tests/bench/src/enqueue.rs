//! How many enqueues a second the database takes, beside plain INSERTs of the same row.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use rouse_workbench::database;
use rouse_workbench::percentiles::median;

use super::Bench;
use super::backlog::PAYLOAD;
use super::host::{Host, HostOptions};
use super::plain::Plain;
use super::producers::{Producers, What};
use super::report::{Report, Unit};
use super::server::Server;
use super::wal::Place;

/// A busy host has so many jobs before it at least …
const BACKLOG_MIN: i64 = 20_000;
/// … and they are filled up in steps of so many.
const BACKLOG_STEP: i64 = 5_000;

#[derive(Args)]
pub(super) struct Options {
    /// How long each measurement takes
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub(super) seconds: u32,
    /// How often plain INSERTs and enqueues take turns; the median ratio is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(super) pairs: u16,
    /// Numbers of connections
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32])]
    pub(super) connections: Vec<usize>,
    /// What the workers do meanwhile
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Workers::Absent, Workers::Asleep, Workers::Busy])]
    pub(super) workers: Vec<Workers>,
}

/// What the workers do while jobs are enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Workers {
    /// There is none
    Absent,
    /// One that serves other handlers is asleep: every commit finds a sleeper, and notifies
    Asleep,
    /// One drains a backlog, during the plain INSERTs too
    Busy,
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut report = Report::new("enqueue");
        report.settings = server.settings();
        let plain = Plain::make(&server.client).await?;
        let most = options.connections.iter().max().context("no connections")?;
        let clients = Producers::connect(server, &plain, *most).await?;
        for workers in &options.workers {
            let mut measure = Measure {
                bench,
                server,
                options,
                clients: &clients,
                workers: *workers,
                report: &mut report,
            };
            measure.with_workers().await?;
        }
        Ok(report)
    })
    .await
}

/// Plain INSERTs and enqueues in turns, with workers in one state.
struct Measure<'a> {
    bench: &'a Bench,
    server: &'a Server,
    options: &'a Options,
    clients: &'a Producers,
    workers: Workers,
    report: &'a mut Report,
}

impl Measure<'_> {
    async fn with_workers(&mut self) -> Result<()> {
        let (bench, server) = (self.bench, self.server);
        self.empty().await?;
        match self.workers {
            Workers::Absent => {
                self.singles().await?;
                self.many().await
            }
            Workers::Asleep => {
                let handlers = server.handlers(&bench.guests, &["text_stats"])?;
                let mut host = Host::start(bench, server, &HostOptions::new(&handlers)).await?;
                host.asleep(server).await?;
                host.during(Box::pin(self.singles())).await?;
                // It has slept all the time, or else the producers had nobody to notify.
                host.asleep(server).await?;
                host.stop().await
            }
            Workers::Busy => {
                let handlers = server.handlers(&bench.guests, &["noop"])?;
                let mut host = Host::start(bench, server, &HostOptions::new(&handlers)).await?;
                let started = Instant::now();
                host.during(Box::pin(async {
                    tokio::select! {
                        done = self.singles() => done,
                        fed = feed(server) => fed,
                    }
                }))
                .await?;
                let finished: i64 = server
                    .client
                    .query_one("SELECT count(*) FROM rouse.finished", &[])
                    .await?
                    .get(0);
                let drained = finished as f64 / started.elapsed().as_secs_f64();
                let what = "jobs that the busy worker has drained meanwhile";
                self.report
                    .add("enqueue.busy.drained", what, drained, Unit::PerSecond);
                host.stop().await
            }
        }
    }

    async fn singles(&mut self) -> Result<()> {
        let name = match self.workers {
            Workers::Absent => "absent",
            Workers::Asleep => "asleep",
            Workers::Busy => "busy",
        };
        for connections in self.options.connections.clone() {
            let title = format!("enqueueing over {connections} connection(s), workers {name}");
            self.bench.progress.count(&title, self.options.pairs.into());
            let seconds = self.options.seconds;
            let mut pairs = Vec::new();
            let mut wal = [0.0; 2];
            for pair in 0..self.options.pairs {
                self.empty().await?;
                let from = Place::now(&self.server.observer).await?;
                let plain = self
                    .clients
                    .commits(What::Plain, connections, seconds)
                    .await?;
                let middle = Place::now(&self.server.observer).await?;
                let rouse = self
                    .clients
                    .commits(What::Rouse, connections, seconds)
                    .await?;
                let to = Place::now(&self.server.observer).await?;
                wal = [
                    middle.bytes_since(from) as f64 / plain.rows,
                    to.bytes_since(middle) as f64 / rouse.rows,
                ];
                pairs.push((plain.per_s, rouse.per_s));
                self.bench.progress.at(u64::from(pair) + 1);
            }
            let key = format!("enqueue.{name}.{connections}");
            self.pairs(
                &key,
                &format!("{connections} connection(s), workers {name}"),
                &pairs,
            )?;
            if self.workers == Workers::Absent && connections == 1 {
                self.wal("enqueue", wal);
            }
        }
        Ok(())
    }

    async fn many(&mut self) -> Result<()> {
        self.bench
            .progress
            .count("enqueueing a thousand at a time", self.options.pairs.into());
        let mut pairs = Vec::new();
        let mut wal = [0.0; 2];
        for pair in 0..self.options.pairs {
            self.empty().await?;
            let from = Place::now(&self.server.observer).await?;
            let plain = self.clients.many(What::Plain, self.options.seconds).await?;
            let middle = Place::now(&self.server.observer).await?;
            let rouse = self.clients.many(What::Rouse, self.options.seconds).await?;
            let to = Place::now(&self.server.observer).await?;
            wal = [
                middle.bytes_since(from) as f64 / plain.rows,
                to.bytes_since(middle) as f64 / rouse.rows,
            ];
            pairs.push((plain.per_s, rouse.per_s));
            self.bench.progress.at(u64::from(pair) + 1);
        }
        self.pairs("enqueue.many", "enqueue_many, 1,000 a call, jobs", &pairs)?;
        self.wal("enqueue.many", wal);
        self.empty().await
    }

    fn pairs(&mut self, key: &str, what: &str, pairs: &[(f64, f64)]) -> Result<()> {
        let plain = median(pairs.iter().map(|(plain, _)| *plain).collect())?;
        let rouse = median(pairs.iter().map(|(_, rouse)| *rouse).collect())?;
        let ratio = median(pairs.iter().map(|(plain, rouse)| rouse / plain).collect())?;
        let report = &mut *self.report;
        report.add(format!("{key}.per_s"), what, rouse, Unit::PerSecond);
        report.add(
            format!("{key}.plain_per_s"),
            "probe: plain INSERT",
            plain,
            Unit::PerSecond,
        );
        report.add(
            format!("{key}.ratio"),
            "ratio to the plain INSERT",
            ratio,
            Unit::Ratio,
        );
        Ok(())
    }

    fn wal(&mut self, key: &str, [plain, rouse]: [f64; 2]) {
        let report = &mut *self.report;
        report.add(format!("{key}.wal"), "WAL for a job", rouse, Unit::Bytes);
        report.add(
            format!("{key}.plain_wal"),
            "probe: WAL for a plain row",
            plain,
            Unit::Bytes,
        );
    }

    /// Both tables start empty, but for jobs that a worker has in hand.
    async fn empty(&self) -> Result<()> {
        let tables = match self.workers {
            Workers::Absent | Workers::Asleep => "rouse.job, public.plain_job",
            Workers::Busy => "public.plain_job",
        };
        self.server
            .client
            .batch_execute(&format!("TRUNCATE {tables}"))
            .await
            .context("empty the tables")
    }
}

/// Keeps a worker busy for as long as it is polled.
async fn feed(server: &Server) -> Result<()> {
    let client = database::connect(&server.url).await?;
    let missing = client
        .prepare(
            "SELECT (SELECT last_value FROM rouse.turn_seq) - (SELECT coalesce(max(id), 0) FROM rouse.finished)",
        )
        .await?;
    let step = client
        .prepare(&format!(
            "SELECT count(*) FROM rouse.enqueue_many('noop', ARRAY(
                 SELECT {PAYLOAD} FROM generate_series(1, {BACKLOG_STEP}) AS n))"
        ))
        .await?;
    loop {
        let ahead: i64 = client.query_one(&missing, &[]).await?.get(0);
        if ahead < BACKLOG_MIN {
            client
                .query_one(&step, &[])
                .await
                .context("feed the worker")?;
        } else {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
