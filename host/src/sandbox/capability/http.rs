//! `wasi:http`: requests to servers that the operator has granted, and to no others.
//!
//! wasmtime-wasi-http holds the requests and responses of the guest; this module sends and receives them. Each request
//! is checked separately, so a redirect, which the guest follows itself, is a request like any other. The addresses of
//! a name are checked again for each connection, and the connection goes to exactly the address that was checked. After
//! the abort, nothing more is sent. The guest never sees a secret: it has a placeholder, which is replaced here.

mod access;
mod address;
mod attempt;
mod connect;
mod denial;
mod fault;
mod hooks;
mod host_memory;
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

use wasmtime::component::Linker;
use wasmtime_wasi_http::{WasiHttpCtxView, WasiHttpView};

pub(in crate::sandbox) use self::access::HttpAccess;
pub(in crate::sandbox) use self::attempt::{FIELDS_BYTES_MAX, Http};
pub use self::lookups::{Addresses, Resolver, SystemResolver};
pub(in crate::sandbox) use self::net::Net;
pub use self::settings::HttpSettings;
use crate::sandbox::attempt::state::AttemptState;

/// Links `wasi:http/types` and `wasi:http/outgoing-handler`.
pub(in crate::sandbox) fn link_http(linker: &mut Linker<AttemptState>) -> wasmtime::Result<()> {
    wasmtime_wasi_http::p2::add_only_http_to_linker_async(linker)?;
    host_memory::count(linker)
}

impl WasiHttpView for AttemptState {
    fn http(&mut self) -> WasiHttpCtxView<'_> {
        WasiHttpCtxView {
            hooks: &mut self.http,
            table: &mut self.table,
            ctx: &mut self.http_fields,
        }
    }
}
