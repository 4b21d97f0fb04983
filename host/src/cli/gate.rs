//! `rouse gate`: lists, shows, sets and deletes gates.

mod set;
mod show;

use std::process::ExitCode;

use clap::{Args as ClapArgs, Subcommand};
use rouse_display::gate::describe;
use serde_json::{Value, json};

use super::each::{Done, Refusal, each};
use super::list::List;
use super::target::Target;
use super::text::{as_json, plain, words};

/// There is no such gate.
const EXIT_UNKNOWN: u8 = 3;

/// The word for an item in messages.
const GATE: &str = "gate";

/// Options of `rouse gate`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Without a command: lists the gates, like `rouse gate ls`. A gate limits how many jobs run, how often they start, or which are enqueued:
  rouse gate set tenants --kind max_concurrent --key tenant --max 5
  rouse gate show tenants     which tenants have running and waiting jobs, and how many more may start
  rouse gate delete tenants"
)]
pub(super) struct Args {
    #[command(subcommand)]
    operation: Option<Operation>,

    #[command(flatten)]
    list: Ls,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// List the gates and what they limit
    #[command(visible_alias = "list")]
    Ls(Ls),
    /// Show one gate and its keys: running and waiting jobs, how many may start, and when the gate opens
    Show(show::Args),
    /// Create or replace a gate
    Set(Box<set::Args>),
    /// Delete gates; jobs that they hold back can start at once
    Delete(Named),
}

/// Options of `rouse gate ls`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Needs the role rouse_observer or rouse_operator.")]
struct Ls {
    #[command(flatten)]
    target: Target,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options that name gates.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
A gate that a module declares comes back when a worker that has the module starts.\n\
Needs the role rouse_operator. A refused gate does not stop the others, and a summary follows.\n\
Exit codes: 0 all done · 3 no such gate · 6 another transaction has locked a gate; \
with several gates, the highest code")]
struct Named {
    #[command(flatten)]
    target: Target,

    /// The names of the gates
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,

    /// Print one JSON object for each gate, and one for the summary of several
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.operation {
        None => ls(args.list).await,
        Some(Operation::Ls(args)) => ls(args).await,
        Some(Operation::Show(args)) => show::run(args).await,
        Some(Operation::Set(args)) => set::run(*args).await,
        Some(Operation::Delete(args)) => delete(args).await,
    }
}

async fn ls(args: Ls) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let gates = store.gates(None).await?;
    match args.json {
        true => println!("{}", as_json(json!({"gates": gates}))),
        false => table(&gates).print("no gates"),
    }
    Ok(ExitCode::SUCCESS)
}

fn table(gates: &[Value]) -> List {
    let mut list = List::new([
        "name",
        "kind",
        "handler",
        "queue",
        "key",
        "limit",
        "declared by",
    ]);
    list.expendable(&["declared by", "kind", "key"]);
    for gate in gates {
        let text = |key: &str| plain(gate[key].as_str().unwrap_or_default());
        list.row([
            text("name"),
            text("kind"),
            text("handler"),
            text("queue"),
            words(&gate["key"]),
            describe(gate),
            text("declared_by"),
        ]);
    }
    list
}

async fn delete(args: Named) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    each(&args.names, GATE, args.json, async |name| {
        Ok(match store.delete_gate(name).await? {
            true => Ok(Done {
                text: format!("gate {} is deleted", plain(name)),
                json: json!({"gate": name, "deleted": true}),
            }),
            false => Err(Refusal {
                code: EXIT_UNKNOWN,
                why: no_gate(name),
            }),
        })
    })
    .await
}

fn no_gate(name: &str) -> String {
    format!("no gate {} (`rouse gate ls`)", plain(name))
}
