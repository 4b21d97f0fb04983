//! Enqueues per second, compared with plain INSERTs of the same row.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Args;
use rouse_workbench::database;
use rouse_workbench::percentiles::median;

use super::Bench;
use super::backlog::PAYLOAD;
use super::contract;
use super::host::{Host, HostOptions};
use super::plain::Plain;
use super::producers::{Kind, Producers};
use super::report::{Report, Unit};
use super::server::Server;
use super::wal::Position;

/// A busy host always has at least this many jobs queued …
const BACKLOG_MIN: i64 = 20_000;
/// … and they are replenished in steps of this size.
const BACKLOG_STEP: i64 = 5_000;

#[derive(Args)]
pub(super) struct Options {
    /// Length of each measurement, in seconds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub(super) seconds: u32,
    /// Number of pairs of plain INSERTs and enqueues; the median ratio is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(super) pairs: u16,
    /// Numbers of connections
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32])]
    pub(super) connections: Vec<usize>,
    /// States of the workers
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Workers::Absent, Workers::Asleep, Workers::Busy])]
    pub(super) workers: Vec<Workers>,
}

/// The state of the workers during the enqueues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Workers {
    /// No worker
    Absent,
    /// A worker of other handlers is asleep, so every commit sends a notification
    Asleep,
    /// A worker drains a backlog, also during the plain INSERTs
    Busy,
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut report = Report::new("enqueue");
        report.settings = server.settings();
        let plain = Plain::create(&server.client).await?;
        let max = options.connections.iter().max().context("no connections")?;
        let clients = Producers::connect(server, &plain, *max).await?;
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

/// Alternates plain INSERTs and enqueues, with workers in one state.
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
                self.many().await?;
                self.contracts().await
            }
            Workers::Asleep => {
                let handlers = server.handlers(&bench.guests, &["text_stats"])?;
                let mut host = Host::start(bench, server, &HostOptions::new(&handlers)).await?;
                host.asleep(server).await?;
                host.during(Box::pin(self.singles())).await?;
                // The host must still be asleep; otherwise the producers had no sleeper to notify.
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
                let label = "jobs drained by the busy worker in that time";
                self.report
                    .add("enqueue.busy.drained", label, drained, Unit::PerSecond);
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
                let from = Position::now(&self.server.observer).await?;
                let plain = self
                    .clients
                    .commits(Kind::Plain, connections, seconds)
                    .await?;
                let middle = Position::now(&self.server.observer).await?;
                let rouse = self
                    .clients
                    .commits(Kind::Rouse, connections, seconds)
                    .await?;
                let to = Position::now(&self.server.observer).await?;
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
            let from = Position::now(&self.server.observer).await?;
            let plain = self.clients.many(Kind::Plain, self.options.seconds).await?;
            let middle = Position::now(&self.server.observer).await?;
            let rouse = self.clients.many(Kind::Rouse, self.options.seconds).await?;
            let to = Position::now(&self.server.observer).await?;
            wal = [
                middle.bytes_since(from) as f64 / plain.rows,
                to.bytes_since(middle) as f64 / rouse.rows,
            ];
            pairs.push((plain.per_s, rouse.per_s));
            self.bench.progress.at(u64::from(pair) + 1);
        }
        self.pairs(
            "enqueue.many",
            "jobs, enqueue_many with 1,000 per call",
            &pairs,
        )?;
        self.wal("enqueue.many", wal);
        self.empty().await
    }

    /// Enqueues with a contract, compared with those without.
    async fn contracts(&mut self) -> Result<()> {
        let (server, clients, seconds) = (self.server, self.clients, self.options.seconds);
        let title = "enqueueing with a contract";
        self.bench.progress.count(title, self.options.pairs.into());
        let (mut singles, mut many) = (Vec::new(), Vec::new());
        for pair in 0..self.options.pairs {
            let mut rates = [(0.0, 0.0); 2];
            for (place, sql) in [contract::DROP, contract::PUBLISH].into_iter().enumerate() {
                self.empty().await?;
                let publishing = server.client.batch_execute(sql).await;
                publishing.context("change the contract")?;
                let single = clients.commits(Kind::Rouse, 1, seconds).await?;
                rates[place] = (
                    single.per_s,
                    clients.many(Kind::Rouse, seconds).await?.per_s,
                );
            }
            let [without, with] = rates;
            singles.push(with.0 / without.0);
            many.push(with.1 / without.1);
            self.bench.progress.at(u64::from(pair) + 1);
        }
        let report = &mut *self.report;
        for (key, label, ratios) in [
            (
                "enqueue.contract.ratio",
                "1 connection: ratio to enqueues without a contract",
                singles,
            ),
            (
                "enqueue.contract.many.ratio",
                "enqueue_many: ratio to enqueues without a contract",
                many,
            ),
        ] {
            report.add(key, label, median(ratios)?, Unit::Ratio);
        }
        let mut took_us = [0.0; 2];
        for (place, sql) in contract::READS.into_iter().enumerate() {
            let started = Instant::now();
            server.client.query_one(sql, &[]).await?;
            took_us[place] = started.elapsed().as_secs_f64() * 1e6;
        }
        let check_us = (took_us[1] - took_us[0]) / f64::from(contract::CHECKED);
        let label = "time of the check of one payload";
        report.add(
            "enqueue.contract.check",
            label,
            check_us,
            Unit::Microseconds,
        );
        self.server.client.batch_execute(contract::DROP).await?;
        self.empty().await
    }

    fn pairs(&mut self, key: &str, label: &str, pairs: &[(f64, f64)]) -> Result<()> {
        let plain = median(pairs.iter().map(|(plain, _)| *plain).collect())?;
        let rouse = median(pairs.iter().map(|(_, rouse)| *rouse).collect())?;
        let ratio = median(pairs.iter().map(|(plain, rouse)| rouse / plain).collect())?;
        let report = &mut *self.report;
        report.add(format!("{key}.per_s"), label, rouse, Unit::PerSecond);
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
        report.add(format!("{key}.wal"), "WAL per job", rouse, Unit::Bytes);
        report.add(
            format!("{key}.plain_wal"),
            "probe: WAL per plain row",
            plain,
            Unit::Bytes,
        );
    }

    /// Empties the tables, except for the backlog of a busy worker.
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

/// Keeps a worker busy as long as this future is polled.
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
