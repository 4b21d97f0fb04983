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
mod sources;
mod starting;
mod state;
mod vitals;
mod wakeups;

mod middleware;
mod names;
mod narrowing;
mod order;
mod outcomes;
mod outside;
mod steps;
mod stopping;
mod usage;
mod worker;
mod workers;

mod code_cache;
mod compiling;
mod contract;
mod files;
mod folder;
mod grants;
mod harmless;
mod hostile;
mod in_force;
mod pinning;
mod quotas;
mod sandbox_abort;
mod sandbox_guest;
mod sandbox_reuse;
mod sandbox_run;
mod sandbox_sdk;

mod clocks;
mod commands;
mod drain;
mod fleet;
mod harness;
mod http;
mod http_out;
mod invoke;
mod invoke_http;
mod outages;
mod pooler;
mod private_postgres;
mod ready;
mod secrets;
mod tls;
