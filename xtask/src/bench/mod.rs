//! `cargo xtask bench`: one file per measurement, each on a private Postgres that keeps its promises.

mod drain;
mod probe;

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::Subcommand;
use tokio_postgres::Client;

use crate::guests;
use crate::host_process::HostProcess;
use crate::workspace::Workspace;

#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Jobs per second that one host takes out of a full queue, beside what plain SQL does on that server
    Drain(drain::Options),
}

pub(crate) fn run(workspace: &Workspace, bench: Bench) -> Result<()> {
    let rouse = workspace.build_rouse()?;
    let handlers = workspace.root.join("handlers-wasm");
    eprintln!("{}", guests::build_handlers(workspace, &handlers)?);

    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    match bench {
        Bench::Drain(options) => runtime.block_on(drain::run(&rouse, &handlers, &options)),
    }
}

/// Starts only the private Postgres, migrated; returns it with its connection string.
async fn start_postgres(rouse: &Path, data_dir: &Path) -> Result<(HostProcess, String)> {
    let mut command = Command::new(rouse);
    command
        .args(["postgres", "--json", "--data-dir"])
        .arg(data_dir);
    let mut server = HostProcess::start(command)?;
    let url = server
        .ready()
        .await?
        .url
        .context("`rouse postgres` did not say how to connect")?;
    Ok((server, url))
}

/// What a figure depends on; measured on a server that may lose data it would mean nothing.
struct Server {
    version: String,
    fsync: String,
    synchronous_commit: String,
}

impl Server {
    async fn read(client: &Client) -> Result<Self> {
        let row = client
            .query_one(
                "SELECT current_setting('server_version'), current_setting('fsync'), \
                        current_setting('synchronous_commit')",
                &[],
            )
            .await
            .context("read the settings of the server")?;
        let server = Self {
            version: row.get(0),
            fsync: row.get(1),
            synchronous_commit: row.get(2),
        };
        if server.fsync != "on" || server.synchronous_commit != "on" {
            bail!(
                "fsync is {} and synchronous_commit is {}: a benchmark needs both on",
                server.fsync,
                server.synchronous_commit
            );
        }
        Ok(server)
    }
}
