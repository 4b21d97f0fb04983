//! The private Postgres of `rouse dev` and of the tests.
