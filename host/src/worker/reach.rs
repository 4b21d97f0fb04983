//! Says when the database is not reached, and when it is again: once each. Who has lost it meanwhile is silent.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tracing::{info, warn};

use super::Shared;

/// Warns of what the database has not done. Where there is no connection, [`tell_forever`] has said so.
macro_rules! warn_unless_unreachable {
    ($error:ident, $($rest:tt)+) => {
        match $error.is_unreachable() {
            true => tracing::debug!(error = %$error, $($rest)+),
            false => tracing::warn!(error = %$error, $($rest)+),
        }
    };
}
pub(super) use warn_unless_unreachable;

/// For as long as the worker lives.
pub(super) async fn tell_forever(shared: Arc<Shared>) {
    let mut reach = shared.store.reach();
    loop {
        // The sender is in the store, which lives as long as the worker.
        let lost = reach.wait_for(|reach| reach.away().is_some()).await;
        let Some(away) = lost.ok().and_then(|reach| reach.away().cloned()) else {
            return;
        };
        shared.database_answers.store(false, Ordering::Relaxed);
        warn!(
            error = away.why,
            "the database is not reached; trying again after 1, 2, 4 … 60 s"
        );
        if reach
            .wait_for(|reach| reach.away().is_none())
            .await
            .is_err()
        {
            return;
        }
        let after_ms = u64::try_from(away.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        // A worker whose slots are full may not claim for long.
        shared.database_answers.store(true, Ordering::Relaxed);
        info!(after_ms, "the database is reached again");
        shared.heartbeat_now.notify_one();
    }
}
