//! Chains that handlers continue with `ctx.continue_with`: how fast one host runs many of them, compared with jobs of
//! the same handler that do not continue their chain; and how soon a job of a single chain follows its predecessor.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rouse_workbench::percentiles::{Percentiles, median};

use super::{Measured, wait_for_count};
use crate::backlog::Work;
use crate::drained::{self, Drained};
use crate::host::Host;
use crate::report::Unit;
use crate::round_trip;

/// Jobs in each of many chains.
const CHAIN: i64 = 10;
/// The number of rounds of the probe of a single chain, and the interval between their starts.
const PROBE_ROUNDS: u32 = 200;
const PROBE_EVERY: Duration = Duration::from_millis(10);

/// Measures many chains, alternating with the probe.
pub(super) async fn many(measured: &mut Measured<'_>, chains: i64, runs: u16) -> Result<()> {
    let jobs = chains * CHAIN;
    let workloads = [Work::hops(jobs, 1), Work::hops(jobs, CHAIN)];
    let mut drains: [Vec<Drained>; 2] = Default::default();
    for run in 1..=runs {
        for (work, drains) in workloads.iter().zip(&mut drains) {
            let (bench, server) = (measured.bench, measured.server);
            let drained = drained::drain(bench, server, &measured.host, 1, work).await?;
            let jobs_per_s = drained.jobs_per_s();
            bench.progress.note(&format!(
                "run {run} of {runs}, {jobs} jobs in chains of {}: {jobs_per_s:.0} jobs/s",
                work.chain
            ));
            drains.push(drained);
        }
    }
    let [probe, drains] = drains;
    let median_of =
        |runs: &[Drained], value: fn(&Drained) -> f64| median(runs.iter().map(value).collect());
    let probe = median_of(&probe, Drained::jobs_per_s)?;
    let jobs_per_s = median_of(&drains, Drained::jobs_per_s)?;
    for (key, label, value, unit) in [
        (
            "probe",
            "probe: as many jobs of the same handler, one in each chain",
            probe,
            Unit::PerSecond,
        ),
        (
            "jobs_per_s",
            "chains of ten jobs, continued by the handler",
            jobs_per_s,
            Unit::PerSecond,
        ),
        (
            "ratio",
            "ratio to the probe",
            jobs_per_s / probe,
            Unit::Ratio,
        ),
        (
            "cpu_postgres",
            "CPU time per job: Postgres",
            median_of(&drains, |run| run.cpu_postgres_us)?,
            Unit::Microseconds,
        ),
        (
            "wal",
            "WAL per job: claim, settle and enqueue the next one",
            median_of(&drains, |run| run.wal)?,
            Unit::Bytes,
        ),
        (
            "transactions",
            "transactions per 1,000 jobs",
            median_of(&drains, |run| run.transactions)?,
            Unit::Count,
        ),
    ] {
        measured.add(&format!("continued.{key}"), label, value, unit);
    }
    Ok(())
}

/// The times of each job but the first, from the settlement of its predecessor, according to the database's clock. That
/// clock is read before the settlement commits, so that the times include the commit.
const GAPS: &str = "\
    SELECT (extract(epoch FROM claimed_at - before) * 1000)::float8, (extract(epoch FROM started_at - before) * 1000)::float8
    FROM (SELECT claimed_at, started_at, lag(finished_at) OVER (ORDER BY id) AS before
          FROM rouse.finished WHERE (id = $1 OR chain = $1) AND state = 'succeeded') AS jobs
    WHERE before IS NOT NULL";

/// Measures one chain on an idle host.
pub(super) async fn single(measured: &mut Measured<'_>, hops: i64) -> Result<()> {
    let (bench, server) = (measured.bench, measured.server);
    let mut probe = round_trip::run(bench, server, PROBE_EVERY, PROBE_ROUNDS).await?;
    bench.progress.step("starting a host");
    let mut host = Host::start(bench, server, &measured.host).await?;
    host.asleep(server).await?;
    let gaps = host.during(async {
        let client = &server.client;
        let enqueue = "SELECT rouse.enqueue('flow.hop', jsonb_build_object('n', $1::bigint))";
        let first = client.query_one(enqueue, &[&hops]).await;
        let first: i64 = first.context("enqueue the first job")?.get(0);
        let ended = "SELECT count(*) FROM rouse.finished WHERE chain = $1";
        wait_for_count(bench, client, "running one chain", ended, &[&first], hops).await?;
        let rows = client.query(GAPS, &[&first]).await?;
        ensure!(
            rows.len() as i64 == hops,
            "only {} of {hops} hops have succeeded",
            rows.len()
        );
        Ok(rows
            .iter()
            .map(|row| (row.get(0), row.get(1)))
            .collect::<Vec<(f64, f64)>>())
    });
    let (claimed, started) = gaps.await?.into_iter().unzip();
    host.stop().await?;
    probe.extend(round_trip::run(bench, server, PROBE_EVERY, PROBE_ROUNDS).await?);
    for (key, label, times) in [
        (
            "probe",
            "probe: NOTIFY, then an UPDATE by the listener",
            probe,
        ),
        (
            "claimed",
            "one chain on an idle host: settled → next one claimed",
            claimed,
        ),
        ("started", "settled → next one started", started),
    ] {
        let times = Percentiles::of(times)?;
        for (percentile, value) in [("p50", times.p50), ("p99", times.p99)] {
            let key = format!("hops.{key}.{percentile}");
            measured.add(&key, label, value, Unit::Milliseconds);
        }
    }
    Ok(())
}
