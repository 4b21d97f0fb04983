//! Wakes the claimer: after notifications, retries, ends of jobs, and changes to the handlers folder.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, bail};
use tokio::sync::Notify;
use tracing::{debug, info, warn};

use super::Shared;
use crate::job::{Incarnation, LaneId};
use crate::store::connect::{Connector, backoff};
use crate::store::{ECHO_TIMEOUT, Listener, Notification, Wakeup};

/// Wakeups for the claimer.
#[derive(Default)]
pub(super) struct Wakeups {
    signal: Notify,
    pending: Mutex<Pending>,
}

#[derive(Default)]
struct Pending {
    /// Lanes that may have jobs.
    lanes: HashSet<LaneId>,
    /// Lanes behind limits on running jobs, one of whose jobs has ended.
    freed: HashSet<LaneId>,
    /// The number of attempts that have ended, of handlers whose concurrent attempts this host limits.
    freed_handlers: HashMap<Arc<str>, usize>,
    /// True if jobs wait for such an end.
    wait_for_ends: bool,
    /// True if something else may have changed.
    other: bool,
}

impl Pending {
    /// True if jobs may start that have waited for an end.
    fn is_freed(&self) -> bool {
        self.wait_for_ends && !(self.freed.is_empty() && self.freed_handlers.is_empty())
    }
}

impl Wakeups {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        // Nothing panics while holding the lock.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the claimer to look into this lane; `None` means all lanes.
    pub(super) fn notify(&self, lane: Option<LaneId>) {
        match lane {
            Some(lane) => _ = self.pending().lanes.insert(lane),
            None => self.pending().other = true,
        }
        self.signal.notify_one();
    }

    /// Notes that a job of a lane behind a limit on running jobs has ended, and wakes the claimer if others wait for
    /// that.
    pub(super) fn freed(&self, lane: LaneId) {
        let mut pending = self.pending();
        pending.freed.insert(lane);
        if pending.is_freed() {
            self.signal.notify_one();
        }
    }

    /// Notes that an attempt of a limited handler no longer counts on this host, and wakes the claimer if others wait
    /// for that.
    pub(super) fn freed_handler(&self, handler: &Arc<str>) {
        let mut pending = self.pending();
        *pending.freed_handlers.entry(handler.clone()).or_default() += 1;
        if pending.is_freed() {
            self.signal.notify_one();
        }
    }

    /// Sets whether jobs wait for the end of another one.
    pub(super) fn wait_for_ends(&self, wait: bool) {
        let mut pending = self.pending();
        pending.wait_for_ends = wait;
        if pending.is_freed() {
            self.signal.notify_one();
        }
    }

    /// Takes the lanes behind limits in which a job has ended, and the number of ended attempts of each limited
    /// handler.
    pub(super) fn take_freed(&self) -> (HashSet<LaneId>, HashMap<Arc<str>, usize>) {
        let mut pending = self.pending();
        let lanes = std::mem::take(&mut pending.freed);
        (lanes, std::mem::take(&mut pending.freed_handlers))
    }

    /// Waits for a wakeup. Returns at once if there was one since the last call.
    pub(super) async fn notified(&self) {
        self.signal.notified().await;
    }

    /// Drops lanes that this worker does not serve. True if any wakeup is left.
    pub(super) fn retain(&self, serves: impl Fn(LaneId) -> bool) -> bool {
        let mut pending = self.pending();
        pending.lanes.retain(|lane| serves(*lane));
        pending.other || !pending.lanes.is_empty() || pending.is_freed()
    }

    /// Takes the lanes to look into; `None` means all lanes.
    pub(super) fn take(&self) -> Option<HashSet<LaneId>> {
        let mut pending = self.pending();
        let lanes = std::mem::take(&mut pending.lanes);
        let other = std::mem::take(&mut pending.other);
        (!other).then_some(lanes)
    }
}

/// The state of the listening connection.
#[derive(Default)]
pub(super) struct ListenerState {
    /// True while the listening connection is open.
    pub(super) connected: AtomicBool,
    /// True after it was opened (again), until the next request for notifications.
    pub(super) reconnected: AtomicBool,
}

/// Listens until the worker ends. After a failure that is not an outage, it backs off in the same way as after an
/// outage.
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
                info!("the listening connection ended; polling until it is open again");
            }
            Err(error) => {
                let why = format!("{error:#}");
                // `reach` reports outages of the store's address.
                let is_outage = is_away && shared.store.reach().borrow().away().is_some();
                match is_outage || last_warning == why {
                    true => debug!("{why}; polling in the meantime"),
                    false => {
                        warn!("{why}; polling in the meantime");
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
    let mut incarnations = shared.presence.incarnation.subscribe();
    let incarnation = *incarnations.borrow_and_update();
    // Through a transaction pooler, LISTEN would take effect in sessions that others use.
    let is_pooled = connector.shares_sessions().await;
    if is_pooled.context("cannot listen for notifications")? {
        bail!(
            "notifications do not arrive through {}, which is a transaction pooler; set ROUSE_LISTEN_URL to a direct address of the \
             same database, or set notify = false",
            connector.target()
        );
    }
    let mut listener = Listener::start(connector, incarnation)
        .await
        .context("cannot listen for notifications")?;
    if let Err(why) = test_delivery(shared, connector, &mut listener, incarnation).await {
        listener.close().await;
        return Err(why);
    }
    shared.listener.connected.store(true, Ordering::Relaxed);
    shared.listener.reconnected.store(true, Ordering::Relaxed);
    // Notifications may have been missed: look for jobs and schedules, renew all leases, and check for
    // challenges.
    shared.wakeups.notify(None);
    shared.leases.doubt(None);
    shared.presence.challenges.notify();
    shared.schedules.notify_one();
    loop {
        let received = tokio::select! {
            received = listener.next() => received,
            // A new incarnation has a channel of its own. The sender outlives this task.
            _ = incarnations.changed() => None,
        };
        match received {
            Some(Notification::Wakeup(Wakeup { queue, lane })) => {
                let queues = &shared.settings.queues;
                if queues.is_empty() || queues.contains(&queue) {
                    shared.wakeups.notify(lane);
                }
            }
            // Only a hint: the renewal of the lease returns what has happened to the job.
            Some(Notification::Changed(job)) => {
                shared.leases.doubt(job);
                if job.is_none() {
                    // This incarnation may be over.
                    shared.presence.heartbeat_now.notify_one();
                }
            }
            Some(Notification::Schedules) => shared.schedules.notify_one(),
            Some(Notification::Challenged) => shared.presence.challenges.notify(),
            // A late echo.
            Some(Notification::Echo) => {}
            None => break,
        }
    }
    shared.listener.connected.store(false, Ordering::Relaxed);
    Ok(())
}

/// Tests whether notifications arrive.
async fn test_delivery(
    shared: &Shared,
    connector: &Connector,
    listener: &mut Listener,
    incarnation: Incarnation,
) -> anyhow::Result<()> {
    shared
        .store
        .echo(incarnation)
        .await
        .context("cannot test whether notifications arrive")?;
    if !listener.receives_echo(ECHO_TIMEOUT).await {
        bail!(
            "notifications do not arrive through {}: it is another database, or a pooler; set ROUSE_LISTEN_URL to a direct address of the \
             same database, or set notify = false",
            connector.target()
        );
    }
    Ok(())
}
