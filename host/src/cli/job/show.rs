//! `rouse job show`: one job with its history.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use serde_json::{Value, json};

use super::attempts::attempts;
use super::list;
use super::wait;
use crate::cli::ago;
use crate::cli::attempt_error::{cell, lines};
use crate::cli::list::{List, Shown};
use crate::cli::number::job_id;
use crate::cli::screen::{Colour, Screen};
use crate::cli::served::{Wanted, waits};
use crate::cli::target::{EXIT_NO_JOB, Target, no_job};
use crate::cli::text::{as_json, plain};
use crate::cli::top::bytes;
use crate::cli::waiting::{Waiting, exit_code, is_live};
use crate::cli::why::sentences;
use crate::duration;
use crate::job::JobId;
use crate::store::{JobStatus, JobView, Store, StoreError};

/// Options of `rouse job show`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Exit codes: 0 found (with --wait: succeeded) · 3 no such job · with --wait also \
4 failed or timed out · 5 not ended in time · 7 cancelled")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The job's id, as rouse.enqueue returned it
    #[arg(value_parser = job_id)]
    id: Option<i64>,

    /// Wait until it has ended
    #[arg(long, requires = "id")]
    wait: bool,

    /// The maximum time to wait with --wait
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration::argument, requires = "wait")]
    timeout: Duration,

    /// Print everything as one JSON object
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(super) fn id(&self) -> Option<i64> {
        self.id
    }
}

/// Without an id, the command lists the newest jobs.
impl From<Args> for list::Args {
    fn from(args: Args) -> Self {
        Self::newest(args.target, args.json)
    }
}

/// Shows the job; with --wait, after its end.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Some(id) = args.id else {
        anyhow::bail!("no job id was given: use `rouse job ID`, or `rouse job ls` to list jobs");
    };
    let store = args.target.checked_store().await?;
    let waiting = Waiting::start(args.timeout);
    let Some(mut job) = read(&store, JobId(id), args.json).await? else {
        eprintln!("rouse: {}", no_job(id));
        return Ok(ExitCode::from(EXIT_NO_JOB));
    };
    if args.wait && waits(&job.record) {
        Wanted::from_row(&job.record)
            .warn_if_unserved(&store)
            .await?;
    }
    if args.wait && is_live(&job.state) {
        if !has_ended_in_time(&store, id, &waiting).await? {
            eprintln!(
                "rouse: job {id} has not ended within {}",
                humantime::format_duration(args.timeout)
            );
        }
        // If the job has been removed in the meantime, the last view is kept.
        job = read(&store, JobId(id), args.json).await?.unwrap_or(job);
    }
    let code = if args.wait { exit_code(&job.state) } else { 0 };
    if args.json {
        println!("{}", as_json(&job.text));
    } else {
        let why = match waits(&job.record) {
            true => store.why(JobId(id)).await?.unwrap_or_default(),
            false => Vec::new(),
        };
        println!("{}", show(&job, &why, store.now().await?));
    }
    Ok(ExitCode::from(code))
}

/// Reads the job, with all events if they are all printed.
async fn read(store: &Store, id: JobId, all_events: bool) -> Result<Option<JobView>, StoreError> {
    match all_events {
        true => store.job_with_all_events(id).await,
        false => store.job(id).await,
    }
}

/// Waits until the job is no longer live.
async fn has_ended_in_time(store: &Store, id: i64, waiting: &Waiting) -> anyhow::Result<bool> {
    while waiting.pause().await {
        let statuses = store.statuses(&[id]).await?;
        if !matches!(statuses.first(), Some((_, JobStatus::Live(_)))) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// `why`: the reasons why the job has not started.
fn show(job: &JobView, why: &[Value], now: f64) -> String {
    let screen = Screen::from_stdout();
    let record = &job.record;
    let mut list = List::plain();
    for key in [
        "id",
        "handler",
        "queue",
        "priority",
        "tags",
        "unique_key",
        "state",
        "tenant",
        "source",
        "parent",
        "chain",
        "after",
        "waits_for",
        "attempt",
        "uncounted",
        "max_attempts",
        "lease_ms",
        "timeout_ms",
        "deadline_at",
        "grants",
        "trace",
        "requested_at",
        "available_at",
        "claimed_at",
        "orphaned_at",
        "started_at",
        "finished_at",
    ] {
        let is_default = |value: &Value| {
            value.is_null()
                || (key == "tags" && *value == json!([]))
                || (key == "uncounted" && *value == json!(0))
                || (key == "chain" && *value == record["id"])
        };
        let Some(value) = record.get(key).filter(|value| !is_default(value)) else {
            continue;
        };
        let value = match (key, value.as_str()) {
            ("state", Some(word)) => Shown::in_colour(plain(word), Colour::for_state(word)),
            ("attempt", _) => attempts(record, max_attempts(record), now).into(),
            ("lease_ms" | "timeout_ms", _) => {
                let time = Duration::from_millis(value.as_u64().unwrap_or_default());
                humantime::format_duration(time).to_string().into()
            }
            (key, Some(time)) if key.ends_with("_at") => ago::shown(time, now, screen).into(),
            _ => cell(value).into(),
        };
        let name = key.strip_suffix("_ms").unwrap_or(key);
        list.row([Shown::from(name.to_string()), value]);
    }
    if let Some(wait) = wait::waits_for(record) {
        list.row(["suspended".to_string(), format!("waits for {wait}")]);
    }
    if let Some(progress) = record.get("progress").filter(|value| !value.is_null()) {
        let field = |key: &str| progress.get(key).map(cell).unwrap_or_default();
        list.row([
            "progress".to_string(),
            format!("{} %, {}", field("percent"), field("step")),
        ]);
    }
    if let Some(used) = record.get("usage").filter(|used| !used.is_null()) {
        list.row(["used".to_string(), usage(used)]);
    }
    let mut text = list.text();
    text.push('\n');
    if !why.is_empty() {
        text.push_str(&format!("\nwhy it waits\n{}\n", sentences(why)));
    }
    // Payload and result are printed outside the table, which would wrap them: they are meant to be copied.
    for (key, value) in [("payload", &job.payload), ("result", &job.result)] {
        if let Some(value) = value {
            text.push_str(&format!("\n{key}\n  {}\n", plain(value)));
        }
    }
    if let Some(error) = record.get("error").filter(|error| !error.is_null()) {
        text.push_str("\nerror\n");
        if job.state == "failed" && error["kind"] == "lost" {
            text.push_str(&format!(
                "  quarantined: this job probably crashes the hosts that run it; once the cause is fixed, run `rouse job retry {}`\n",
                cell(&record["id"])
            ));
        }
        text.push_str(&lines(error));
    }
    text.push_str("\nhistory\n");
    let mut history = List::plain();
    let mut since = None;
    for event in record["history"].as_array().into_iter().flatten() {
        let word = |key: &str| event.get(key).map(cell).unwrap_or_default();
        let detail = |key: &str| event.get("detail").and_then(|detail| detail.get(key));
        let by = detail("by").map(|by| format!("by {}", cell(by)));
        // The last error is printed above in full. Print only the first line of the others; `--json` contains all of
        // them.
        let is_above = |message: &Value| *message == record["error"]["message"];
        let message = detail("message").map(|message| match first_line(message) {
            (_, true) if is_above(message) => "the error above".to_owned(),
            (first, true) => format!("{first} …"),
            (first, false) => first.to_owned(),
        });
        // The renewals of an attempt are one event.
        let times = event["times"].as_i64();
        let repeated = || times.map(|times| format!("{times} times, last at this time"));
        let message = message.or_else(repeated).map(Value::from);
        let why = message
            .as_ref()
            .or_else(|| detail("step"))
            .or_else(|| detail("name"))
            .or_else(|| detail("run_at"))
            .or_else(|| detail("as"));
        let at = match ago::epoch(&word("at")).filter(|_| screen.is_terminal()) {
            None => word("at"),
            Some(at) => match since {
                None => {
                    since = Some(at);
                    ago::relative(at, now)
                }
                Some(since) => format!("+{}", ago::took(at - since)),
            },
        };
        let event = word("event");
        let colour = Colour::for_state(&event);
        history.row([
            at.into(),
            Shown::in_colour(event, colour),
            word("attempt").into(),
            word("worker").into(),
            by.into_iter()
                .chain(why.map(cell))
                .collect::<Vec<_>>()
                .join(": ")
                .into(),
        ]);
    }
    text.push_str(&history.text());
    text
}

/// The first line, and whether there are more.
fn first_line(text: &Value) -> (&str, bool) {
    let text = text.as_str().unwrap_or_default();
    match text.split_once('\n') {
        Some((first, _)) => (first, true),
        None => (text, false),
    }
}

/// The maximum number of attempts, without the uncounted ones: the producer's limit, or that of the last error that has
/// one.
fn max_attempts(record: &Value) -> Option<u64> {
    let history = record["history"].as_array().into_iter().flatten().rev();
    let known = history.filter_map(|event| event["detail"]["max_attempts"].as_u64());
    let own = record["max_attempts"].as_u64();
    let last = record["error"]["max_attempts"].as_u64();
    own.or(last).or_else(|| known.into_iter().next())
}

/// The usage of an attempt, in one line.
fn usage(used: &Value) -> String {
    let number = |key: &str| used[key].as_u64().unwrap_or_default();
    let mut text = format!(
        "{} ms of CPU time, {} of memory, {}",
        used["cpu_ms"],
        bytes(number("memory_bytes")),
        match number("host_calls") {
            1 => "1 host call".to_string(),
            calls => format!("{calls} host calls"),
        },
    );
    if number("bytes_in") + number("bytes_out") > 0 {
        text += &format!(
            ", {} received, {} sent",
            bytes(number("bytes_in")),
            bytes(number("bytes_out"))
        );
    }
    if let Some(digest) = used["sha256"].as_str() {
        text += &format!(", module {}", plain(&digest[..digest.len().min(12)]));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_host_call_is_printed_in_the_singular() {
        let used = |calls| usage(&json!({"cpu_ms": 1.5, "memory_bytes": 0, "host_calls": calls}));
        assert!(used(1).ends_with(", 1 host call"), "{}", used(1));
        assert!(used(2).ends_with(", 2 host calls"), "{}", used(2));
    }
}
