//! Maintenance: creates and drops partitions of the history, cleans up the catalog of lanes, looks for lost releases,
//! and deletes what ended jobs leave behind.
//!
//! Partitions are created for a week ahead, every hour. Still, one may be missing: after the machine was suspended for
//! more than a week, or after a jump of the database's clock. Then it is created as soon as a write has failed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tracing::{debug, info, warn};

use super::Shared;
use super::reach::warn_unless_unreachable;
use crate::store::{Deletion, Leftover};

const PARTITIONS_EVERY: Duration = Duration::from_secs(3600);
/// The wait after an error, and the first one if a partition could not be dropped because a query was reading it.
const PARTITIONS_RETRY: Duration = Duration::from_secs(60);
/// The wait after the creation of a missing partition: writes that still fail are repeated several times a second.
const MISSING_PAUSE: Duration = Duration::from_secs(1);

/// The time for which signals, flows, or keys of gates are examined in each round. The next round continues.
const EXAMINED_FOR: Duration = Duration::from_secs(10);
/// A call that has deleted this many rows is followed by another one, regardless of the time: otherwise, rows could be
/// added faster than they are deleted.
const MANY: i32 = 100;

/// Maintains the partitions and the catalog until the worker ends.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    let (mut signals, mut flows, mut gate_keys) = (None, None, None);
    let mut retry = PARTITIONS_RETRY;
    loop {
        let again = partitions(&shared, &mut retry).await;
        lanes(&shared).await;
        dependencies(&shared).await;
        signals = leftovers(&shared, Leftover::Signals, signals).await;
        flows = leftovers(&shared, Leftover::Flows, flows).await;
        gate_keys = leftovers(&shared, Leftover::GateKeys, gate_keys).await;
        schedules(&shared).await;
        let next_at = Instant::now() + again;
        while notified_before(next_at, &shared.missing_partitions).await {
            create_missing_partitions(&shared).await;
        }
    }
}

/// Waits for a notification until this time. A notification that is noticed only at that time does not count:
/// otherwise, writes that fail again and again would delay the next round for as long as they do.
async fn notified_before(at: Instant, notify: &Notify) -> bool {
    Instant::now() < at
        && tokio::time::timeout_at(at.into(), notify.notified())
            .await
            .is_ok()
}

/// Creates the partitions that writes have found missing.
async fn create_missing_partitions(shared: &Shared) {
    let permit = shared.calls.patient.acquire().await;
    let made = shared.store.prepare_partitions().await;
    drop(permit);
    match made {
        // Another worker has created them.
        Ok(0) => {}
        Ok(made) => info!(made, "created missing partitions of the history"),
        Err(error) => {
            warn_unless_unreachable!(
                error,
                "could not create missing partitions of the history; trying again"
            );
        }
    }
    tokio::time::sleep(MISSING_PAUSE).await;
}

/// Creates and drops partitions. Returns the wait before the next time.
async fn partitions(shared: &Shared, retry: &mut Duration) -> Duration {
    let _permit = shared.calls.patient.acquire().await;
    let made = shared.store.prepare_partitions().await;
    let dropped = shared.store.maintain_partitions().await;
    match (made, dropped) {
        (Ok(made), Ok((dropped, in_use))) => {
            if made > 0 || dropped > 0 {
                info!(
                    made,
                    dropped, in_use, "maintained the partitions of the history"
                );
            }
            wait_after(dropped, in_use, retry)
        }
        (Err(error), _) | (_, Err(error)) => {
            warn_unless_unreachable!(
                error,
                "could not maintain the partitions of the history; trying again in a minute"
            );
            PARTITIONS_RETRY
        }
    }
}

/// The wait after a round. `retry` is the wait if partitions are in use. It doubles for as long as none can be dropped:
/// while a drop waits for a reader, settlements wait behind it, for up to 50 ms for each of these partitions, and a
/// backup may read them for hours.
fn wait_after(dropped: i32, in_use: i32, retry: &mut Duration) -> Duration {
    if dropped > 0 || in_use == 0 {
        *retry = PARTITIONS_RETRY;
    }
    if in_use == 0 {
        return PARTITIONS_EVERY;
    }
    let wait = *retry;
    *retry = (wait * 2).min(PARTITIONS_EVERY);
    wait
}

/// Closes unused lanes and removes closed ones. After an error, the next round tries again.
async fn lanes(shared: &Shared) {
    let _permit = shared.calls.patient.acquire().await;
    match shared.store.maintain_lanes().await {
        Ok((0, 0, 0)) => {}
        Ok((closed, reopened, removed)) => {
            info!(closed, reopened, removed, "maintained the catalog of lanes");
        }
        Err(error) => {
            warn_unless_unreachable!(
                error,
                "could not maintain the catalog of lanes; trying again with the next maintenance"
            )
        }
    }
}

/// Looks for jobs that wait for chains that have ended. After an error, the next round tries again.
async fn dependencies(shared: &Shared) {
    let _permit = shared.calls.patient.acquire().await;
    match shared.store.maintain_dependencies().await {
        Ok((0, 0)) => {}
        Ok((lost, dropped)) => {
            if lost > 0 {
                warn!(
                    chains = lost,
                    "jobs were waiting for chains that had ended; releasing them (please report this)"
                );
            }
            if dropped > 0 {
                info!(
                    chains = dropped,
                    "jobs were waiting for the retry of chains that are no longer kept; cancelling them"
                );
            }
            shared.releases.notify_one();
        }
        Err(error) => {
            warn_unless_unreachable!(
                error,
                "could not look for jobs that wait for chains that have ended; trying again in an hour"
            );
        }
    }
}

/// Deletes signals, flows, or keys of gates that ended jobs have left behind, after this position. Returns the position
/// from which the next round continues.
async fn leftovers(shared: &Shared, what: Leftover, mut after: Option<String>) -> Option<String> {
    let started_at = Instant::now();
    loop {
        let permit = shared.calls.patient.acquire().await;
        let deletion = shared.store.delete_leftovers(what, after.as_deref());
        let deletion = deletion.await;
        drop(permit);
        match deletion {
            Ok(Deletion { reached, deleted }) => {
                if deleted > 0 {
                    debug!(?what, deleted, "deleted what ended jobs have left behind");
                }
                after = reached;
                if after.is_none() || (deleted < MANY && started_at.elapsed() > EXAMINED_FOR) {
                    return after;
                }
            }
            Err(error) => {
                warn_unless_unreachable!(
                    error,
                    "could not delete what ended jobs have left behind; trying again with the next maintenance"
                );
                return after;
            }
        }
    }
}

/// Deletes old rows about due times. After an error, the next round continues.
async fn schedules(shared: &Shared) {
    loop {
        let _permit = shared.calls.patient.acquire().await;
        match shared.store.maintain_schedules().await {
            Ok(0) => break,
            Ok(deleted) => info!(deleted, "deleted old rows about due times of schedules"),
            Err(error) => {
                warn_unless_unreachable!(
                    error,
                    "could not delete old rows about due times; trying again with the next maintenance"
                );
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_that_stay_in_use_are_tried_less_and_less_often() {
        let mut retry = PARTITIONS_RETRY;
        let mut minutes = |dropped, in_use| wait_after(dropped, in_use, &mut retry).as_secs() / 60;
        let waits = [(); 8].map(|()| minutes(0, 2));
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(minutes(1, 1), 1, "the reader has moved on");
        assert_eq!(minutes(0, 1), 2);
        assert_eq!(minutes(0, 0), 60);
        assert_eq!(minutes(0, 1), 1);
    }

    #[tokio::test]
    async fn partitions_that_stay_missing_do_not_delay_the_next_round() {
        let missing = Notify::new();
        missing.notify_one();
        let now = Instant::now();
        assert!(notified_before(now + PARTITIONS_EVERY, &missing).await);
        missing.notify_one();
        assert!(!notified_before(now, &missing).await);
    }
}
