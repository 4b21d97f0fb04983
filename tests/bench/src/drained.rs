//! Lets hosts empty a backlog, and says how long it took and what it cost.

use anyhow::Result;

use super::backlog::Work;
use super::host::{self, Host, HostOptions, Memory};
use super::server::Server;
use super::wal::{Place, Records};
use super::{Bench, counts};

/// A host that has done this share has allocated what it keeps.
const EARLY: f64 = 0.1;

/// One backlog, from the first claim to the last settlement.
pub(super) struct Drained {
    pub(super) jobs: i64,
    /// The first id and the last.
    pub(super) ids: (i64, i64),
    pub(super) seconds: f64,
    /// The longest time in which nothing was settled.
    pub(super) gap_ms: f64,
    /// CPU time for each job, microseconds.
    pub(super) cpu_postgres_us: f64,
    pub(super) cpu_control_us: f64,
    pub(super) cpu_guests_us: f64,
    /// Bytes of WAL for each job.
    pub(super) wal_enqueue: f64,
    pub(super) wal: f64,
    pub(super) log: [Place; 2],
    /// For 1,000 jobs.
    pub(super) statements: f64,
    /// Of the largest host, bytes.
    pub(super) rss_peak: f64,
    /// From when a tenth was done to the end, all hosts together; none where it was over too soon.
    pub(super) rss_growth: Option<f64>,
}

impl Drained {
    pub(super) fn jobs_per_s(&self) -> f64 {
        self.jobs as f64 / self.seconds
    }

    /// WAL for each job without images of whole pages, enqueue not included.
    pub(super) async fn wal_records(&self, server: &Server) -> Option<f64> {
        let records = Records::between(&server.observer, self.log[0], self.log[1]).await?;
        Some((records.bytes - records.image_bytes) as f64 / self.jobs as f64)
    }
}

/// Starts the hosts, then lets them have all of `work` at once.
///
/// All of it is enqueued in one transaction, while the hosts are idle. Its commit is the start: what
/// comes before (compiling, enqueueing) and what comes after can so be told apart.
pub(super) async fn drain(
    bench: &Bench,
    server: &Server,
    options: &HostOptions,
    hosts: usize,
    work: &Work,
) -> Result<Drained> {
    let client = &server.client;
    // Each run starts with a table of live jobs that has no dead rows, as with a host that goes on.
    client.batch_execute("VACUUM rouse.job").await?;
    bench.progress.step(&format!("starting {hosts} host(s)"));
    let mut hosts = Host::start_many(bench, server, options, hosts).await?;
    let log_start = Place::now(&server.observer).await?;
    counts::hand_over(client).await?;
    client.batch_execute("BEGIN").await?;
    let mut backlog = work.enqueue(client, &bench.progress).await?;
    let log_enqueued = Place::now(&server.observer).await?;
    let statements = counts::statements(&server.observer).await?;
    let (postgres, host) = (server.cpu()?, host::cpu_of(&hosts)?);

    client.batch_execute("COMMIT").await?;
    let pids: Vec<u32> = hosts.iter().map(Host::pid).collect();
    let mut rss_early = None;
    let mut look = |share: f64| {
        if rss_early.is_none() && share >= EARLY {
            rss_early = Some(resident(&pids)?);
        }
        Ok(())
    };
    let waiting = backlog.watched(client, &bench.progress, &mut look);
    host::during(&mut hosts, Box::pin(waiting)).await?;

    let (postgres, host) = (server.cpu()? - postgres, host::cpu_of(&hosts)?.since(host));
    let rss_end = resident(&pids)?;
    let log_end = Place::now(&server.observer).await?;
    let mut rss_peak = 0;
    for host in &hosts {
        rss_peak = rss_peak.max(host.memory()?.resident_peak);
    }
    host::stop_all(hosts).await?;
    counts::hand_over(client).await?;
    let statements = counts::statements(&server.observer).await? - statements - backlog.statements;
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
        statements: statements as f64 * 1000.0 / jobs,
        rss_peak: rss_peak as f64,
        rss_growth: rss_early.map(|early| rss_end - early),
    })
}

/// Memory of the hosts together, bytes.
fn resident(pids: &[u32]) -> Result<f64> {
    pids.iter()
        .try_fold(0.0, |sum, pid| Ok(sum + Memory::of(*pid)?.resident as f64))
}
