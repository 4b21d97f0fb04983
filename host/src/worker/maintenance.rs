//! What must happen now and then: the partitions of the history, and the catalog of lanes.

use std::sync::Arc;
use std::time::Duration;

use tracing::info;

use super::Shared;
use super::reach::warn_unless_unreachable;

const PARTITIONS_EVERY: Duration = Duration::from_secs(3600);
/// Partitions that somebody was reading are tried again soon.
const PARTITIONS_AGAIN: Duration = Duration::from_secs(60);

/// Keeps the partitions and the catalog, for as long as the worker lives.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    loop {
        let again = partitions(&shared).await;
        lanes(&shared).await;
        tokio::time::sleep(again).await;
    }
}

/// Makes and drops partitions; returns when to do it again.
async fn partitions(shared: &Shared) -> Duration {
    let _turn = shared.calls.patient.acquire().await;
    let made = shared.store.prepare_partitions().await;
    let dropped = shared
        .store
        .maintain_partitions(shared.settings.keep_days)
        .await;
    match (made, dropped) {
        (Ok(made), Ok((dropped, in_use))) => {
            if made > 0 || dropped > 0 {
                info!(made, dropped, in_use, "partitions of the history");
            }
            if in_use > 0 {
                PARTITIONS_AGAIN
            } else {
                PARTITIONS_EVERY
            }
        }
        (Err(error), _) | (_, Err(error)) => {
            warn_unless_unreachable!(
                error,
                "could not keep the partitions of the history; trying again in a minute"
            );
            PARTITIONS_AGAIN
        }
    }
}

/// Closes lanes that nobody uses, and removes what is left of them. Where it fails, it is done the next time.
async fn lanes(shared: &Shared) {
    let _turn = shared.calls.patient.acquire().await;
    match shared.store.maintain_lanes().await {
        Ok((0, 0, 0)) => {}
        Ok((closed, reopened, removed)) => info!(closed, reopened, removed, "catalog of lanes"),
        Err(error) => {
            warn_unless_unreachable!(
                error,
                "could not keep the catalog of lanes; trying again with the partitions"
            )
        }
    }
}
