//! Every promise of Rouse, shown against a real Postgres.

mod support;

mod http;
mod private_postgres;
mod tls;
mod folder;
mod sandbox_guest;
mod sandbox_run;
