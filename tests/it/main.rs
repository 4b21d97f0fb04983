//! Every promise of Rouse, shown against a real Postgres.

mod support;

mod adopt;
mod enqueue;
mod looking;
mod migrations;
mod partitions;
mod plans;
mod roles;
mod settle;
mod vitals;
mod wakeups;

mod middleware;
mod outcomes;
mod outside;
mod steps;
mod stopping;
mod worker;
mod workers;

mod folder;
mod sandbox_abort;
mod sandbox_guest;
mod sandbox_reuse;
mod sandbox_run;
mod sandbox_sdk;

mod commands;
mod fleet;
mod harness;
mod http;
mod invoke;
mod outages;
mod pooler;
mod private_postgres;
mod tls;
