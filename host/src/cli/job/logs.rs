//! `rouse job logs`: the log and the output of a job's attempts.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use serde_json::json;

use crate::cli::number::{between, job_id};
use crate::cli::served::Wanted;
use crate::cli::signals::Signals;
use crate::cli::target::{EXIT_NO_JOB, Target, no_job};
use crate::cli::text::{as_json, plain};
use crate::cli::waiting::is_live;
use crate::job::JobId;
use crate::store::{JobView, LoggedLine, Store};

/// The interval at which --follow polls. Workers send log lines twice a second.
const POLL_EVERY: Duration = Duration::from_millis(500);

/// The number of polls after the end of a job, for lines that arrive late.
const POLLS_AFTER_THE_END: u32 = 4;

/// Options of `rouse job logs`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Lines come from standard output (info), standard error (warn) and the handler's log, with the time (UTC) and the attempt. They \
appear within about half a second. By default, an attempt may write 256 KiB. The job's last error, and with --follow the \
reason why no worker takes it, go to standard error.\n\
Exit codes: 0 the job is known, even if Ctrl-C or SIGTERM ends --follow · 3 no such job")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The job's id
    #[arg(value_parser = job_id)]
    id: i64,

    /// Continue until the job has ended
    #[arg(long, short)]
    follow: bool,

    /// Only lines of this attempt
    #[arg(long, value_name = "N", value_parser = between(1, i32::MAX))]
    attempt: Option<i32>,

    /// Print one JSON object for each line
    #[arg(long)]
    json: bool,
}

/// Prints the lines; with --follow, also later ones, until the job has ended or a signal arrives.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    if !args.follow {
        return print_all(args).await;
    }
    let mut signals = Signals::install()?;
    let ended = signals.unless(print_all(args)).await;
    ended.unwrap_or(Ok(ExitCode::SUCCESS))
}

async fn print_all(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.store()?;
    store.check_schema().await?;
    let id = JobId(args.id);
    let mut after = (
        args.attempt.map_or(0, |attempt| attempt.saturating_sub(1)),
        i32::MAX,
    );
    if args.attempt.is_none() {
        after = (0, 0);
    }
    let mut polls_left = None;
    let mut warned = false;
    loop {
        // Read the job before its lines: lines after the end are polled for again.
        let Some(job) = store.job(id).await? else {
            eprintln!("rouse: {}", no_job(args.id));
            return Ok(ExitCode::from(EXIT_NO_JOB));
        };
        if args.follow && job.state == "queued" && !warned {
            warned = true;
            Wanted::from_row(&job.record)
                .warn_if_unserved(&store)
                .await?;
        }
        let printed = print(&store, id, &mut after, &args).await?;
        let ended = !is_live(&job.state);
        let is_past_attempt = args
            .attempt
            .is_some_and(|attempt| job.record["attempt"].as_i64() > Some(attempt.into()));
        match (args.follow, ended || is_past_attempt) {
            (false, _) => {
                report_error(&job, &args);
                return Ok(ExitCode::SUCCESS);
            }
            (true, false) => {}
            (true, true) => {
                let left = match polls_left {
                    Some(left) if !printed => left,
                    _ => POLLS_AFTER_THE_END,
                };
                if left == 0 {
                    report_error(&job, &args);
                    return Ok(ExitCode::SUCCESS);
                }
                polls_left = Some(left - 1);
            }
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
}

/// Prints the last error, which the log does not contain.
fn report_error(job: &JobView, args: &Args) {
    if let (Some(message), None) = (job.record["error"]["message"].as_str(), args.attempt) {
        let (id, state) = (args.id, state_clause(&job.state));
        let first = plain(message.lines().next().unwrap_or_default());
        eprintln!("rouse: the last error of job {id}, which {state}: {first} (`rouse job {id}`)");
    }
}

/// The verb phrase for a state: `has failed`.
fn state_clause(state: &str) -> String {
    match state {
        "succeeded" | "failed" => format!("has {state}"),
        "timed_out" => "has timed out".to_owned(),
        "cancelled" => "was cancelled".to_owned(),
        _ => format!("is {}", plain(state)),
    }
}

/// Prints the lines after `after`, and advances it. True if there were any.
async fn print(
    store: &Store,
    id: JobId,
    after: &mut (i32, i32),
    args: &Args,
) -> anyhow::Result<bool> {
    let mut any = false;
    loop {
        let lines = store.job_log(id, *after).await?;
        let Some(last) = lines.last() else {
            return Ok(any);
        };
        *after = (last.attempt, last.line);
        any = true;
        for line in lines
            .iter()
            .filter(|line| args.attempt.is_none_or(|attempt| attempt == line.attempt))
        {
            println!("{}", formatted(line, args.json));
        }
    }
}

fn formatted(line: &LoggedLine, in_json: bool) -> String {
    let LoggedLine {
        attempt,
        line: number,
        at,
        level,
        text,
    } = line;
    match in_json {
        true => as_json(
            json!({"attempt": attempt, "line": number, "at": at, "level": level, "text": text}),
        ),
        false => format!("{at} {attempt} {:5} {}", level.to_uppercase(), plain(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::state_clause;

    #[test]
    fn states_read_as_verb_phrases() {
        let phrases = ["queued", "failed", "timed_out", "cancelled"].map(state_clause);
        let expected = ["is queued", "has failed", "has timed out", "was cancelled"];
        assert_eq!(phrases, expected);
    }
}
