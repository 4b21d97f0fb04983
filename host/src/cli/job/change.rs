//! `rouse job cancel`, `retry`, `complete`, `fail`, `reschedule`, `delete`.

use std::io::Read as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::{EXIT_UNKNOWN, unknown};
use crate::cli::duration::duration;
use crate::cli::target::Target;
use crate::cli::text::as_json;
use crate::job::JobId;
use crate::store::{JsonText, Store, StoreError, When};

/// The job is not in a state for that.
const EXIT_REFUSED: u8 = 6;

const EXIT_CODES: &str = "\
Exit codes: 0 done, now or by an earlier call · 3 no such job · 6 the job is not in a state for that";

/// Options that name one job.
#[derive(Debug, ClapArgs)]
#[command(after_help = EXIT_CODES)]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The job's id
    id: i64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `rouse job complete`.
#[derive(Debug, ClapArgs)]
#[command(after_help = EXIT_CODES)]
pub(super) struct Complete {
    #[command(flatten)]
    target: Target,

    /// The job's id
    id: i64,

    /// The result; `-` reads it from standard input
    #[arg(value_name = "JSON", default_value = "null")]
    result: String,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `rouse job fail`.
#[derive(Debug, ClapArgs)]
#[command(after_help = EXIT_CODES)]
pub(super) struct Fail {
    #[command(flatten)]
    target: Target,

    /// The job's id
    id: i64,

    /// Why, for whoever looks at the job
    message: String,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `rouse job reschedule`.
#[derive(Debug, ClapArgs)]
#[command(after_help = EXIT_CODES)]
pub(super) struct Reschedule {
    #[command(flatten)]
    target: Target,

    /// The job's id
    id: i64,

    /// Not before this long from now, for instance 90s or 2h; default: at once
    #[arg(long = "in", value_name = "TIME", value_parser = duration, conflicts_with = "at")]
    delay: Option<Duration>,

    /// Not before this time, for instance 2027-01-31T08:00Z
    #[arg(long, value_name = "TIME")]
    at: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// `rouse job cancel`.
pub(super) async fn cancel(args: Args) -> anyhow::Result<ExitCode> {
    let store = open(&args.target).await?;
    if store.cancel(JobId(args.id)).await? {
        return Ok(done(args.json, args.id, "cancelled"));
    }
    Ok(match store.job(JobId(args.id)).await? {
        None => {
            unknown(args.id);
            ExitCode::from(EXIT_UNKNOWN)
        }
        Some(job) => {
            eprintln!(
                "rouse: job {} cannot be cancelled any more: it has ended as {}",
                args.id, job.state
            );
            ExitCode::from(EXIT_REFUSED)
        }
    })
}

/// `rouse job retry`.
pub(super) async fn retry(args: Args) -> anyhow::Result<ExitCode> {
    let store = open(&args.target).await?;
    match store.retry(JobId(args.id)).await {
        Ok(id) => {
            if args.json {
                println!("{}", as_json(json!({"id": id.0, "retried_from": args.id})));
            } else {
                println!("{id}");
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => refused(error),
    }
}

/// `rouse job complete`.
pub(super) async fn complete(args: Complete) -> anyhow::Result<ExitCode> {
    let result = if args.result == "-" {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .context("read the result from standard input")?;
        text
    } else {
        args.result
    };
    serde_json::from_str::<serde::de::IgnoredAny>(&result)
        .context("the result is no JSON (is it quoted for the shell? '{\"rows\": 3}')")?;
    let store = open(&args.target).await?;
    match store.complete(JobId(args.id), JsonText(result)).await {
        Ok(()) => Ok(done(args.json, args.id, "succeeded")),
        Err(error) => refused(error),
    }
}

/// `rouse job fail`.
pub(super) async fn fail(args: Fail) -> anyhow::Result<ExitCode> {
    let store = open(&args.target).await?;
    match store.fail(JobId(args.id), &args.message).await {
        Ok(()) => Ok(done(args.json, args.id, "failed")),
        Err(error) => refused(error),
    }
}

/// `rouse job reschedule`.
pub(super) async fn reschedule(args: Reschedule) -> anyhow::Result<ExitCode> {
    let when = match (args.delay, args.at) {
        (Some(delay), _) => When::InSecs(delay.as_secs_f64()),
        (None, Some(at)) => When::At(at),
        (None, None) => When::Now,
    };
    let store = open(&args.target).await?;
    match store.reschedule(JobId(args.id), &when).await {
        Ok(()) => Ok(done(args.json, args.id, "queued")),
        Err(error) => refused(error),
    }
}

/// `rouse job delete`.
pub(super) async fn delete(args: Args) -> anyhow::Result<ExitCode> {
    let store = open(&args.target).await?;
    match store.delete(JobId(args.id)).await {
        Ok(()) => Ok(done(args.json, args.id, "cancelled")),
        Err(error) => refused(error),
    }
}

async fn open(target: &Target) -> anyhow::Result<Store> {
    let store = target.checked_store().await?;
    Ok(store)
}

/// Says what the job is now.
fn done(in_json: bool, id: i64, state: &str) -> ExitCode {
    if in_json {
        println!(
            "{}",
            as_json(json!({"id": id, "state": Value::from(state)}))
        );
    } else {
        println!("job {id} is {state}");
    }
    ExitCode::SUCCESS
}

/// What the database says of a job that this cannot be done to.
fn refused(error: StoreError) -> anyhow::Result<ExitCode> {
    let code = if error.is_unknown_job() {
        EXIT_UNKNOWN
    } else if error.is_refused_by_state() {
        EXIT_REFUSED
    } else {
        return Err(error.into());
    };
    // Its text names us already.
    eprintln!("{error}");
    Ok(ExitCode::from(code))
}
