//! How a queue is shared: the options of `rouse queue set`, and the keys in `rouse queue ls`.

use std::time::Duration;

use clap::Args;
use rouse_display::plural::counted;
use serde_json::Value;

use crate::cli::ago;
use crate::cli::list::List;
use crate::cli::screen::Screen;
use crate::cli::text::plain;
use crate::duration;
use crate::job::{FairCharge, FairKey, FairPolicy};
use crate::store::NewFairShare;

/// The maximum number of keys of a fair queue in a human-readable list.
const KEYS_SHOWN: usize = 20;
const HEADING: &str = "Fair share";
const GROUPS: [&str; 2] = ["settings", "share"];

/// How a queue is shared.
#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct Options {
    /// Which jobs of a priority go first
    #[arg(long, value_enum, groups = GROUPS, help_heading = HEADING)]
    policy: Option<FairPolicy>,

    /// The key by which the jobs of the queue are divided
    #[arg(long, value_enum, groups = GROUPS, help_heading = HEADING)]
    key: Option<FairKey>,

    /// What a job costs its key
    #[arg(long, value_enum, groups = GROUPS, help_heading = HEADING)]
    charge: Option<FairCharge>,

    /// The number of jobs of a key of weight 1 in each round, 1 to 1000
    #[arg(long, value_name = "JOBS", groups = GROUPS, help_heading = HEADING)]
    quantum: Option<i32>,

    /// The weight of a key, 0.001 to 1000; the weights given replace all that were set
    #[arg(long = "weight", value_name = "KEY=WEIGHT", value_parser = weight, groups = GROUPS, help_heading = HEADING)]
    weights: Vec<(String, f64)>,

    /// Remove the weights of all keys
    #[arg(long, conflicts_with = "weights", groups = GROUPS, help_heading = HEADING)]
    no_weights: bool,

    /// The weight of all other keys
    #[arg(long, value_name = "WEIGHT", groups = GROUPS, help_heading = HEADING)]
    default_weight: Option<f64>,

    /// Jobs that have waited this long go first, the oldest of them first; 0s: never
    #[arg(long, value_name = "TIME", value_parser = duration::argument, groups = GROUPS, help_heading = HEADING)]
    starvation: Option<Duration>,

    /// The maximum number of running jobs of a key, on all workers; 0: any number
    #[arg(long, value_name = "JOBS", groups = GROUPS, help_heading = HEADING)]
    max_in_flight: Option<i32>,
}

impl Options {
    /// The settings to change. `None` if there are none.
    pub(super) fn new_share(&self) -> Option<NewFairShare> {
        let sets_weights = self.no_weights || !self.weights.is_empty();
        let new = NewFairShare {
            policy: self.policy,
            key: self.key,
            quantum: self.quantum,
            weights: sets_weights.then(|| self.weights.iter().cloned().collect()),
            default_weight: self.default_weight,
            starvation_s: self.starvation.map(|time| time.as_secs_f64()),
            max_in_flight: self.max_in_flight,
            charge: self.charge,
        };
        (new != NewFairShare::default()).then_some(new)
    }
}

/// `acme=3`; the key itself may contain `=`.
fn weight(text: &str) -> Result<(String, f64), String> {
    let parts = text.rsplit_once('=').filter(|(key, _)| !key.is_empty());
    let weight = parts.and_then(|(key, weight)| Some((key.to_owned(), weight.parse().ok()?)));
    weight.ok_or_else(|| "expected a key and a number, for instance acme=3".to_owned())
}

/// Prints the keys of a fair queue, starting with those that have the oldest jobs.
pub(super) fn print_keys(queue: &Value, now: f64) {
    let scheduler = &queue["scheduler"];
    if scheduler["policy"] != "drr" {
        return;
    }
    let keys = scheduler["keys"].as_array().into_iter().flatten();
    let keys: Vec<&Value> = keys
        .filter(|key| key["ready"] != 0 || key["in_flight"] != 0)
        .collect();
    let name = plain(queue["name"].as_str().unwrap_or_default());
    println!("\n{name}: {}", describe(scheduler));
    let screen = Screen::from_stdout();
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
        let more = counted(keys.len() - KEYS_SHOWN, "more key");
        println!("and {more} (--json shows all)");
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
pub(super) fn describe(share: &Value) -> String {
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
            number(&share["default_weight"])
        );
    }
    if let Some(age) = share["starvation_ms"].as_u64().filter(|age| *age > 0) {
        text += &format!(
            "; after {} the oldest first",
            rouse_display::when::in_days(Duration::from_millis(age))
        );
    }
    if let Some(max) = share["max_in_flight"].as_u64().filter(|max| *max > 0) {
        text += &format!("; at most {max} running for each key");
    }
    text
}
