//! `rouse serve`: a worker on a database, or a host for direct invocations only.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args as ClapArgs;
use tracing::info;

use super::host::invocations::Tokenless;
use super::host::{Databases, Host, HostArgs};
use super::signals::{Signals, stopped_early};
use super::target::{Target, warn_of_a_password};
use crate::config::{Environment, Queue};
use crate::store::connect::Connector;
use crate::store::migrate;
use crate::worker::Middleware;

/// Options of `rouse serve`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    host: HostArgs,

    /// The address for notifications if DATABASE_URL points to a transaction pooler: a direct address of the same
    /// database; default: $ROUSE_LISTEN_URL, else that of the database
    #[arg(long, value_name = "URL")]
    listen_url: Option<String>,

    /// Take no jobs and use no database: serve only POST /invoke/HANDLER; the same as `queue = "off"` in rouse.toml
    #[arg(long, conflicts_with_all = ["database_url", "listen_url"])]
    no_queue: bool,

    /// The address of /healthz, /readyz, /metrics, /invoke, /jobs/ID and the dashboard /ui/; `off`: none. Unless it is on
    /// loopback, anyone who can reach it can read the dashboard, except payloads, results, errors and logs;
    /// $ROUSE_UI_VIEWER_TOKEN requires a sign-in
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8420")]
    http: String,
}

/// Serves until a signal.
pub(super) async fn run(
    args: Args,
    middleware: Vec<Arc<dyn Middleware>>,
) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::install()?;
    let Some(started) = signals.unless(start(&args)).await else {
        stopped_early();
        return Ok(ExitCode::SUCCESS);
    };
    let (host, databases) = started?;
    host.work(databases, signals, middleware).await?;
    Ok(ExitCode::SUCCESS)
}

/// Reads the settings, checks the database, and starts to load the handlers.
async fn start(args: &Args) -> anyhow::Result<(Host, Option<Databases>)> {
    let mut written = args.host.read()?;
    if args.no_queue {
        written.queue = Queue::Off;
    }
    let databases = match written.queue {
        Queue::On => Some(databases(args).await?),
        Queue::Off => None,
    };
    let host = Host::prepare(&args.host, written, &args.http, Tokenless::Nobody).await?;
    info!(
        modules = host.catalog.current().loading.len(),
        folder = %args.host.handlers.display(),
        "serving; each module as soon as it is loaded"
    );
    if let Some(address) = host.http_address() {
        info!("health and metrics on http://{address}");
    }
    host.log_invocations();
    if databases.is_none() {
        info!("the queue is off: this host takes no jobs and uses no database");
    }
    Ok((host, databases))
}

/// The addresses of the database. Checks the schema, before anything is compiled.
async fn databases(args: &Args) -> anyhow::Result<Databases> {
    let connector = args.target.connector()?;
    if let Some(url) = &args.listen_url {
        warn_of_a_password("--listen-url", "ROUSE_LISTEN_URL", url);
    }
    let listen_url = args.listen_url.clone();
    let listen_connector = match listen_url.or_else(|| Environment.listen_url()) {
        Some(url) => Connector::from_url(&url, &|name| Environment.get(name))
            .context("read the address for notifications (--listen-url or ROUSE_LISTEN_URL)")?,
        None => connector.clone(),
    };
    migrate::check(&connector.client().await?).await?;
    Ok(Databases {
        connector,
        listen_connector,
    })
}
