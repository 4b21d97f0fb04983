//! `wasi:http`: requests to servers that the operator has granted, and to no others.
//!
//! wasmtime-wasi-http keeps what the guest writes and reads; this sends it. Each request is looked at by itself, so a
//! redirect, which the guest follows by itself, is as good as any other request. What a name leads to is
//! looked at again at each connection, and the connection goes to the very address that was looked at. From
//! the abort on nothing more is sent. The guest never sees a secret: it holds a placeholder, which is replaced here.

mod access;
mod address;
mod connect;
mod denial;
mod fault;
mod held;
mod incoming;
mod lookups;
mod net;
mod outgoing;
mod secrets;
mod send;
mod settings;
mod tally;
mod target;
mod tls;

use std::sync::Arc;

use http::HeaderName;
use wasmtime::component::Linker;
use wasmtime_wasi_http::p2::bindings::http::types::ErrorCode;
use wasmtime_wasi_http::{
    DEFAULT_FORBIDDEN_HEADERS, Error, RequestOptions, WasiBody, WasiHttpCtxView, WasiHttpHooks,
    WasiHttpView,
};

pub(in crate::sandbox) use access::HttpAccess;
pub use lookups::{Addresses, Resolver, SystemResolver};
pub(in crate::sandbox) use net::Net;
pub use settings::HttpSettings;

use crate::sandbox::attempt::memory::Held;
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::{AbortHandle, Limits, Meter};
use fault::Fault;
use secrets::Placeholders;
use tally::Tally;

/// Bytes of a set of fields (headers, trailers) that a guest makes, with what they take in memory: ten times
/// what servers accept. What all of them take is counted (`held`).
pub(in crate::sandbox) const FIELDS_BYTES_MAX: usize = 64 << 10;

/// A guest that writes a body has this many chunks of this size on their way to the network: wasmtime-wasi-http keeps one more
/// than it is asked for.
const CHUNKS_MAX: usize = 2;
const CHUNK_BYTES_MAX: usize = 64 << 10;

/// Links `wasi:http/types` and `wasi:http/outgoing-handler`.
pub(in crate::sandbox) fn link_http(linker: &mut Linker<AttemptState>) -> wasmtime::Result<()> {
    wasmtime_wasi_http::p2::add_only_http_to_linker_async(linker)?;
    held::count(linker)
}

/// What one attempt does over HTTP.
pub(in crate::sandbox) struct Http {
    /// None: nothing at all, for a module that is only described.
    access: Option<Arc<HttpAccess>>,
    limits: HttpLimits,
    abort: AbortHandle,
    meter: Arc<Meter>,
    requests: usize,
    /// None until there is an instance.
    held: Option<Arc<Held>>,
    /// None until the first request.
    tally: Option<Arc<Tally>>,
    placeholders: Placeholders,
}

/// What the handler's [`Limits`] say of requests.
struct HttpLimits {
    requests: usize,
    bytes: u64,
    body_bytes: u64,
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
            held: None,
            tally: None,
            placeholders: Placeholders::default(),
        }
    }

    /// Counts there what the host holds for it.
    pub(in crate::sandbox) fn within(mut self, held: Arc<Held>) -> Self {
        self.held = Some(held);
        self
    }

    /// What stands for a secret in this attempt.
    ///
    /// # Errors
    /// Why the handler may not have it, with what the operator can do about it.
    pub(in crate::sandbox) fn placeholder(&mut self, name: &str) -> Result<String, String> {
        match &self.access {
            Some(access) => self.placeholders.of(access, name),
            None => Err("a module that is described has no secrets".into()),
        }
    }

    /// HMAC-SHA256 of a message, with a secret as the key.
    ///
    /// # Errors
    /// Why the handler may not sign with it, with what the operator can do about it.
    pub(in crate::sandbox) fn sign(&self, name: &str, message: &[u8]) -> Result<Vec<u8>, String> {
        match &self.access {
            Some(access) => secrets::sign(access, name, message),
            None => Err("a module that is described has no secrets".into()),
        }
    }

    /// What was denied last.
    pub(in crate::sandbox) fn denial(&self) -> Option<String> {
        self.tally.as_ref()?.denial()
    }
}

impl WasiHttpHooks for Http {
    fn is_forbidden_header(&mut self, name: &HeaderName) -> bool {
        DEFAULT_FORBIDDEN_HEADERS.contains(name)
    }

    /// The client writes it, from the address that was checked.
    fn set_host_header(&mut self) -> bool {
        false
    }

    fn send_request(
        &mut self,
        request: http::Request<WasiBody>,
        options: Option<RequestOptions>,
        _processed: Box<dyn Future<Output = Result<(), Error>> + Send>,
    ) -> Box<dyn Future<Output = Result<Answer, Error>> + Send> {
        match self.prepare(request, options.unwrap_or_default()) {
            Ok(sending) => Box::new(async move {
                let response = sending.send().await.map_err(Fault::into_error)?;
                Ok::<Answer, _>((response, Box::new(async { Ok(()) })))
            }),
            Err(fault) => Box::new(async move { Err(fault.into_error()) }),
        }
    }

    fn p2_outgoing_body_buffer_chunks(&mut self) -> usize {
        CHUNKS_MAX - 1
    }

    fn p2_outgoing_body_chunk_size(&mut self) -> usize {
        CHUNK_BYTES_MAX
    }

    // The defaults of these write what guests do into the host's log, as often as they do it.

    fn p2_error_from_hyper(&mut self, _: &hyper::Error) -> ErrorCode {
        ErrorCode::HttpProtocolError
    }

    fn p2_error_from_connect(&mut self, _: &std::io::Error) -> ErrorCode {
        ErrorCode::ConnectionRefused
    }

    fn p2_error_from_tls(&mut self, _: &std::io::Error) -> ErrorCode {
        ErrorCode::TlsProtocolError
    }
}

/// A response, and what else has to be done for it: nothing.
type Answer = (
    http::Response<WasiBody>,
    Box<dyn Future<Output = Result<(), Error>> + Send>,
);

impl WasiHttpView for AttemptState {
    fn http(&mut self) -> WasiHttpCtxView<'_> {
        WasiHttpCtxView {
            hooks: &mut self.http,
            table: &mut self.table,
            ctx: &mut self.http_fields,
        }
    }
}
