//! Many jobs that sleep durably, and wake at the same moment: how fast one host suspends and resumes them, compared
//! with jobs that do not sleep, and whether its memory depends on the number of sleeping jobs.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, ensure};
use rouse_workbench::percentiles::median;

use super::{Measured, wait_for_count};
use crate::backlog::{Backlog, Work};
use crate::drained;
use crate::host::Host;
use crate::report::Unit;

/// The jobs are due this long, plus `PROBES` times the duration of the probe, after the start of their enqueueing: long
/// enough for the host to suspend all of them first.
const ASLEEP_AFTER: Duration = Duration::from_secs(5);
const PROBES: u32 = 8;

/// One round.
struct Round {
    probe_per_s: f64,
    suspended_per_s: f64,
    /// From the time at which all jobs are due to the last settlement.
    seconds: f64,
    rss_asleep: f64,
    rss_peak: f64,
    /// From 10 % of the suspensions to the peak.
    rss_growth: f64,
}

pub(super) async fn run(measured: &mut Measured<'_>, jobs: i64, runs: u16) -> Result<()> {
    let mut rounds = Vec::new();
    for run in 1..=runs {
        let round = round(measured, jobs).await?;
        measured.bench.progress.note(&format!(
            "run {run} of {runs}, {jobs} sleepers: {:.0} suspended per s, resumed within {:.1} s",
            round.suspended_per_s, round.seconds
        ));
        rounds.push(round);
    }
    let median_of = |value: &dyn Fn(&Round) -> f64| median(rounds.iter().map(value).collect());
    let resumed_per_s = |round: &Round| jobs as f64 / round.seconds;
    for (key, label, value, unit) in [
        (
            "probe",
            "probe: as many jobs that do not sleep",
            median_of(&|round| round.probe_per_s)?,
            Unit::PerSecond,
        ),
        (
            "suspended_per_s",
            "jobs suspended by a sleep",
            median_of(&|round| round.suspended_per_s)?,
            Unit::PerSecond,
        ),
        (
            "suspended_ratio",
            "ratio to the probe",
            median_of(&|round| round.suspended_per_s / round.probe_per_s)?,
            Unit::Ratio,
        ),
        (
            "resumed_per_s",
            "jobs that were all due at once, resumed and settled",
            median_of(&resumed_per_s)?,
            Unit::PerSecond,
        ),
        (
            "resumed_ratio",
            "ratio to the probe",
            median_of(&|round| resumed_per_s(round) / round.probe_per_s)?,
            Unit::Ratio,
        ),
        (
            "resumed_within",
            "due → last one settled",
            median_of(&|round| round.seconds)?,
            Unit::Seconds,
        ),
        (
            "rss_asleep",
            "memory of the host while all sleep",
            median_of(&|round| round.rss_asleep)?,
            Unit::Bytes,
        ),
        (
            "rss_peak",
            "peak memory of the host",
            median_of(&|round| round.rss_peak)?,
            Unit::Bytes,
        ),
        (
            "rss_growth",
            "growth of the host's memory after a tenth of the suspensions",
            median_of(&|round| round.rss_growth)?,
            Unit::Bytes,
        ),
    ] {
        measured.add(&format!("sleepers.{key}"), label, value, unit);
    }
    Ok(())
}

async fn round(measured: &Measured<'_>, jobs: i64) -> Result<Round> {
    let (bench, server) = (measured.bench, measured.server);
    let started = Instant::now();
    let probe = drained::drain(bench, server, &measured.host, 1, &Work::hops(jobs, 1)).await?;
    let until_due = ASLEEP_AFTER + started.elapsed() * PROBES;

    let client = &server.client;
    client.batch_execute("VACUUM rouse.job").await?;
    bench.progress.step("starting a host");
    let mut host = Host::start(bench, server, &measured.host).await?;
    let pid = host.pid();
    let due_at = SystemTime::now() + until_due;
    let due_ms = due_at.duration_since(SystemTime::UNIX_EPOCH)?.as_millis();
    let work = Work {
        handler: "flow.sleep-until",
        payload: format!("jsonb_build_object('unix_ms', {due_ms})"),
        ..Work::noop(jobs)
    };
    client.batch_execute("BEGIN").await?;
    let mut backlog = work.enqueue(client, &bench.progress).await?;
    client.batch_execute("COMMIT").await?;

    let resting = host.during(async {
        suspended(measured, &backlog, jobs / 10).await?;
        let rss_early = resident(pid)?;
        suspended(measured, &backlog, jobs).await?;
        let rss_asleep = resident(pid)?;
        let suspended_per_s = jobs as f64 / suspensions(measured, &backlog, due_at).await?;
        anyhow::Ok((suspended_per_s, rss_early, rss_asleep))
    });
    let (suspended_per_s, rss_early, rss_asleep) = resting.await?;
    let waking = host.during(async {
        bench.progress.step("waiting until the jobs are due");
        let rest = due_at.duration_since(SystemTime::now());
        // If they are already due, they are about to wake.
        tokio::time::sleep(rest.unwrap_or_default()).await;
        backlog.until_done(client, &bench.progress).await
    });
    waking.await?;
    let rss_peak = host.memory()?.resident_peak as f64;
    host.stop().await?;
    // Fails if a job has not succeeded.
    backlog.times(client).await?;
    let seconds = "SELECT extract(epoch FROM max(finished_at) - $3::timestamptz)::float8 FROM rouse.finished WHERE id BETWEEN $1 AND $2";
    let row = client
        .query_one(seconds, &[&backlog.first, &backlog.last, &due_at])
        .await;
    Ok(Round {
        probe_per_s: probe.jobs_per_s(),
        suspended_per_s,
        seconds: row.context("read when the jobs ended")?.get(0),
        rss_asleep,
        rss_peak,
        rss_growth: rss_peak - rss_early,
    })
}

/// Waits until this many jobs are suspended.
async fn suspended(measured: &Measured<'_>, backlog: &Backlog, jobs: i64) -> Result<()> {
    let sql = "SELECT count(*) FROM rouse.job WHERE wait IS NOT NULL AND id BETWEEN $1 AND $2";
    let range: [&(dyn tokio_postgres::types::ToSql + Sync); 2] = [&backlog.first, &backlog.last];
    let (bench, client) = (measured.bench, &measured.server.client);
    let counted = wait_for_count(bench, client, "suspending", sql, &range, jobs).await;
    counted
        .context("suspend all jobs before they are due; those that are due are no longer counted")
}

/// The seconds from the first claim to the last suspension. Fails if a job was due before that.
async fn suspensions(
    measured: &Measured<'_>,
    backlog: &Backlog,
    due_at: SystemTime,
) -> Result<f64> {
    let sql = "SELECT count(*), extract(epoch FROM max(ended_at) - min(claimed_at))::float8, max(ended_at)
               FROM rouse.attempt WHERE job BETWEEN $1 AND $2 AND wait IS NOT NULL";
    let client = &measured.server.client;
    let row = client
        .query_one(sql, &[&backlog.first, &backlog.last])
        .await;
    let row = row.context("read when the jobs were suspended")?;
    ensure!(
        row.get::<_, i64>(0) == backlog.jobs && row.get::<_, SystemTime>(2) < due_at,
        "the host had not suspended all {} jobs when they were due",
        backlog.jobs
    );
    Ok(row.get(1))
}

fn resident(pid: u32) -> Result<f64> {
    Ok(crate::host::Memory::of(pid)?.resident as f64)
}
