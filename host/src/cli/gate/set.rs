//! `rouse gate set`: creates or replaces a gate.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args as ClapArgs;
use rouse_display::gate::{describe, scope};

use crate::cli::target::Target;
use crate::cli::text::{as_json, plain};
use crate::cli::used::{warn_of_unused_handler, warn_of_unused_queue};
use crate::duration;
use crate::store::NewGate;

/// Options of `rouse gate set`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
The same as SELECT rouse.set_gate(…). If the gate exists, it is replaced as a whole: options that are left out \
get their defaults. The new settings apply at once, on all workers. A new --key divides jobs that are enqueued afterwards; \
those that already wait share a limit.

At most 5 jobs of each tenant run at a time:
  rouse gate set tenants --kind max_concurrent --key tenant --max 5
At most 100 jobs of the handler start in any minute:
  rouse gate set mail --kind throttle --handler mail.send --max 100 --period 1m
10 jobs of each account start per second on average, and up to 50 at once after a pause:
  rouse gate set api --kind throttle --queue api --key '$.account' --max 10 --period 1s --burst 50
Up to 100 mails of a tenant run in one attempt, once 100 are waiting or the first has waited for half a second:
  rouse gate set mails --kind batch --handler mail.send --max 100 --period 500ms
While a report of a tenant is queued or runs, another one is an error:
  rouse gate set report --kind singleton --handler report.make --key tenant --during running --on-conflict refuse
An index is built once its document has not changed for 5 seconds, or a minute after the first change:
  rouse gate set index --kind debounce --handler index.build --key '$.document' --period 5s --max-wait 1m

Needs the role rouse_operator. Exit codes: 0 done · 1 refused, nothing was changed")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The name of the gate
    name: String,

    /// What the gate limits: running jobs (max_concurrent), starts (throttle), jobs that start together (batch), or
    /// which jobs are enqueued (singleton, debounce)
    #[arg(long, value_parser = ["max_concurrent", "throttle", "batch", "singleton", "debounce"])]
    kind: String,

    /// Only jobs of this handler; batch, singleton and debounce need one
    #[arg(long, value_name = "NAME")]
    handler: Option<String>,

    /// Only jobs of this queue
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,

    /// The scope of each limit: tenant, source, handler, queue, or a path in the payload such as $.customer.id (repeat
    /// for two); default: one limit for all jobs. The jobs of a batch are always of one tenant
    #[arg(long = "key", value_name = "KEY")]
    keys: Vec<String>,

    /// max_concurrent: running jobs of a key; throttle: starts of a key in a period; batch: jobs of one attempt
    #[arg(long, value_name = "JOBS")]
    max: Option<i32>,

    /// The period of throttle, of debounce, and of a singleton with --during period; batch: how long the first job waits
    /// for others (default: it does not wait); 1ms to 30d
    #[arg(long, value_name = "TIME", value_parser = duration::argument)]
    period: Option<Duration>,

    /// throttle: how many jobs may start at once after a pause; default: never more than --max in any period
    #[arg(long, value_name = "JOBS")]
    burst: Option<i32>,

    /// singleton: a job keeps others out until it has started (queued), until it has ended (running), or for a period;
    /// default: queued
    #[arg(long, value_parser = ["queued", "running", "period"])]
    during: Option<String>,

    /// singleton: later jobs are not enqueued (keep), give the earlier one their arguments (replace), or are an error
    /// (refuse); default: keep
    #[arg(long, value_name = "POLICY", value_parser = ["keep", "replace", "refuse"])]
    on_conflict: Option<String>,

    /// debounce: the last job of a burst runs, after a period without others (trailing), or the first one, at once
    /// (leading); default: trailing
    #[arg(long, value_parser = ["trailing", "leading"])]
    edge: Option<String>,

    /// debounce: the maximum duration of a burst, at most 30d; default: any duration
    #[arg(long, value_name = "TIME", value_parser = duration::argument)]
    max_wait: Option<Duration>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Sets the gate, and prints the settings in force.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let secs = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    let new = NewGate {
        name: args.name,
        kind: args.kind,
        handler: args.handler,
        queue: args.queue,
        key: args.keys,
        max: args.max,
        period_s: secs(args.period),
        burst: args.burst,
        during: args.during,
        on_conflict: args.on_conflict,
        edge: args.edge,
        max_wait_s: secs(args.max_wait),
    };
    store.set_gate(&new).await?;
    let gates = store.gates(Some(&new.name)).await?;
    let gate = gates
        .first()
        .context("the gate has been deleted in the meantime")?;
    if let Some(handler) = &new.handler {
        warn_of_unused_handler(&store, handler).await?;
    }
    if let Some(queue) = &new.queue {
        warn_of_unused_queue(&store, queue).await?;
    }
    match args.json {
        true => println!("{}", as_json(gate)),
        false => println!(
            "gate {} is set: {} ({})",
            plain(&new.name),
            describe(gate),
            scope(gate)
        ),
    }
    Ok(ExitCode::SUCCESS)
}
