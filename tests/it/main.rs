//! Every promise of Rouse, shown against a real Postgres.

mod support;

mod folder;
mod http;
mod private_postgres;
mod sandbox_guest;
mod sandbox_run;
mod sandbox_sdk;
mod tls;
