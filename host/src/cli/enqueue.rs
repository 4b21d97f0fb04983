//! `rouse enqueue`: one job, from the shell.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use serde_json::json;

use super::number::between;
use super::payload;
use super::served::Wanted;
use super::target::Target;
use super::text::as_json;
use crate::duration;
use crate::store::{Enqueue, Enqueued};

/// Options of `rouse enqueue`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The handler, for instance text.stats
    handler: String,

    /// The payload; `-` reads it from standard input
    #[arg(value_name = "JSON", default_value = "{}")]
    payload: String,

    /// The queue; default: default
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,

    /// The tenant of the job
    #[arg(long)]
    tenant: Option<String>,

    /// The source that triggers the job
    #[arg(long)]
    source: Option<String>,

    /// high, normal or low
    #[arg(long)]
    priority: Option<String>,

    /// Run it after this time, for instance 90s or 2h
    #[arg(long = "in", value_name = "TIME", value_parser = duration::argument)]
    delay: Option<Duration>,

    /// The maximum number of attempts; default: the handler's own
    #[arg(long, value_name = "N", value_parser = between(1_i32, 1_000))]
    max_attempts: Option<i32>,

    /// Unique among the live jobs of the handler and tenant: if such a job exists, its id is printed and nothing is
    /// added
    #[arg(long, value_name = "KEY")]
    unique_key: Option<String>,

    /// How long a claim is valid without renewal, 2s to 1d; default: the handler's own
    #[arg(long, value_name = "TIME", value_parser = duration::argument_above_zero)]
    lease: Option<Duration>,

    /// How long an attempt may run, at most 30d; default: the handler's own. If rouse.toml sets a timeout for the
    /// handler, the shorter of the two counts
    #[arg(long, value_name = "TIME", value_parser = duration::argument_above_zero)]
    timeout: Option<Duration>,

    /// A tag that the worker must have (repeat for several)
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,

    /// Grants of this job, fewer than the handler's, for instance {"http": ["api.example.com"], "memory_mb": 32};
    /// default: all
    #[arg(long, value_name = "JSON")]
    grants: Option<String>,

    /// Print {"id": …, "created": …, "differs": [arguments in which the live job with the key differs]}
    #[arg(long)]
    json: bool,
}

/// Enqueues and prints the id.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let payload = payload::read(args.payload)?;
    let store = args.target.checked_store().await?;
    let (handler, tags) = (args.handler.clone(), json!(args.tags));
    let payload_text = payload.clone();
    let queue = args.queue.clone().unwrap_or_else(|| "default".into());
    // A worker may have bound a source to another handler.
    let is_bound = args.source.is_some();
    let Enqueued {
        id,
        created,
        differs,
    } = store
        .enqueue(&Enqueue {
            handler: args.handler,
            payload,
            queue: args.queue,
            tenant: args.tenant,
            source: args.source,
            priority: args.priority,
            delay_secs: args.delay.map(|delay| delay.as_secs_f64()),
            max_attempts: args.max_attempts,
            unique_key: args.unique_key,
            tags: args.tags,
            grants: args.grants,
            lease_secs: args.lease.map(|lease| lease.as_secs_f64()),
            timeout_secs: args.timeout.map(|timeout| timeout.as_secs_f64()),
        })
        .await?;
    if created && !is_bound {
        let wanted = Wanted {
            handler: &handler,
            queue: &queue,
            tags: &tags,
        };
        // These are hints: the job is enqueued even if the login may not see the workers.
        let _ = wanted.warn_if_unserved(&store).await;
        let _ = wanted.warn_of_unknown_keys(&store, &payload_text).await;
    }
    if args.json {
        let done = json!({"id": id.0, "created": created, "differs": differs});
        println!("{}", as_json(done));
        return Ok(ExitCode::SUCCESS);
    }
    println!("{id}");
    if !created {
        let differs = match differs.is_empty() {
            true => String::new(),
            false => format!(", with a different {}", differs.join(", ")),
        };
        eprintln!("rouse: already queued as {id}{differs}; nothing was added");
    }
    Ok(ExitCode::SUCCESS)
}
