//! All kinds of aging at once: many pending jobs, many finished jobs, and an open transaction.

use std::slice;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rouse_workbench::database;
use rouse_workbench::percentiles::median;

use super::held::HOLD;
use super::{Decay, finished, rates};
use crate::backlog::Work;
use crate::host::{self, Host};
use crate::report::Unit;

/// The interval at which drains start while the transaction is open; drains without pauses would need a larger disk.
const EVERY: Duration = Duration::from_secs(60);
/// The number of first drains, and of last drains, from which a figure is computed.
const WINDOW: usize = 5;

/// One host runs all drains, like a long-running service; at the end, other hosts are started in the aged state.
pub(super) async fn measure(decay: &mut Decay<'_>) -> Result<()> {
    let (bench, options) = (decay.bench, decay.options);
    let mut host = Host::start(bench, decay.server, &decay.host).await?;
    let mut fresh = drains(decay, &mut host).await?;

    let held_for = Duration::from_secs(options.minutes * 60);
    finished::fill(bench, decay.server, options.finished).await?;
    decay.fill("noop", "elsewhere", "normal").await?;
    let holder = database::connect(&decay.server.url).await?;
    holder
        .batch_execute(HOLD)
        .await
        .context("open a transaction and read the tables")?;
    let opened = Instant::now();
    let mut held = Vec::new();
    while opened.elapsed() < held_for {
        let next = Instant::now() + EVERY;
        held.push(drain(decay, &mut host).await?);
        tokio::time::sleep_until(next.into()).await;
    }
    host.stop().await?;
    let started = median(rates(&decay.drains().await?))?;
    holder
        .batch_execute("ROLLBACK")
        .await
        .context("end the open transaction")?;

    decay.clear().await?;
    let mut host = Host::start(bench, decay.server, &decay.host).await?;
    fresh.extend(drains(decay, &mut host).await?);
    host.stop().await?;
    let fresh = median(fresh)?;
    let window = held.len().min(WINDOW);
    let first = median(held[..window].to_vec())?;
    let last = median(held[held.len() - window..].to_vec())?;
    let all = median(held)?;
    let label = format!(
        "{} pending, {} finished, a transaction open for {} min",
        options.pending, options.finished, options.minutes
    );
    decay.figure(
        "old.fresh_per_s",
        "probe: jobs, fresh",
        fresh,
        Unit::PerSecond,
    );
    decay.figure("old.per_s", &label, all, Unit::PerSecond);
    for (key, label, rate) in [
        (
            "first_ratio",
            "the first drains in this state, ratio to fresh",
            first,
        ),
        (
            "last_ratio",
            "the last drains in this state, ratio to fresh",
            last,
        ),
        ("ratio", "all drains in this state, ratio to fresh", all),
        (
            "started_ratio",
            "drains by hosts started at the end of this state, ratio to fresh",
            started,
        ),
    ] {
        decay.figure(&format!("old.{key}"), label, rate / fresh, Unit::Ratio);
    }
    Ok(())
}

/// Jobs per second of as many drains as in the other states.
async fn drains(decay: &Decay<'_>, host: &mut Host) -> Result<Vec<f64>> {
    let mut rates = Vec::new();
    for _ in 0..decay.options.runs {
        rates.push(drain(decay, host).await?);
    }
    Ok(rates)
}

/// Jobs per second of one drain by a running host.
async fn drain(decay: &Decay<'_>, host: &mut Host) -> Result<f64> {
    let (client, progress) = (&decay.server.client, &decay.bench.progress);
    client.batch_execute("VACUUM rouse.job").await?;
    client.batch_execute("BEGIN").await?;
    let mut backlog = Work::noop(decay.options.jobs)
        .enqueue(client, progress)
        .await?;
    client.batch_execute("COMMIT").await?;
    let waiting = backlog.until_done(client, progress);
    host::during(slice::from_mut(host), Box::pin(waiting)).await?;
    Ok(backlog.jobs as f64 / backlog.times(client).await?.seconds)
}
