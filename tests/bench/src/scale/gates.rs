//! Gates: the cost of open gates, whose limits are never reached, and how soon the next job starts behind a limit of
//! one.

use anyhow::{Context as _, Result};
use rouse_workbench::percentiles::median;

use super::Scale;
use crate::backlog::Work;
use crate::drained::{self, Drained};
use crate::host::HostOptions;
use crate::report::Unit;

/// The queue. It is fair, so that its tenants have the same lanes with and without gates.
const QUEUE: &str = "gated";
const TENANTS: i64 = 1_000;

pub(super) async fn measure(scale: &mut Scale<'_>) -> Result<()> {
    let client = &scale.server.client;
    let gate = async |gate: &str| {
        let set = format!("SELECT rouse.set_gate({gate}, queue => '{QUEUE}')");
        client.batch_execute(&set).await.context("set a gate")
    };
    client
        .execute(
            "SELECT rouse.set_fair_share($1, policy => 'drr')",
            &[&QUEUE],
        )
        .await?;
    let mut work = Work::noop(scale.jobs());
    work.tenants = Some((QUEUE, format!("'t' || n % {TENANTS}")));
    // Measured in turn, so that both have the same noise. The first drain adds the lanes to the catalog.
    let options = HostOptions::new(&scale.handlers);
    drained::drain(scale.bench, scale.server, &options, 1, &work).await?;
    let (mut without, mut with): (Vec<Drained>, Vec<Drained>) = (Vec::new(), Vec::new());
    for run in 1..=scale.runs() {
        without.push(scale.run(run, "no gates", &options, 1, &work).await?);
        gate("'few', 'max_concurrent', key => '{tenant}', max => 1000000").await?;
        gate("'rate', 'throttle', key => '{tenant}', max => 1000000, period => '1 s', burst => 1000000").await?;
        with.push(scale.run(run, "open gates", &options, 1, &work).await?);
        client
            .batch_execute("SELECT rouse.delete_gate('few'), rouse.delete_gate('rate')")
            .await?;
    }
    let plain = median(without.iter().map(Drained::jobs_per_s).collect())?;
    let label = format!("jobs of {TENANTS} tenants behind two open gates");
    let per_s = scale.drained("gates_open", &label, &with)?;
    let label = "ratio to the same jobs without gates";
    scale.figure("gates_open.ratio", label, per_s / plain, Unit::Ratio);

    let client = &scale.server.client;
    let set =
        format!("SELECT rouse.set_gate('one', 'max_concurrent', queue => '{QUEUE}', max => 1)");
    client.batch_execute(&set).await?;
    for hosts in [1, 3] {
        let mut work = Work::noop(scale.options.chain);
        work.tenants = Some((QUEUE, "'t' || n % 3".to_owned()));
        let options = HostOptions::new(&scale.handlers);
        let drained = drained::drain(scale.bench, scale.server, &options, hosts, &work).await?;
        let gaps = "
            SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY extract(epoch FROM g.gap)::float8 * 1000), count(*) FILTER (WHERE g.gap < '0')
            FROM (SELECT f.started_at - lag(f.finished_at) OVER (ORDER BY f.started_at) AS gap FROM rouse.finished AS f WHERE f.id BETWEEN $1 AND $2) AS g";
        let (first, last) = drained.ids;
        let row = client
            .query_one(gaps, &[&first, &last])
            .await
            .context("read the gaps")?;
        let gaps: Vec<f64> = row.get(0);
        for (name, gap) in [("p50", gaps[0]), ("p99", gaps[1])] {
            let key = format!("gates_one_{hosts}.{name}");
            let label =
                format!("limit of one, {hosts} host(s): settlement → start of the next, {name}");
            scale.figure(&key, &label, gap, Unit::Milliseconds);
        }
        #[expect(clippy::cast_precision_loss, reason = "a number of jobs")]
        let exceeded = row.get::<_, i64>(1) as f64;
        let key = format!("gates_one_{hosts}.exceeded");
        scale.figure(
            &key,
            "jobs that started before the previous one had ended",
            exceeded,
            Unit::Count,
        );
    }
    scale
        .server
        .client
        .batch_execute("SELECT rouse.delete_gate('one')")
        .await?;
    Ok(())
}
