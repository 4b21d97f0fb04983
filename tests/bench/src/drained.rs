//! Runs hosts that drain a backlog, and measures the time and the cost.

use anyhow::Result;

use super::backlog::Work;
use super::host::{self, Host, HostOptions, Memory};
use super::server::Server;
use super::wal::{Position, Records};
use super::{Bench, counts};

/// A host that has run this share of the jobs has allocated the memory that it keeps.
const EARLY: f64 = 0.1;

/// One backlog, from the first claim to the last settlement.
pub(super) struct Drained {
    pub(super) jobs: i64,
    /// The first and the last job id.
    pub(super) ids: (i64, i64),
    pub(super) seconds: f64,
    /// The longest time without a settlement.
    pub(super) gap_ms: f64,
    /// CPU time per job, in microseconds.
    pub(super) cpu_postgres_us: f64,
    pub(super) cpu_control_us: f64,
    pub(super) cpu_guests_us: f64,
    /// Bytes of WAL per job.
    pub(super) wal_enqueue: f64,
    pub(super) wal: f64,
    pub(super) log: [Position; 2],
    /// Transactions per 1,000 jobs.
    pub(super) transactions: f64,
    /// Peak memory of the largest host, in bytes.
    pub(super) rss_peak: f64,
    /// Memory growth of all hosts together from 10 % of the jobs to the end, in bytes. `None` if the drain was too
    /// short.
    pub(super) rss_growth: Option<f64>,
}

impl Drained {
    pub(super) fn jobs_per_s(&self) -> f64 {
        self.jobs as f64 / self.seconds
    }

    /// Bytes of WAL per job without full-page images and without the enqueue.
    pub(super) async fn wal_records(&self, server: &Server) -> Option<f64> {
        let records = Records::between(&server.observer, self.log[0], self.log[1]).await?;
        Some((records.bytes - records.image_bytes) as f64 / self.jobs as f64)
    }
}

/// Starts the hosts, then enqueues all of `work` at once.
///
/// All jobs are enqueued in one transaction, while the hosts are idle. Its commit starts the measurement,
/// which therefore excludes compilation and enqueueing.
pub(super) async fn drain(
    bench: &Bench,
    server: &Server,
    options: &HostOptions,
    hosts: usize,
    work: &Work,
) -> Result<Drained> {
    let client = &server.client;
    // Each run starts without dead rows in the table of live jobs, like a host that has run for a while.
    client.batch_execute("VACUUM rouse.job").await?;
    bench.progress.step(&format!("starting {hosts} host(s)"));
    let mut hosts = Host::start_many(bench, server, options, hosts).await?;
    let log_start = Position::now(&server.observer).await?;
    counts::report_counts(client).await?;
    client.batch_execute("BEGIN").await?;
    let mut backlog = work.enqueue(client, &bench.progress).await?;
    let log_enqueued = Position::now(&server.observer).await?;
    let transactions = counts::transactions(&server.observer).await?;
    let (postgres, host) = (server.cpu()?, host::cpu_of(&hosts)?);

    client.batch_execute("COMMIT").await?;
    let pids: Vec<u32> = hosts.iter().map(Host::pid).collect();
    let mut rss_early = None;
    let mut on_progress = |share: f64| {
        if rss_early.is_none() && share >= EARLY {
            rss_early = Some(resident(&pids)?);
        }
        Ok(())
    };
    let waiting = backlog.watch(client, &bench.progress, &mut on_progress);
    host::during(&mut hosts, Box::pin(waiting)).await?;

    let (postgres, host) = (server.cpu()? - postgres, host::cpu_of(&hosts)?.since(host));
    let rss_end = resident(&pids)?;
    let log_end = Position::now(&server.observer).await?;
    let mut rss_peak = 0;
    for host in &hosts {
        rss_peak = rss_peak.max(host.memory()?.resident_peak);
    }
    host::stop_all(hosts).await?;
    counts::report_counts(client).await?;
    let transactions =
        counts::transactions(&server.observer).await? - transactions - backlog.transactions;
    let times = backlog.times(client).await?;
    let jobs = backlog.jobs as f64;
    Ok(Drained {
        jobs: backlog.jobs,
        ids: (backlog.first, backlog.last),
        seconds: times.seconds,
        gap_ms: times.gap_ms,
        cpu_postgres_us: postgres * 1e6 / jobs,
        cpu_control_us: host.control() * 1e6 / jobs,
        cpu_guests_us: host.guests * 1e6 / jobs,
        wal_enqueue: log_enqueued.bytes_since(log_start) as f64 / jobs,
        wal: log_end.bytes_since(log_enqueued) as f64 / jobs,
        log: [log_enqueued, log_end],
        transactions: transactions as f64 * 1000.0 / jobs,
        rss_peak: rss_peak as f64,
        rss_growth: rss_early.map(|early| rss_end - early),
    })
}

/// Resident memory of all hosts together, in bytes.
fn resident(pids: &[u32]) -> Result<f64> {
    pids.iter()
        .try_fold(0.0, |sum, pid| Ok(sum + Memory::of(*pid)?.resident as f64))
}
