//! Continues releases that a settlement could not finish.
//!
//! A settlement releases the jobs that wait for those that it ends, in the same transaction, except locked ones and
//! those beyond a maximum number. It requests that the rest be released at once; a peek finds what another worker has
//! left.

use std::sync::Arc;

use super::Shared;
use super::reach::warn_unless_unreachable;

/// Continues releases whenever a settlement or a peek requests it. An error ends a round: the next peek requests it
/// again.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    loop {
        shared.releases.notified().await;
        loop {
            match shared.store.continue_releases().await {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    warn_unless_unreachable!(
                        error,
                        "cannot release jobs that wait for others; trying again in a second"
                    );
                    break;
                }
            }
        }
    }
}
