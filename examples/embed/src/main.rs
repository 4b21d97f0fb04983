//! The `rouse` command, every subcommand and setting of it, with a middleware around each attempt.

use std::process::ExitCode;
use std::sync::Arc;

use rouse::worker::{AttemptInfo, Middleware, Next, Running};

/// Says how long each attempt took.
struct Stopwatch;

impl Middleware for Stopwatch {
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            let run = next.run().await;
            eprintln!(
                "job {} ({}) took {:?}",
                attempt.id, attempt.handler, run.wall
            );
            run
        })
    }
}

fn main() -> ExitCode {
    rouse::cli::main_with(vec![Arc::new(Stopwatch)])
}
