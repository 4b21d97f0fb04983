//! The totals of one attempt's requests, shared with the requests in flight.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::header::HeaderMap;
use http::{Method, Uri};

use super::fault::Fault;
use crate::sandbox::Meter;
use crate::sandbox::attempt::memory::{Charge, Denial, HostMemory};

/// The maximum number of requests that one attempt may have in flight. A request counts until its response has been
/// read or dropped.
pub(super) const IN_FLIGHT_MAX: usize = 16;
/// The maximum size of the host's buffers for one request, without those for a body that may contain secrets.
pub(super) const REQUEST_BUFFER_BYTES: usize = 512 << 10;

/// The totals of one attempt's requests.
#[derive(Debug)]
pub(super) struct Tally {
    in_flight: AtomicUsize,
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
            in_flight: AtomicUsize::new(0),
            meter,
            bytes_max,
            host_memory,
            denial: Mutex::new(None),
        })
    }

    /// Counts a request until the result is dropped.
    pub(super) fn start(self: &Arc<Self>) -> Result<InFlight, Fault> {
        let before = self.in_flight.fetch_add(1, Ordering::Relaxed);
        let mut in_flight = InFlight {
            tally: self.clone(),
            buffers: Vec::new(),
        };
        match before < IN_FLIGHT_MAX {
            true => in_flight.charge(REQUEST_BUFFER_BYTES).map(|()| in_flight),
            false => Err(Fault::Limit(format!(
                "an attempt may have at most {IN_FLIGHT_MAX} requests in flight; read or drop their responses first"
            ))),
        }
    }

    /// Charges host memory until the attempt ends.
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

/// A request that is in flight.
#[derive(Debug)]
pub(super) struct InFlight {
    tally: Arc<Tally>,
    buffers: Vec<Charge>,
}

impl InFlight {
    pub(super) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Charges host buffers until the request ends.
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

impl Drop for InFlight {
    fn drop(&mut self) {
        self.tally.in_flight.fetch_sub(1, Ordering::Relaxed);
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
        let budget = MemoryBudget::new(3 * REQUEST_BUFFER_BYTES);
        let tally = |requests: usize| {
            let host_memory = HostMemory::new(requests * REQUEST_BUFFER_BYTES, budget.clone());
            Tally::new(Arc::default(), u64::MAX, Some(host_memory))
        };
        let (first, second) = (tally(2), tally(2));
        let one = first.start().unwrap();
        let _two = first.start().unwrap();
        let refused = |tally: &Arc<Tally>| tally.start().unwrap_err().to_string();
        let by_attempt = refused(&first);
        assert!(by_attempt.contains("raise memory_mb"), "{by_attempt}");
        let mut other = second.start().unwrap();
        let by_host = refused(&second);
        assert!(by_host.contains("raise memory_total_mb"), "{by_host}");
        assert!(other.charge(1).is_err() && second.charge_until_end(1).is_err());
        drop(one);
        assert!(second.charge_until_end(REQUEST_BUFFER_BYTES).is_ok());
        drop((first, second, other));
        assert_eq!(
            budget.free_bytes(),
            2 * REQUEST_BUFFER_BYTES,
            "one is in flight"
        );
    }
}
