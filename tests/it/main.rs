//! Every promise of Rouse, shown against a real Postgres.

mod support;

mod private_postgres;
