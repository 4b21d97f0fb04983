//! Leases the shards of this worker: in a queue that is divided into shards, it claims only from the lanes of its own
//! shards.
//!
//! The database refuses claims from other shards, so correctness does not depend on this module. A worker whose lease
//! may have ended does not serve any shard until it has leased its shards again. A worker that serves no lane of a
//! sharded queue sends nothing.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::Shared;
use super::reach::warn_unless_unreachable;
use crate::job::{LaneId, shard_of};
use crate::sandbox::{BootTime, Digest};
use crate::store::LeasedShards;

/// The interval at which leases are renewed, and shards given up or taken; ±10 %, so that hosts that were started
/// together do not call together.
const RENEWED_EVERY: Duration = Duration::from_secs(1);

/// The leased shards, by queue: how many shards the queue has, and the numbers of the worker's own.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Own(HashMap<String, (u32, HashSet<u32>)>);

impl Own {
    /// True if a lane of this queue is in a leased shard.
    pub(super) fn has(&self, queue: &str, lane: LaneId) -> bool {
        let of_queue = self.0.get(queue);
        of_queue.is_some_and(|(shards, own)| own.contains(&shard_of(lane, *shards)))
    }
}

impl FromIterator<LeasedShards> for Own {
    fn from_iter<T: IntoIterator<Item = LeasedShards>>(leased: T) -> Self {
        let leased = leased.into_iter();
        Self(leased.map(|of| (of.queue, (of.shards, of.own))).collect())
    }
}

/// The sharded queues of which this worker serves a lane.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Wanted {
    queues: Vec<String>,
    serves: i64,
}

/// The shards of one worker.
#[derive(Default)]
pub(super) struct Shards {
    wanted: watch::Sender<Wanted>,
    leased: Mutex<Leased>,
    none: Arc<Own>,
}

#[derive(Default)]
struct Leased {
    own: Arc<Own>,
    /// When the call was sent, plus the lease.
    trusted_until: BootTime,
}

impl Shards {
    fn leased(&self) -> MutexGuard<'_, Leased> {
        // Nothing panics while holding the lock.
        self.leased.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The leased shards; none if the lease can no longer be trusted. The same `Arc` as long as they are the same.
    pub(super) fn own(&self, now: BootTime) -> Arc<Own> {
        let leased = self.leased();
        match now < leased.trusted_until {
            true => leased.own.clone(),
            false => self.none.clone(),
        }
    }

    /// Sets the sharded queues of which this worker serves a lane, and the handlers, sources and tags that it has.
    pub(super) fn want(&self, queues: Vec<String>, serves: &[&str]) {
        let digest = Digest::compute(serves.join("\n").as_bytes());
        let mut first = [0; 8];
        first.copy_from_slice(&digest.0[..8]);
        let wanted = match queues.is_empty() {
            true => Wanted::default(),
            false => Wanted {
                queues,
                serves: i64::from_be_bytes(first),
            },
        };
        self.wanted.send_if_modified(|before| {
            let is_new = *before != wanted;
            *before = wanted;
            is_new
        });
    }

    /// Notes the shards that were leased by a call that was sent at this time. True if the served shards have changed.
    fn note(&self, own: Own, sent: BootTime, lease: Duration) -> bool {
        let mut leased = self.leased();
        let was_over = leased.trusted_until <= sent && !own.0.is_empty();
        leased.trusted_until = sent.plus(lease);
        let is_new = *leased.own != own;
        if is_new {
            leased.own = Arc::new(own);
        }
        is_new || was_over
    }
}

/// Leases and renews until the worker stops; then its shards are free.
pub(super) async fn lease_until_stopped(shared: Arc<Shared>) {
    let mut wanted = shared.shards.wanted.subscribe();
    let mut has_leased = false;
    loop {
        let now = wanted.borrow_and_update().clone();
        if has_leased || !now.queues.is_empty() {
            lease(&shared, &now).await;
        }
        has_leased = !now.queues.is_empty();
        let every = RENEWED_EVERY.mul_f64(rand::random_range(0.9..1.1));
        tokio::select! {
            () = tokio::time::sleep(every), if has_leased => {}
            // The sender outlives this task.
            _ = wanted.changed() => {}
            () = shared.stop.drain.cancelled() => break,
        }
    }
    if has_leased {
        lease(&shared, &Wanted::default()).await;
    }
}

async fn lease(shared: &Shared, wanted: &Wanted) {
    let sent = BootTime::now();
    match shared
        .store
        .lease_shards(&wanted.queues, wanted.serves)
        .await
    {
        Ok(leased) => {
            let lease = leased.iter().map(|of| of.lease).min().unwrap_or_default();
            if shared
                .shards
                .note(leased.into_iter().collect(), sent, lease)
            {
                shared.wakeups.notify(None);
            }
        }
        Err(error) => {
            if !shared.has_incarnation_ended(&error) {
                warn_unless_unreachable!(
                    error,
                    "could not lease shards; trying again within a second"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(shards: u32, own: &[u32]) -> Own {
        let own = LeasedShards {
            queue: "q".into(),
            shards,
            own: own.iter().copied().collect(),
            lease: Duration::from_secs(5),
        };
        [own].into_iter().collect()
    }

    #[test]
    fn shards_are_served_until_the_lease_can_no_longer_be_trusted() {
        let shards = Shards::default();
        let sent = BootTime::now();
        let at = |s| sent.plus(Duration::from_secs(s));
        assert!(!shards.own(sent).has("q", LaneId(3)), "nothing is leased");
        let lease = Duration::from_secs(5);
        assert!(shards.note(own(16, &[3, 5]), sent, lease));
        assert!(shards.own(at(4)).has("q", LaneId(3)));
        assert!(!shards.own(at(4)).has("q", LaneId(4)), "another shard");
        assert!(!shards.own(at(4)).has("other", LaneId(3)));
        assert!(
            !shards.own(at(5)).has("q", LaneId(3)),
            "the lease has expired"
        );
        let before = shards.own(at(4));
        assert!(!shards.note(own(16, &[5, 3]), at(3), lease), "a renewal");
        assert!(Arc::ptr_eq(&before, &shards.own(at(7))));
        assert!(
            shards.note(own(16, &[3, 5]), at(8), lease),
            "it had expired"
        );
        assert!(shards.note(own(8, &[3, 5]), at(9), lease), "another number");
    }

    #[test]
    fn a_change_of_the_served_queues_and_handlers_is_noticed_once() {
        let shards = Shards::default();
        let mut wanted = shards.wanted.subscribe();
        let mut is_new = |queues: &[&str], serves: &[&str]| {
            shards.want(
                queues.iter().map(|queue| (*queue).to_owned()).collect(),
                serves,
            );
            let is_new = wanted.has_changed().unwrap();
            wanted.mark_unchanged();
            is_new
        };
        assert!(!is_new(&[], &["a"]), "no queue has shards");
        assert!(is_new(&["q"], &["a"]));
        assert!(!is_new(&["q"], &["a"]));
        assert!(is_new(&["q"], &["a", "b"]));
        assert!(is_new(&["q"], &["ab"]));
        assert!(is_new(&[], &["ab"]));
    }
}
