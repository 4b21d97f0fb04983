//! Releases jobs that wait for others, as far as settlements have left them over.
//!
//! A settlement releases the jobs that wait for its own in the same transaction, except those that are locked or too many. It asks for the
//! rest to be done at once; a peek finds what another worker has left.

use std::sync::Arc;

use tracing::error;

use super::Shared;

/// Continues releases whenever a settlement or a peek asks for it. An error ends a round: the next peek asks again.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    loop {
        shared.releases.notified().await;
        loop {
            match shared.store.continue_releases().await {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    error!(%error, "cannot release jobs that wait for others; trying again in a second");
                    break;
                }
            }
        }
    }
}
