//! Chooses workers for the jobs of a queue: the options of `rouse queue set`, and a line in `rouse queue ls`.

use clap::Args;
use serde_json::Value;

use crate::cli::text::plain;
use crate::job::Dispatch;

const HEADING: &str = "Direct dispatch";
const GROUPS: [&str; 2] = ["settings", "dispatching"];

/// The options of direct dispatch.
#[derive(Debug, Args)]
#[group(skip)]
pub(super) struct Options {
    /// Which worker gets each job that is enqueued
    #[arg(long, value_enum, groups = GROUPS, help_heading = HEADING)]
    dispatch: Option<Dispatch>,

    /// With hash: jobs with the same values of these keys go to the same worker: tenant, source, or a path in the payload such as $.customer.id; at most three
    #[arg(long, value_name = "KEY", value_delimiter = ',', groups = GROUPS, help_heading = HEADING)]
    dispatch_key: Vec<String>,
}

impl Options {
    /// The settings to change. `None` if there are none.
    pub(super) fn new_dispatch(&self) -> Option<(Option<Dispatch>, Option<Vec<String>>)> {
        let key = (!self.dispatch_key.is_empty()).then(|| self.dispatch_key.clone());
        (self.dispatch.is_some() || key.is_some()).then_some((self.dispatch, key))
    }
}

/// Prints which workers get the jobs of this queue, if it has direct dispatch.
pub(super) fn print(queue: &Value) {
    if queue["dispatch"] != "shared" {
        let name = plain(queue["name"].as_str().unwrap_or_default());
        let settings =
            serde_json::json!({"dispatch": queue["dispatch"], "key": queue["dispatch_key"]});
        println!("\n{name}: jobs go to {}", describe(&settings));
    }
}

/// Describes to which workers the jobs of a queue go.
pub(super) fn describe(settings: &Value) -> String {
    let key = settings["key"].as_array().into_iter().flatten();
    let key: Vec<String> = key.filter_map(Value::as_str).map(plain).collect();
    match settings["dispatch"].as_str().unwrap_or_default() {
        "round-robin" => "the workers in turn (round-robin)".to_owned(),
        "random" => "random workers (random)".to_owned(),
        "hash" => format!("the same worker for the same {} (hash)", key.join(" and ")),
        _ => "any worker (shared)".to_owned(),
    }
}
