//! `rouse queue`: lists queues, and drains, purges, pauses, resumes and configures them.

mod drain;

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgGroup, Args as ClapArgs, Subcommand};
use serde_json::{Value, json};

use super::ago;
use super::each::{Done, each};
use super::list::List;
use super::screen::Screen;
use super::target::Target;
use super::text::{as_json, plain};
use super::used::warn_of_unused_queue;
use crate::duration;
use crate::store::NewFairShare;
use crate::worker::Middleware;

/// Jobs per statement of a purge, which takes some ten milliseconds and blocks no other transaction.
const PURGE_BATCH: i32 = 1_000;

/// The maximum number of keys of a fair queue in a list for people.
const KEYS_SHOWN: usize = 20;

/// The items, in summaries.
const QUEUES: &str = "queues";

/// Nothing was done, because it was not confirmed.
const EXIT_UNCONFIRMED: u8 = 2;

/// Options of `rouse queue`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Without a command: lists the queues, like `rouse queue ls`."
)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Option<Verb>,

    #[command(flatten)]
    list: Ls,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the queues: ready, scheduled and running jobs, and how long the oldest ready job has waited
    #[command(visible_alias = "list")]
    Ls(Ls),
    /// Run the jobs of a queue in this process until the queue is empty
    Drain(drain::Args),
    /// Cancel the ready jobs of a queue; running and scheduled jobs stay
    Purge(Purge),
    /// Pause queues: no job of them is claimed; running attempts continue, and jobs can still be enqueued
    Pause(Named),
    /// Resume paused queues
    Resume(Named),
    /// Set how long finished jobs of queues are kept, and how their keys share the workers
    Set(Set),
}

/// Options of `rouse queue ls`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer. At most 10,000 jobs of a lane are counted; a + after the number means that there are more.")]
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
Each batch is a transaction of its own and leaves a record. In the history, the jobs are cancelled.\n\
Exit codes: 0 done · 2 nothing was done: --confirm is missing")]
struct Purge {
    #[command(flatten)]
    target: Target,

    /// The queue
    name: String,

    /// Confirm the purge
    #[arg(long)]
    confirm: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options that name queues.
#[derive(Debug, ClapArgs)]
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
    group = ArgGroup::new("settings").required(true).multiple(true),
    after_help = "\
Retention applies to jobs that end from now on; ended jobs keep theirs. Attempts and records (rouse audit) are kept as long as any job \
that ended before them; steps and log lines follow the hosts' keep_days (rouse.toml).\n\
Retentions over 31 days are dropped a month at a time, so jobs may be kept up to a month longer. All queues together may have 4 \
different retentions.\n\
  rouse queue set reports --keep-days 1 --keep-failed-days 90\n\
  rouse queue set reports --keep-days 0         back to the default of all queues\n\
Workers notice a change of the fair share within seconds. Jobs that were enqueued before a queue became fair stay together, as \
one key.\n\
  rouse queue set mail --policy drr --weight acme=3     tenant acme gets three times the share of each other tenant\n\
  rouse queue set mail --max-in-flight 5                and at most 5 jobs of a tenant run at a time\n\
Needs the role rouse_operator. Exit codes: 0 done · 1 refused, nothing was changed"
)]
struct Set {
    #[command(flatten)]
    target: Target,

    /// The queues
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,

    /// How many days finished jobs are kept, 1 to 3650; 0: the default of all queues
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(i32).range(0..=3650), group = "settings")]
    keep_days: Option<i32>,

    /// How many days jobs that failed or timed out are kept; 0: as long as the queue's other jobs
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(i32).range(0..=3650), group = "settings")]
    keep_failed_days: Option<i32>,

    #[command(flatten)]
    share: Share,

    /// Print one JSON object for each queue, and one for the summary of several
    #[arg(long)]
    json: bool,
}

/// How a queue is shared.
#[derive(Debug, ClapArgs)]
struct Share {
    /// drr: the keys share the workers by their weights; fifo: they do not count
    #[arg(long, value_parser = ["fifo", "drr"], group = "settings", help_heading = "Fair share")]
    policy: Option<String>,

    /// By what the jobs of the queue are divided
    #[arg(long, value_parser = ["tenant", "handler", "source", "tenant-and-handler"], group = "settings", help_heading = "Fair share")]
    key: Option<String>,

    /// cpu: a job costs its key as much as the last jobs of its lane have used of the CPU; jobs: one turn
    #[arg(long, value_parser = ["jobs", "cpu"], group = "settings", help_heading = "Fair share")]
    charge: Option<String>,

    /// The jobs of a key of weight 1 in each round, 1 to 1000
    #[arg(
        long,
        value_name = "JOBS",
        group = "settings",
        help_heading = "Fair share"
    )]
    quantum: Option<i32>,

    /// The weight of a key, 0.001 to 1000; the weights given replace all that were set
    #[arg(long = "weight", value_name = "KEY=WEIGHT", value_parser = weight, group = "settings", help_heading = "Fair share")]
    weights: Vec<(String, f64)>,

    /// Remove the weights of all keys
    #[arg(
        long,
        conflicts_with = "weights",
        group = "settings",
        help_heading = "Fair share"
    )]
    no_weights: bool,

    /// The weight of all other keys
    #[arg(
        long,
        value_name = "WEIGHT",
        group = "settings",
        help_heading = "Fair share"
    )]
    default_weight: Option<f64>,

    /// Jobs that have waited this long go first, the oldest ahead; 0s: none do
    #[arg(long, value_name = "TIME", value_parser = duration::argument, group = "settings", help_heading = "Fair share")]
    starvation: Option<Duration>,

    /// The maximum number of running jobs of a key, on all workers; 0: any number
    #[arg(
        long,
        value_name = "JOBS",
        group = "settings",
        help_heading = "Fair share"
    )]
    max_in_flight: Option<i32>,
}

impl Share {
    /// The settings to change. `None` if there are none.
    fn new_share(&self) -> Option<NewFairShare> {
        let weights = match (self.weights.is_empty(), self.no_weights) {
            (true, false) => None,
            _ => Some(
                self.weights
                    .iter()
                    .map(|(key, weight)| (key.clone(), json!(weight)))
                    .collect(),
            ),
        };
        let is_given = weights.is_some()
            || self.policy.is_some()
            || self.key.is_some()
            || self.quantum.is_some()
            || self.charge.is_some()
            || self.default_weight.is_some()
            || self.starvation.is_some()
            || self.max_in_flight.is_some();
        is_given.then(|| NewFairShare {
            policy: self.policy.clone(),
            key: self.key.clone(),
            quantum: self.quantum,
            weights: weights.map(Value::Object),
            default_weight: self.default_weight,
            starvation_s: self.starvation.map(|time| time.as_secs_f64()),
            max_in_flight: self.max_in_flight,
            charge: self.charge.clone(),
        })
    }
}

/// `acme=3`; the key itself may contain `=`.
fn weight(text: &str) -> Result<(String, f64), String> {
    let parts = text.rsplit_once('=').filter(|(key, _)| !key.is_empty());
    let weight = parts.and_then(|(key, weight)| Some((key.to_owned(), weight.parse().ok()?)));
    weight.ok_or_else(|| "expected a key and a number, for instance acme=3".to_owned())
}

impl Args {
    /// True for a command that runs as a worker, and logs.
    pub(super) fn works(&self) -> bool {
        match self.verb {
            Some(Verb::Drain(_)) => true,
            None
            | Some(
                Verb::Ls(_) | Verb::Purge(_) | Verb::Pause(_) | Verb::Resume(_) | Verb::Set(_),
            ) => false,
        }
    }
}

/// Runs the subcommand.
pub(super) async fn run(
    args: Args,
    middlewares: Vec<Arc<dyn Middleware>>,
) -> anyhow::Result<ExitCode> {
    match args.verb {
        None => ls(args.list).await,
        Some(Verb::Ls(args)) => ls(args).await,
        Some(Verb::Drain(args)) => drain::run(args, middlewares).await,
        Some(Verb::Purge(args)) => purge(args).await,
        Some(Verb::Pause(args)) => pause(args).await,
        Some(Verb::Resume(args)) => resume(args).await,
        Some(Verb::Set(args)) => set(args).await,
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
            print_keys(queue, now);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn table(queues: &[Value], now: f64) -> List {
    let screen = Screen::of_stdout();
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
            Some(jobs) if at_least && jobs >= 10_000 => format!("{jobs}+"),
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

/// Prints the keys of a fair queue, those first that have the oldest job.
fn print_keys(queue: &Value, now: f64) {
    let scheduler = &queue["scheduler"];
    let keys = scheduler["keys"].as_array().into_iter().flatten();
    let keys: Vec<&Value> = keys
        .filter(|key| key["ready"] != 0 || key["in_flight"] != 0)
        .collect();
    if scheduler["policy"] != "drr" {
        return;
    }
    let name = plain(queue["name"].as_str().unwrap_or_default());
    println!("\n{name}: {}", shared(scheduler));
    let screen = Screen::of_stdout();
    let mut list = List::new([
        "key",
        "weight",
        "ready",
        "running",
        ago::waits(screen),
        "claimed",
        "deferred",
    ]);
    list.expendable(&["claimed", "deferred"]);
    for key in keys.iter().take(KEYS_SHOWN) {
        let count = |field: &str| {
            key[field]
                .as_u64()
                .map(|count| count.to_string())
                .unwrap_or_default()
        };
        let wait = key["oldest_age_s"]
            .as_f64()
            .map(|secs| ago::waited(secs, now, screen));
        list.row([
            plain(match key["key"].as_str() {
                Some("") => "(none)",
                Some(key) => key,
                None => "(other)",
            }),
            number(&key["weight"]),
            count("ready") + if key["at_least"] == true { "+" } else { "" },
            count("in_flight"),
            wait.unwrap_or_default(),
            count("selected"),
            count("deferred"),
        ]);
    }
    list.print("no key has jobs");
    if keys.len() > KEYS_SHOWN {
        println!(
            "and {} more keys (--json shows all)",
            keys.len() - KEYS_SHOWN
        );
    }
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
    let mut purged: u64 = 0;
    let shown = std::io::stderr().is_terminal();
    loop {
        let batch = store.purge_queue(&args.name, PURGE_BATCH).await?;
        purged += u64::from(batch.unsigned_abs());
        if shown && purged > 0 {
            eprint!("\rpurged {purged}");
            // Progress is only a hint.
            let _ = std::io::stderr().flush();
        }
        // Do not wait for an empty queue: a producer may enqueue as fast as this.
        if batch < PURGE_BATCH {
            break;
        }
    }
    if shown && purged > 0 {
        eprintln!();
    }
    warn_of_unused_queue(&store, &args.name).await?;
    if args.json {
        println!("{}", as_json(json!({"queue": args.name, "purged": purged})));
    } else {
        println!("{purged} jobs of queue {} are cancelled", plain(&args.name));
    }
    Ok(ExitCode::SUCCESS)
}

async fn pause(args: Named) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&args.names, QUEUES, args.json, async |name| {
        let since = store.pause_queue(name).await?;
        warn_of_unused_queue(&store, name).await?;
        let shown = plain(name);
        Ok(Ok(Done {
            text: format!(
                "queue {shown} is paused since {since}; claimed jobs continue (`rouse queue resume {shown}`)"
            ),
            json: json!({"queue": name, "paused_at": since}),
        }))
    })
    .await
}

async fn resume(args: Named) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&args.names, QUEUES, args.json, async |name| {
        let was_paused = store.resume_queue(name).await?;
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
    let keeps = args.keep_days.is_some() || args.keep_failed_days.is_some();
    let share = args.share.new_share();
    each(&args.names, QUEUES, args.json, async |name| {
        let (mut texts, mut json) = (Vec::new(), json!({"queue": name}));
        // What may be refused goes first.
        if let Some(share) = &share {
            let in_force = store.set_fair_share(name, share).await?;
            texts.push(format!(
                "queue {} is shared: {}",
                plain(name),
                shared(&in_force)
            ));
            json["fair_share"] = in_force;
        }
        if keeps {
            let (days, failed) = store
                .set_retention(name, args.keep_days, args.keep_failed_days)
                .await?;
            json["keep_days"] = json!(days);
            json["keep_failed_days"] = json!(failed);
            texts.push(format!(
                "finished jobs of queue {} are kept: {}",
                plain(name),
                kept(days, failed)
            ));
        }
        warn_of_unused_queue(&store, name).await?;
        Ok(Ok(Done {
            text: texts.join("\n"),
            json,
        }))
    })
    .await
}

/// How long finished jobs are kept, and those that failed or timed out.
fn kept(days: Option<i32>, failed: Option<i32>) -> String {
    let kept = days.map_or("as those of all queues".to_owned(), in_days);
    match failed {
        Some(failed) if Some(failed) != days => format!("{kept}; failed ones: {}", in_days(failed)),
        _ => kept,
    }
}

/// A weight: `3`, not `3.0`. Empty for none.
fn number(weight: &Value) -> String {
    weight
        .as_f64()
        .map(|weight| weight.to_string())
        .unwrap_or_default()
}

/// How a queue is shared, in one line.
fn shared(share: &Value) -> String {
    if share["policy"] != "drr" {
        return "first in, first out (fifo)".to_owned();
    }
    let key = match share["key"].as_str().unwrap_or_default() {
        "tenant-and-handler" => "tenant and handler",
        key => key,
    };
    let mut text = match share["charge"] == "cpu" {
        true => format!("by {key} (drr) and CPU time"),
        false => format!("by {key} (drr)"),
    };
    text += &format!(", quantum {}", share["quantum"]);
    let weights = share["weights"].as_object().into_iter().flatten();
    let weights: Vec<String> = weights
        .map(|(key, weight)| format!("{} {}", plain(key), number(weight)))
        .collect();
    if weights.is_empty() {
        text += &format!(", weight {}", number(&share["default_weight"]));
    } else {
        text += &format!(
            ", weights {}, others {}",
            weights.join(", "),
            share["default_weight"]
        );
    }
    if let Some(age) = share["starvation_s"].as_u64().filter(|age| *age > 0) {
        text += &format!(
            "; after {} the oldest first",
            duration::shown(Duration::from_secs(age))
        );
    }
    if let Some(most) = share["max_in_flight"].as_u64().filter(|most| *most > 0) {
        text += &format!("; at most {most} running for each key");
    }
    text
}

fn in_days(days: i32) -> String {
    match days {
        1 => "1 day".to_owned(),
        _ => format!("{days} days"),
    }
}
