//! The lease of one claim, from its arrival to its settlement.

use std::sync::Arc;
use std::time::Duration;

use crate::job::{Fence, RunEnd};
use crate::sandbox::{AbortHandle, BootTime};
use crate::worker::journal::LiveUsage;

/// A lease is renewed when this fraction of it has passed: less than half, so that there is time for a second try.
const RENEWED_AFTER: f64 = 0.4;

/// The lease of one claim.
pub(super) struct Lease {
    pub(super) fence: Fence,
    pub(super) lease: Duration,
    /// When the claim or the last renewal was sent, plus the lease.
    pub(super) valid_until: BootTime,
    pub(super) abort: AbortHandle,
    /// `None` while the claim waits for a slot.
    pub(super) attempt: Option<StartedAttempt>,
    /// Lost or given up: it is no longer renewed.
    pub(super) over: bool,
    /// Another session may have changed the job since the last renewal: it is renewed now instead of when it is due.
    pub(super) doubted: bool,
    /// A renewal has been sent and has no response yet.
    pub(super) renewing: bool,
}

/// An attempt that has started.
#[derive(Clone)]
pub(in crate::worker) struct StartedAttempt {
    /// The duration to which each renewal extends its lease.
    pub(in crate::worker) lease: Duration,
    /// The time from the abort signal to the hard stop.
    pub(in crate::worker) grace: Duration,
    pub(in crate::worker) usage: Arc<LiveUsage>,
}

impl Lease {
    pub(super) fn new(fence: Fence, claim_sent: BootTime, lease: Duration) -> Self {
        Self {
            fence,
            lease,
            valid_until: claim_sent.plus(lease),
            abort: AbortHandle::new(),
            attempt: None,
            over: false,
            doubted: false,
            renewing: false,
        }
    }

    /// The time until which this worker trusts the lease. `alive_until`: the time until which the worker cannot have
    /// been declared dead, which would free the claim regardless of the lease.
    pub(super) fn trusted_until(&self, alive_until: BootTime) -> BootTime {
        self.valid_until.min(alive_until)
    }

    /// The grace of its attempt; zero for a claim that waits, because nothing runs.
    pub(super) fn grace(&self) -> Duration {
        self.attempt
            .as_ref()
            .map_or(Duration::ZERO, |attempt| attempt.grace)
    }

    /// Lets its attempt run until [`trusted_until`](Self::trusted_until).
    pub(super) fn trust(&self, alive_until: BootTime) {
        if let Some(attempt) = &self.attempt {
            let until = self.trusted_until(alive_until);
            self.abort.trust_until(until, attempt.grace);
        }
    }

    /// True if it has to be renewed now. A claim that waits is renewed only if it is in doubt: it is given back long
    /// before its renewal is due.
    pub(super) fn is_due(&self, now: BootTime) -> bool {
        let is_late = now.plus(self.lease.mul_f64(1.0 - RENEWED_AFTER)) >= self.valid_until;
        !self.over && (self.doubted || (self.attempt.is_some() && is_late))
    }

    /// Starts its attempt, or returns why the attempt may not start. `None` if that is not known yet.
    pub(super) fn start(
        &mut self,
        attempt: &StartedAttempt,
        now: BootTime,
        alive_until: BootTime,
    ) -> Option<Result<AbortHandle, RunEnd>> {
        let trusted_until = self.trusted_until(alive_until);
        if let Some(reason) = self.abort.reason() {
            return Some(Err(RunEnd::Aborted(reason)));
        }
        // Another worker may run it by now. If none does, the job is released and nothing is lost.
        if trusted_until <= now {
            return Some(Err(RunEnd::NotStarted));
        }
        if self.doubted || self.renewing {
            return None;
        }
        self.lease = attempt.lease;
        // Until the first renewal, the lease is that of the claim. A new version of the handler, or a handler that the
        // operator bound to the source, may have a different one.
        self.abort.trust_until(trusted_until, attempt.grace);
        self.attempt = Some(attempt.clone());
        Some(Ok(self.abort.clone()))
    }
}
