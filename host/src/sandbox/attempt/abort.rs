//! The abort signal of a running attempt, and the hard stop behind it.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::boottime::BootTime;
use crate::job::AbortReason;

/// The maximum grace; longer ones would overflow the clock.
const GRACE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Aborts one attempt. Clones share the signal. It turns once and never back:
///
/// 1. at once, the guest's abort signal is ready, and guest calls with outside effects (log, progress, file changes)
///    are refused;
/// 2. after the grace, the guest is stopped wherever it is, in WebAssembly or in a host call.
///
/// It also turns when it is read after the attempt's trust has expired: a process that was frozen continues with its
/// guests before it checks the leases.
#[derive(Debug, Clone, Default)]
pub struct AbortHandle(Arc<Signal>);

// Created for each attempt and turned for almost none, so it is built from the cheapest parts: tokio's `watch` costs
// ten times as much.
#[derive(Debug, Default)]
struct Signal {
    turned: Mutex<Option<Turned>>,
    changed: Notify,
    /// When trust expires, in nanoseconds of [`BootTime`]; 0 means never.
    trusted_until: AtomicU64,
    /// The grace if trust expires before an abort, milliseconds.
    grace_ms: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
struct Turned {
    reason: AbortReason,
    at: Instant,
    kill_at: Instant,
}

impl AbortHandle {
    /// Creates a signal that has not turned.
    pub fn new() -> Self {
        Self::default()
    }

    /// Turns the signal. If it has turned already, the first reason stays, and the hard stop only moves closer: a
    /// lost lease ends the grace of a timeout.
    pub fn abort(&self, reason: AbortReason, grace: Duration) {
        let at = Instant::now();
        let kill_at = at + grace.min(GRACE_MAX);
        let mut turned = self.lock();
        match &mut *turned {
            None => {
                *turned = Some(Turned {
                    reason,
                    at,
                    kill_at,
                });
            }
            Some(turned) if kill_at < turned.kill_at => turned.kill_at = kill_at,
            Some(_) => return,
        }
        drop(turned);
        self.0.changed.notify_waiters();
    }

    /// Trusts the attempt until then; afterwards it is aborted with this grace. Without a call, trust never expires.
    /// Renewing the lease extends it.
    pub fn trust_until(&self, until: BootTime, grace: Duration) {
        let nanos = until.as_nanos().max(1);
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        // Stored first, so that a reader of the time sees the matching grace.
        self.0.grace_ms.store(grace_ms, Ordering::Relaxed);
        self.0.trusted_until.store(nanos, Ordering::Release);
    }

    /// Why the attempt has to stop; `None` while it may continue.
    pub fn reason(&self) -> Option<AbortReason> {
        let reason = self.lock().map(|turned| turned.reason);
        if reason.is_none() && self.has_lapsed() {
            let grace = Duration::from_millis(self.0.grace_ms.load(Ordering::Relaxed));
            self.abort(AbortReason::Error, grace);
            return self.lock().map(|turned| turned.reason);
        }
        reason
    }

    fn has_lapsed(&self) -> bool {
        let until = self.0.trusted_until.load(Ordering::Acquire);
        until != 0 && until <= BootTime::now().as_nanos()
    }

    /// How long ago the signal turned; `None` while the attempt may continue.
    pub fn turned_for(&self) -> Option<Duration> {
        self.lock().map(|turned| turned.at.elapsed())
    }

    /// How long until the hard stop; `None` while the attempt may continue.
    pub fn grace_remaining(&self) -> Option<Duration> {
        let turned = *self.lock();
        turned.map(|turned| turned.kill_at.saturating_duration_since(Instant::now()))
    }

    /// Waits until the signal turns.
    pub async fn turned(&self) {
        loop {
            let mut changed = pin!(self.0.changed.notified());
            // Registers the waiter now, so that a change between the check and the await is not missed.
            changed.as_mut().enable();
            if self.reason().is_some() {
                return;
            }
            changed.await;
        }
    }

    /// True from the hard stop on.
    pub(in crate::sandbox) fn is_killed(&self) -> bool {
        self.grace_remaining() == Some(Duration::ZERO)
    }

    /// Waits for the hard stop, even if it moves closer meanwhile.
    pub(in crate::sandbox) async fn killed(&self) -> AbortReason {
        loop {
            let mut changed = pin!(self.0.changed.notified());
            changed.as_mut().enable();
            let turned = *self.lock();
            let Some(turned) = turned else {
                changed.await;
                continue;
            };
            tokio::select! {
                () = tokio::time::sleep_until(turned.kill_at.into()) => return turned.reason,
                () = changed => {}
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Turned>> {
        // Nothing panics in the middle of a change.
        self.0.turned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const REASONS: [AbortReason; 7] = [
        AbortReason::TakenByAnotherWorker,
        AbortReason::AlreadyCompleted,
        AbortReason::NotFound,
        AbortReason::Error,
        AbortReason::TimedOut,
        AbortReason::Cancelled,
        AbortReason::Shutdown,
    ];

    proptest! {
        #[test]
        fn the_first_abort_gives_the_reason_and_the_closest_hard_stop_counts(
            aborts in prop::collection::vec((0..REASONS.len(), 0_u64..10_000_000), 1..10),
        ) {
            let abort = AbortHandle::new();
            let mut remaining = Duration::MAX;
            for (reason, grace_ms) in &aborts {
                abort.abort(REASONS[*reason], Duration::from_millis(*grace_ms));
                let now = abort.grace_remaining().expect("it has turned");
                prop_assert!(now <= remaining && now <= Duration::from_millis(*grace_ms));
                remaining = now;
            }
            prop_assert_eq!(abort.reason(), Some(REASONS[aborts[0].0]));
            let closest = aborts.iter().map(|(_, ms)| *ms).min().expect("there is one");
            let late = Duration::from_millis(closest).min(GRACE_MAX).saturating_sub(remaining);
            // Less the duration of the loop; a stop is never later than asked for.
            prop_assert!(late < Duration::from_secs(10), "{:?}", late);
        }
    }

    #[test]
    fn the_first_reason_stays_while_the_hard_stop_only_moves_closer() {
        let abort = AbortHandle::new();
        assert_eq!(abort.reason(), None);
        assert_eq!(abort.grace_remaining(), None);

        abort.abort(AbortReason::TimedOut, Duration::from_secs(60));
        abort.abort(AbortReason::Cancelled, Duration::from_secs(3600));
        assert_eq!(abort.reason(), Some(AbortReason::TimedOut));
        assert!(abort.grace_remaining() <= Some(Duration::from_secs(60)));
        assert!(!abort.is_killed());

        abort.abort(AbortReason::TakenByAnotherWorker, Duration::ZERO);
        assert_eq!(abort.reason(), Some(AbortReason::TimedOut));
        assert!(abort.is_killed());
    }

    #[test]
    fn an_attempt_stops_when_its_trust_expires_without_an_abort() {
        const GRACE: Duration = Duration::from_secs(5);
        let abort = AbortHandle::new();
        let now = BootTime::now();
        abort.trust_until(now.plus(Duration::from_secs(60)), GRACE);
        assert_eq!(abort.reason(), None);
        abort.trust_until(now, GRACE);
        assert_eq!(abort.reason(), Some(AbortReason::Error));
        assert!(!abort.is_killed(), "its grace has just started");
        assert!(
            abort.grace_remaining() <= Some(GRACE),
            "the grace given with the trust"
        );
        abort.trust_until(now.plus(Duration::from_secs(60)), GRACE);
        assert_eq!(abort.reason(), Some(AbortReason::Error), "never back");
        abort.abort(AbortReason::Error, Duration::ZERO);
        assert!(abort.is_killed());
    }

    #[test]
    fn an_endless_grace_is_a_day() {
        let abort = AbortHandle::new();
        abort.abort(AbortReason::Shutdown, Duration::MAX);
        assert!(abort.grace_remaining() <= Some(GRACE_MAX));
    }

    #[tokio::test]
    async fn a_waiter_notices_a_hard_stop_that_moved_closer() {
        let abort = AbortHandle::new();
        abort.abort(AbortReason::TimedOut, Duration::from_secs(3600));
        let waiter = tokio::spawn({
            let abort = abort.clone();
            async move { abort.killed().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        abort.abort(AbortReason::TakenByAnotherWorker, Duration::ZERO);
        assert_eq!(waiter.await.ok(), Some(AbortReason::TimedOut));
    }
}
