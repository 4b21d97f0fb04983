//! Everything that makes a queue old at once: much pending, much finished, and a transaction that stays open (SPEC row B8).

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::held::HOLD;
use super::{Decay, finished, rates};
use crate::bench::percentiles::median;
use crate::bench::report::Unit;
use crate::database;

/// One drain in each while the transaction is open: a queue that is used, on a disk of ordinary size.
const EVERY: Duration = Duration::from_secs(60);
/// So many of the first drains and of the last ones make a figure.
const WINDOW: usize = 5;

pub(super) async fn measure(decay: &mut Decay<'_>) -> Result<()> {
    let (bench, options) = (decay.bench, decay.options);
    let held_for = Duration::from_secs(options.minutes * 60);
    finished::fill(bench, decay.server, options.finished).await?;
    decay.fill("noop", "default", "low").await?;

    let holder = database::connect(&decay.server.url).await?;
    holder
        .batch_execute(HOLD)
        .await
        .context("open a transaction and read the tables")?;
    let began = Instant::now();
    let mut held = Vec::new();
    while began.elapsed() < held_for {
        let next = Instant::now() + EVERY;
        held.push(decay.drain(options.jobs).await?);
        tokio::time::sleep_until(next.into()).await;
    }
    holder
        .batch_execute("ROLLBACK")
        .await
        .context("the transaction was open to the end")?;
    let held = rates(&held);

    decay.clear().await?;
    let after = rates(&decay.drains().await?);
    let mut fresh = std::mem::replace(&mut decay.fresh, after.clone());
    fresh.extend(after);
    let fresh = median(fresh)?;
    let some = held.len().min(WINDOW);
    let (first, last) = (
        median(held[..some].to_vec())?,
        median(held[held.len() - some..].to_vec())?,
    );
    let all = median(held)?;
    let what = format!(
        "{} pending, {} finished, a transaction open for {} min",
        options.pending, options.finished, options.minutes
    );
    decay.figure("old.per_s", &what, all, Unit::PerSecond);
    decay.figure(
        "old.first_ratio",
        "the first drains of it, ratio to fresh",
        first / fresh,
        Unit::Ratio,
    );
    decay.figure(
        "old.last_ratio",
        "the last drains of it, ratio to fresh",
        last / fresh,
        Unit::Ratio,
    );
    decay.figure(
        "old.ratio",
        "all drains of it, ratio to fresh",
        all / fresh,
        Unit::Ratio,
    );
    Ok(())
}
