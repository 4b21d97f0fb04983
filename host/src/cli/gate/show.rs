//! `rouse gate show`: one gate and its keys.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use rouse_display::gate::describe;
use rouse_display::plural::counted;
use serde_json::{Value, json};

use super::{EXIT_UNKNOWN, no_gate};
use crate::cli::ago;
use crate::cli::list::List;
use crate::cli::number::between;
use crate::cli::screen::Screen;
use crate::cli::target::Target;
use crate::cli::text::{as_json, plain, strings};

/// Options of `rouse gate show`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Lists the keys that have ready jobs, and those for which the gate has an effect now; those with the most waiting jobs \
first. At most 10,000 waiting jobs of a lane are counted, and about a million in all lanes; a + after the number means \
that there are more.\n\
Needs the role rouse_observer or rouse_operator. Exit codes: 0 found · 3 no such gate")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The name of the gate
    name: String,

    /// The maximum number of keys
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = between(1_i64, 100_000))]
    limit: i64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Shows the gate.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let mut gates = store.gates(Some(&args.name)).await?;
    let Some(mut gate) = gates.pop() else {
        eprintln!("rouse: {}", no_gate(&args.name));
        return Ok(ExitCode::from(EXIT_UNKNOWN));
    };
    let found = store.gate_keys(&args.name, args.limit).await?;
    if args.json {
        gate["keys_total"] = json!(found.total);
        gate["keys"] = json!(found.keys);
        println!("{}", as_json(gate));
        return Ok(ExitCode::SUCCESS);
    }
    println!("{}", properties(&gate).text());
    println!();
    keys(&gate, &found.keys, store.now().await?).print("no key has jobs");
    let shown = i64::try_from(found.keys.len()).unwrap_or(i64::MAX);
    if found.total > shown {
        let more = counted(found.total - shown, "more key");
        println!("and {more} (--limit N)");
    }
    Ok(ExitCode::SUCCESS)
}

/// The settings of the gate.
fn properties(gate: &Value) -> List {
    let mut list = List::plain();
    let text = |key: &str| gate[key].as_str().map(plain);
    let mut row = |key: &str, text: String| list.row([key.to_owned(), text]);
    row("kind", text("kind").unwrap_or_default());
    row("limit", describe(gate));
    row("handler", text("handler").unwrap_or("(all)".to_owned()));
    row("queue", text("queue").unwrap_or("(all)".to_owned()));
    if let Some(handler) = text("declared_by") {
        row("declared_by", handler);
    }
    list
}

/// The keys of the gate. Each kind of gate has its own columns.
fn keys(gate: &Value, keys: &[Value], now: f64) -> List {
    let screen = Screen::from_stdout();
    let kind = gate["kind"].as_str().unwrap_or_default();
    let mut list = match kind {
        "max_concurrent" => List::new(["key", "running", "may start", "waiting"]),
        "throttle" => List::new(["key", "may start", "opens", "waiting"]),
        "batch" => List::new(["key", "waiting"]),
        _ => List::new(["key", "job", "opens"]),
    };
    for key in keys {
        let count = |field: &str| key[field].as_i64().map(|n| n.to_string());
        let count = |field: &str| count(field).unwrap_or_default();
        let waiting = count("waiting") + if key["at_least"] == true { "+" } else { "" };
        let opens = match (&key["opens_at"], kind) {
            (Value::Null, "throttle") => String::new(),
            (Value::Null, _) if gate["during"] == "running" => "when the job ends".to_owned(),
            (Value::Null, _) => "when the job starts".to_owned(),
            (at, _) => ago::listed(at, now, screen),
        };
        match kind {
            "max_concurrent" => list.row([values(key), count("running"), count("left"), waiting]),
            "throttle" => list.row([values(key), count("left"), opens, waiting]),
            "batch" => list.row([values(key), waiting]),
            _ => list.row([values(key), count("job"), opens]),
        }
    }
    list
}

/// The values of a key.
fn values(key: &Value) -> String {
    let values: Vec<String> = strings(&key["key"])
        .map(|value| match value {
            "" => "(none)".to_owned(),
            value => plain(value),
        })
        .collect();
    match values.is_empty() {
        true => "(all)".to_owned(),
        false => values.join(" / "),
    }
}
