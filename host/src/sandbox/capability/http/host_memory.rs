//! Counts what a guest creates for its requests in the host's memory: fields (headers, trailers), the strings of
//! request lines, and bodies that are not sent yet.
//!
//! Fields and strings count until the attempt ends, like the guest's own memory: they become part of a request, and
//! nothing reports when that is dropped. The buffers of a body count until it is sent or dropped.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use wasmtime::StoreContextMut;
use wasmtime::component::{Linker, Resource};
use wasmtime_wasi_http::p2::bindings::http::types::{
    self, HeaderError, HostFields as _, Method, Scheme,
};
use wasmtime_wasi_http::p2::types::{HostOutgoingRequest, HostOutgoingResponse};
use wasmtime_wasi_http::{Error, FieldMap, WasiBody, WasiHttpView as _};

use super::outgoing::{CHUNK_BYTES_MAX, CHUNKS_MAX};
use crate::sandbox::attempt::memory::Charge;
use crate::sandbox::attempt::state::AttemptState;

/// The name under which wasmtime-wasi-http links the interface.
const TYPES: &str = "wasi:http/types@0.2.12";

/// The overhead of a field: its slots in a hash table that may be half empty, and two allocations.
const FIELD_BYTES: usize = 320;

/// The overhead of a set of fields.
const FIELDS_BYTES: usize = 256;

/// The maximum size of a method, scheme, authority or path: the crate `http` does not accept longer paths. Each of them
/// is copied several times.
const TEXT_BYTES_MAX: usize = 64 << 10;

/// The size of the buffers of a body until it is sent.
const BODY_BYTES: usize = CHUNKS_MAX * CHUNK_BYTES_MAX;

type Name = String;
type Value = Vec<u8>;
type Fields = Resource<FieldMap>;
type Request = Resource<HostOutgoingRequest>;
type Response = Resource<HostOutgoingResponse>;
type State<'a> = StoreContextMut<'a, AttemptState>;

/// Shadows functions that wasmtime-wasi-http has linked, so that guests call versions that count.
pub(super) fn count(linker: &mut Linker<AttemptState>) -> wasmtime::Result<()> {
    linker.allow_shadowing(true);
    let mut types = linker.instance(TYPES)?;
    types.func_wrap("[constructor]fields", |mut context: State<'_>, (): ()| {
        let state = context.data_mut();
        let charge = state.limiter.charge_host(FIELDS_BYTES)?;
        let made = state.http().new()?;
        charge.keep();
        Ok((made,))
    })?;
    types.func_wrap(
        "[static]fields.from-list",
        |mut context: State<'_>, (entries,): (Vec<(Name, Value)>,)| {
            let state = context.data_mut();
            let entries_bytes = entries.iter().map(|(name, value)| field_bytes(name, value));
            let bytes = FIELDS_BYTES + entries_bytes.sum::<usize>();
            let charge = state.limiter.charge_host(bytes)?;
            let made = in_wasi(state.http().from_list(entries))?;
            Ok((keep_if_ok(charge, made),))
        },
    )?;
    types.func_wrap(
        "[method]fields.append",
        |mut context: State<'_>, (fields, name, value): (Fields, Name, Value)| {
            let state = context.data_mut();
            let charge = state.limiter.charge_host(field_bytes(&name, &value))?;
            let done = in_wasi(state.http().append(fields, name, value))?;
            Ok((keep_if_ok(charge, done),))
        },
    )?;
    types.func_wrap(
        "[method]fields.set",
        |mut context: State<'_>, (fields, name, values): (Fields, Name, Vec<Value>)| {
            let state = context.data_mut();
            let values_bytes = values.iter().map(|value| field_bytes(&name, value));
            let charge = state.limiter.charge_host(values_bytes.sum())?;
            let done = in_wasi(state.http().set(fields, name, values))?;
            Ok((keep_if_ok(charge, done),))
        },
    )?;
    types.func_wrap(
        "[method]fields.clone",
        |mut context: State<'_>, (fields,): (Fields,)| {
            let state = context.data_mut();
            let bytes = host_bytes(state.table.get(&fields)?);
            let charge = state.limiter.charge_host(bytes)?;
            let made = state.http().clone(fields)?;
            charge.keep();
            Ok((made,))
        },
    )?;
    types.func_wrap(
        "[method]outgoing-request.set-method",
        |mut context: State<'_>, (request, method): (Request, Method)| {
            let text = match &method {
                Method::Other(text) => text.len(),
                _ => 0,
            };
            let set = |state: &mut AttemptState| {
                types::HostOutgoingRequest::set_method(&mut state.http(), request, method)
            };
            set_text(context.data_mut(), text, set)
        },
    )?;
    types.func_wrap(
        "[method]outgoing-request.set-path-with-query",
        |mut context: State<'_>, (request, path): (Request, Option<String>)| {
            let text = path.as_ref().map_or(0, String::len);
            let set = |state: &mut AttemptState| {
                types::HostOutgoingRequest::set_path_with_query(&mut state.http(), request, path)
            };
            set_text(context.data_mut(), text, set)
        },
    )?;
    types.func_wrap(
        "[method]outgoing-request.set-scheme",
        |mut context: State<'_>, (request, scheme): (Request, Option<Scheme>)| {
            let text = match &scheme {
                Some(Scheme::Other(text)) => text.len(),
                _ => 0,
            };
            let set = |state: &mut AttemptState| {
                types::HostOutgoingRequest::set_scheme(&mut state.http(), request, scheme)
            };
            set_text(context.data_mut(), text, set)
        },
    )?;
    types.func_wrap(
        "[method]outgoing-request.set-authority",
        |mut context: State<'_>, (request, authority): (Request, Option<String>)| {
            let text = authority.as_ref().map_or(0, String::len);
            let set = |state: &mut AttemptState| {
                types::HostOutgoingRequest::set_authority(&mut state.http(), request, authority)
            };
            set_text(context.data_mut(), text, set)
        },
    )?;
    types.func_wrap(
        "[method]outgoing-request.body",
        |mut context: State<'_>, (request,): (Request,)| {
            let state = context.data_mut();
            let charge = state.limiter.charge_host(BODY_BYTES)?;
            let id = Resource::new_borrow(request.rep());
            let made = types::HostOutgoingRequest::body(&mut state.http(), id)?;
            if made.is_ok() {
                let body = &mut state.table.get_mut(&request)?.body;
                *body = body.take().map(|body| counted(body, charge));
            }
            Ok((made,))
        },
    )?;
    // Guests do not serve requests, but can create responses.
    types.func_wrap(
        "[method]outgoing-response.body",
        |mut context: State<'_>, (response,): (Response,)| {
            let state = context.data_mut();
            let charge = state.limiter.charge_host(BODY_BYTES)?;
            let id = Resource::new_borrow(response.rep());
            let made = types::HostOutgoingResponse::body(&mut state.http(), id)?;
            if made.is_ok() {
                let body = &mut state.table.get_mut(&response)?.body;
                *body = body.take().map(|body| counted(body, charge));
            }
            Ok((made,))
        },
    )?;
    linker.allow_shadowing(false);
    Ok(())
}

/// The error for the guest, or a trap.
fn in_wasi<T>(
    done: Result<T, wasmtime_wasi_http::p2::HeaderError>,
) -> wasmtime::Result<Result<T, HeaderError>> {
    match done {
        Ok(done) => Ok(Ok(done)),
        Err(error) => error.downcast().map(Err),
    }
}

/// Keeps the charge until the attempt ends, unless the call failed.
fn keep_if_ok<T, E>(charge: Charge, done: Result<T, E>) -> Result<T, E> {
    if done.is_ok() {
        charge.keep();
    }
    done
}

/// Sets a string of the request line.
fn set_text(
    state: &mut AttemptState,
    bytes: usize,
    set: impl FnOnce(&mut AttemptState) -> wasmtime::Result<Result<(), ()>>,
) -> wasmtime::Result<(Result<(), ()>,)> {
    if bytes > TEXT_BYTES_MAX {
        return Ok((Err(()),));
    }
    let charge = state.limiter.charge_host(bytes)?;
    let done = set(state)?;
    Ok((keep_if_ok(charge, done),))
}

/// A body whose buffers are counted until it is dropped.
struct Counted {
    body: WasiBody,
    _charge: Charge,
}

fn counted(body: WasiBody, charge: Charge) -> WasiBody {
    let counted = Counted {
        body,
        _charge: charge,
    };
    counted.boxed_unsync()
}

impl Body for Counted {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn field_bytes(name: &str, value: &[u8]) -> usize {
    name.len() + value.len() + FIELD_BYTES
}

/// The memory that a set of fields takes in the host, in bytes.
pub(super) fn host_bytes(fields: &HeaderMap) -> usize {
    let each = fields.iter();
    let sum: usize = each
        .map(|(name, value)| field_bytes(name.as_str(), value.as_bytes()))
        .sum();
    FIELDS_BYTES + sum
}
