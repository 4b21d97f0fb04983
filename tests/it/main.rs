//! Every promise of Rouse, shown against a real Postgres.

mod support;

mod harness;
mod http;
mod private_postgres;
mod tls;
