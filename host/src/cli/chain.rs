//! `rouse chain`: shows the jobs of a chain, and waits for its end.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use serde_json::Value;

use super::ago;
use super::attempt_error::{cell, lines};
use super::list::{List, Shown};
use super::number::job_id;
use super::screen::{Colour, Screen};
use super::target::{EXIT_NO_JOB, Target, no_job};
use super::text::{as_json, plain};
use super::waiting::{Waiting, exit_code, is_live};
use crate::duration;
use crate::job::JobId;
use crate::store::JobView;

/// Options of `rouse chain`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
A chain is a job, its retries, and the jobs with which handlers continue it. It ends with its last job, \
in the same state.\n\
Exit codes: 0 found (with --wait: succeeded) · 3 no such job · with --wait also \
3 its last job is no longer kept · 4 failed or timed out · 5 not ended in time · 7 cancelled")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The id of any job of the chain
    #[arg(value_parser = job_id)]
    id: i64,

    /// Wait until the chain has ended
    #[arg(long)]
    wait: bool,

    /// The maximum time to wait with --wait
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration::argument, requires = "wait")]
    timeout: Duration,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Shows the chain; with --wait, after its end.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let waiting = Waiting::start(args.timeout);
    let chain = loop {
        let Some(chain) = store.chain(JobId(args.id)).await? else {
            eprintln!("rouse: {}", no_job(args.id));
            return Ok(ExitCode::from(EXIT_NO_JOB));
        };
        if !args.wait || !is_live(&chain.state) {
            break chain;
        }
        if !waiting.pause().await {
            eprintln!(
                "rouse: the chain of job {} has not ended within {}",
                args.id,
                humantime::format_duration(args.timeout)
            );
            break chain;
        }
    };
    if args.json {
        println!("{}", as_json(&chain.text));
    } else {
        println!("{}", show(&chain, store.now().await?));
    }
    let code = match args.wait {
        true if chain.state.is_empty() => EXIT_NO_JOB,
        true => exit_code(&chain.state),
        false => 0,
    };
    Ok(ExitCode::from(code))
}

fn show(chain: &JobView, now: f64) -> String {
    let screen = Screen::from_stdout();
    let state = match chain.state.as_str() {
        "" => "its last job is no longer kept",
        state => state,
    };
    let mut text = format!(
        "chain {}: {}\n\n",
        cell(&chain.record["chain"]),
        plain(state)
    );
    let mut list = List::new([
        "job",
        "handler",
        "queue",
        "state",
        "attempt",
        "requested",
        "ended",
    ]);
    list.expendable(&["queue", "attempt"]);
    for job in chain.record["jobs"].as_array().into_iter().flatten() {
        let state = cell(&job["state"]);
        let colour = Colour::for_state(&state);
        let at = |time: &Value| match time {
            Value::Null => Shown::nothing("-"),
            time => ago::listed(time, now, screen).into(),
        };
        list.row([
            cell(&job["job"]).into(),
            cell(&job["handler"]).into(),
            cell(&job["queue"]).into(),
            Shown::in_colour(state, colour),
            cell(&job["attempt"]).into(),
            at(&job["requested_at"]),
            at(&job["finished_at"]),
        ]);
    }
    text.push_str(&list.text());
    if let Some(result) = &chain.result {
        text.push_str(&format!("\n\nresult\n  {}", plain(result)));
    }
    if let Some(error) = chain.record.get("error").filter(|error| !error.is_null()) {
        text.push_str(&format!("\n\nerror\n{}", lines(error).trim_end()));
    }
    text
}
