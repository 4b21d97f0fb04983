//! `rouse schedule backfill`: jobs for due times of the past.

use std::process::ExitCode;

use anyhow::anyhow;
use clap::Args as ClapArgs;
use jiff::{SignedDuration, Timestamp};
use rouse_display::plural::counted;
use serde_json::json;

use super::{next, unknown};
use crate::cli::target::Target;
use crate::cli::text::{as_json, plain};
use crate::job::cron::DueTimes;
use crate::job::firing::BACKFILL_MAX;

/// Options of `rouse schedule backfill`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Hosts enqueue the jobs, the oldest due time first; `rouse schedule show` shows their progress. A due time that has \
a job does not get another one, so the same backfill can be repeated. overlap and jitter do not apply. At most 10,000 \
due times at once.
  rouse schedule backfill nightly --since 2026-03-01T00:00:00Z --before 2026-03-08T00:00:00Z\n\
Exit codes: 0 requested · 1 refused · 3 no such schedule")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The name of the schedule
    name: String,

    /// The start of the range, which is included
    #[arg(long, value_name = "TIME", value_parser = next::time)]
    since: Timestamp,

    /// The end of the range; due times before it are included
    #[arg(long, value_name = "TIME", value_parser = next::time)]
    before: Timestamp,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Counts the due times, and requests them.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let schedules = store.schedules(Some(&args.name)).await?;
    let Some(schedule) = schedules.first() else {
        return Ok(unknown(&args.name));
    };
    let text = |key: &str| schedule[key].as_str().unwrap_or_default();
    let due = DueTimes::parse(text("cron"), text("time_zone")).map_err(|why| anyhow!(why))?;
    let moment = SignedDuration::from_micros(1);
    let before = |time: Timestamp| time.checked_sub(moment).unwrap_or(Timestamp::MIN);
    let (after, until) = (before(args.since), before(args.before));
    let count = due.between(after, until).take(BACKFILL_MAX + 1).count();
    anyhow::ensure!(
        count <= BACKFILL_MAX,
        "there are more than {BACKFILL_MAX} due times between these times; backfill a shorter range, then the next one"
    );
    let (since, before) = (args.since.to_string(), args.before.to_string());
    let id = store.backfill_schedule(&args.name, &since, &before).await?;
    if args.json {
        let done = json!({"schedule": args.name, "backfill": id, "due_times": count});
        println!("{}", as_json(done));
    } else {
        println!(
            "backfill {id} of schedule {}: {}; each that has no job yet gets one (`rouse schedule show {}`)",
            plain(&args.name),
            counted(count, "due time"),
            plain(&args.name)
        );
    }
    Ok(ExitCode::SUCCESS)
}
