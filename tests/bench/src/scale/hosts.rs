//! Several hosts that share one queue.

use anyhow::Result;
use rouse_workbench::percentiles::median;

use super::Scale;
use crate::backlog::Work;
use crate::probe;
use crate::report::Unit;

pub(super) async fn measure(scale: &mut Scale<'_>) -> Result<()> {
    let work = Work::noop(scale.jobs());
    let probes = probe::run(scale.bench, scale.server, work.jobs, &work.payload).await?;
    let probe = median(probes)?;
    let label = "probe: rows claimed and deleted by plain SQL";
    scale.figure("probe_per_s", label, probe, Unit::PerSecond);
    for hosts in scale.options.hosts.clone() {
        let title = format!("{hosts} host(s)");
        let drains = scale.drains(&title, hosts, &work).await?;
        let key = format!("hosts_{hosts}");
        let per_s = scale.drained(&key, &format!("jobs, {hosts} host(s)"), &drains)?;
        let ratio = per_s / probe;
        scale.figure(
            &format!("{key}.ratio"),
            "ratio to the probe",
            ratio,
            Unit::Ratio,
        );
    }
    Ok(())
}
