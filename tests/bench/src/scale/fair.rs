//! Fair queues: the cost of turns, the shares of the keys, and the delay of a tenant that had no jobs before.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rouse_workbench::percentiles::{Percentiles, median};

use super::Scale;
use crate::backlog::Work;
use crate::drained;
use crate::host::{Host, HostOptions};
use crate::report::Unit;

const QUEUE: &str = "fair";
/// The numbers of tenants whose drains are compared with a drain of one lane of another queue.
const TENANT_COUNTS: [i64; 3] = [1, 100, 10_000];
/// The number of tenants in the measurement of shares. The first tenant has half of all jobs, the second the weight 3.
const TENANTS: i64 = 20;
/// The number of jobs in a window in which shares are compared.
const WINDOW: i64 = 5_000;
/// The number of jobs of tenants that had none before.
const COLD: u32 = 200;
const COLD_EVERY: Duration = Duration::from_millis(20);
/// The time limit for the cold jobs to end after the last of them was enqueued.
const COLD_TIMEOUT: Duration = Duration::from_secs(60);
/// The number of jobs of the tenant that floods the queue.
const FLOOD: i64 = 400_000;

pub(super) async fn measure(scale: &mut Scale<'_>) -> Result<()> {
    let client = &scale.server.client;
    client
        .execute("SELECT rouse.set_fair_share($1, policy => 'drr', weights => '{\"t1\": 3}', starvation => '0 s')", &[&QUEUE])
        .await?;
    let options = HostOptions::new(&scale.handlers);
    let of_tenants = |tenants: i64, jobs: i64| {
        let mut work = Work::noop(jobs);
        work.tenants = Some((QUEUE, format!("'t' || n % {tenants}")));
        work
    };
    // The lanes are added to the catalog beforehand, so that the figures do not include their creation.
    for tenants in TENANT_COUNTS {
        let work = of_tenants(tenants, tenants);
        drained::drain(scale.bench, scale.server, &options, 1, &work).await?;
    }
    // Measured in turn, so that all have the same noise.
    let mut plain = Vec::new();
    let mut fair = TENANT_COUNTS.map(|_| Vec::new());
    for run in 1..=scale.runs() {
        let one_lane = Work::noop(scale.jobs());
        let drained = scale.run(run, "one lane", &options, 1, &one_lane).await?;
        plain.push(drained.jobs_per_s());
        for (tenants, drains) in TENANT_COUNTS.iter().zip(&mut fair) {
            let title = format!("{tenants} tenant(s)");
            let work = of_tenants(*tenants, scale.jobs());
            drains.push(scale.run(run, &title, &options, 1, &work).await?);
        }
    }
    let plain = median(plain)?;
    for (tenants, drains) in TENANT_COUNTS.iter().zip(&fair) {
        let key = format!("fair_{tenants}");
        let label = format!("jobs of {tenants} tenant(s) of a fair queue");
        let per_s = scale.drained(&key, &label, drains)?;
        scale.figure(
            &format!("{key}.ratio"),
            "ratio to one lane",
            per_s / plain,
            Unit::Ratio,
        );
    }
    for hosts in [1, 3] {
        shares(scale, hosts).await?;
    }
    cold(scale).await
}

/// Jain's index of the shares by weight, while all tenants have jobs: 1 if the shares are exactly as set. The lowest
/// value of all windows.
async fn shares(scale: &mut Scale<'_>, hosts: usize) -> Result<()> {
    let mut work = Work::noop(scale.jobs() * 2);
    let others = TENANTS - 1;
    let tenant = format!("CASE WHEN n % 2 = 0 THEN 't0' ELSE 't' || 1 + n / 2 % {others} END");
    work.tenants = Some((QUEUE, tenant));
    let options = HostOptions::new(&scale.handlers);
    let drained = drained::drain(scale.bench, scale.server, &options, hosts, &work).await?;
    let windows = "
        WITH f AS (SELECT f.tenant, row_number() OVER (ORDER BY f.claimed_at, f.id) - 1 AS place FROM rouse.finished AS f WHERE f.id BETWEEN $1 AND $2),
        ends AS (SELECT min(e.place) AS place FROM (SELECT max(f.place) AS place FROM f GROUP BY f.tenant) AS e),
        shares AS (SELECT f.place / $3::bigint AS nth, f.tenant, count(*) / CASE f.tenant WHEN 't1' THEN 3.0 ELSE 1.0 END AS share
                   FROM f, ends WHERE f.place < ends.place / $3::bigint * $3::bigint GROUP BY 1, 2)
        SELECT count(*), min(w.jain)::float8
        FROM (SELECT sum(s.share) ^ 2 / ($4::bigint * sum(s.share ^ 2)) AS jain FROM shares AS s GROUP BY s.nth) AS w";
    let (first, last) = drained.ids;
    let row = scale
        .server
        .client
        .query_one(windows, &[&first, &last, &WINDOW, &TENANTS])
        .await
        .context("compare the shares")?;
    ensure!(
        row.get::<_, i64>(0) > 0,
        "too few jobs for a window of {WINDOW}: raise --jobs"
    );
    let key = format!("fair_shares_{hosts}.jain");
    let label =
        format!("shares of {TENANTS} tenants on {hosts} host(s): Jain's index of the worst window");
    scale.figure(&key, &label, row.get(1), Unit::Ratio);
    Ok(())
}

/// The delay from the enqueue to the start of the first job of a tenant, on an idle host and during a flood.
async fn cold(scale: &mut Scale<'_>) -> Result<()> {
    let options = HostOptions::new(&scale.handlers);
    let mut p99 = Vec::new();
    for (key, flood) in [("idle", 0), ("flood", FLOOD)] {
        let client = &scale.server.client;
        scale.bench.progress.step("starting a host");
        let mut host = Host::start(scale.bench, scale.server, &options).await?;
        let mut work = Work::noop(flood);
        work.tenants = Some((QUEUE, "'flood'".to_owned()));
        client.batch_execute("BEGIN").await?;
        work.enqueue(client, &scale.bench.progress).await?;
        client.batch_execute("COMMIT").await?;
        let delays = host
            .during(async {
                for nth in 0..COLD {
                    tokio::time::sleep(COLD_EVERY).await;
                    let tenant = format!("cold-{key}-{nth}");
                    let enqueue = "SELECT rouse.enqueue('noop', queue => $1, tenant => $2)";
                    client.execute(enqueue, &[&QUEUE, &tenant]).await?;
                }
                let left = "SELECT count(*) FROM rouse.job WHERE tenant = 'flood'";
                let left: i64 = client.query_one(left, &[]).await?.get(0);
                ensure!(flood == 0 || left > 0, "the flood ended before the last cold tenant");
                let ended = "SELECT extract(epoch FROM f.started_at - f.requested_at)::float8 * 1000 FROM rouse.finished AS f WHERE f.tenant LIKE $1";
                let enqueued = Instant::now();
                loop {
                    let rows = client.query(ended, &[&format!("cold-{key}-%")]).await?;
                    if rows.len() == COLD as usize {
                        break Ok(rows.iter().map(|row| row.get(0)).collect::<Vec<f64>>());
                    }
                    ensure!(
                        enqueued.elapsed() < COLD_TIMEOUT,
                        "{} of {COLD} cold jobs had ended after {COLD_TIMEOUT:?}",
                        rows.len()
                    );
                    tokio::time::sleep(COLD_EVERY).await;
                }
            })
            .await?;
        // The rest of the flood is not needed.
        client
            .execute("SELECT rouse.pause_queue($1)", &[&QUEUE])
            .await?;
        host.stop().await?;
        client
            .execute("SELECT rouse.resume_queue($1)", &[&QUEUE])
            .await?;
        client
            .batch_execute(
                "SELECT rouse.unlock_history('bench'); TRUNCATE rouse.job, rouse.finished",
            )
            .await?;
        let delays = Percentiles::of(delays)?;
        for (name, delay) in [("p50", delays.p50), ("p99", delays.p99)] {
            let label = format!("first job of a tenant, {key}: enqueue → start, {name}");
            scale.figure(
                &format!("fair_cold_{key}.{name}"),
                &label,
                delay,
                Unit::Milliseconds,
            );
        }
        p99.push(delays.p99);
    }
    let label = "first job of a tenant: flood / idle, p99";
    scale.figure("fair_cold.ratio", label, p99[1] / p99[0], Unit::Ratio);
    Ok(())
}
