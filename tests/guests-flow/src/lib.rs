//! Handlers that enqueue and call jobs, wait, and run SQL statements, one behaviour each, for the tests of the host.

mod abuse;
mod calls;
mod chain;
mod children;
mod raw;
mod results;
mod spec;
mod sql;
mod waits;

use rouse_sdk::export;

export!(
    children::children,
    children::tree,
    chain::next,
    chain::hop,
    results::results,
    results::result,
    waits::sleeps,
    waits::sleep_until,
    waits::naps,
    waits::signals,
    calls::call,
    calls::call_all,
    calls::square,
    calls::fails,
    abuse::in_step,
    abuse::many_children,
    abuse::many_waits,
    raw::raw,
    sql::run,
    sql::transfer,
    sql::jobs,
    sql::settle,
    sql::copy,
    sql::listen,
    sql::block,
    sql::temporary,
    sql::two,
    sql::commit,
    sql::set_role,
    sql::missing,
    sql::modifying,
    sql::syntax,
    sql::into,
);
