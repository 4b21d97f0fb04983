//! `rouse audit`: what happened, when, and who did it.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use clap::builder::NonEmptyStringValueParser;
use serde_json::{Value, json};

use super::attempt_error::cell;
use super::list::{List, Shown};
use super::number::between;
use super::screen::Colour;
use super::target::{EXIT_NO_JOB, Target, no_job, seen};
use super::text::{as_json, plain};
use crate::duration;
use crate::job::JobId;
use crate::store::Audit;

/// Options of `rouse audit`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
With a job: its whole history, from the request to the end, oldest first. Without one: the events since a time, newest \
first: ended jobs and attempts, released claims, renewals, and admin actions with the login. Ended jobs are never rewritten by \
accident: even the owner of the schema has to call rouse.unlock_history first, which leaves a record.\n\
The search goes back until the page is full, at most to --since; a filter with few matches may search the whole range.\n\
Needs the role rouse_observer or rouse_operator.\n\
Exit codes: 0 found, even if no event matches · 3 no such job")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The job's id; default: all jobs and queues
    #[arg(
        value_name = "JOB",
        conflicts_with_all = ["since", "before", "before_key", "queue", "handler", "who", "limit"]
    )]
    job: Option<i64>,

    /// How far to search back from now, or from --before, for instance 90s or 2h
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration::argument_above_zero)]
    since: Duration,

    /// Only events before this time, as listed
    #[arg(long, value_name = "AT")]
    before: Option<String>,

    /// With --before: also the events at that time that follow the one with this key; continues where a listing ended
    #[arg(long, value_name = "KEY", requires = "before")]
    before_key: Option<String>,

    /// Only events of this queue
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    queue: Option<String>,

    /// Only events of this handler
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    handler: Option<String>,

    /// Only admin actions of this login, or of this user of the dashboard
    #[arg(long, value_name = "LOGIN", value_parser = NonEmptyStringValueParser::new())]
    who: Option<String>,

    /// The maximum number of rows
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = between(1_i32, 100_000))]
    limit: i32,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Lists the events.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let rows = match args.job {
        Some(id) => {
            let rows = seen(store.audit_job(JobId(id)).await?)?;
            if rows.is_empty() {
                eprintln!("rouse: {}", no_job(id));
                return Ok(ExitCode::from(EXIT_NO_JOB));
            }
            rows
        }
        None => {
            let audit = Audit {
                since: args.since,
                before: args.before,
                before_key: args.before_key,
                queue: args.queue,
                handler: args.handler,
                who: args.who,
                limit: args.limit,
            };
            seen(store.audit(&audit).await?)?
        }
    };
    match args.json {
        true => println!("{}", as_json(json!({"audit": rows}))),
        false => table(&rows).print("no matching events in that time"),
    }
    let is_full = i32::try_from(rows.len()).unwrap_or(i32::MAX) >= args.limit;
    if let (None, true, Some(last)) = (args.job, is_full, rows.last()) {
        eprintln!(
            "rouse: there may be more; --before {} --before-key {} continues from there",
            cell(&last["at"]),
            cell(&last["key"])
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn table(rows: &[Value]) -> List {
    let mut list = List::new([
        "at", "event", "job", "handler", "queue", "attempt", "worker", "by", "detail",
    ]);
    list.expendable(&["queue", "attempt", "worker"]);
    for row in rows {
        let text = |key: &str| match &row[key] {
            Value::Null => Shown::default(),
            value => Shown::from(cell(value)),
        };
        let event = cell(&row["event"]);
        let colour = Colour::for_state(&event);
        list.row([
            text("at"),
            Shown::in_colour(event, colour),
            text("job"),
            text("handler"),
            text("queue"),
            text("attempt"),
            text("worker"),
            text("by"),
            match &row["detail"] {
                Value::Null => Shown::default(),
                detail => plain(&detail.to_string()).into(),
            },
        ]);
    }
    list
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    #[test]
    fn an_empty_filter_is_refused() {
        let command = Args::augment_args(Command::new("audit"));
        for name in ["--queue", "--handler", "--who"] {
            let parsed = |value| command.clone().try_get_matches_from(["audit", name, value]);
            assert!(parsed("x").is_ok(), "{name}");
            let error = parsed("").unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
