//! Jobs spread over many lanes.

use anyhow::Result;

use super::Scale;
use crate::backlog::Work;
use crate::drained;
use crate::host::HostOptions;
use crate::report::Unit;

/// Round robin over this many queues of one handler. The lanes are added to the catalog beforehand, so that the figure
/// does not include the creation of lanes.
pub(super) async fn measure(scale: &mut Scale<'_>) -> Result<()> {
    let mut counts = scale.lanes();
    // The catalog only grows, so small numbers of lanes are measured first.
    counts.sort_unstable();
    let mut fewest = None;
    for lanes in counts {
        let mut work = Work::noop(lanes);
        work.queues = Some(lanes);
        let options = HostOptions::new(&scale.handlers);
        drained::drain(scale.bench, scale.server, &options, 1, &work).await?;
        work.jobs = scale.jobs();
        let title = format!("{lanes} lane(s)");
        let drains = scale.drains(&title, 1, &work).await?;
        let key = format!("lanes_{lanes}");
        let per_s = scale.drained(&key, &format!("jobs, {lanes} lane(s)"), &drains)?;
        let fewest = *fewest.get_or_insert(per_s);
        let label = "ratio to the fewest lanes";
        scale.figure(&format!("{key}.ratio"), label, per_s / fewest, Unit::Ratio);
    }
    Ok(())
}
