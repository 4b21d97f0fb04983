//! The last steps of a worker: its attempts end, their outcomes are settled, and it unregisters.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tracing::{info, warn};

use super::settler::SettlerTask;
use super::{Shared, logs, slots};
use crate::job::AbortReason;
use crate::store::{Store, StoreError};

/// The time that a worker that stops during an outage waits for the database before its last try to unregister.
const UNREGISTER_TIMEOUT: Duration = Duration::from_secs(5);
/// The time limit for each of the last steps after an immediate stop or a failure: for attempts whose guests were
/// stopped, for writing the last outcomes, and for unregistering.
const LAST_STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// Notes when the worker has been stopping for `drain_timeout`.
pub(super) async fn time_out(shared: Arc<Shared>) {
    shared.stop.stopping().await;
    tokio::time::sleep(shared.settings.drain_timeout).await;
    shared.drain_timed_out.cancel();
}

/// Gives back the claims in line, and waits until all attempts have ended.
pub(super) async fn drain(shared: &Arc<Shared>) {
    slots::release_all(shared).await;
    shared.attempts.tasks.close();
    wait_for_attempts(shared).await;
}

/// Waits for the running attempts, for as long as the settings allow; then aborts them.
async fn wait_for_attempts(shared: &Shared) {
    let running = shared.slots.in_hand();
    if running > 0 {
        info!(running, "waiting for running attempts");
    }
    tokio::select! {
        () = shared.attempts.tasks.wait() => return,
        () = shared.stop.now.cancelled() => {}
        () = shared.drain_timed_out.cancelled() => {}
    }
    let ids = shared.leases.abort_all(AbortReason::Shutdown);
    if !ids.is_empty() {
        warn!(job.ids = ?ids, "aborting attempts that have not finished; their jobs are given back");
    }
    tokio::select! {
        () = shared.attempts.tasks.wait() => {}
        () = attempts_have_had_their_time(shared) => warn!(
            job.ids = ?shared.leases.ids(),
            "attempts have not ended although their guests were stopped, or their outcomes have no space; not waiting for them"
        ),
    }
}

/// Aborts all attempts of a worker that cannot settle them, and waits until it is certain that no guest is running: as
/// soon as the worker is unregistered, other workers run their jobs.
pub(super) async fn abort_attempts(shared: &Shared) {
    let ids = shared.leases.abort_all(AbortReason::Shutdown);
    if !ids.is_empty() {
        warn!(job.ids = ?ids, "aborting attempts whose outcomes cannot be settled; their jobs are given back");
    }
    shared.attempts.tasks.close();
    let within = shared
        .leases
        .longest_grace()
        .saturating_add(LAST_STEP_TIMEOUT);
    let ended = tokio::time::timeout(within, shared.attempts.tasks.wait()).await;
    if ended.is_err() {
        warn!(
            job.ids = ?shared.leases.ids(),
            "attempts have not ended although their guests were stopped; not waiting for them"
        );
    }
}

/// Waits until it is certain that no guest is running after an immediate stop. An attempt that is still left then is,
/// for instance, in middleware that never ends.
async fn attempts_have_had_their_time(shared: &Shared) {
    shared.stop.now.cancelled().await;
    let grace = shared.leases.longest_grace();
    tokio::time::sleep(grace.saturating_add(LAST_STEP_TIMEOUT)).await;
}

/// Waits until the settler has written or given up the outcomes of all attempts, which have ended; after an immediate
/// stop, for a limited time.
///
/// # Errors
/// If the settler has failed.
pub(super) async fn settle_last_outcomes(
    shared: &Shared,
    mut settler: SettlerTask,
) -> anyhow::Result<()> {
    settler.finish_soon();
    match before_last_deadline(shared, settler.ended()).await {
        Some(ended) => ended.context("the settler has failed"),
        None => {
            settler.abort();
            warn!(
                job.ids = ?shared.leases.ids(),
                "could not write the last outcomes in time; these jobs run again once their leases have expired"
            );
            Ok(())
        }
    }
}

/// Stores the last log lines and unregisters the worker.
///
/// # Errors
/// If the worker could not continue, with the reason.
pub(super) async fn leave(shared: &Shared) -> anyhow::Result<()> {
    shared.store.try_now();
    logs::finish(shared).await;
    if let Some(why) = shared.presence.fatal.get() {
        anyhow::bail!("{why}");
    }
    match before_last_deadline(shared, unregister(shared)).await {
        Some(Ok(())) => {}
        Some(Err(error)) => {
            warn!(%error, "could not unregister; this worker will be listed as dead in 90 s");
        }
        None => warn!("could not unregister in time; this worker will be listed as dead in 90 s"),
    }
    Ok(())
}

/// Unregisters a worker that has failed: its id and its jobs are free at once, and its supervisor may restart it
/// elsewhere.
pub(super) async fn leave_after_failure(store: &Store) {
    store.try_now();
    match tokio::time::timeout(LAST_STEP_TIMEOUT, store.unregister()).await {
        Ok(Ok(())) => {}
        // It is no longer registered, which may be why it has failed.
        Ok(Err(error)) if error.is_incarnation_ended() || error.is_superseded() => {}
        Ok(Err(error)) => {
            warn!(%error, "could not unregister; this worker will be listed as dead in 90 s");
        }
        Err(_) => {
            warn!("could not unregister in time; this worker will be listed as dead in 90 s");
        }
    }
}

/// Unregisters without waiting for the backoff: otherwise attempts that were lost in an outage would count as crashes.
/// During an outage it tries twice.
async fn unregister(shared: &Shared) -> Result<(), StoreError> {
    let store = &shared.store;
    store.try_now();
    match store.unregister().await {
        Err(error) if error.is_unreachable() => {
            // Tries again whether or not the database became reachable in time.
            let _ = tokio::time::timeout(UNREGISTER_TIMEOUT, store.ready()).await;
            store.try_now();
            store.unregister().await
        }
        response => response,
    }
}

/// The result of this work. `None` if it is not done [`LAST_STEP_TIMEOUT`] after an immediate stop.
async fn before_last_deadline<T>(shared: &Shared, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        done = work => Some(done),
        () = async {
            shared.stop.now.cancelled().await;
            tokio::time::sleep(LAST_STEP_TIMEOUT).await;
        } => None,
    }
}
