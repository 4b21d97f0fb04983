//! The signal that tells a running attempt to stop, with the hard stop behind it.

use std::future::pending;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::job::AbortReason;

/// Stands in for "never" where a grace is too long for the clock.
const GRACE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Tells one attempt to stop. Clones share the signal. It turns once and never back:
///
/// 1. at once, the guest's abort signal is ready, and calls of the guest with an effect outside
///    (log, progress, changes of files) are refused;
/// 2. after the grace, the guest is stopped wherever it is, in WebAssembly or in a host call.
#[derive(Debug, Clone)]
pub struct AbortHandle(watch::Sender<Option<Turned>>);

#[derive(Debug, Clone, Copy)]
struct Turned {
    reason: AbortReason,
    kill_at: Instant,
}

impl Default for AbortHandle {
    fn default() -> Self {
        Self::new()
    }
}

impl AbortHandle {
    /// A signal that has not turned.
    pub fn new() -> Self {
        Self(watch::Sender::new(None))
    }

    /// Turns the signal. When it has turned already, the first reason stays, and the hard stop
    /// only ever moves closer: a lost lease ends the grace of a time-out.
    pub fn abort(&self, reason: AbortReason, grace: Duration) {
        let kill_at = Instant::now() + grace.min(GRACE_MAX);
        self.0.send_if_modified(|turned| match turned {
            None => {
                *turned = Some(Turned { reason, kill_at });
                true
            }
            Some(turned) if kill_at < turned.kill_at => {
                turned.kill_at = kill_at;
                true
            }
            Some(_) => false,
        });
    }

    /// Why the attempt has to stop; none while it may go on.
    pub fn reason(&self) -> Option<AbortReason> {
        self.0.borrow().map(|turned| turned.reason)
    }

    /// How long until the hard stop; none while the attempt may go on.
    pub fn grace_remaining(&self) -> Option<Duration> {
        let turned = *self.0.borrow();
        turned.map(|turned| turned.kill_at.saturating_duration_since(Instant::now()))
    }

    /// Waits until the signal turns.
    pub async fn turned(&self) {
        // `self` keeps a sender alive, so the channel cannot close while this waits.
        if self.0.subscribe().wait_for(Option::is_some).await.is_err() {
            pending().await
        }
    }

    /// True from the hard stop on.
    pub(super) fn is_killed(&self) -> bool {
        self.grace_remaining() == Some(Duration::ZERO)
    }

    /// Waits until the hard stop, also when it moves closer meanwhile.
    pub(super) async fn killed(&self) -> AbortReason {
        let mut changes = self.0.subscribe();
        loop {
            let turned = *changes.borrow_and_update();
            let hard_stop = async {
                match turned {
                    Some(turned) => {
                        tokio::time::sleep_until(turned.kill_at.into()).await;
                        turned.reason
                    }
                    None => pending().await,
                }
            };
            tokio::select! {
                reason = hard_stop => return reason,
                _ = changes.changed() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn an_endless_grace_is_a_day() {
        let abort = AbortHandle::new();
        abort.abort(AbortReason::Shutdown, Duration::MAX);
        assert!(abort.grace_remaining() <= Some(GRACE_MAX));
    }

    #[tokio::test]
    async fn whoever_waits_for_the_hard_stop_hears_of_one_that_moved_closer() {
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
