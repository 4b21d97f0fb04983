//! `rouse postgres`: the private Postgres alone. `rouse dev` starts it the same way.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args as ClapArgs;
use serde_json::json;
use tracing::debug;

use super::dev_file::Serves;
use super::signals::{Signals, stopped_early};
use super::target::{DATABASE, data_dir};
use super::text::as_json;
use crate::config::Environment;
use crate::postgres::{Server, Settings, StartError};
use crate::store::connect::Connector;
use crate::store::migrate;

/// The interval at which the server is checked.
const CHECK_EVERY: Duration = Duration::from_millis(500);

/// Options of the private Postgres.
#[derive(Debug, Clone, ClapArgs)]
pub(super) struct PrivateArgs {
    /// The data folder of the private Postgres; default: $ROUSE_DATA_DIR, else ./.rouse/pg
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// Also open this port on 127.0.0.1, with a password, for clients that cannot use sockets
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    pg_port: Option<u16>,
}

/// Options of `rouse postgres`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    private: PrivateArgs,

    /// Print events as JSON, one object per line
    #[arg(long)]
    json: bool,
}

/// A running private Postgres, migrated.
pub(super) struct Private {
    server: Server,
    pub(super) url: String,
    pub(super) tcp_url: Option<String>,
}

impl PrivateArgs {
    /// Starts the server, creates its database and migrates it. `None` if a signal came first; then the server is
    /// stopped.
    pub(super) async fn start(&self, signals: &mut Signals) -> anyhow::Result<Option<Private>> {
        let mut settings = Settings::new(data_dir(self.data_dir.as_deref()));
        settings.port = self.pg_port;
        settings.search.pinned = Environment.get("ROUSE_PG_BIN").map(PathBuf::from);
        settings.search.path = Environment.get("PATH").map(Into::into);
        settings.search.download = true;
        let cancel = settings.cancel.clone();
        let mut starting = tokio::task::spawn_blocking(move || Server::start(&settings));
        let Some(server) = signals.unless(&mut starting).await else {
            cancel.cancel();
            return match starting.await? {
                Ok(server) => stop(server).await.map(|()| None),
                Err(StartError::Cancelled) => Ok(None),
                Err(error) => Err(error.into()),
            };
        };
        let server = server??;
        Serves::forget(server.data_dir())?;
        match signals.unless(migrated(&server)).await {
            Some(Ok(())) => Ok(Some(Private {
                url: server.url(DATABASE),
                tcp_url: server.tcp_url(DATABASE),
                server,
            })),
            Some(Err(error)) => {
                stop(server).await?;
                Err(error)
            }
            None => stop(server).await.map(|()| None),
        }
    }
}

/// Creates the database if it is missing, and migrates it.
async fn migrated(server: &Server) -> anyhow::Result<()> {
    let admin = Connector::from_url(&server.url("postgres"), &|_| None)?;
    let client = admin.client().await?;
    let existing = client
        .query_opt("SELECT FROM pg_database WHERE datname = $1", &[&DATABASE])
        .await?;
    if existing.is_none() {
        debug!("creating the database {DATABASE}");
        client
            .batch_execute(&format!("CREATE DATABASE {DATABASE}"))
            .await?;
    }
    debug!("migrating the database {DATABASE}");
    let connector = Connector::from_url(&server.url(DATABASE), &|_| None)?;
    let (mut client, mut keeper) = (connector.client().await?, connector.client().await?);
    migrate::run(&mut client, &mut keeper, migrate::WAIT).await?;
    debug!("the private Postgres is ready");
    Ok(())
}

/// Stops a server and waits for it.
async fn stop(server: Server) -> anyhow::Result<()> {
    tokio::task::spawn_blocking(move || server.stop())
        .await
        .context("stop the private Postgres")
}

impl Private {
    /// The server's data folder.
    pub(super) fn data_dir(&self) -> &Path {
        self.server.data_dir()
    }

    /// Returns an error when the server has ended unexpectedly.
    pub(super) async fn died(&self) -> anyhow::Error {
        while self.server.is_running() {
            tokio::time::sleep(CHECK_EVERY).await;
        }
        anyhow::anyhow!(
            "the private Postgres ended unexpectedly; its log is {}",
            self.server.log_path().display()
        )
    }

    /// Stops the server and waits for it.
    pub(super) async fn stop(self) -> anyhow::Result<()> {
        stop(self.server).await
    }
}

/// Runs the server until a signal.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::install()?;
    let Some(private) = args.private.start(&mut signals).await? else {
        stopped_early();
        return Ok(ExitCode::SUCCESS);
    };
    // The server runs even if nobody reads this.
    let _ = print_ready(&private, args.json);
    tokio::select! {
        () = signals.next() => {}
        error = private.died() => return Err(error),
    }
    private.stop().await?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the addresses of the server.
fn print_ready(private: &Private, as_event: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if as_event {
        let event = json!({"event": "ready", "url": private.url, "tcp_url": private.tcp_url});
        writeln!(out, "{}", as_json(event))?;
    } else {
        for url in [Some(&private.url), private.tcp_url.as_ref()]
            .into_iter()
            .flatten()
        {
            writeln!(out, "postgres: {url}")?;
        }
    }
    out.flush()
}
