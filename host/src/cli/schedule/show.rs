//! `rouse schedule show`: one schedule.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use jiff::Timestamp;
use serde_json::Value;

use super::{last, next, state, unknown};
use crate::cli::ago;
use crate::cli::list::{List, Shown};
use crate::cli::screen::{Colour, Screen};
use crate::cli::target::Target;
use crate::cli::text::{as_json, plain, words};
use crate::job::cron::DueTimes;

/// Options of `rouse schedule show`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer or rouse_operator.\n\
Outcomes of a due time: enqueued · queued (behind the previous job) · replaced (the previous job was cancelled) · backfilled · \
manual (rouse schedule run) · skipped (the previous job was live) · missed (this due time was too old, and perhaps earlier ones too) · \
refused (the job could not be enqueued)\n\
Exit codes: 0 found · 3 no such schedule")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The name of the schedule
    name: String,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Shows the schedule.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let schedules = store.schedules(Some(&args.name)).await?;
    let Some(schedule) = schedules.first() else {
        return Ok(unknown(&args.name));
    };
    if args.json {
        println!("{}", as_json(schedule));
        return Ok(ExitCode::SUCCESS);
    }
    let now = store.now().await?;
    println!("{}", properties(schedule).text());
    println!("\nnext\n{}", upcoming(schedule).text());
    for (title, rows, table) in [
        (
            "last",
            &schedule["last_runs"],
            runs as fn(&[Value], f64) -> List,
        ),
        ("backfills", &schedule["backfills"], backfills),
    ] {
        let rows = rows.as_array().map_or(&[][..], Vec::as_slice);
        if !rows.is_empty() {
            println!("\n{title}\n{}", table(rows, now).text());
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Its definition, without uninformative defaults.
fn properties(schedule: &Value) -> List {
    let mut list = List::plain();
    list.row([Shown::from("state".to_owned()), state(schedule)]);
    for key in [
        "error",
        "cron",
        "time_zone",
        "handler",
        "payload",
        "due_key",
        "overlap",
        "catch_up",
        "catch_up_window",
        "jitter",
        "queue",
        "priority",
        "tenant",
        "source",
        "max_attempts",
        "tags",
        "grants",
        "lease",
        "timeout",
        "job_timeout",
        "module_version",
        "login",
        "created_at",
        "changed_at",
        "paused_at",
        "handled_until",
    ] {
        let value = &schedule[key];
        let text = match value {
            Value::Null => continue,
            Value::String(text) if key == "jitter" && text == "00:00:00" => continue,
            Value::String(text) => plain(text),
            Value::Array(_) => words(value),
            other => plain(&other.to_string()),
        };
        if !text.is_empty() {
            list.row([key.to_owned(), text]);
        }
    }
    list
}

fn upcoming(schedule: &Value) -> List {
    let text = |key: &str| schedule[key].as_str().unwrap_or_default();
    let due = DueTimes::parse(text("cron"), text("time_zone"));
    let mut list = List::plain();
    for at in schedule["upcoming"].as_array().into_iter().flatten() {
        let at = at.as_str().unwrap_or_default();
        let parsed = at.parse::<Timestamp>();
        list.row([match (&due, parsed) {
            (Ok(due), Ok(at)) => next::shown(due, at),
            // The schedule was written by a newer host.
            (Err(_), _) | (_, Err(_)) => plain(at),
        }]);
    }
    let nothing = match (schedule["paused_at"].is_null(), schedule["error"].is_null()) {
        (false, _) => "none: it is paused",
        (_, false) => "none: see error",
        (true, true) => "a host has yet to compute them",
    };
    if schedule["upcoming"].as_array().is_none_or(Vec::is_empty) {
        list.row([nothing.to_owned()]);
    }
    list
}

fn runs(runs: &[Value], now: f64) -> List {
    let screen = Screen::from_stdout();
    let mut list = List::new(["due", "handled", "outcome", "job", "state", "error"]);
    for run in runs {
        let state = run["state"].as_str().unwrap_or_default();
        let job = run["job"].as_i64().map(|id| id.to_string());
        list.row([
            ago::listed(&run["due_at"], now, screen).into(),
            ago::listed(&run["at"], now, screen).into(),
            plain(run["outcome"].as_str().unwrap_or_default()).into(),
            job.unwrap_or_default().into(),
            Shown::in_colour(
                if run["job"].is_null() {
                    String::new()
                } else {
                    last(run)
                },
                Colour::for_state(state),
            ),
            plain(run["error"].as_str().unwrap_or_default()).into(),
        ]);
    }
    list
}

fn backfills(backfills: &[Value], now: f64) -> List {
    let screen = Screen::from_stdout();
    let mut list = List::new(["id", "since", "before", "enqueued", "state", "error"]);
    for backfill in backfills {
        let text = |key: &str| plain(backfill[key].as_str().unwrap_or_default());
        let is_open = backfill["finished_at"].is_null();
        list.row([
            backfill["id"].to_string(),
            text("since"),
            text("before"),
            backfill["enqueued"].to_string(),
            match is_open {
                true => "in progress".to_owned(),
                false => format!(
                    "finished {}",
                    ago::listed(&backfill["finished_at"], now, screen)
                ),
            },
            text("error"),
        ]);
    }
    list
}
