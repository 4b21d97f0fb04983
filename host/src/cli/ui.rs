//! `rouse ui`: the dashboard in a process of its own, which needs only a login for the hosts' database.

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args as ClapArgs;
use tokio_util::sync::CancellationToken;

use super::host::dashboard;
use super::signals::{Signals, stopped_early};
use super::target::Target;
use crate::http;
use crate::ui::CONNECTIONS_MAX;

/// Options of `rouse ui`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Needs the role rouse_observer to read, and rouse_operator for changes. On a loopback address, users may do what \
the login may. On another address, users sign in with a token: ROUSE_UI_OPERATOR_TOKEN permits changes, ROUSE_UI_VIEWER_TOKEN reading. \
Users who have not signed in can change nothing; they see everything except payloads, results, errors and logs, or nothing if \
ROUSE_UI_VIEWER_TOKEN is set.")]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// The address of the dashboard; port 0: any free port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8430")]
    http: SocketAddr,
}

/// Serves until a signal.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::install()?;
    let listener = http::bind(args.http).await?;
    let address = listener
        .local_addr()
        .context("read the address of the port")?;
    let connector = args.target.connector()?;
    let stopping = CancellationToken::new();
    let made = async {
        args.target.checked_store().await?;
        dashboard::start(Some(&connector), None, address, true, stopping.clone())
    };
    let Some(made) = signals.unless(made).await else {
        stopped_early();
        return Ok(ExitCode::SUCCESS);
    };
    let off = "the dashboard is off (ROUSE_UI=off)";
    let dashboard = made?.context(off)?;
    let url = dashboard::url(address).context(off)?;
    let mut out = std::io::stdout();
    writeln!(out, "dashboard: {url}")?;
    out.flush().context("print the address")?;
    let shutdown = async move {
        signals.next().await;
        stopping.cancel();
    };
    http::serve_router(listener, dashboard.router, CONNECTIONS_MAX, shutdown).await;
    Ok(ExitCode::SUCCESS)
}
