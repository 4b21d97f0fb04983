//! Logs outages of the database, and reconnects while the worker stops.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::{info, warn};

use super::Shared;

/// Logs a failed call: as a warning; at info if its connection broke; at debug if there was no connection, since
/// [`report_forever`] warns of an outage once.
macro_rules! warn_unless_unreachable {
    ($error:ident, $($rest:tt)+) => {
        if $error.is_unreachable() {
            tracing::debug!(error = %$error, $($rest)+)
        } else if $error.is_cut_off() {
            tracing::info!(error = %$error, $($rest)+)
        } else {
            tracing::warn!(error = %$error, $($rest)+)
        }
    };
}
pub(super) use warn_unless_unreachable;

/// How often a worker that stops tries to connect, regardless of the backoff.
const STOPPING_TRY_EVERY: Duration = Duration::from_secs(5);

/// Shortens the backoff after a stop: a host that is killed before it has settled its outcomes loses them, and the
/// losses count as crashes.
pub(super) async fn shorten_backoff_when_stopping(shared: Arc<Shared>) {
    shared.stop.drain.cancelled().await;
    loop {
        shared.store.try_now();
        tokio::time::sleep(STOPPING_TRY_EVERY).await;
    }
}

/// Logs the start and the end of each outage, until the worker ends.
pub(super) async fn report_forever(shared: Arc<Shared>) {
    let mut reach = shared.store.reach();
    loop {
        // The sender is in the store, which lives as long as the worker.
        let lost = reach.wait_for(|reach| reach.away().is_some()).await;
        let Some(away) = lost.ok().and_then(|reach| reach.away().cloned()) else {
            return;
        };
        shared
            .health
            .database_responds
            .store(false, Ordering::Relaxed);
        warn!(
            error = away.why,
            "the database is unreachable; trying again after 1, 2, 4 … 60 s"
        );
        if reach
            .wait_for(|reach| reach.away().is_none())
            .await
            .is_err()
        {
            return;
        }
        let after_ms = u64::try_from(away.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        // While all slots are taken, it may be a long time until the next claim.
        shared
            .health
            .database_responds
            .store(true, Ordering::Relaxed);
        info!(after_ms, "the database is reachable again");
        shared.presence.heartbeat_now.notify_one();
        shared.sql.try_logins();
    }
}
