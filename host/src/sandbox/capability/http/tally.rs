//! What the requests of one attempt add up to. Shared with those that are under way.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Fault;
use crate::sandbox::Meter;

/// Requests of one attempt that are under way at once, until the ends of their responses. Each has buffers of up to
/// half a MiB in the host.
const UNDER_WAY_MAX: usize = 16;

/// What the requests of one attempt add up to.
#[derive(Debug)]
pub(super) struct Tally {
    under_way: AtomicUsize,
    meter: Arc<Meter>,
    bytes_max: u64,
    denial: Mutex<Option<String>>,
}

impl Tally {
    pub(super) fn new(meter: Arc<Meter>, bytes_max: u64) -> Arc<Self> {
        Arc::new(Self {
            under_way: AtomicUsize::new(0),
            meter,
            bytes_max,
            denial: Mutex::new(None),
        })
    }

    /// Counts a request until what is returned is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> Result<UnderWay, Fault> {
        let before = self.under_way.fetch_add(1, Ordering::Relaxed);
        let under_way = UnderWay(self.clone());
        match before < UNDER_WAY_MAX {
            true => Ok(under_way),
            false => Err(Fault::Limit(format!(
                "{UNDER_WAY_MAX} requests are under way, which is all that an attempt may have at once; read or drop their responses first"
            ))),
        }
    }

    pub(super) fn sent(&self, bytes: usize) -> Result<(), Fault> {
        self.meter.sent(bytes);
        self.check()
    }

    pub(super) fn received(&self, bytes: usize) -> Result<(), Fault> {
        self.meter.received(bytes);
        self.check()
    }

    fn check(&self) -> Result<(), Fault> {
        let used = self.meter.usage();
        match used.bytes_out.saturating_add(used.bytes_in) <= self.bytes_max {
            true => Ok(()),
            false => Err(Fault::Limit(format!(
                "the attempt has sent and received {} bytes, which is its limit (limits.http_bytes)",
                self.bytes_max
            ))),
        }
    }

    /// Notes what was denied.
    pub(super) fn deny(&self, denial: String) -> Fault {
        *self.lock() = Some(denial);
        Fault::Denied
    }

    pub(super) fn denial(&self) -> Option<String> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        // Nothing panics while it holds the lock.
        self.denial.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that is under way.
#[derive(Debug)]
pub(super) struct UnderWay(Arc<Tally>);

impl UnderWay {
    pub(super) fn tally(&self) -> &Tally {
        &self.0
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}
