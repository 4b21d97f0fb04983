//! `rouse schedule next`: the next due times of a cron expression, without a database, or of a schedule.

use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use clap::Args as ClapArgs;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::unknown;
use crate::cli::number::between;
use crate::cli::target::Target;
use crate::cli::text::as_json;
use crate::job::cron::DueTimes;

/// Options of `rouse schedule next`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
An expression has five fields: minute, hour, day of the month, month, day of the week; or six, with seconds first. \
Fields contain numbers, lists (1,15), ranges (1-5), steps (*/10) and names (MON, JAN). L is the last day of the month, \
5L its last Friday, 5#2 its second Friday, 15W the working day nearest to the 15th. If both day fields are restricted, \
a day that matches either one is due.\n\
When the clock goes forward or back: if second, minute and hour are numbers or lists of numbers, a time that is skipped is due when \
the clock goes forward, and a time that is repeated is due once, the first time. Other expressions follow elapsed time: what is \
skipped is not due, and what is repeated is due both times.
  rouse schedule next '30 2 * * *' --time-zone Europe/Berlin
  rouse schedule next nightly\n\
Exit codes: 0 done · 1 the expression is invalid · 3 no such schedule")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// A cron expression in quotes, or the name of a schedule
    #[arg(value_name = "CRON|NAME")]
    what: String,

    /// The time zone in which the expression is read; default: UTC
    #[arg(long, value_name = "ZONE")]
    time_zone: Option<String>,

    /// The number of due times
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = between(1_usize, 1_000))]
    count: usize,

    /// Due times after this time, for instance 2026-03-28T00:00:00Z; default: now, by the clock of this machine
    #[arg(long, value_name = "TIME", value_parser = time)]
    after: Option<Timestamp>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Parses a time with its offset.
pub(super) fn time(text: &str) -> Result<Timestamp, String> {
    let time = text.parse();
    time.map_err(|_| "expected a time such as 2026-03-28T00:00:00Z".to_owned())
}

/// Prints the due times.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (cron, time_zone) = match args.what.contains(char::is_whitespace) {
        true => (args.what, args.time_zone.unwrap_or_else(|| "UTC".into())),
        false => {
            let store = args.target.checked_store().await.context(
                "a word without spaces is the name of a schedule; a cron expression has five or six fields",
            )?;
            let schedules = store.schedules(Some(&args.what)).await?;
            let Some(schedule) = schedules.first() else {
                return Ok(unknown(&args.what));
            };
            let text = |key: &str| schedule[key].as_str().unwrap_or_default().to_owned();
            (
                text("cron"),
                args.time_zone.unwrap_or_else(|| text("time_zone")),
            )
        }
    };
    let due = DueTimes::parse(&cron, &time_zone).map_err(|why| anyhow!(why))?;
    let times = due.upcoming(args.after.unwrap_or_else(Timestamp::now), args.count);
    if args.json {
        let times: Vec<Value> = times.iter().map(|at| json!(at.to_string())).collect();
        println!(
            "{}",
            as_json(json!({"cron": cron, "time_zone": time_zone, "times": times}))
        );
        return Ok(ExitCode::SUCCESS);
    }
    if times.is_empty() {
        eprintln!("rouse: never: the expression names no later date");
    }
    for at in times {
        println!("{}", shown(&due, at));
    }
    Ok(ExitCode::SUCCESS)
}

/// A due time in its time zone, and in UTC.
pub(super) fn shown(due: &DueTimes, at: Timestamp) -> String {
    let local = due.local(at);
    format!("{}   {}", local.strftime("%a %Y-%m-%d %H:%M:%S %:z"), at)
}
