//! What wakes the claimer from outside: notifications, and changes of the handlers folder.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::{info, warn};

use super::Shared;
use crate::store::Listener;
use crate::store::connect::Connector;

/// Listens for as long as the worker lives; connects again after 1, 2, 4 … 60 s (SPEC row A7).
pub(super) async fn listen_forever(shared: Arc<Shared>, connector: Connector) {
    if !shared.settings.notify {
        return;
    }
    let mut failures = 0;
    loop {
        match Listener::start(&connector).await {
            Ok(mut listener) => {
                failures = 0;
                shared.listening.store(true, Ordering::Relaxed);
                shared.listens_anew.store(true, Ordering::Relaxed);
                // Whatever was notified while nobody listened is found by this look.
                shared.look.notify_one();
                while let Some(wakeup) = listener.next().await {
                    let queues = &shared.settings.queues;
                    if queues.is_empty() || queues.contains(&wakeup.queue) {
                        shared.look.notify_one();
                    }
                }
                shared.listening.store(false, Ordering::Relaxed);
                info!("the listening connection ended; polling until it stands again");
            }
            Err(error) => warn!(%error, "cannot listen for notifications; polling meanwhile"),
        }
        tokio::time::sleep(reconnect_after(failures, rand::random())).await;
        failures += 1;
    }
}

/// A new handler may have jobs that wait for it.
pub(super) async fn watch_handlers(shared: Arc<Shared>) {
    let mut changes = shared.catalog.changed();
    while changes.changed().await.is_ok() {
        shared.look.notify_one();
        let names = shared.catalog.current().names();
        if let Err(error) = shared.store.heartbeat(shared.incarnation, &names).await {
            warn!(%error, "could not publish the changed list of handlers; the next heartbeat does");
        }
    }
}

/// 1, 2, 4 … 60 s, of which a random half. `random` is uniform in `0.0..1.0`.
pub(super) fn reconnect_after(failures: u32, random: f64) -> Duration {
    Duration::from_secs(1 << failures.min(6))
        .min(Duration::from_secs(60))
        .mul_f64(0.5 + 0.5 * random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reconnects_come_after_one_two_four_and_at_most_sixty_seconds() {
        let waits: Vec<u64> = (0..8).map(|n| reconnect_after(n, 1.0).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
    }
}
