//! Fields of requests (headers, trailers) are in the host's memory, not in the guest's: what a guest puts into them is counted.
//!
//! Until the attempt has ended, as for memory of its own: a request takes its fields along, and nobody says when it is gone.

use http::HeaderMap;
use wasmtime::StoreContextMut;
use wasmtime::component::{Linker, Resource};
use wasmtime_wasi_http::FieldMap;
use wasmtime_wasi_http::WasiHttpView as _;
use wasmtime_wasi_http::p2::bindings::http::types::{HeaderError, HostFields as _};

use crate::sandbox::state::AttemptState;

/// The interface, as wasmtime-wasi-http has linked it.
const TYPES: &str = "wasi:http/types@0.2.12";

/// What a field takes beside its bytes: its places in a table of hashes that may be half empty, and two allocations.
const FIELD_BYTES: usize = 320;

/// What a set of fields takes.
const FIELDS_BYTES: usize = 256;

type Name = String;
type Value = Vec<u8>;
type Fields = Resource<FieldMap>;

/// Puts the count before what wasmtime-wasi-http has linked.
pub(super) fn count(linker: &mut Linker<AttemptState>) -> wasmtime::Result<()> {
    linker.allow_shadowing(true);
    let mut types = linker.instance(TYPES)?;
    types.func_wrap(
        "[constructor]fields",
        |mut context: StoreContextMut<'_, AttemptState>, (): ()| {
            let state = context.data_mut();
            state.limiter.hold(FIELDS_BYTES)?;
            Ok((state.http().new()?,))
        },
    )?;
    types.func_wrap(
        "[static]fields.from-list",
        |mut context: StoreContextMut<'_, AttemptState>, (entries,): (Vec<(Name, Value)>,)| {
            let state = context.data_mut();
            let entries_bytes = entries.iter().map(|(name, value)| field_bytes(name, value));
            state
                .limiter
                .hold(FIELDS_BYTES + entries_bytes.sum::<usize>())?;
            let made = state.http().from_list(entries);
            Ok((told(made)?,))
        },
    )?;
    types.func_wrap(
        "[method]fields.append",
        |mut context: StoreContextMut<'_, AttemptState>,
         (fields, name, value): (Fields, Name, Value)| {
            let state = context.data_mut();
            state.limiter.hold(field_bytes(&name, &value))?;
            let done = state.http().append(fields, name, value);
            Ok((told(done)?,))
        },
    )?;
    types.func_wrap(
        "[method]fields.set",
        |mut context: StoreContextMut<'_, AttemptState>,
         (fields, name, values): (Fields, Name, Vec<Value>)| {
            let state = context.data_mut();
            let values_bytes = values.iter().map(|value| field_bytes(&name, value));
            state.limiter.hold(values_bytes.sum())?;
            let done = state.http().set(fields, name, values);
            Ok((told(done)?,))
        },
    )?;
    types.func_wrap(
        "[method]fields.clone",
        |mut context: StoreContextMut<'_, AttemptState>, (fields,): (Fields,)| {
            let state = context.data_mut();
            let bytes = held_bytes(state.table.get(&fields)?);
            state.limiter.hold(bytes)?;
            Ok((state.http().clone(fields)?,))
        },
    )?;
    linker.allow_shadowing(false);
    Ok(())
}

/// What the guest is told, or the trap.
fn told<T>(
    done: Result<T, wasmtime_wasi_http::p2::HeaderError>,
) -> wasmtime::Result<Result<T, HeaderError>> {
    match done {
        Ok(done) => Ok(Ok(done)),
        Err(error) => error.downcast().map(Err),
    }
}

fn field_bytes(name: &str, value: &[u8]) -> usize {
    name.len() + value.len() + FIELD_BYTES
}

/// What a set of fields takes in the host, bytes.
pub(super) fn held_bytes(fields: &HeaderMap) -> usize {
    let each = fields.iter();
    let all: usize = each
        .map(|(name, value)| field_bytes(name.as_str(), value.as_bytes()))
        .sum();
    FIELDS_BYTES + all
}
