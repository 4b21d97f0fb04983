//! `rouse serve`: a worker on somebody's database.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args as ClapArgs;
use tracing::{info, warn};

use super::host::{Host, HostArgs};
use super::target::Target;
use crate::config::Environment;
use crate::store::connect::Connector;
use crate::store::migrate;

/// Options of `rouse serve`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    host: HostArgs,

    /// Where to listen for notifications, when DATABASE_URL leads through a transaction pooler: a direct address of the
    /// same database; default: $ROUSE_LISTEN_URL, else the database's own
    #[arg(long, value_name = "URL")]
    listen_url: Option<String>,

    /// Where /healthz, /readyz and /metrics answer; `off`: nowhere
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8420")]
    http: String,
}

/// Serves until a signal.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let connector = args.target.connector()?;
    let listen_at = match args.listen_url.or_else(|| Environment.listen_url()) {
        Some(url) => Connector::from_url(&url, &|name| Environment.get(name))
            .context("read the address to listen at (--listen-url or ROUSE_LISTEN_URL)")?,
        None => connector.clone(),
    };
    // Before anything is compiled: the mistakes of the first day.
    migrate::check(&connector.client().await?).await?;
    let host = Host::prepare(&args.host, &args.http).await?;
    let handlers = host.catalog.current();
    info!(
        handlers = handlers.names().join(", "),
        refused = handlers.refused.len(),
        folder = %args.host.handlers.display(),
        "serving"
    );
    if handlers.names().is_empty() {
        warn!(folder = %args.host.handlers.display(), "no handler serves; put *.wasm files there");
    }
    if let Some(address) = host.http_address() {
        info!("health and metrics on http://{address}");
    }
    host.work(connector, listen_at).await?;
    Ok(ExitCode::SUCCESS)
}
