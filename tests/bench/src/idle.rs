//! The cost of idle hosts.

use std::time::Duration;

use anyhow::Result;
use clap::Args;

use super::backlog::Work;
use super::host::{self, Host, HostOptions};
use super::report::{Report, Unit};
use super::server::Server;
use super::{Bench, counts, drained};

/// Number of lanes that an idle host knows from earlier jobs.
const LANES: i64 = 3;

#[derive(Args)]
pub(super) struct Options {
    /// Length of the measurement, in seconds
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub(super) seconds: u32,
    /// How long the hosts settle before the measurement, in seconds
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(..=3_600))]
    pub(super) settle: u32,
    /// How long the server is measured without hosts, in seconds
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub(super) alone: u32,
    /// Numbers of hosts
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10])]
    pub(super) hosts: Vec<usize>,
}

/// The cost of an idle host.
pub(super) struct Idle {
    /// The share of one CPU that the host uses, in percent.
    pub(super) host_percent: f64,
    /// The share of one CPU that Postgres uses beyond its share without hosts, in percent.
    pub(super) postgres_percent: f64,
    pub(super) transactions_per_s: f64,
}

pub(super) async fn run(bench: &Bench, options: &Options) -> Result<Report> {
    Server::during(bench, async |server| {
        let mut report = Report::new("idle");
        report.settings = server.settings();
        server.suspend_autovacuum().await?;
        // A host that has never seen a job has no lanes to read.
        let mut before = Work::noop(LANES * 10);
        before.queues = Some(LANES);
        let host = HostOptions::new(&server.handlers(&bench.guests, &["noop"])?);
        drained::drain(bench, server, &host, 1, &before).await?;
        // After this pause, the server has done the work that was left over from its start.
        wait(bench, "letting the server settle", options.alone / 3).await;
        let alone = alone(bench, server, options.alone).await?;
        let label = "probe: Postgres without hosts";
        report.add("idle.probe.postgres", label, alone, Unit::Percent);
        for hosts in &options.hosts {
            let idle = idle(
                bench,
                server,
                *hosts,
                options.settle,
                options.seconds,
                alone,
            )
            .await?;
            let key = |name: &str| format!("idle.{hosts}.{name}");
            let of = format!("of {hosts} idle host(s), per host");
            let transactions = idle.transactions_per_s;
            let (host, postgres) = (idle.host_percent, idle.postgres_percent);
            report.add(
                key("transactions"),
                format!("transactions {of}"),
                transactions,
                Unit::PerSecond,
            );
            report.add(
                key("cpu"),
                format!("CPU {of}"),
                host + postgres,
                Unit::Percent,
            );
            report.add(key("cpu_host"), "of this, the host", host, Unit::Percent);
            report.add(
                key("cpu_postgres"),
                "of this, Postgres",
                postgres,
                Unit::Percent,
            );
        }
        Ok(report)
    })
    .await
}

/// CPU share of the server without hosts, in percent of one CPU.
async fn alone(bench: &Bench, server: &Server, seconds: u32) -> Result<f64> {
    let before = server.cpu()?;
    wait(bench, "watching the server alone", seconds).await;
    Ok((server.cpu()? - before) * 100.0 / f64::from(seconds))
}

/// Measures idle hosts; the figures are averages per host.
pub(super) async fn idle(
    bench: &Bench,
    server: &Server,
    count: usize,
    settle: u32,
    seconds: u32,
    alone: f64,
) -> Result<Idle> {
    bench.progress.step(&format!("starting {count} host(s)"));
    let options = HostOptions::new(&server.handlers(&bench.guests, &["noop"])?);
    let mut hosts = Host::start_many(bench, server, &options, count).await?;
    let settling = async {
        wait(bench, &format!("letting {count} host(s) settle"), settle).await;
        Ok(())
    };
    host::during(&mut hosts, Box::pin(settling)).await?;

    // The benchmark's own transactions during the start of the hosts are counted by now.
    counts::report_counts(&server.client).await?;
    let (cpu_host, cpu_postgres) = (host::cpu_of(&hosts)?, server.cpu()?);
    let transactions = counts::transactions(&server.observer).await?;
    let watching = async {
        wait(bench, &format!("watching {count} idle host(s)"), seconds).await;
        Ok(())
    };
    host::during(&mut hosts, Box::pin(watching)).await?;
    let cpu_host = host::cpu_of(&hosts)?.since(cpu_host).total;
    let cpu_postgres = server.cpu()? - cpu_postgres;
    // At the start of the window, a session may not have reported the transactions of its last look yet. At the end,
    // all sessions have reported, and frozen hosts do not add anything.
    for host in &hosts {
        host.freeze()?;
    }
    server.end_other_sessions().await?;
    let transactions = counts::transactions(&server.observer).await? - transactions;
    for host in &hosts {
        host.thaw()?;
    }
    host::stop_all(hosts).await?;

    let (seconds, count) = (f64::from(seconds), count as f64);
    Ok(Idle {
        host_percent: cpu_host * 100.0 / seconds / count,
        postgres_percent: (cpu_postgres * 100.0 / seconds - alone).max(0.0) / count,
        transactions_per_s: transactions as f64 / seconds / count,
    })
}

async fn wait(bench: &Bench, label: &str, seconds: u32) {
    let length = Duration::from_secs(seconds.into());
    bench
        .progress
        .during(label, length, tokio::time::sleep(length))
        .await;
}
