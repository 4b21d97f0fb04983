//! The totals of one attempt's requests, shared with the requests under way.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::header::HeaderMap;
use http::{Method, Uri};

use super::fault::Fault;
use crate::sandbox::Meter;
use crate::sandbox::attempt::memory::{Charge, Denial, HostMemory};

/// The maximum number of concurrent requests of one attempt. A request counts until the end of its response. Each has
/// buffers of up to half a MiB in the host.
pub(super) const UNDER_WAY_MAX: usize = 16;
pub(super) const UNDER_WAY_BYTES: usize = 512 << 10;

/// The totals of one attempt's requests.
#[derive(Debug)]
pub(super) struct Tally {
    under_way: AtomicUsize,
    meter: Arc<Meter>,
    bytes_max: u64,
    host_memory: Option<Arc<HostMemory>>,
    denial: Mutex<Option<String>>,
}

impl Tally {
    pub(super) fn new(
        meter: Arc<Meter>,
        bytes_max: u64,
        host_memory: Option<Arc<HostMemory>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            under_way: AtomicUsize::new(0),
            meter,
            bytes_max,
            host_memory,
            denial: Mutex::new(None),
        })
    }

    /// Counts a request until the result is dropped.
    pub(super) fn start(self: &Arc<Self>) -> Result<UnderWay, Fault> {
        let before = self.under_way.fetch_add(1, Ordering::Relaxed);
        let mut under_way = UnderWay {
            tally: self.clone(),
            buffers: Vec::new(),
        };
        match before < UNDER_WAY_MAX {
            true => under_way.charge(UNDER_WAY_BYTES).map(|()| under_way),
            false => Err(Fault::Limit(format!(
                "an attempt may have at most {UNDER_WAY_MAX} requests under way; read or drop their responses first"
            ))),
        }
    }

    /// Counts host memory until the attempt ends.
    pub(super) fn charge_until_end(&self, bytes: usize) -> Result<(), Fault> {
        match &self.host_memory {
            Some(host_memory) => host_memory
                .charge(bytes)
                .map(Charge::keep)
                .map_err(no_memory),
            None => Ok(()),
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
                "the attempt has reached its limit of {} bytes sent and received (limits.http_bytes)",
                self.bytes_max
            ))),
        }
    }

    /// Records a denial.
    pub(super) fn deny(&self, denial: String) -> Fault {
        *self.lock() = Some(denial);
        Fault::Denied
    }

    pub(super) fn denial(&self) -> Option<String> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        // Nothing panics while the lock is held.
        self.denial.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that is under way.
#[derive(Debug)]
pub(super) struct UnderWay {
    tally: Arc<Tally>,
    buffers: Vec<Charge>,
}

impl UnderWay {
    pub(super) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Counts host buffers until the request ends.
    pub(super) fn charge(&mut self, bytes: usize) -> Result<(), Fault> {
        if let Some(host_memory) = &self.tally.host_memory {
            let charge = host_memory.charge(bytes).map_err(no_memory)?;
            self.buffers.push(charge);
        }
        Ok(())
    }
}

fn no_memory(denial: Denial) -> Fault {
    let why = match denial {
        Denial::Attempt => {
            "the requests of the attempt need more memory in the host than memory_mb; read or drop responses first, or raise memory_mb"
        }
        Denial::Host => {
            "the attempts of this host together have used up its memory; try again later, run fewer at once, or raise memory_total_mb"
        }
    };
    Fault::Limit(why.into())
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.tally.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The size of an HTTP/1.1 head, in bytes, without the fields that the client adds automatically (`host`).
pub(super) fn head_bytes(method: &Method, uri: &Uri, fields: &HeaderMap) -> usize {
    const LINE: usize = " HTTP/1.1\r\n".len() + "\r\n".len();
    let path = uri.path_and_query().map_or(0, |path| path.as_str().len());
    let line = method.as_str().len() + 1 + path;
    LINE + line + fields_bytes(fields)
}

/// The size of HTTP/1.1 fields, in bytes.
pub(super) fn fields_bytes(fields: &HeaderMap) -> usize {
    let each = fields.iter();
    each.map(|(name, value)| name.as_str().len() + value.len() + 4)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::attempt::memory::MemoryBudget;

    #[test]
    fn count_buffers_until_a_request_ends() {
        let budget = MemoryBudget::new(3 * UNDER_WAY_BYTES);
        let tally = |requests: usize| {
            let host_memory = HostMemory::new(requests * UNDER_WAY_BYTES, budget.clone());
            Tally::new(Arc::default(), u64::MAX, Some(host_memory))
        };
        let (first, second) = (tally(2), tally(2));
        let one = first.start().unwrap();
        let _two = first.start().unwrap();
        let refused = |tally: &Arc<Tally>| tally.start().unwrap_err().to_string();
        let own = refused(&first);
        assert!(own.contains("raise memory_mb"), "{own}");
        let mut other = second.start().unwrap();
        let hosts = refused(&second);
        assert!(hosts.contains("raise memory_total_mb"), "{hosts}");
        assert!(other.charge(1).is_err() && second.charge_until_end(1).is_err());
        drop(one);
        assert!(second.charge_until_end(UNDER_WAY_BYTES).is_ok());
        drop((first, second, other));
        assert_eq!(budget.free_bytes(), 2 * UNDER_WAY_BYTES, "one is under way");
    }
}
