//! The `rouse` command with all its subcommands and settings, and middleware around each attempt.

use std::process::ExitCode;
use std::sync::Arc;

use rouse::worker::{AttemptInfo, Middleware, Next, Running};

/// Prints the duration of each attempt.
struct Stopwatch;

impl Middleware for Stopwatch {
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            let report = next.run().await;
            eprintln!(
                "job {} ({}) took {:?}",
                attempt.id, attempt.handler, report.wall
            );
            report
        })
    }
}

fn main() -> ExitCode {
    rouse::cli::main_with(vec![Arc::new(Stopwatch)])
}
