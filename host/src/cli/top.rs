//! `rouse top`: the running attempts and what they use.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args as ClapArgs, ValueEnum};
use serde_json::{Value, json};

use super::ago;
use super::list::{List, Shown};
use super::number::between;
use super::screen::Colour;
use super::signals::Signals;
use super::target::Target;
use super::text::{as_json, plain};
use crate::store::Store;

/// The interval at which the listing is refreshed; workers report usage every 5 s.
const REFRESH_EVERY: Duration = Duration::from_secs(2);

/// The default number of attempts, about a screen.
const ATTEMPTS: i64 = 50;

/// The maximum number of attempts that are read in order to sort them by what they use.
const SORTED_MAX: i64 = 1000;

/// An attempt that has run for longer is marked.
const LONG: Duration = Duration::from_secs(600);

/// Printed if no attempt is running.
const NOTHING: &str = "no attempt is running";

/// Clears the screen and moves the cursor to the upper left corner.
const CLEAR: &str = "\x1b[2J\x1b[H";

/// Options of `rouse top`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer or rouse_operator. The longest-running attempts come first, or those that use the most (--sort). Workers \
report usage every 5 seconds, for attempts that have run for 2 seconds; `-` means that nothing is known yet. For ended \
attempts see `rouse job ID` and the view rouse.usage.")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// List once and end; the default without a terminal
    #[arg(long)]
    once: bool,

    /// Sort by this column; only the longest-running attempts are considered
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t = Sort::Time)]
    sort: Sort,

    /// The maximum number of attempts
    #[arg(long, value_name = "N", default_value_t = ATTEMPTS, value_parser = between(1_i64, 100_000))]
    limit: i64,

    /// Print one JSON object and end
    #[arg(long)]
    json: bool,
}

/// A column by which attempts are sorted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Sort {
    Time,
    Cpu,
    Memory,
    Calls,
    In,
    Out,
}

impl Sort {
    /// The key of its value in a row.
    fn key(self) -> &'static str {
        match self {
            Self::Time => "running_s",
            Self::Cpu => "cpu_us",
            Self::Memory => "memory_bytes",
            Self::Calls => "host_calls",
            Self::In => "bytes_in",
            Self::Out => "bytes_out",
        }
    }

    /// The `limit` rows with the highest values; rows with equal values stay in their order.
    fn first(self, mut rows: Vec<Value>, limit: i64) -> Vec<Value> {
        let value = |row: &Value| row[self.key()].as_f64().unwrap_or(-1.0);
        rows.sort_by(|a, b| value(b).total_cmp(&value(a)));
        rows.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
        rows
    }
}

/// Lists until a signal, or once.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let follows = !args.once && !args.json && std::io::stdout().is_terminal();
    if !follows {
        return once(&args).await;
    }
    let mut signals = Signals::install()?;
    let ended = signals.unless(follow(&args)).await;
    ended.unwrap_or(Ok(ExitCode::SUCCESS))
}

/// Lists repeatedly, until the future is dropped.
async fn follow(args: &Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    loop {
        let running = listed(&store, args).await?;
        print!("{CLEAR}");
        std::io::stdout().flush().context("clear the screen")?;
        table(&running).print(NOTHING);
        tokio::time::sleep(REFRESH_EVERY).await;
    }
}

async fn once(args: &Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    if args.json {
        println!(
            "{}",
            as_json(json!({"running": listed(&store, args).await?}))
        );
        return Ok(ExitCode::SUCCESS);
    }
    table(&listed(&store, args).await?).print(NOTHING);
    Ok(ExitCode::SUCCESS)
}

async fn listed(store: &Store, args: &Args) -> anyhow::Result<Vec<Value>> {
    let read = match args.sort {
        Sort::Time => args.limit,
        _ => args.limit.max(SORTED_MAX),
    };
    let listed = store.top(read).await?;
    let listed = listed
        .context("this login may not see running attempts; it needs the role rouse_observer")?;
    Ok(args.sort.first(listed, args.limit))
}

fn table(running: &[Value]) -> List {
    let mut list = List::new([
        "job", "handler", "tenant", "worker", "attempt", "runs for", "cpu", "memory", "calls",
        "in", "out", "progress",
    ]);
    for attempt in running {
        let text = |key: &str| plain(attempt[key].as_str().unwrap_or_default());
        let number = |key: &str| attempt[key].as_u64();
        let unknown = || Shown::nothing("-");
        let bytes = |key: &str| number(key).map_or_else(unknown, |number| bytes(number).into());
        let cpu = number("cpu_us").map_or_else(unknown, |us| {
            format!("{:.1} s", Duration::from_micros(us).as_secs_f64()).into()
        });
        let progress = number("percent").map_or_else(String::new, |percent| {
            format!("{percent} % {}", text("step"))
        });
        list.row([
            attempt["id"].to_string().into(),
            text("handler").into(),
            text("tenant").into(),
            text("worker_id").into(),
            attempt["attempt"].to_string().into(),
            runs_for(attempt["running_s"].as_f64().unwrap_or_default()),
            cpu,
            bytes("memory_bytes"),
            number("host_calls").map_or_else(unknown, |calls| calls.to_string().into()),
            bytes("bytes_in"),
            bytes("bytes_out"),
            progress.into(),
        ]);
    }
    list.expendable(&[
        "out", "in", "calls", "tenant", "attempt", "progress", "worker", "memory", "cpu",
    ]);
    list.align_right(&["cpu", "memory", "calls", "in", "out"]);
    list
}

/// The time that an attempt has run, in a colour if that is long.
fn runs_for(secs: f64) -> Shown {
    let is_long = secs > LONG.as_secs_f64();
    Shown::in_colour(ago::seconds(secs), is_long.then_some(Colour::Red))
}

/// A size in a suitable unit.
pub(super) fn bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_sorted_by_a_column_and_those_without_a_value_come_last() {
        let rows = || {
            vec![
                json!({"id": 1, "running_s": 9.0}),
                json!({"id": 2, "running_s": 5.0, "cpu_us": 7}),
                json!({"id": 3, "running_s": 1.0, "cpu_us": 90}),
            ]
        };
        let first = |sort: Sort, limit| {
            let rows = sort.first(rows(), limit);
            rows.iter().map(|row| row["id"].clone()).collect::<Vec<_>>()
        };
        assert_eq!(first(Sort::Time, 9), [1, 2, 3]);
        assert_eq!(first(Sort::Cpu, 9), [3, 2, 1]);
        assert_eq!(first(Sort::Cpu, 1), [3]);
    }
}
