//! What wakes the claimer from outside: notifications, and changes of the handlers folder.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, bail};
use tokio::sync::Notify;
use tracing::{debug, info, warn};

use super::Shared;
use crate::job::{Incarnation, LaneId};
use crate::store::connect::{Connector, backoff};
use crate::store::{ECHO_WITHIN, Heard, Listener, Wakeup};

/// Who rings for the claimer, and why.
#[derive(Default)]
pub(super) struct Wakeups {
    rung: Notify,
    noted: Mutex<Noted>,
}

#[derive(Default)]
struct Noted {
    /// There may be jobs in these lanes.
    lanes: HashSet<LaneId>,
    /// Something else may have changed.
    other: bool,
}

impl Wakeups {
    fn noted(&self) -> MutexGuard<'_, Noted> {
        // Nothing panics while it holds the lock.
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wants the claimer to look now, into this lane; none: everywhere.
    pub(super) fn ring(&self, lane: Option<LaneId>) {
        match lane {
            Some(lane) => _ = self.noted().lanes.insert(lane),
            None => self.noted().other = true,
        }
        self.rung.notify_one();
    }

    /// Waits until somebody rings, or has rung since the last time.
    pub(super) async fn rung(&self) {
        self.rung.notified().await;
    }

    /// Drops what nobody here can use; true where anything is left to look for.
    pub(super) fn keep(&self, useful: impl Fn(LaneId) -> bool) -> bool {
        let mut noted = self.noted();
        noted.lanes.retain(|lane| useful(*lane));
        noted.other || !noted.lanes.is_empty()
    }

    /// Takes what was noted: the lanes to look into; none: everywhere.
    pub(super) fn take(&self) -> Option<HashSet<LaneId>> {
        let noted = std::mem::take(&mut *self.noted());
        (!noted.other).then_some(noted.lanes)
    }
}

/// Whether the worker receives notifications.
#[derive(Default)]
pub(super) struct ListenerState {
    /// True while the listening connection is open.
    pub(super) connected: AtomicBool,
    /// True after it was opened (again), until a look follows.
    pub(super) reconnected: AtomicBool,
}

/// Listens until the worker ends. After a failure that is not an outage it backs off in the same way.
pub(super) async fn listen_forever(shared: Arc<Shared>, connector: Connector) {
    if !shared.settings.notify {
        return;
    }
    let mut failures = 0;
    let mut last_warning = String::new();
    loop {
        let ended = listen(&shared, &connector).await;
        let is_away = connector.reach().borrow().away().is_some();
        match ended {
            Ok(()) => {
                failures = 0;
                last_warning.clear();
                info!("the listening connection ended; polling until it stands again");
            }
            Err(error) => {
                let why = format!("{error:#}");
                // `reach` reports outages of the store's address.
                let is_outage = is_away && shared.store.reach().borrow().away().is_some();
                match is_outage || last_warning == why {
                    true => debug!("{why}; polling meanwhile"),
                    false => {
                        warn!("{why}; polling meanwhile");
                        last_warning = why;
                    }
                }
            }
        }
        match is_away {
            true => connector.ready().await,
            false => {
                tokio::time::sleep(backoff(failures, rand::random())).await;
                failures += 1;
            }
        }
    }
}

/// Listens until the connection ends.
async fn listen(shared: &Shared, connector: &Connector) -> anyhow::Result<()> {
    let mut reborn = shared.presence.incarnation.subscribe();
    let incarnation = *reborn.borrow_and_update();
    // It would listen in sessions of others, for as long as those last.
    let is_pooled = connector.shares_sessions().await;
    if is_pooled.context("cannot listen for notifications")? {
        bail!(
            "notifications do not arrive at {}: a transaction pooler is in between; set ROUSE_LISTEN_URL to a direct address of the \
             same database, or notify = false",
            connector.target()
        );
    }
    let mut listener = Listener::start(connector, incarnation)
        .await
        .context("cannot listen for notifications")?;
    if let Err(why) = try_out(shared, connector, &mut listener, incarnation).await {
        listener.leave().await;
        return Err(why);
    }
    shared.listener.connected.store(true, Ordering::Relaxed);
    shared.listener.reconnected.store(true, Ordering::Relaxed);
    // Whatever was notified while nobody listened is found by this look, and by asking for all that runs.
    shared.wakeups.ring(None);
    shared.leases.doubt(None);
    shared.presence.challenges.ring();
    loop {
        let heard = tokio::select! {
            heard = listener.next() => heard,
            // A new life has a channel of its own. The sender lives as long as the worker.
            _ = reborn.changed() => None,
        };
        match heard {
            Some(Heard::Wakeup(Wakeup { queue, lane })) => {
                let queues = &shared.settings.queues;
                if queues.is_empty() || queues.contains(&queue) {
                    shared.wakeups.ring(lane);
                }
            }
            // A hint: what has become of the job is asked of the database.
            Some(Heard::Changed(job)) => {
                shared.leases.doubt(job);
                if job.is_none() {
                    // Perhaps this life is over.
                    shared.presence.heartbeat_now.notify_one();
                }
            }
            Some(Heard::Challenged) => shared.presence.challenges.ring(),
            // One that came late.
            Some(Heard::Echo) => {}
            None => break,
        }
    }
    shared.listener.connected.store(false, Ordering::Relaxed);
    Ok(())
}

/// Tries out whether notifications arrive.
async fn try_out(
    shared: &Shared,
    connector: &Connector,
    listener: &mut Listener,
    incarnation: Incarnation,
) -> anyhow::Result<()> {
    shared
        .store
        .echo(incarnation)
        .await
        .context("cannot try out whether notifications arrive")?;
    if !listener.hears_the_echo(ECHO_WITHIN).await {
        bail!(
            "notifications do not arrive at {}: it is another database, or a pooler is in between; set \
             ROUSE_LISTEN_URL to a direct address of the same database, or notify = false",
            connector.target()
        );
    }
    Ok(())
}
