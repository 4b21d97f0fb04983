//! Throughput during an open transaction, which prevents the server from removing dead rows.

use anyhow::{Context as _, Result};
use rouse_workbench::database;

use super::Decay;
use crate::backlog::Work;
use crate::drained;
use crate::report::Unit;

/// A transaction with a snapshot, a transaction id, and locks on the tables that it has read.
pub(super) const HOLD: &str = "\
    BEGIN ISOLATION LEVEL REPEATABLE READ;
    SELECT pg_current_xact_id();
    SELECT (SELECT count(*) FROM rouse.job), (SELECT count(*) FROM rouse.finished), (SELECT count(*) FROM rouse.attempt)";

/// Seconds in which the first and the last `$3` of the jobs with ids `$1` to `$2` finished.
const WINDOWS: &str = "\
    WITH numbered AS (
        SELECT finished_at AS at, row_number() OVER (ORDER BY finished_at, id) AS n, count(*) OVER () AS total
        FROM rouse.finished WHERE id BETWEEN $1 AND $2)
    SELECT extract(epoch FROM max(at) FILTER (WHERE n <= $3::bigint) - min(at))::float8,
           extract(epoch FROM max(at) - min(at) FILTER (WHERE n > total - $3::bigint))::float8
    FROM numbered";

/// Compares the last jobs with the first jobs, without and with an open transaction.
pub(super) async fn measure(decay: &mut Decay<'_>) -> Result<()> {
    let jobs = decay.options.held;
    let [first, last] = windows(decay).await?;
    let ratio = last / first;
    let label = format!("probe: last to first of {jobs}, no open transaction");
    decay.figure("held.control", &label, ratio, Unit::Ratio);
    decay.clear().await?;

    let holder = database::connect(&decay.server.url).await?;
    holder
        .batch_execute(HOLD)
        .await
        .context("open a transaction and read the tables")?;
    let [first, last] = windows(decay).await?;
    holder
        .batch_execute("ROLLBACK")
        .await
        .context("end the open transaction")?;
    decay.clear().await?;
    let (label, per_s) = ("jobs, with an open transaction", Unit::PerSecond);
    decay.figure("held.first_per_s", &format!("first {label}"), first, per_s);
    decay.figure("held.last_per_s", &format!("last {label}"), last, per_s);
    decay.figure(
        "held.ratio",
        "ratio of last to first",
        last / first,
        Unit::Ratio,
    );
    Ok(())
}

/// Jobs per second of the first window and of the last one.
async fn windows(decay: &Decay<'_>) -> Result<[f64; 2]> {
    let window = decay.options.window.min(decay.options.held / 2);
    let work = Work::noop(decay.options.held);
    let done = drained::drain(decay.bench, decay.server, &decay.host, 1, &work).await?;
    let (first, last) = done.ids;
    let row = decay
        .server
        .client
        .query_one(WINDOWS, &[&first, &last, &window])
        .await
        .context("read when the first and the last jobs finished")?;
    let per_s = |column| window as f64 / row.get::<_, f64>(column);
    Ok([per_s(0), per_s(1)])
}
