//! `rouse job cancel ID`, `retry ID`, `delete ID`, `complete`, `fail`, `signal`, `reschedule`, `edit`.

use std::cell::Cell;
use std::io::Read as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args as ClapArgs, ValueEnum};
use serde_json::json;

use crate::cli::each::{Done, Refusal, each};
use crate::cli::number::job_id;
use crate::cli::target::{EXIT_NO_JOB, Target, no_job};
use crate::duration;
use crate::job::JobId;
use crate::store::{JsonText, Store, StoreError, When};

/// The state of the job does not allow the change.
pub(super) const EXIT_REFUSED: u8 = 6;

/// The word for an item in messages.
const JOB: &str = "job";

const EXIT_CODES: &str = "\
Exit codes: 0 done, now or by an earlier call · 3 no such job · 6 the job is not in a state that allows it, or another \
transaction has locked it";

const EXIT_CODES_OF_SEVERAL: &str = "\
Several jobs are changed one after the other. A refused job does not stop the others, and a summary follows.\n\
Exit codes: 0 all done, now or by an earlier call · 3 no such job · 6 a job is not in a state that allows it, or \
another transaction has locked it; with several jobs, the highest code";

/// Options of `rouse job complete`.
#[derive(Debug, ClapArgs)]
#[command(after_help = EXIT_CODES)]
pub(super) struct Complete {
    #[command(flatten)]
    target: Target,

    /// The job's id
    #[arg(value_parser = job_id)]
    id: i64,

    /// The result; `-` reads it from standard input
    #[arg(value_name = "JSON", default_value = "null")]
    result: String,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `rouse job signal`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
For instance: rouse job signal 17 approved '{\"by\": \"Ada\"}'\n\
Exit codes: 0 the job has received the signal · 3 no such job · 6 the job has ended, or another transaction has \
locked it")]
pub(super) struct Signal {
    #[command(flatten)]
    target: Target,

    /// The job's id
    #[arg(value_parser = job_id)]
    id: i64,

    /// The name that the handler waits for
    name: String,

    /// The payload; `-` reads it from standard input
    #[arg(value_name = "JSON", default_value = "null")]
    payload: String,

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
    #[arg(value_parser = job_id)]
    id: i64,

    /// The reason, shown with the job
    message: String,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `rouse job reschedule`.
#[derive(Debug, ClapArgs)]
#[command(after_help = EXIT_CODES_OF_SEVERAL)]
pub(super) struct Reschedule {
    #[command(flatten)]
    target: Target,

    /// The jobs' ids
    #[arg(value_name = "ID", required = true, value_parser = job_id)]
    ids: Vec<i64>,

    /// Run the jobs after this delay, for instance 90s or 2h; default: at once
    #[arg(long = "in", value_name = "TIME", value_parser = duration::argument, conflicts_with = "at")]
    delay: Option<Duration>,

    /// Run the jobs at this time, for instance 2027-01-31T08:00Z
    #[arg(long, value_name = "TIME")]
    at: Option<String>,

    /// Print one JSON object for each job, and one for the summary of several
    #[arg(long)]
    json: bool,
}

/// Options of `rouse job edit`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
A job with another payload is a new job: the old one is cancelled, and keeps its payload and its history. The id of the new one is printed. The \
new job continues the chain, so jobs that wait for the old one wait for the new one.\n\
Exit codes: 0 done · 3 no such job · 6 the job is not queued, or another transaction has locked it")]
#[group(id = "edited", required = true, multiple = true, args = ["priority", "payload"])]
pub(super) struct Edit {
    #[command(flatten)]
    target: Target,

    /// The job's id
    #[arg(value_parser = job_id)]
    id: i64,

    /// The priority
    #[arg(long)]
    priority: Option<Priority>,

    /// The payload; `-` reads it from standard input
    #[arg(long, value_name = "JSON")]
    payload: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The priority of a job.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Priority {
    High,
    Normal,
    Low,
}

impl Priority {
    fn as_str(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }
}

/// `rouse job cancel ID`.
pub(super) async fn cancel_each(
    store: &Store,
    ids: &[i64],
    in_json: bool,
) -> anyhow::Result<ExitCode> {
    each(ids, JOB, in_json, async |&id| {
        let done = store.cancel(JobId(id)).await;
        if !matches!(done, Ok(false)) {
            return item_result(id, done, |_| now(id, "cancelled"));
        }
        Ok(Err(match store.job(JobId(id)).await? {
            None => Refusal {
                code: EXIT_NO_JOB,
                why: no_job(id),
            },
            Some(job) => Refusal {
                code: EXIT_REFUSED,
                why: format!(
                    "job {id} cannot be cancelled any more: it has ended as {}",
                    job.state
                ),
            },
        }))
    })
    .await
}

/// `rouse job retry ID`.
pub(super) async fn retry_each(
    store: &Store,
    ids: &[i64],
    in_json: bool,
) -> anyhow::Result<ExitCode> {
    each(ids, JOB, in_json, async |&id| {
        item_result(id, store.retry(JobId(id)).await, |new| Done {
            text: new.to_string(),
            json: json!({"id": new.0, "retried_from": id}),
        })
    })
    .await
}

/// `rouse job complete`.
pub(super) async fn complete(args: Complete) -> anyhow::Result<ExitCode> {
    let result = json_argument("result", args.result)?;
    let store = args.target.checked_store().await?;
    each(&[args.id], JOB, args.json, async |&id| {
        let done = store.complete(JobId(id), JsonText(result.clone())).await;
        item_result(id, done, |()| now(id, "succeeded"))
    })
    .await
}

/// `rouse job signal`.
pub(super) async fn signal(args: Signal) -> anyhow::Result<ExitCode> {
    let payload = json_argument("payload", args.payload)?;
    let store = args.target.checked_store().await?;
    each(&[args.id], JOB, args.json, async |&id| {
        let sent = store.signal(JobId(id), &args.name, JsonText(payload.clone()));
        let sent = sent.await;
        if let Ok(false) = sent {
            return Ok(Err(Refusal {
                code: EXIT_REFUSED,
                why: format!("job {id} has ended, so it cannot receive signals"),
            }));
        }
        item_result(id, sent, |_| Done {
            text: format!("job {id} has received the signal {}", args.name),
            json: json!({"id": id, "signal": args.name}),
        })
    })
    .await
}

/// JSON from the command line, or from standard input for `-`. `what` describes it in the error.
fn json_argument(what: &str, argument: String) -> anyhow::Result<String> {
    let text = if argument == "-" {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .with_context(|| format!("read the {what} from standard input"))?;
        text
    } else {
        argument
    };
    serde_json::from_str::<serde::de::IgnoredAny>(&text).with_context(|| {
        format!("the {what} is not JSON (is it quoted for the shell? '{{\"rows\": 3}}')")
    })?;
    Ok(text)
}

/// `rouse job fail`.
pub(super) async fn fail(args: Fail) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&[args.id], JOB, args.json, async |&id| {
        let done = store.fail(JobId(id), &args.message).await;
        item_result(id, done, |()| now(id, "failed"))
    })
    .await
}

/// `rouse job reschedule`.
pub(super) async fn reschedule(args: Reschedule) -> anyhow::Result<ExitCode> {
    let when = match (args.delay, args.at) {
        (Some(delay), _) => When::InSecs(delay.as_secs_f64()),
        (None, Some(at)) => When::At(at),
        (None, None) => When::Now,
    };
    let store = args.target.checked_store().await?;
    each(&args.ids, JOB, args.json, async |&id| {
        let done = store.reschedule(JobId(id), &when).await;
        item_result(id, done, |()| now(id, "queued"))
    })
    .await
}

/// `rouse job edit`.
pub(super) async fn edit(args: Edit) -> anyhow::Result<ExitCode> {
    let payload = args.payload.map(|text| json_argument("payload", text));
    let payload = payload.transpose()?;
    let store = args.target.checked_store().await?;
    // The change of the payload may conflict with another transaction, and is then tried again.
    let has_priority = Cell::new(false);
    each(&[args.id], JOB, args.json, async |&id| {
        // The priority comes first: the new job gets it from the old one, and if the priority is refused, there is no
        // new job whose id was not printed.
        let priority = args.priority.filter(|_| !has_priority.get());
        if let Some(priority) = priority.map(Priority::as_str) {
            let text = format!("job {id} has the priority {priority}");
            let done = store.set_priority(JobId(id), priority).await;
            let done = item_result(id, done, |()| Done {
                text: text.clone(),
                json: json!({"id": id, "priority": priority}),
            })?;
            if payload.is_none() || done.is_err() {
                return Ok(done);
            }
            // Printed even if the payload is refused.
            eprintln!("rouse: {text}");
            has_priority.set(true);
        }
        let payload = payload.clone().expect("one of the two is required");
        let done = store.replace_payload(JobId(id), JsonText(payload)).await;
        item_result(id, done, |new| Done {
            text: new.to_string(),
            json: json!({"id": new.0, "retried_from": id}),
        })
    })
    .await
}

/// `rouse job delete ID`.
pub(super) async fn delete_each(
    store: &Store,
    ids: &[i64],
    in_json: bool,
) -> anyhow::Result<ExitCode> {
    each(ids, JOB, in_json, async |&id| {
        let done = store.delete(JobId(id)).await;
        item_result(id, done, |()| now(id, "cancelled"))
    })
    .await
}

/// The job's new state.
fn now(id: i64, state: &str) -> Done {
    Done {
        text: format!("job {id} is {state}"),
        json: json!({"id": id, "state": state}),
    }
}

/// The result of a change: done, or the reason why the database refused it.
fn item_result<T>(
    id: i64,
    done: Result<T, StoreError>,
    show: impl FnOnce(T) -> Done,
) -> anyhow::Result<Result<Done, Refusal>> {
    match done {
        Ok(done) => Ok(Ok(show(done))),
        Err(error) => {
            let code = if error.is_unknown_job() {
                EXIT_NO_JOB
            } else if error.is_refused_by_state() {
                EXIT_REFUSED
            } else {
                return Err(error.into());
            };
            let why = as_commands(id, error.to_string());
            Ok(Err(Refusal { code, why }))
        }
    }
}

/// The message with commands instead of the SQL statements that it suggests.
fn as_commands(id: i64, mut why: String) -> String {
    for operation in ["cancel", "retry", "reschedule"] {
        let statement = format!("SELECT rouse.{operation}({id})");
        why = why.replace(&statement, &format!("`rouse job {operation} {id}`"));
    }
    why
}
