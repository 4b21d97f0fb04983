//! `rouse schedule set`: creates or replaces a schedule.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args as ClapArgs;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::next;
use crate::cli::number::between;
use crate::cli::payload;
use crate::cli::target::Target;
use crate::cli::text::{as_json, plain};
use crate::duration;
use crate::job::cron::DueTimes;
use crate::store::NewSchedule;

/// Options of `rouse schedule set`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
The same as SELECT rouse.schedule(…). If the schedule exists, it is replaced as a whole: options that are left out get their \
defaults. A paused schedule stays paused. `rouse schedule next --help` explains expressions and daylight saving time.
  rouse schedule set nightly report.make '0 3 * * MON-FRI' '{\"kind\": \"sales\"}' --time-zone Europe/Berlin --due-key day\n\
Needs the role rouse_producer or rouse_operator. Exit codes: 0 done · 1 refused, nothing was changed")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The name of the schedule
    name: String,

    /// The handler of its jobs, for instance report.make
    handler: String,

    /// When it is due: a cron expression in quotes
    cron: String,

    /// The payload of its jobs; `-` reads it from standard input
    #[arg(value_name = "JSON", default_value = "{}")]
    payload: String,

    /// The time zone in which the expression is read; default: UTC
    #[arg(long, value_name = "ZONE")]
    time_zone: Option<String>,

    /// If its previous job is live when the next one is due: skip the new one, queue it behind the previous one (one at
    /// a time), allow both, or cancel the previous one; default: skip
    #[arg(long, value_name = "POLICY", value_parser = ["skip", "queue", "allow", "cancel"])]
    overlap: Option<String>,

    /// Which due times get a job although no host was running: none, one (the latest), or all; default: one
    #[arg(long, value_name = "POLICY", value_parser = ["none", "one", "all"])]
    catch_up: Option<String>,

    /// The maximum age of due times that are caught up, for instance 2h; default: any age
    #[arg(long, value_name = "TIME", value_parser = duration::argument_above_zero)]
    catch_up_window: Option<Duration>,

    /// Each job starts up to this much later, at most 1d
    #[arg(long, value_name = "TIME", value_parser = duration::argument)]
    jitter: Option<Duration>,

    /// The key of the payload that gets the due time
    #[arg(long, value_name = "KEY")]
    due_key: Option<String>,

    /// The queue; default: `default`
    #[arg(long, value_name = "NAME")]
    queue: Option<String>,

    /// The tenant of its jobs
    #[arg(long)]
    tenant: Option<String>,

    /// The source of its jobs; default: schedule:NAME
    #[arg(long)]
    source: Option<String>,

    /// high, normal or low
    #[arg(long)]
    priority: Option<String>,

    /// The maximum number of attempts; default: the handler's own
    #[arg(long, value_name = "N", value_parser = between(1_i32, 1_000))]
    max_attempts: Option<i32>,

    /// How long a claim is valid without renewal, 2s to 1d; default: the handler's own
    #[arg(long, value_name = "TIME", value_parser = duration::argument_above_zero)]
    lease: Option<Duration>,

    /// How long an attempt may run, at most 30d; default: the handler's own
    #[arg(long, value_name = "TIME", value_parser = duration::argument_above_zero)]
    timeout: Option<Duration>,

    /// The time within which a job has to end, with all its attempts, retries and waits, at most 3660d. A job that has
    /// not ended by then fails; default: none
    #[arg(long, value_name = "TIME", value_parser = duration::argument_above_zero)]
    job_timeout: Option<Duration>,

    /// A tag that the worker must have (repeat for several)
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,

    /// Grants of its jobs, fewer than the handler's; default: all
    #[arg(long, value_name = "JSON")]
    grants: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Checks the expression here, because SQL cannot, and sends the schedule.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let zone = args.time_zone.as_deref().unwrap_or("UTC");
    let due = DueTimes::parse(&args.cron, zone).map_err(|why| anyhow!(why))?;
    let payload = payload::read(args.payload)?;
    let store = args.target.checked_store().await?;
    let secs = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    let done = store
        .put_schedule(&NewSchedule {
            name: args.name.clone(),
            handler: args.handler,
            payload,
            cron: args.cron,
            time_zone: args.time_zone,
            overlap: args.overlap,
            catch_up: args.catch_up,
            catch_up_window_secs: secs(args.catch_up_window),
            jitter_secs: secs(args.jitter),
            queue: args.queue,
            tenant: args.tenant,
            source: args.source,
            priority: args.priority,
            max_attempts: args.max_attempts,
            tags: args.tags,
            grants: args.grants,
            lease_secs: secs(args.lease),
            timeout_secs: secs(args.timeout),
            job_timeout_secs: secs(args.job_timeout),
            due_key: args.due_key,
        })
        .await?;
    let now = Timestamp::from_microsecond((store.now().await? * 1e6) as i64)?;
    let first = due.next_after(now);
    if args.json {
        let next_at = first.map_or(Value::Null, |at| json!(at.to_string()));
        println!(
            "{}",
            as_json(json!({"schedule": args.name, "done": done, "next_at": next_at}))
        );
        return Ok(ExitCode::SUCCESS);
    }
    let first = first.map_or("never due".to_owned(), |at| {
        format!("next due {}", next::shown(&due, at))
    });
    println!("schedule {} is {done}; {first}", plain(&args.name));
    Ok(ExitCode::SUCCESS)
}
