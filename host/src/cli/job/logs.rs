//! `rouse job logs`: what the attempts at a job have printed and logged.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use serde_json::json;

use super::{EXIT_UNKNOWN, unknown};
use crate::cli::number::{between, job_id};
use crate::cli::served::Wanted;
use crate::cli::signals::Signals;
use crate::cli::target::Target;
use crate::cli::text::{as_json, plain};
use crate::job::JobId;
use crate::store::{JobView, LoggedLine, Store};

/// How often who follows looks. Workers tell what was said twice a second.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How many looks after the end of a job the last lines may take.
const LOOKS_AFTER_THE_END: u32 = 4;

/// Options of `rouse job logs`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Lines come from standard output (info), standard error (warn) and the handler's log, with the time (UTC) and the attempt that said \
them, half a second after they were said. An attempt may write 256 KiB. The job's last error and, with --follow, why nobody takes it \
are on standard error.\n\
Exit codes: 0 the job is known, also where Ctrl-C or SIGTERM ends --follow · 3 no such job")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The job's id
    #[arg(value_parser = job_id)]
    id: i64,

    /// Go on until the job has ended
    #[arg(long, short)]
    follow: bool,

    /// Only what this attempt has said
    #[arg(long, value_name = "N", value_parser = between(1, i32::MAX))]
    attempt: Option<i32>,

    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// Prints the lines; those to come too, until the end of the job or a signal.
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
    let mut looks_left = None;
    let mut told = false;
    loop {
        // Before its lines: what is said after the end is looked for again.
        let Some(job) = store.job(id).await? else {
            eprintln!("rouse: {}", unknown(args.id));
            return Ok(ExitCode::from(EXIT_UNKNOWN));
        };
        if args.follow && job.state == "queued" && !told {
            told = true;
            Wanted::of(&job.record).tell_if_nobody(&store).await?;
        }
        let said_more = print(&store, id, &mut after, &args).await?;
        let ended = !matches!(job.state.as_str(), "queued" | "running");
        let past_it = args
            .attempt
            .is_some_and(|attempt| job.record["attempt"].as_i64() > Some(attempt.into()));
        match (args.follow, ended || past_it) {
            (false, _) => {
                tell_the_error(&job, &args);
                return Ok(ExitCode::SUCCESS);
            }
            (true, false) => {}
            (true, true) => {
                let left = match looks_left {
                    Some(left) if !said_more => left,
                    _ => LOOKS_AFTER_THE_END,
                };
                if left == 0 {
                    tell_the_error(&job, &args);
                    return Ok(ExitCode::SUCCESS);
                }
                looks_left = Some(left - 1);
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// No line of the log says why the guest panicked, or what the host did not let it do.
fn tell_the_error(job: &JobView, args: &Args) {
    if let (Some(message), None) = (job.record["error"]["message"].as_str(), args.attempt) {
        let (id, state) = (args.id, plain(&job.state));
        let first = plain(message.lines().next().unwrap_or_default());
        eprintln!(
            "rouse: the last error of job {id}, which is {state}: {first} (`rouse job {id}`)"
        );
    }
}

/// Prints what was said after that line, and moves on. True when there was something.
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
            println!("{}", said(line, args.json));
        }
    }
}

fn said(line: &LoggedLine, in_json: bool) -> String {
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
