//! Figures with more hosts, direct dispatch, more lanes, larger payloads, long jobs and late commits.

mod direct;
mod fair;
mod gates;
mod hosts;
mod lanes;
mod late;
mod long;
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
use super::report::{Report, Unit};
use super::server::Server;

#[derive(Args)]
pub(super) struct Options {
    /// Jobs per drain
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(i64).range(100..=10_000_000))]
    pub(super) jobs: i64,
    /// Drains per kind; the median is reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(super) runs: u16,
    /// Numbers of hosts
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8])]
    pub(super) hosts: Vec<usize>,
    /// Numbers of lanes
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10, 1_000, 10_000])]
    pub(super) lanes: Vec<i64>,
    /// Sizes of payloads, bytes
    #[arg(long, value_delimiter = ',', default_values_t = [100, 4_096, 65_536])]
    pub(super) payloads: Vec<i64>,
    /// How long after its enqueue a late producer commits, seconds
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(..=3_600))]
    pub(super) late: u32,
    /// Number of late producers; their worst delay is reported
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=50))]
    pub(super) producers: u32,
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
    /// Jobs of 1,000 tenants behind open gates, and one job at a time
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
}

struct Scale<'a> {
    bench: &'a Bench,
    server: &'a Server,
    options: &'a Options,
    /// The handlers folder, with `noop` only.
    handlers: PathBuf,
    report: Report,
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut scale = Scale {
            bench,
            server,
            options,
            handlers: server.handlers(&bench.guests, &["noop"])?,
            report: Report::new("scale"),
        };
        scale.report.settings = server.settings();
        for kind in &options.only {
            if let Err(error) = scale.measure(*kind).await {
                let failure = format!("scale, {kind:?}: {error:#}");
                scale.report.failures.push(failure);
            }
            // Leftovers of a failed part must not affect the next one.
            server
                .client
                .batch_execute(
                    "SELECT rouse.unlock_history('bench'); TRUNCATE rouse.job, rouse.finished",
                )
                .await?;
        }
        Ok(scale.report)
    })
    .await
}

impl Scale<'_> {
    async fn measure(&mut self, kind: Kind) -> Result<()> {
        match kind {
            Kind::Hosts => hosts::measure(self).await,
            Kind::Lanes => lanes::measure(self).await,
            Kind::Fair => fair::measure(self).await,
            Kind::Gates => gates::measure(self).await,
            Kind::Direct => direct::measure(self).await,
            Kind::Shards => shards::measure(self).await,
            Kind::Payloads => payloads::measure(self).await,
            Kind::Long => long::measure(self).await,
            Kind::Late => late::measure(self).await,
        }
    }

    async fn drains(&self, hosts: usize, work: &Work) -> Result<Vec<Drained>> {
        let options = HostOptions::new(&self.handlers);
        let mut drains = Vec::new();
        for _ in 0..self.options.runs {
            drains.push(drained::drain(self.bench, self.server, &options, hosts, work).await?);
        }
        Ok(drains)
    }

    fn figure(&mut self, name: &str, label: &str, value: f64, unit: Unit) {
        self.report.add(format!("scale.{name}"), label, value, unit);
    }

    /// Adds the figures that all drains have, and returns the jobs per second.
    fn drained(&mut self, key: &str, label: &str, drains: &[Drained]) -> Result<f64> {
        let median_of = |value: fn(&Drained) -> f64| median(drains.iter().map(value).collect());
        let per_s = median_of(Drained::jobs_per_s)?;
        self.figure(&format!("{key}.per_s"), label, per_s, Unit::PerSecond);
        let (cpu, statements) = (
            median_of(|d| d.cpu_postgres_us)?,
            median_of(|d| d.statements)?,
        );
        let label = "CPU time per job: Postgres";
        self.figure(
            &format!("{key}.cpu_postgres"),
            label,
            cpu,
            Unit::Microseconds,
        );
        let label = "round trips per 1,000 jobs";
        self.figure(&format!("{key}.statements"), label, statements, Unit::Count);
        Ok(per_s)
    }
}
