//! The hooks that wasmtime-wasi-http calls in the host, above all to send a request.

use http::HeaderName;
use wasmtime_wasi_http::p2::bindings::http::types::ErrorCode;
use wasmtime_wasi_http::{
    DEFAULT_FORBIDDEN_HEADERS, Error, RequestOptions, WasiBody, WasiHttpHooks,
};

use super::attempt::Http;
use super::fault::Fault;
use super::outgoing::{CHUNK_BYTES_MAX, CHUNKS_MAX};

impl WasiHttpHooks for Http {
    fn is_forbidden_header(&mut self, name: &HeaderName) -> bool {
        DEFAULT_FORBIDDEN_HEADERS.contains(name)
    }

    /// The client writes the header from the checked address.
    fn set_host_header(&mut self) -> bool {
        false
    }

    fn send_request(
        &mut self,
        request: http::Request<WasiBody>,
        options: Option<RequestOptions>,
        _processed: Box<dyn Future<Output = Result<(), Error>> + Send>,
    ) -> Box<dyn Future<Output = Result<Sent, Error>> + Send> {
        match self.prepare(request, options.unwrap_or_default()) {
            Ok(sending) => Box::new(async move {
                let response = sending.send().await.map_err(Fault::into_error)?;
                Ok::<Sent, _>((response, Box::new(async { Ok(()) })))
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

    // The default implementations would write each error of a guest to the host's log, without a limit.

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

/// A response, and a future for background work, of which there is none.
type Sent = (
    http::Response<WasiBody>,
    Box<dyn Future<Output = Result<(), Error>> + Send>,
);
