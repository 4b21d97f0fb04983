//! `rouse state`: the state that handlers keep between their jobs. It needs no running worker.

use std::io::{IsTerminal as _, Read as _, Write as _};
use std::process::ExitCode;

use anyhow::Context as _;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args as ClapArgs, Subcommand};
use rouse_display::plural::counted;
use serde_json::{Value, json};

use super::ago;
use super::list::List;
use super::screen::Screen;
use super::target::Target;
use super::text::{as_json, plain};
use crate::store::StoreError;

/// Nothing was done, because it was not confirmed.
const EXIT_UNCONFIRMED: u8 = 2;

/// There is no such key.
const EXIT_UNKNOWN: u8 = 3;

/// Another transaction has locked the state.
const EXIT_LOCKED: u8 = 6;

/// Options of `rouse state`.
#[derive(Debug, ClapArgs)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Without a command: lists the handlers and tenants that have any state, like `rouse state ls`."
)]
pub(super) struct Args {
    #[command(subcommand)]
    operation: Option<Operation>,

    #[command(flatten)]
    list: LsAll,
}

/// Options of `rouse state` without a command.
#[derive(Debug, ClapArgs)]
struct LsAll {
    #[command(flatten)]
    target: Target,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// List the keys of a handler; without one, all handlers and tenants that have any state
    #[command(visible_alias = "list")]
    Ls(Ls),
    /// Print the value of a key
    Get(Get),
    /// Set the value of a key
    Set(Set),
    /// Delete a key, or all keys of a handler and tenant
    Delete(Delete),
}

/// Options of `rouse state ls`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "Needs the role rouse_observer or rouse_operator.")]
struct Ls {
    #[command(flatten)]
    target: Target,

    /// The handler; default: all handlers, with the size of their state
    handler: Option<String>,

    /// The tenant; default: the state of jobs without a tenant
    #[arg(long, requires = "handler", value_parser = NonEmptyStringValueParser::new())]
    tenant: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `rouse state get`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer or rouse_operator. Prints the raw bytes; on a terminal, with control characters escaped. With \
--json, a value that is JSON is in `value`, any other in `base64`.\n\
Exit codes: 0 the key exists · 3 there is no such key")]
struct Get {
    #[command(flatten)]
    target: Target,

    /// The handler
    handler: String,

    /// The key
    key: String,

    /// The tenant; default: the state of jobs without a tenant
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    tenant: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `rouse state set`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_operator, and leaves a record. The quota of rouse.toml does not apply here, but a handler above its quota cannot \
add anything. Running attempts see the value at their next read.\n\
Exit codes: 0 done · 6 another transaction has locked the state")]
struct Set {
    #[command(flatten)]
    target: Target,

    /// The handler
    handler: String,

    /// The key
    key: String,

    /// The value, JSON as handlers in Rust read it; `-` reads it from standard input
    #[arg(allow_negative_numbers = true)]
    value: String,

    /// Accept any bytes
    #[arg(long)]
    raw: bool,

    /// The tenant; default: the state of jobs without a tenant
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    tenant: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Options of `rouse state delete`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_operator, and leaves a record.\n\
Exit codes: 0 done · 2 nothing was done: --confirm is missing · 3 there is no such key · 6 another transaction has \
locked the state")]
struct Delete {
    #[command(flatten)]
    target: Target,

    /// The handler
    handler: String,

    /// The key; default: all keys of the handler for this tenant
    key: Option<String>,

    /// The tenant; default: the state of jobs without a tenant
    #[arg(long, value_parser = NonEmptyStringValueParser::new())]
    tenant: Option<String>,

    /// Confirm the deletion
    #[arg(long, visible_alias = "yes")]
    confirm: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.operation {
        None => {
            let LsAll { target, json } = args.list;
            ls(Ls {
                target,
                handler: None,
                tenant: None,
                json,
            })
            .await
        }
        Some(Operation::Ls(args)) => ls(args).await,
        Some(Operation::Get(args)) => get(args).await,
        Some(Operation::Set(args)) => set(args).await,
        Some(Operation::Delete(args)) => delete(args).await,
    }
}

async fn ls(args: Ls) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let (rows, key, columns) = match &args.handler {
        None => (
            store.state_spaces().await?,
            "states",
            ["handler", "tenant", "keys", "bytes"],
        ),
        Some(handler) => (
            store.state_entries(handler, args.tenant.as_deref()).await?,
            "entries",
            ["key", "bytes", "version", "set_at"],
        ),
    };
    match args.json {
        true => println!("{}", as_json(json!({ key: rows }))),
        false => table(&rows, columns, store.now().await?).print(match &args.handler {
            None => "no handler has any state",
            Some(_) => "the handler has no state for this tenant",
        }),
    }
    Ok(ExitCode::SUCCESS)
}

fn table(rows: &[Value], columns: [&'static str; 4], now: f64) -> List {
    let screen = Screen::from_stdout();
    let mut list = List::new(columns.map(|column| match column {
        "set_at" => "set at",
        column => column,
    }));
    for row in rows {
        list.row(columns.map(|column| match &row[column] {
            time if column == "set_at" => ago::listed(time, now, screen),
            Value::String(text) => plain(text),
            Value::Null => String::new(),
            other => other.to_string(),
        }));
    }
    list
}

async fn get(args: Get) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let tenant = args.tenant.as_deref();
    let Some((value, mut entry)) = store.state_value(&args.handler, tenant, &args.key).await?
    else {
        return Ok(nothing(&args.handler, tenant, Some(&args.key)));
    };
    let mut out = std::io::stdout();
    if args.json {
        match serde_json::from_slice::<Value>(&value) {
            Ok(value) => entry["value"] = value,
            Err(_) => entry["base64"] = BASE64_STANDARD.encode(&value).into(),
        }
        println!("{}", as_json(entry));
    } else if out.is_terminal() {
        println!("{}", plain(&String::from_utf8_lossy(&value)));
    } else {
        out.write_all(&value).context("print the value")?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn set(args: Set) -> anyhow::Result<ExitCode> {
    let mut value = args.value.into_bytes();
    if value == b"-" {
        value.clear();
        std::io::stdin()
            .read_to_end(&mut value)
            .context("read the value from standard input")?;
    }
    if !args.raw {
        serde_json::from_slice::<serde::de::IgnoredAny>(&value).context(
            "the value is not JSON (is it quoted for the shell? '\"text\"'); --raw accepts any bytes",
        )?;
    }
    let store = args.target.checked_store().await?;
    let tenant = args.tenant.as_deref();
    let set = store.set_state(&args.handler, tenant, &args.key, &value);
    if let Err(error) = set.await {
        return locked(error, &described(&args.handler, tenant, Some(&args.key)));
    }
    match args.json {
        true => println!(
            "{}",
            as_json(
                json!({"handler": args.handler, "tenant": tenant, "key": args.key, "set": true})
            )
        ),
        false => println!("set {}", described(&args.handler, tenant, Some(&args.key))),
    }
    Ok(ExitCode::SUCCESS)
}

async fn delete(args: Delete) -> anyhow::Result<ExitCode> {
    let store = args.target.checked_store().await?;
    let (tenant, key) = (args.tenant.as_deref(), args.key.as_deref());
    let selection = described(&args.handler, tenant, key);
    if !args.confirm {
        eprintln!(
            "rouse: nothing was done: this deletes {selection} for good; confirm it with --confirm"
        );
        return Ok(ExitCode::from(EXIT_UNCONFIRMED));
    }
    let deleted = match store.delete_state(&args.handler, tenant, key).await {
        Ok(deleted) => deleted,
        Err(error) => return locked(error, &selection),
    };
    if args.json {
        println!(
            "{}",
            as_json(
                json!({"handler": args.handler, "tenant": tenant, "key": key, "deleted": deleted})
            )
        );
    } else if deleted > 0 {
        println!("deleted {selection}: {}", counted(deleted, "key"));
    }
    match deleted {
        0 => Ok(nothing(&args.handler, tenant, key)),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Describes the state that a command refers to.
fn described(handler: &str, tenant: Option<&str>, key: Option<&str>) -> String {
    let keys = key.map_or("all keys".to_owned(), |key| format!("key {}", plain(key)));
    let tenant = tenant.map_or("jobs without a tenant".to_owned(), |tenant| {
        format!("tenant {}", plain(tenant))
    });
    format!("{keys} of handler {} for {tenant}", plain(handler))
}

/// Reports that another transaction has locked this state: the message of Postgres does not name it.
///
/// # Errors
/// Any other error.
fn locked(error: StoreError, selection: &str) -> anyhow::Result<ExitCode> {
    if !error.is_locked() {
        return Err(error.into());
    }
    eprintln!("rouse: {selection}: {error}");
    Ok(ExitCode::from(EXIT_LOCKED))
}

fn nothing(handler: &str, tenant: Option<&str>, key: Option<&str>) -> ExitCode {
    eprintln!(
        "rouse: no such state: {}; `rouse state ls` lists the existing state",
        described(handler, tenant, key)
    );
    ExitCode::from(EXIT_UNKNOWN)
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    #[test]
    fn an_empty_tenant_is_refused() {
        let commands: [(Command, &[&str]); 4] = [
            (Ls::augment_args(Command::new("ls")), &["ls", "a.b"]),
            (Get::augment_args(Command::new("get")), &["get", "a.b", "k"]),
            (
                Set::augment_args(Command::new("set")),
                &["set", "a.b", "k", "1"],
            ),
            (
                Delete::augment_args(Command::new("delete")),
                &["delete", "a.b"],
            ),
        ];
        for (command, args) in commands {
            let parsed = |tenant| {
                let args = args.iter().copied().chain(["--tenant", tenant]);
                command.clone().try_get_matches_from(args)
            };
            assert!(parsed("t").is_ok(), "{args:?}");
            let error = parsed("").unwrap_err().to_string();
            assert!(error.contains("--tenant"), "{error}");
        }
    }
}
