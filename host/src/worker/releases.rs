//! Continues releases that a settlement could not finish.
//!
//! A settlement releases the jobs that wait for those that it ends, in the same transaction, except locked ones and
//! those beyond a maximum number. It requests that the rest be released at once; a peek finds what another worker has
//! left.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::reach::warn_unless_unreachable;

/// The pause after an error.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Continues releases whenever a settlement or a peek requests it, until nothing is left to do at once.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    loop {
        shared.releases.notified().await;
        let mut has_failed = false;
        loop {
            match shared.store.continue_releases().await {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    if !std::mem::replace(&mut has_failed, true) {
                        warn_unless_unreachable!(
                            error,
                            "cannot release jobs that wait for others; trying again each second"
                        );
                    }
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        }
    }
}
