//! Handlers that cannot be written with the SDK: malformed results, misused host calls.
//!
//! On native targets this crate is empty.
#![cfg(target_family = "wasm")]
#![expect(
    unsafe_code,
    reason = "the exports that wit-bindgen writes are unsafe functions"
)]

mod misuse;
mod rubbish;

mod bindings {
    wit_bindgen::generate!({ path: "../../sdk/wit", world: "module", generate_all });
}

use bindings::exports::rouse::handler::handlers::{Failure, Guest, JobInfo};

/// A handler of this module.
type Handler = fn(Vec<u8>) -> Result<Vec<u8>, Failure>;

const HANDLERS: &[(&str, Handler)] = &[
    // Returns the bytes of the payload.
    ("raw.echo", Ok),
    ("raw.empty", rubbish::empty),
    ("raw.not-json", rubbish::not_json),
    ("raw.two-values", rubbish::two_values),
    ("raw.invalid-utf8", rubbish::invalid_utf8),
    ("raw.deep", rubbish::deep),
    ("raw.huge-number", rubbish::huge_number),
    ("raw.nul-key", rubbish::nul_key),
    ("raw.lone-surrogate", rubbish::lone_surrogate),
    ("raw.bad-details", rubbish::bad_details),
    ("raw.long-failure", rubbish::long_failure),
    ("raw.endless-retry-after", rubbish::endless_retry_after),
    ("raw.log-escapes", misuse::log_escapes),
    ("raw.log-flood", misuse::log_flood),
    ("raw.long-log", misuse::long_log),
    ("raw.percent", misuse::percent),
    ("raw.hoard-handles", misuse::hoard_handles),
    ("raw.poll-nothing", misuse::poll_nothing),
    ("raw.drop-signal-first", misuse::drop_signal_first),
    ("raw.panicked-but-fine", misuse::panicked_but_fine),
];

struct Module;

impl Guest for Module {
    /// Contains only names: the host's defaults apply to everything else.
    fn describe() -> String {
        let names: Vec<String> = HANDLERS
            .iter()
            .map(|(name, _)| format!(r#"{{"name":"{name}"}}"#))
            .collect();
        format!(r#"{{"handlers":[{}]}}"#, names.join(","))
    }

    fn run(job: JobInfo) -> Result<Vec<u8>, Failure> {
        match HANDLERS.iter().find(|(name, _)| *name == job.handler) {
            Some((_, handler)) => handler(job.payload),
            None => Err(Failure {
                kind: "unknown_handler".into(),
                message: job.handler,
                details: None,
                permanent: true,
                retry_after_ms: None,
            }),
        }
    }
}

bindings::export!(Module with_types_in bindings);
