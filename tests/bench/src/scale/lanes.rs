//! Jobs that are spread over many lanes.

use anyhow::Result;

use super::Scale;
use crate::backlog::Work;
use crate::drained;
use crate::host::HostOptions;
use crate::report::Unit;

/// Round robin over so many queues of one handler. The lanes are in the catalog before: this is about
/// lanes that are used, not about their first job.
pub(super) async fn measure(scale: &mut Scale<'_>) -> Result<()> {
    let mut counts = scale.options.lanes.clone();
    // The catalog only grows; few lanes are measured while it has few.
    counts.sort_unstable();
    let mut one = None;
    for lanes in counts {
        let mut work = Work::noop(lanes);
        work.queues = Some(lanes);
        let options = HostOptions::new(&scale.handlers);
        drained::drain(scale.bench, scale.server, &options, 1, &work).await?;
        work.jobs = scale.options.jobs;
        let drains = scale.drains(1, &work).await?;
        let key = format!("lanes_{lanes}");
        let per_s = scale.drained(&key, &format!("jobs, {lanes} lane(s)"), &drains)?;
        let one = *one.get_or_insert(per_s);
        let what = "ratio to the fewest lanes";
        scale.figure(&format!("{key}.ratio"), what, per_s / one, Unit::Ratio);
    }
    Ok(())
}
