//! Direct dispatch: what it costs to drain inboxes instead of one lane, and what share of a tenant's jobs runs on the
//! same worker.

use anyhow::{Context as _, Result};
use rouse_workbench::percentiles::median;

use super::Scale;
use crate::backlog::Work;
use crate::drained::{self, Drained};
use crate::host::HostOptions;
use crate::report::Unit;

const QUEUE: &str = "direct";
const TENANTS: i64 = 64;
const HOSTS: [usize; 3] = [1, 2, 4];
/// The number of hosts in the measurement with reused instances.
const HOSTS_REUSING: usize = 4;

pub(super) async fn measure(scale: &mut Scale<'_>) -> Result<()> {
    let mut work = Work::noop(scale.jobs());
    work.tenants = Some((QUEUE, format!("'t' || n % {TENANTS}")));
    let options = HostOptions::new(&scale.handlers);
    for hosts in HOSTS {
        let [shared, round_robin, hash] = drains(
            scale,
            &options,
            hosts,
            &work,
            ["shared", "round-robin", "hash"],
        )
        .await?;
        let plain = median(shared.iter().map(Drained::jobs_per_s).collect())?;
        for (policy, drains) in [("round_robin", round_robin), ("hash", hash)] {
            let key = format!("direct_{hosts}_{policy}");
            let label = format!("jobs, {hosts} host(s), direct dispatch by {policy}");
            let per_s = scale.drained(&key, &label, &drains)?;
            scale.figure(
                &format!("{key}.ratio"),
                "ratio to shared dispatch",
                per_s / plain,
                Unit::Ratio,
            );
        }
    }
    affinity(scale, &work).await?;
    set(scale, "shared").await
}

/// With reused instances: the share of jobs that ran on the main worker of their tenant, and the CPU time of guests.
async fn affinity(scale: &mut Scale<'_>, work: &Work) -> Result<()> {
    let mut options = HostOptions::new(&scale.handlers);
    options.config = Some("[handlers.noop]\ninstances = \"reuse\"\n".to_owned());
    let policies = ["shared", "hash"];
    let all = drains(scale, &options, HOSTS_REUSING, work, policies).await?;
    for (policy, drains) in policies.into_iter().zip(all) {
        let mut on_one = Vec::new();
        for drain in &drains {
            let share = "
                SELECT (sum(t.most) / sum(t.jobs))::float8
                FROM (SELECT sum(w.jobs) AS jobs, max(w.jobs) AS most
                      FROM (SELECT f.tenant, count(*) AS jobs FROM rouse.finished AS f WHERE f.id BETWEEN $1 AND $2 GROUP BY f.tenant, f.worker) AS w
                      GROUP BY w.tenant) AS t";
            let (first, last) = drain.ids;
            let row = scale.server.client.query_one(share, &[&first, &last]).await;
            on_one.push(row.context("read which workers ran the jobs")?.get(0));
        }
        let key = format!("direct_reuse_{policy}");
        let label = format!(
            "reused instances, {HOSTS_REUSING} hosts, {policy}: jobs on the main worker of their tenant"
        );
        scale.figure(
            &format!("{key}.affinity"),
            &label,
            median(on_one)?,
            Unit::Ratio,
        );
        let cpu = median(drains.iter().map(|drain| drain.cpu_guests_us).collect())?;
        scale.figure(
            &format!("{key}.cpu_guests"),
            "CPU time per job: guests",
            cpu,
            Unit::Microseconds,
        );
    }
    Ok(())
}

/// Drains with each policy in turn, so that all have the same noise. A first round adds the lanes to the catalog.
async fn drains<const N: usize>(
    scale: &Scale<'_>,
    options: &HostOptions,
    hosts: usize,
    work: &Work,
    policies: [&str; N],
) -> Result<[Vec<Drained>; N]> {
    let mut all = std::array::from_fn(|_| Vec::new());
    for round in 0..=scale.runs() {
        for (policy, drains) in policies.iter().zip(&mut all) {
            set(scale, policy).await?;
            if round == 0 {
                drained::drain(scale.bench, scale.server, options, hosts, work).await?;
            } else {
                let title = format!("{hosts} host(s), {policy}");
                drains.push(scale.run(round, &title, options, hosts, work).await?);
            }
        }
    }
    Ok(all)
}

async fn set(scale: &Scale<'_>, policy: &str) -> Result<()> {
    let set = "SELECT rouse.set_dispatch($1, $2)";
    let set = scale.server.client.execute(set, &[&QUEUE, &policy]).await;
    set.context("set the dispatch").map(|_| ())
}
