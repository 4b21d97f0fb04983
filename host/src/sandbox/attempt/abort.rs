//! The abort signal of a running attempt, and the hard stop behind it.

use std::future::pending;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::Notify;

use super::boottime::BootTime;
use crate::job::AbortReason;

/// The maximum grace; longer ones would overflow the clock.
const GRACE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Aborts one attempt. Clones share the signal. The signal fires once, and is never reset. When it fires:
///
/// 1. at once, the guest's abort signal becomes ready, and guest calls with outside effects (log lines, progress,
///    changes to files and state, requests and so on) are refused;
/// 2. after the grace, the guest is stopped wherever it is, in WebAssembly or in a host call.
///
/// The signal also fires when it is read after the attempt's trust has expired, because a process that was frozen
/// continues to run its guests before it checks the leases.
#[derive(Debug, Clone, Default)]
pub struct AbortHandle(Arc<Signal>);

// Created for each attempt and fired for almost none, so it is built from the cheapest parts: tokio's `watch` costs ten
// times as much.
#[derive(Debug, Default)]
struct Signal {
    abort: Mutex<Option<Abort>>,
    changed: Notify,
    /// When trust expires, in nanoseconds of [`BootTime`]; 0 means never.
    trusted_until: AtomicU64,
    /// The grace if trust expires before an abort, in milliseconds.
    grace_ms: AtomicU64,
    /// The signals of the jobs of a batch; empty otherwise.
    parts: Vec<AbortHandle>,
}

#[derive(Debug, Clone, Copy)]
struct Abort {
    reason: AbortReason,
    at: Instant,
    hard_stop_at: Instant,
}

impl AbortHandle {
    /// Creates a signal that has not fired.
    pub fn new() -> Self {
        Self::default()
    }

    /// The signal of an attempt at several jobs, each with a signal of its own. It fires when the signal of the first
    /// job fires, because the attempt acts for that job; when any of them fires for a reason that concerns this worker;
    /// and when all of them have fired. [`follow`](Self::follow) has to be awaited in the meantime.
    pub fn for_batch(parts: Vec<Self>) -> Self {
        Self(Arc::new(Signal {
            parts,
            ..Signal::default()
        }))
    }

    /// Fires the signal of a batch when those of its jobs require it. Never returns.
    pub async fn follow(&self) {
        let parts = self.0.parts.iter();
        let mut aborts: FuturesUnordered<_> = parts.map(Self::aborted).collect();
        while aborts.next().await.is_some() {
            self.check_parts();
        }
        pending().await
    }

    fn check_parts(&self) {
        let parts = &self.0.parts;
        let aborted = |(at, part): (usize, &Self)| {
            let reason = part.reason()?;
            let ends_all = at == 0 || matches!(reason, AbortReason::Error | AbortReason::Shutdown);
            ends_all.then(|| (reason, part.grace_remaining().unwrap_or_default()))
        };
        // If all have fired, the first one is among them.
        if let Some((reason, grace)) = parts.iter().enumerate().find_map(aborted) {
            self.abort(reason, grace);
        }
    }

    /// Fires the signal. If it has fired already, the first reason stays, and the hard stop only moves closer: a lost
    /// lease ends the grace of a timeout.
    pub fn abort(&self, reason: AbortReason, grace: Duration) {
        let at = Instant::now();
        let hard_stop_at = at + grace.min(GRACE_MAX);
        let mut abort = self.lock();
        match &mut *abort {
            None => {
                *abort = Some(Abort {
                    reason,
                    at,
                    hard_stop_at,
                });
            }
            Some(abort) if hard_stop_at < abort.hard_stop_at => abort.hard_stop_at = hard_stop_at,
            Some(_) => return,
        }
        drop(abort);
        self.0.changed.notify_waiters();
    }

    /// Trusts the attempt until this time; after that, the attempt is aborted with this grace. Each renewal of the
    /// lease extends the trust. If this is never called, trust never expires.
    pub fn trust_until(&self, until: BootTime, grace: Duration) {
        let nanos = until.as_nanos().max(1);
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        // Stored first, so that a reader of the time sees the matching grace.
        self.0.grace_ms.store(grace_ms, Ordering::Relaxed);
        self.0.trusted_until.store(nanos, Ordering::Release);
    }

    /// Why the attempt has to stop; `None` while it may continue.
    pub fn reason(&self) -> Option<AbortReason> {
        let reason = self.lock().map(|abort| abort.reason);
        if reason.is_none() && self.trust_has_expired() {
            let grace = Duration::from_millis(self.0.grace_ms.load(Ordering::Relaxed));
            self.abort(AbortReason::Error, grace);
            return self.lock().map(|abort| abort.reason);
        }
        match self.0.parts.first() {
            // The signals of the other jobs take effect through `follow`. If this process was frozen, the trust in
            // those jobs has expired too.
            Some(first) if reason.is_none() && first.reason().is_some() => {
                self.check_parts();
                self.lock().map(|abort| abort.reason)
            }
            _ => reason,
        }
    }

    fn trust_has_expired(&self) -> bool {
        let until = self.0.trusted_until.load(Ordering::Acquire);
        until != 0 && until <= BootTime::now().as_nanos()
    }

    /// The time since the attempt was aborted; `None` while it may continue.
    pub fn aborted_for(&self) -> Option<Duration> {
        self.lock().map(|abort| abort.at.elapsed())
    }

    /// The time until the hard stop; `None` while the attempt may continue.
    pub fn grace_remaining(&self) -> Option<Duration> {
        let abort = *self.lock();
        abort.map(|abort| abort.hard_stop_at.saturating_duration_since(Instant::now()))
    }

    /// Waits until the attempt is aborted.
    pub async fn aborted(&self) {
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

    /// True after the hard stop.
    pub(in crate::sandbox) fn is_hard_stopped(&self) -> bool {
        self.grace_remaining() == Some(Duration::ZERO)
    }

    /// Waits for the hard stop, even if it moves closer during the wait.
    pub(in crate::sandbox) async fn hard_stopped(&self) -> AbortReason {
        loop {
            let mut changed = pin!(self.0.changed.notified());
            changed.as_mut().enable();
            let abort = *self.lock();
            let Some(abort) = abort else {
                changed.await;
                continue;
            };
            tokio::select! {
                () = tokio::time::sleep_until(abort.hard_stop_at.into()) => return abort.reason,
                () = changed => {}
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Abort>> {
        // Nothing panics in the middle of a change.
        self.0.abort.lock().unwrap_or_else(PoisonError::into_inner)
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
            let (started, mut remaining) = (Instant::now(), Duration::MAX);
            for (reason, grace_ms) in &aborts {
                abort.abort(REASONS[*reason], Duration::from_millis(*grace_ms));
                let now = abort.grace_remaining().expect("it was aborted");
                prop_assert!(now <= remaining && now <= Duration::from_millis(*grace_ms));
                remaining = now;
            }
            prop_assert_eq!(abort.reason(), Some(REASONS[aborts[0].0]));
            let closest = aborts.iter().map(|(_, ms)| *ms).min().expect("there is one");
            let late = Duration::from_millis(closest).min(GRACE_MAX).saturating_sub(remaining);
            // The loop takes some time; a stop is never later than requested.
            let took = started.elapsed();
            prop_assert!(late <= took, "{:?} in {:?}", late, took);
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
        assert!(!abort.is_hard_stopped());

        abort.abort(AbortReason::TakenByAnotherWorker, Duration::ZERO);
        assert_eq!(abort.reason(), Some(AbortReason::TimedOut));
        assert!(abort.is_hard_stopped());
    }

    #[test]
    fn an_attempt_stops_when_its_trust_expires_without_an_abort() {
        const GRACE: Duration = Duration::from_secs(3600);
        let abort = AbortHandle::new();
        let now = BootTime::now();
        abort.trust_until(now.plus(Duration::from_secs(60)), GRACE);
        assert_eq!(abort.reason(), None);
        abort.trust_until(now, GRACE);
        assert_eq!(abort.reason(), Some(AbortReason::Error));
        assert!(!abort.is_hard_stopped(), "its grace has just started");
        assert!(
            abort.grace_remaining() <= Some(GRACE),
            "the grace given with the trust"
        );
        abort.trust_until(now.plus(Duration::from_secs(60)), GRACE);
        assert_eq!(abort.reason(), Some(AbortReason::Error), "never reset");
        abort.abort(AbortReason::Error, Duration::ZERO);
        assert!(abort.is_hard_stopped());
    }

    #[tokio::test]
    async fn a_batch_stops_with_its_first_job_or_its_worker_but_not_with_another_job() {
        let parts = || [AbortHandle::new(), AbortHandle::new(), AbortHandle::new()];
        let minute = Duration::from_secs(60);
        let jobs = parts();
        let batch = AbortHandle::for_batch(jobs.to_vec());
        jobs[1].abort(AbortReason::Cancelled, minute);
        batch.check_parts();
        assert_eq!(batch.reason(), None);
        jobs[2].abort(AbortReason::Shutdown, minute);
        batch.check_parts();
        assert_eq!(batch.reason(), Some(AbortReason::Shutdown));
        assert!(batch.grace_remaining() <= Some(minute) && !batch.is_hard_stopped());

        let jobs = parts();
        let batch = AbortHandle::for_batch(jobs.to_vec());
        jobs[0].trust_until(BootTime::now(), minute);
        assert_eq!(batch.reason(), Some(AbortReason::Error), "a frozen host");

        let jobs = parts();
        let batch = AbortHandle::for_batch(jobs.to_vec());
        let waiter = tokio::spawn({
            let batch = batch.clone();
            async move {
                tokio::select! {
                    () = batch.follow() => unreachable!("it never returns"),
                    () = batch.aborted() => {}
                }
            }
        });
        tokio::task::yield_now().await;
        jobs[1].abort(AbortReason::NotFound, minute);
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        jobs[0].abort(AbortReason::Cancelled, Duration::ZERO);
        waiter.await.unwrap();
        assert_eq!(batch.reason(), Some(AbortReason::Cancelled));
        assert!(batch.is_hard_stopped());
    }

    #[test]
    fn limit_an_endless_grace_to_a_day() {
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
            async move { abort.hard_stopped().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        abort.abort(AbortReason::TakenByAnotherWorker, Duration::ZERO);
        assert_eq!(waiter.await.ok(), Some(AbortReason::TimedOut));
    }
}
