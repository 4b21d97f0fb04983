//! The HTTP access of one attempt, and how much of its limits it has used.

use std::sync::Arc;

use super::access::HttpAccess;
use super::outgoing::Unsent;
use super::secrets::{self, Placeholders};
use super::tally::Tally;
use crate::sandbox::attempt::memory::HostMemory;
use crate::sandbox::{AbortHandle, Limits, Meter};
use crate::traces::AttemptTrace;

/// The maximum size of a set of header or trailer fields that a guest creates, including their memory overhead: ten
/// times what servers accept. The total is counted in `host_memory`.
pub(in crate::sandbox) const FIELDS_BYTES_MAX: usize = 64 << 10;

/// The HTTP access of one attempt, and how much of its limits it has used.
pub(in crate::sandbox) struct Http {
    /// `None` while the manifest of a module is read: it has no access then.
    pub(super) access: Option<Arc<HttpAccess>>,
    pub(super) limits: HttpLimits,
    pub(super) abort: AbortHandle,
    pub(super) meter: Arc<Meter>,
    pub(super) requests: usize,
    /// `None` until there is an instance.
    pub(super) host_memory: Option<Arc<HostMemory>>,
    /// `None` until the first request.
    pub(super) tally: Option<Arc<Tally>>,
    pub(super) placeholders: Placeholders,
    pub(super) trace: AttemptTrace,
    /// Bodies that are being sent.
    pub(in crate::sandbox) unsent: Unsent,
}

/// The parts of the handler's [`Limits`] for requests.
pub(super) struct HttpLimits {
    pub(super) requests: usize,
    pub(super) bytes: u64,
    pub(super) body_bytes: u64,
}

impl Http {
    pub(in crate::sandbox) fn new(
        access: Option<Arc<HttpAccess>>,
        limits: &Limits,
        abort: AbortHandle,
        meter: Arc<Meter>,
    ) -> Self {
        Self {
            access,
            limits: HttpLimits {
                requests: limits.http_requests,
                bytes: limits.http_bytes,
                body_bytes: limits.http_body_bytes,
            },
            abort,
            meter,
            requests: 0,
            host_memory: None,
            tally: None,
            placeholders: Placeholders::default(),
            trace: AttemptTrace::default(),
            unsent: Unsent::default(),
        }
    }

    /// Records its requests in this trace, and passes the trace on.
    pub(in crate::sandbox) fn traced(self, trace: AttemptTrace) -> Self {
        Self { trace, ..self }
    }

    /// Counts the host's memory for its requests here.
    pub(in crate::sandbox) fn counted_by(mut self, host_memory: Arc<HostMemory>) -> Self {
        self.host_memory = Some(host_memory);
        self
    }

    /// The placeholder of a secret in this attempt.
    ///
    /// # Errors
    /// A denial: why the handler may not use it, and what the operator can do about it.
    pub(in crate::sandbox) fn placeholder(&mut self, name: &str) -> Result<String, String> {
        match &self.access {
            Some(access) => self.placeholders.get(access, name),
            None => Err("while its manifest is read, a module has no secrets".into()),
        }
    }

    /// HMAC-SHA256 of a message, with a secret as the key.
    ///
    /// # Errors
    /// A denial: why the handler may not sign with it, and what the operator can do about it.
    pub(in crate::sandbox) fn sign(&self, name: &str, message: &[u8]) -> Result<Vec<u8>, String> {
        match &self.access {
            Some(access) => secrets::sign(access, name, message),
            None => Err("while its manifest is read, a module has no secrets".into()),
        }
    }

    /// The last denial.
    pub(in crate::sandbox) fn denial(&self) -> Option<String> {
        self.tally.as_ref()?.denial()
    }
}
