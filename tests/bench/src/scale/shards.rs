//! Several hosts on many lanes of one queue, with and without shards.

use anyhow::{Context as _, Result};
use rouse_workbench::percentiles::median;

use super::Scale;
use crate::backlog::Work;
use crate::drained::{self, Drained};
use crate::host::HostOptions;
use crate::report::Unit;

/// The queue. It is fair, so that its tenants have lanes of their own.
const QUEUE: &str = "sharded";
const SHARDS: i32 = 64;

pub(super) async fn measure(scale: &mut Scale<'_>) -> Result<()> {
    let server = scale.server;
    let client = &server.client;
    client
        .execute(
            "SELECT rouse.set_fair_share($1, policy => 'drr')",
            &[&QUEUE],
        )
        .await?;
    for lanes in scale.options.lanes(scale.kind) {
        on_lanes(scale, lanes).await?;
    }
    client
        .execute("SELECT rouse.set_shards($1, 0)", &[&QUEUE])
        .await?;
    Ok(())
}

async fn on_lanes(scale: &mut Scale<'_>, lanes: i64) -> Result<()> {
    let server = scale.server;
    let client = &server.client;
    let mut work = Work::noop(scale.jobs());
    work.tenants = Some((QUEUE, format!("'t' || n % {lanes}")));
    let options = HostOptions::new(&scale.handlers);
    // The first drain adds the lanes to the catalog.
    drained::drain(scale.bench, server, &options, 1, &work).await?;
    let mut first = [None; 2];
    for hosts in scale.options.hosts.clone() {
        let mut drains: [Vec<Drained>; 2] = [Vec::new(), Vec::new()];
        // Measured in turn, so that both have the same noise.
        for run in 1..=scale.runs() {
            for (drains, shards) in drains.iter_mut().zip([0, SHARDS]) {
                client
                    .execute("SELECT rouse.set_shards($1, $2)", &[&QUEUE, &shards])
                    .await
                    .context("set the shards")?;
                let title = format!("{lanes} lanes, {shards} shards, {hosts} host(s)");
                drains.push(scale.run(run, &title, &options, hosts, &work).await?);
            }
        }
        let plain = median(drains[0].iter().map(Drained::jobs_per_s).collect())?;
        for ((drains, first), with) in drains.iter().zip(&mut first).zip(["without", "with"]) {
            let key = format!("shards_{lanes}_{with}_{hosts}");
            let label = format!("jobs in {lanes} lanes {with} shards, {hosts} host(s)");
            let per_s = scale.drained(&key, &label, drains)?;
            let fewest = *first.get_or_insert(per_s);
            let label = "ratio to the fewest hosts";
            scale.figure(&format!("{key}.ratio"), label, per_s / fewest, Unit::Ratio);
            if with == "with" {
                let label = "ratio to the same hosts without shards";
                let key = format!("shards_{lanes}_{hosts}.ratio");
                scale.figure(&key, label, per_s / plain, Unit::Ratio);
            }
        }
    }
    Ok(())
}
