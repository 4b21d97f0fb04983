//! `rouse queue`: lists queues, and drains, purges, pauses, resumes and configures them.

mod dispatch;
mod drain;
mod share;

use std::future::ready;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{ArgGroup, Args as ClapArgs, Subcommand};
use rouse_display::plural::{choose, counted};
use serde_json::{Value, json};

use super::ago;
use super::each::{Done, Refusal, each};
use super::list::List;
use super::screen::Screen;
use super::signals::Signals;
use super::target::Target;
use super::text::{as_json, error_line, plain, without_prefix};
use super::used::warn_of_unused_queue;
use crate::store::{Store, StoreError};
use crate::worker::Middleware;

/// The number of jobs per statement of a purge, which takes tens of milliseconds and does not block any other
/// transaction.
const PURGE_BATCH: i32 = 1_000;

/// The word for an item in messages.
const QUEUE: &str = "queue";

/// Nothing was done, because it was not confirmed.
const EXIT_UNCONFIRMED: u8 = 2;
/// The database refused the change, and the queue is unchanged. The code is that of any error.
const EXIT_REFUSED: u8 = 1;
/// Another transaction holds a lock that a purge needs.
const EXIT_LOCKED: u8 = 6;
/// A signal stopped a purge.
const EXIT_STOPPED: u8 = 130;

/// Options of `rouse queue`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Without a command: lists the queues, like `rouse queue ls`."
)]
pub(super) struct Args {
    #[command(subcommand)]
    operation: Option<Operation>,

    #[command(flatten)]
    list: Ls,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// List the queues: ready, scheduled and running jobs, and how long the oldest ready job has waited
    #[command(visible_alias = "list")]
    Ls(Ls),
    /// Run the jobs of a queue in this process until the queue is empty
    Drain(drain::Args),
    /// Cancel the ready jobs of a queue; running and scheduled jobs stay
    Purge(Purge),
    /// Pause queues: none of their jobs is claimed; running attempts continue, and jobs can still be enqueued
    Pause(Named),
    /// Resume paused queues
    Resume(Named),
    /// Set how long finished jobs of queues are kept, how their keys share the workers, how workers are chosen for jobs, the shards, or
    /// the maximum size of payloads
    Set(Set),
}

/// Options of `rouse queue ls`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer or rouse_operator. At most 10,000 jobs of a lane are counted, and about a million in all lanes; a + \
after the number means that there are more.")]
struct Ls {
    #[command(flatten)]
    target: Target,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `rouse queue purge`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Each batch is a separate transaction and leaves a record. The history shows the jobs as cancelled. The command \
can be stopped at any time: running it again continues.\n\
Exit codes: 0 done · 2 nothing was done: --confirm is missing · 6 another transaction holds a lock that it needs: \
run the command again · 130 stopped by a signal")]
struct Purge {
    #[command(flatten)]
    target: Target,

    /// The queue
    name: String,

    /// Confirm the purge
    #[arg(long, visible_alias = "yes")]
    confirm: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options that name queues.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_operator. A refused queue does not stop the others, and a summary follows.\n\
Exit codes: 0 all done · 1 a name is not a valid queue name, or an error · 6 another transaction has locked \
a queue; with several queues, the highest code")]
struct Named {
    #[command(flatten)]
    target: Target,

    /// The queues
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,

    /// Print one JSON object for each queue, and one for the summary of several
    #[arg(long)]
    json: bool,
}

/// Options of `rouse queue set`.
#[derive(Debug, ClapArgs)]
#[command(
    // Otherwise the usage would list all settings.
    override_usage = "rouse queue set [OPTIONS] <SETTINGS> <NAME>...\n       rouse queue set --default --keep-days <DAYS>",
    group = ArgGroup::new("settings").required(true).multiple(true),
    group = ArgGroup::new("share").multiple(true),
    group = ArgGroup::new("dispatching").multiple(true).conflicts_with_all(["share", "retention"]),
    group = ArgGroup::new("retention").multiple(true).conflicts_with("share"),
    after_help = "\
The retention of a queue applies to jobs that end after the change; a new default also applies to jobs that have already \
ended. Attempts and records (rouse audit) are kept as long as any job that ended before them; steps and log lines are \
kept for the default retention of all queues.\n\
Jobs with a retention over 31 days are dropped a month at a time, so they may be kept up to a month longer. All queues \
together may have 4 different retentions.
  rouse queue set reports --keep-days 1 --keep-failed-days 90
  rouse queue set reports --keep-days 0         back to the default of all queues
  rouse queue set --default --keep-days 30      the default itself, initially 7; workers drop older jobs within the hour, \
so a smaller number needs --confirm\n\
The fair share is set by a separate call. Workers notice a change within seconds. Jobs that were enqueued before a queue became fair stay together, as \
one key.
  rouse queue set mail --policy drr --weight acme=3     tenant acme gets three times the share of each other tenant
  rouse queue set mail --max-in-flight 5                and at most 5 jobs of a tenant run at a time\n\
Direct dispatch is also set by a separate call. It applies to jobs that are enqueued after the change.
  rouse queue set mail --dispatch hash --dispatch-key tenant     the jobs of a tenant go to the same worker while it is alive\n\
Shards are also set by a separate call. The workers divide them among themselves.
  rouse queue set mail --shards 16\n\
The maximum size of payloads is also set by a separate call. It applies to jobs that are enqueued after the change.
  rouse queue set wide --payload-bytes-max 1048576\n\
Needs the role rouse_operator. A refused queue does not stop the others, and a summary follows.\n\
Exit codes: 0 all done · 1 a queue was refused and is unchanged, or an error · 2 nothing was done: --confirm is \
missing · 6 another transaction has locked a queue; with several queues, the highest code"
)]
struct Set {
    #[command(flatten)]
    target: Target,

    /// The queues
    #[arg(value_name = "NAME", required_unless_present = "default")]
    names: Vec<String>,

    /// Set --keep-days of all queues that have none of their own
    #[arg(long, requires = "keep_days", conflicts_with_all = ["names", "keep_failed_days", "share", "dispatching", "shards", "payload_bytes_max"])]
    default: bool,

    /// The number of days for which finished jobs are kept, 1 to 3650; 0: the default of all queues
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(i32).range(0..=3650), groups = ["settings", "retention"])]
    keep_days: Option<i32>,

    /// The number of days for which jobs that failed or timed out are kept; 0: as long as the queue's other jobs
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(i32).range(0..=3650), groups = ["settings", "retention"])]
    keep_failed_days: Option<i32>,

    #[command(flatten)]
    share: share::Options,

    #[command(flatten)]
    dispatch: dispatch::Options,
    /// The number of shards of the queue, which workers lease, 2 to 1024; 0: all workers serve all lanes
    #[arg(long, value_name = "SHARDS", group = "settings", conflicts_with_all = ["share", "dispatching", "retention"])]
    shards: Option<i32>,

    /// How large a payload may be, 1024 to 67108864 bytes; 262144 by default
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(i32).range(1024..=67_108_864), group = "settings", conflicts_with_all = ["share", "dispatching", "retention", "shards"])]
    payload_bytes_max: Option<i32>,

    /// With --default: confirm a shorter retention
    #[arg(long, visible_alias = "yes", conflicts_with = "names")]
    confirm: bool,

    /// Print one JSON object for each queue, and one for the summary of several
    #[arg(long)]
    json: bool,
}

impl Args {
    /// True for a command that runs as a worker, and logs.
    pub(super) fn works(&self) -> bool {
        match self.operation {
            Some(Operation::Drain(_)) => true,
            None
            | Some(
                Operation::Ls(_)
                | Operation::Purge(_)
                | Operation::Pause(_)
                | Operation::Resume(_)
                | Operation::Set(_),
            ) => false,
        }
    }
}

/// Runs the subcommand.
pub(super) async fn run(
    args: Args,
    middleware: Vec<Arc<dyn Middleware>>,
) -> anyhow::Result<ExitCode> {
    match args.operation {
        None => ls(args.list).await,
        Some(Operation::Ls(args)) => ls(args).await,
        Some(Operation::Drain(args)) => drain::run(args, middleware).await,
        Some(Operation::Purge(args)) => purge(args).await,
        Some(Operation::Pause(args)) => pause(args).await,
        Some(Operation::Resume(args)) => resume(args).await,
        Some(Operation::Set(args)) => set(args).await,
    }
}

async fn ls(args: Ls) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let queues = store.queues().await?;
    if args.json {
        println!("{}", as_json(json!({"queues": queues})));
    } else {
        let now = store.now().await?;
        table(&queues, now).print("no queues");
        for queue in &queues {
            share::print_keys(queue, now);
            dispatch::print(queue);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn table(queues: &[Value], now: f64) -> List {
    let screen = Screen::from_stdout();
    let mut list = List::new([
        "queue",
        "ready",
        "scheduled",
        "running",
        ago::waits(screen),
        "last used",
        "paused since",
    ]);
    list.expendable(&["last used"]);
    for queue in queues {
        let at_least = queue["at_least"] == true;
        let jobs = |key: &str| match queue[key].as_u64() {
            Some(jobs) if at_least && jobs >= 100 => format!("{jobs}+"),
            jobs => jobs.unwrap_or_default().to_string(),
        };
        let wait = queue["oldest_wait_s"].as_f64();
        let wait = wait.map(|secs| ago::waited(secs, now, screen));
        list.row([
            plain(queue["name"].as_str().unwrap_or_default()),
            jobs("ready"),
            jobs("scheduled"),
            jobs("running"),
            wait.unwrap_or_default(),
            ago::listed(&queue["last_used_at"], now, screen),
            ago::listed(&queue["paused_at"], now, screen),
        ]);
    }
    list
}

async fn purge(args: Purge) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    if !args.confirm {
        eprintln!(
            "rouse: nothing was done: this cancels all ready jobs of queue {} (`rouse queue ls` shows how many); confirm it with --confirm",
            plain(&args.name)
        );
        return Ok(ExitCode::from(EXIT_UNCONFIRMED));
    }
    let mut signals = Signals::install()?;
    let (queue, mut purged) = (plain(&args.name), 0);
    let ended = purge_batches(&store, &args.name, &mut signals, &mut purged).await;
    if std::io::stderr().is_terminal() && purged > 0 {
        eprintln!();
    }
    let code = match ended {
        Ok(true) => 0,
        Ok(false) => {
            eprintln!("rouse: stopped by a signal before the end; the same command continues");
            EXIT_STOPPED
        }
        Err(error) if error.is_locked() => {
            // The message of Postgres does not name the queue.
            let why = error.to_string();
            let why = format!("{QUEUE} {queue}: {}", without_prefix(&why));
            eprintln!("{}", error_line(why));
            EXIT_LOCKED
        }
        Err(error) => {
            if purged > 0 {
                let jobs = counted(purged, "job");
                let were = choose(purged, "was", "were");
                eprintln!(
                    "rouse: {jobs} of queue {queue} {were} cancelled before this; the same command continues"
                );
            }
            return Err(error.into());
        }
    };
    if args.json {
        let complete = code == 0;
        println!(
            "{}",
            as_json(json!({"queue": args.name, "purged": purged, "complete": complete}))
        );
    } else {
        let jobs = counted(purged, "job");
        let are = choose(purged, "is", "are");
        println!("{jobs} of queue {queue} {are} cancelled");
    }
    if code == 0 {
        warn_of_unused_queue(&store, &args.name).await?;
    }
    Ok(ExitCode::from(code))
}

/// Cancels the ready jobs of a queue in batches, and adds their number to `purged`, which is valid even after an error.
/// Returns false if a signal arrived before the end.
async fn purge_batches(
    store: &Store,
    queue: &str,
    signals: &mut Signals,
    purged: &mut u64,
) -> Result<bool, StoreError> {
    loop {
        let batch = store.purge_queue(queue, PURGE_BATCH).await?;
        *purged += u64::from(batch.unsigned_abs());
        if std::io::stderr().is_terminal() && *purged > 0 {
            eprint!("\rpurged {purged}");
            // The progress is not essential, so an error is ignored.
            let _ = std::io::stderr().flush();
        }
        // Do not wait until the queue is empty: a producer may enqueue as fast as this command cancels.
        if batch < PURGE_BATCH {
            return Ok(true);
        }
        if signals.unless(ready(())).await.is_none() {
            return Ok(false);
        }
    }
}

async fn pause(args: Named) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&args.names, QUEUE, args.json, async |name| {
        let since = match store.pause_queue(name).await {
            Ok(since) => since,
            Err(error) => return refusal(error),
        };
        warn_of_unused_queue(&store, name).await?;
        let shown = plain(name);
        Ok(Ok(Done {
            text: format!(
                "queue {shown} has been paused since {since}; claimed jobs continue (`rouse queue resume {shown}`)"
            ),
            json: json!({"queue": name, "paused_at": since}),
        }))
    })
    .await
}

async fn resume(args: Named) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&args.names, QUEUE, args.json, async |name| {
        let was_paused = match store.resume_queue(name).await {
            Ok(was_paused) => was_paused,
            Err(error) => return refusal(error),
        };
        warn_of_unused_queue(&store, name).await?;
        let shown = plain(name);
        Ok(Ok(Done {
            text: match was_paused {
                true => format!("queue {shown} is resumed"),
                false => format!("queue {shown} was not paused"),
            },
            json: json!({"queue": name, "was_paused": was_paused}),
        }))
    })
    .await
}

async fn set(args: Set) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    if let (true, Some(days)) = (args.default, args.keep_days) {
        if let Some(now) = store.default_retention().await?
            && (1..now).contains(&days)
            && !args.confirm
        {
            eprintln!(
                "rouse: nothing was done: this permanently deletes jobs that ended more than {} ago, unless their queue has a retention of its own (now they are kept for {}); confirm it with --confirm",
                in_days(days),
                in_days(now)
            );
            return Ok(ExitCode::from(EXIT_UNCONFIRMED));
        }
        let was = store.set_default_retention(days).await?;
        match args.json {
            true => println!("{}", as_json(json!({"keep_days": days, "was": was}))),
            false => println!(
                "finished jobs are kept for {} (previously {})",
                in_days(days),
                in_days(was)
            ),
        }
        return Ok(ExitCode::SUCCESS);
    }
    each(&args.names, QUEUE, args.json, async |name| {
        match set_one(&store, name, &args).await {
            Ok(done) => {
                warn_of_unused_queue(&store, name).await?;
                Ok(Ok(done))
            }
            Err(error) => refusal(error),
        }
    })
    .await
}

/// Changes the settings of one queue.
async fn set_one(store: &Store, name: &str, args: &Set) -> Result<Done, StoreError> {
    let shown = plain(name);
    if let Some(shards) = args.shards {
        store.set_shards(name, shards).await?;
        return Ok(Done {
            text: match shards {
                0 => format!("queue {shown} has no shards: all workers serve all lanes"),
                _ => format!("queue {shown} has {shards} shards"),
            },
            json: json!({"queue": name, "shards": shards}),
        });
    }
    if let Some(bytes) = args.payload_bytes_max {
        store.set_payload_limit(name, bytes).await?;
        return Ok(Done {
            text: format!("payloads of queue {shown} may be at most {bytes} bytes long"),
            json: json!({"queue": name, "payload_bytes_max": bytes}),
        });
    }
    if let Some(new_share) = args.share.new_share() {
        let in_force = store.set_fair_share(name, &new_share).await?;
        return Ok(Done {
            text: format!("queue {shown} is shared: {}", share::describe(&in_force)),
            json: json!({"queue": name, "fair_share": in_force}),
        });
    }
    if let Some((dispatch, key)) = args.dispatch.new_dispatch() {
        let in_force = store.set_dispatch(name, dispatch, key.as_deref()).await?;
        return Ok(Done {
            text: format!(
                "jobs of queue {shown} go to {}",
                dispatch::describe(&in_force)
            ),
            json: json!({"queue": name, "dispatch": in_force["dispatch"], "dispatch_key": in_force["key"]}),
        });
    }
    let (days, failed) = store
        .set_retention(name, args.keep_days, args.keep_failed_days)
        .await?;
    Ok(Done {
        text: format!(
            "finished jobs of queue {shown} are kept {}",
            kept(days, failed)
        ),
        json: json!({"queue": name, "keep_days": days, "keep_failed_days": failed}),
    })
}

/// A name or a setting that the database refuses does not stop the other queues.
fn refusal(error: StoreError) -> anyhow::Result<Result<Done, Refusal>> {
    match error.is_about_data() {
        true => Ok(Err(Refusal {
            code: EXIT_REFUSED,
            why: error.to_string(),
        })),
        false => Err(error.into()),
    }
}

/// The retention of finished jobs, and of those that failed or timed out.
fn kept(days: Option<i32>, failed: Option<i32>) -> String {
    let kept = match days {
        Some(days) => format!("for {}", in_days(days)),
        None => "as long as the default of all queues".to_owned(),
    };
    match failed {
        Some(failed) if Some(failed) != days => {
            format!("{kept}; failed ones for {}", in_days(failed))
        }
        _ => kept,
    }
}

fn in_days(days: i32) -> String {
    match days {
        1 => "1 day".to_owned(),
        _ => format!("{days} days"),
    }
}
