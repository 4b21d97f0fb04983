//! Larger payloads.

use anyhow::Result;
use rouse_workbench::percentiles::median;

use super::Scale;
use crate::backlog::{PAYLOAD, Work};
use crate::probe;
use crate::report::Unit;

/// The maximum size of all payloads of a drain together. More would measure the disk.
const BYTES_MAX: i64 = 128 << 20;
/// Up to this size, the standard payload is used.
const SMALL_BYTES: i64 = 100;

pub(super) async fn measure(scale: &mut Scale<'_>) -> Result<()> {
    for bytes in scale.options.payloads.clone() {
        let mut work = Work::noop(scale.jobs().min(BYTES_MAX / bytes.max(SMALL_BYTES)));
        work.payload = payload(bytes);
        let mut probes = probe::run(scale.bench, scale.server, work.jobs, &work.payload).await?;
        let title = format!("{bytes} bytes each");
        let drains = scale.drains(&title, 1, &work).await?;
        probes.extend(probe::run(scale.bench, scale.server, work.jobs, &work.payload).await?);
        let probe = median(probes)?;
        let key = format!("payload_{bytes}");
        let per_s = scale.drained(&key, &format!("jobs with {bytes} bytes each"), &drains)?;
        let label = "probe: rows with the same payload";
        scale.figure(&format!("{key}.probe_per_s"), label, probe, Unit::PerSecond);
        let ratio = per_s / probe;
        scale.figure(
            &format!("{key}.ratio"),
            "ratio to the probe",
            ratio,
            Unit::Ratio,
        );
        let wal = median(drains.iter().map(|drained| drained.wal).collect())?;
        let label = "WAL per job: claim and settle";
        scale.figure(&format!("{key}.wal"), label, wal, Unit::Bytes);
        let wal = median(drains.iter().map(|drained| drained.wal_enqueue).collect())?;
        let label = "WAL per job: enqueue, in batches";
        scale.figure(&format!("{key}.wal_enqueue"), label, wal, Unit::Bytes);
    }
    Ok(())
}

/// SQL for a payload of about `bytes` bytes that hardly compresses.
fn payload(bytes: i64) -> String {
    if bytes <= SMALL_BYTES {
        return PAYLOAD.to_owned();
    }
    let pieces = bytes / 32;
    format!(
        "jsonb_build_object('n', n, 'pad',
             (SELECT string_agg(md5(n || '.' || piece), '') FROM generate_series(1, {pieces}) AS piece))"
    )
}
