//! Figures with more hosts, fair shares, gates, direct dispatch, more lanes, larger payloads, long jobs, late commits
//! and modes of queues.

mod direct;
mod fair;
mod fair_cpu;
mod gates;
mod hosts;
mod lanes;
mod late;
mod long;
mod modes;
mod payloads;
mod shards;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use rouse_workbench::percentiles::median;

use super::Bench;
use super::backlog::Work;
use super::drained::{self, Drained};
use super::host::HostOptions;
use super::report::{Figure, Report, Unit};
use super::server::Server;

#[derive(Args)]
pub(super) struct Options {
    /// Jobs per drain; default: 50,000, or 40,000 for `modes`
    #[arg(long, value_parser = clap::value_parser!(i64).range(100..=10_000_000))]
    jobs: Option<i64>,
    /// Drains per kind, of which the median is reported; default: 3, or 1 for `modes`
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=100))]
    runs: Option<u16>,
    /// Numbers of hosts
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8])]
    pub(super) hosts: Vec<usize>,
    /// Numbers of lanes; default: 1, 10, 1,000 and 10,000; for `modes` 1, 100 and 10,000; for `shards` 1,000
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(i64).range(1..=1_000_000))]
    lanes: Vec<i64>,
    /// Jobs that run one after the other behind a limit of one
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(i64).range(2..=1_000_000))]
    pub(super) chain: i64,
    /// Sizes of payloads, in bytes
    #[arg(long, value_delimiter = ',', default_values_t = [100, 4_096, 65_536])]
    pub(super) payloads: Vec<i64>,
    /// How long after its enqueue a late producer commits, in seconds
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(..=3_600))]
    pub(super) late: u32,
    /// Number of late producers; their worst delay is reported
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=50))]
    pub(super) producers: u32,
    /// Length of the windows in which shares of CPU time are compared, in seconds
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub(super) window: u32,
    /// Measure only these kinds
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Kind::value_variants().to_vec())]
    pub(super) only: Vec<Kind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// 1, 2, 4 and 8 hosts on one server
    Hosts,
    /// 1, 10, 1,000 and 10,000 lanes with jobs in each
    Lanes,
    /// Fair queues with 1, 100 and 10,000 tenants
    Fair,
    /// Shares of CPU time in fair queues that charge it, on 1 and 3 hosts
    FairCpu,
    /// Jobs of 1,000 tenants behind gates that admit all of them, and jobs behind a gate that admits one at a time
    Gates,
    /// Direct dispatch on 1, 2 and 4 hosts, and with reused instances
    Direct,
    /// 1, 2, 4 and 8 hosts on 1,000 lanes, with and without shards
    Shards,
    /// Payloads of 100 B, 4 KiB and 64 KiB
    Payloads,
    /// Short jobs while 1-hour jobs occupy most slots
    Long,
    /// A producer that commits 30 s after its enqueue
    Late,
    /// Plain, fair, direct and sharded queues side by side, by hosts and lanes
    Modes,
}

impl Options {
    pub(super) fn jobs(&self, kind: Kind) -> i64 {
        // The matrix has many cells, and should not take longer than ten minutes.
        let default = if kind == Kind::Modes { 40_000 } else { 50_000 };
        self.jobs.unwrap_or(default)
    }

    fn runs(&self, kind: Kind) -> u16 {
        self.runs.unwrap_or(if kind == Kind::Modes { 1 } else { 3 })
    }

    pub(super) fn lanes(&self, kind: Kind) -> Vec<i64> {
        match (self.lanes.as_slice(), kind) {
            ([], Kind::Modes) => vec![1, 100, 10_000],
            ([], Kind::Shards) => vec![1_000],
            ([], _) => vec![1, 10, 1_000, 10_000],
            (given, _) => given.to_vec(),
        }
    }
}

struct Scale<'a> {
    bench: &'a Bench,
    server: &'a Server,
    options: &'a Options,
    kind: Kind,
    /// The handlers folder, with `noop` only.
    handlers: PathBuf,
    report: Report,
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    let mut report = Report::new("scale");
    let on_one_server = |kind: &Kind| *kind != Kind::Modes;
    let kinds: Vec<Kind> = options.only.iter().copied().filter(on_one_server).collect();
    if !kinds.is_empty() {
        report.absorb(measure(bench, options, &kinds).await?);
    }
    if options.only.contains(&Kind::Modes) {
        report.absorb(modes::run(bench, options).await?);
    }
    Ok(report)
}

async fn measure(bench: &Bench, options: &Options, kinds: &[Kind]) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut report = Report::new("scale");
        for kind in kinds {
            let mut scale = Scale::new(bench, server, options, *kind)?;
            if let Err(error) = scale.measure().await {
                let failure = format!("scale, {kind:?}: {error:#}");
                scale.report.failures.push(failure);
            }
            report.absorb(scale.report);
            // Leftovers of a failed part must not affect the next one.
            server
                .client
                .batch_execute(
                    "SELECT rouse.unlock_history('bench'); TRUNCATE rouse.job, rouse.finished",
                )
                .await?;
        }
        Ok(report)
    })
    .await
}

impl<'a> Scale<'a> {
    fn new(bench: &'a Bench, server: &'a Server, options: &'a Options, kind: Kind) -> Result<Self> {
        let mut report = Report::new("scale");
        report.settings = server.settings();
        Ok(Self {
            bench,
            server,
            options,
            kind,
            handlers: server.handlers(&bench.guests, &["noop"])?,
            report,
        })
    }
}

impl Scale<'_> {
    fn jobs(&self) -> i64 {
        self.options.jobs(self.kind)
    }

    fn runs(&self) -> u16 {
        self.options.runs(self.kind)
    }

    fn lanes(&self) -> Vec<i64> {
        self.options.lanes(self.kind)
    }

    async fn measure(&mut self) -> Result<()> {
        match self.kind {
            Kind::Hosts => hosts::measure(self).await,
            Kind::Lanes => lanes::measure(self).await,
            Kind::Fair => fair::measure(self).await,
            Kind::FairCpu => fair_cpu::measure(self).await,
            Kind::Gates => gates::measure(self).await,
            Kind::Direct => direct::measure(self).await,
            Kind::Shards => shards::measure(self).await,
            Kind::Payloads => payloads::measure(self).await,
            Kind::Long => long::measure(self).await,
            Kind::Late => late::measure(self).await,
            // Measured on its own servers.
            Kind::Modes => Ok(()),
        }
    }

    /// Drains `work` several times, as set by the options.
    async fn drains(&self, title: &str, hosts: usize, work: &Work) -> Result<Vec<Drained>> {
        let options = HostOptions::new(&self.handlers);
        let mut drains = Vec::new();
        for run in 1..=self.runs() {
            drains.push(self.run(run, title, &options, hosts, work).await?);
        }
        Ok(drains)
    }

    /// One of several drains: prints its jobs per second, because the figures follow only after the last drain.
    async fn run(
        &self,
        run: u16,
        title: &str,
        options: &HostOptions,
        hosts: usize,
        work: &Work,
    ) -> Result<Drained> {
        let drained = drained::drain(self.bench, self.server, options, hosts, work).await?;
        self.bench.progress.note(&format!(
            "run {run} of {}, {title}: {:.0} jobs/s",
            self.runs(),
            drained.jobs_per_s()
        ));
        Ok(drained)
    }

    /// Adds a figure to the report, and prints it at once: other parts may follow for many minutes.
    fn figure(&mut self, name: &str, label: &str, value: f64, unit: Unit) {
        let figure = Figure {
            key: format!("scale.{name}"),
            label: label.to_owned(),
            value,
            unit,
        };
        self.bench.progress.note(&figure.line());
        self.report.figures.push(figure);
    }

    /// Adds the figures that all drains have, and returns the jobs per second.
    fn drained(&mut self, key: &str, label: &str, drains: &[Drained]) -> Result<f64> {
        let median_of = |value: fn(&Drained) -> f64| median(drains.iter().map(value).collect());
        let per_s = median_of(Drained::jobs_per_s)?;
        self.figure(&format!("{key}.per_s"), label, per_s, Unit::PerSecond);
        let (cpu, transactions) = (
            median_of(|d| d.cpu_postgres_us)?,
            median_of(|d| d.transactions)?,
        );
        let label = "CPU time per job: Postgres";
        self.figure(
            &format!("{key}.cpu_postgres"),
            label,
            cpu,
            Unit::Microseconds,
        );
        let label = "transactions per 1,000 jobs";
        self.figure(
            &format!("{key}.transactions"),
            label,
            transactions,
            Unit::Count,
        );
        Ok(per_s)
    }
}
