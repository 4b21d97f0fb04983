//! `cargo xtask demo`: a complete run for new users to watch, from the build to the end of all processes.

pub(crate) mod jobs;
mod report;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rouse_workbench::database;
use rouse_workbench::guests;
use rouse_workbench::host_process::{self, HostProcess};
use rouse_workbench::workspace::Workspace;
use tokio_postgres::Client;

/// All jobs together take a few seconds. If they take longer than this, something is wrong.
const DONE_TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    announce(1, "building the host and the handlers");
    let rouse = workspace.build_rouse()?;
    let handlers = workspace.root.join("handlers-wasm");
    let placed = guests::build_handlers(workspace, &handlers)?;
    println!("      {placed}");

    let started = Instant::now();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    runtime.block_on(watch(workspace, &rouse, &handlers))?;
    println!(
        "\nDone in {:.1} s after the build. Now try it yourself:\n  {} dev --config examples/rouse.toml",
        started.elapsed().as_secs_f64(),
        rouse
            .strip_prefix(&workspace.root)
            .unwrap_or(&rouse)
            .display()
    );
    Ok(())
}

async fn watch(workspace: &Workspace, rouse: &Path, handlers: &Path) -> Result<()> {
    let scratch = host_process::scratch_folder()?;
    let thumbnails = scratch.path().join("thumbnails");
    fs::create_dir(&thumbnails)?;
    let config = scratch.path().join("rouse.toml");
    fs::write(&config, jobs::config(&workspace.root, &thumbnails))?;

    announce(
        2,
        "starting `rouse dev`: a private Postgres with the schema, and the host",
    );
    let command = dev(rouse, handlers, scratch.path(), "127.0.0.1:0");
    let mut host = HostProcess::start(command)?;
    let ready = host.ready().await?;
    let url = ready
        .url
        .context("`rouse dev` did not print a connection URL")?;
    println!("      {url}\n      handlers: {}", ready.handlers.join(", "));

    let postmaster = host
        .during(async {
            let client = database::connect(&url).await?;
            enqueue_and_read(&client, workspace, &thumbnails).await?;
            database::postmaster(&client).await
        })
        .await?;

    announce(6, "stopping everything");
    let pid = host.pid();
    let status = host.stop().await?;
    if !status.success() {
        bail!("`rouse dev` exited with {status}\n{}", host.end().await);
    }
    for (name, id) in [("rouse", pid), ("postgres", Some(postmaster))] {
        if let Some(id) = id.filter(|id| host_process::is_alive(*id)) {
            bail!("{name} still runs as process {id} after `rouse dev` has exited");
        }
    }
    scratch.close().context("remove the data of the demo")?;
    println!("      all processes have ended, and the data is removed");
    Ok(())
}

/// `rouse dev` with these handlers, in a folder that has its settings and gets its data.
pub(crate) fn dev(rouse: &Path, handlers: &Path, folder: &Path, http: &str) -> Command {
    let mut command = Command::new(rouse);
    command
        .args(["dev", "--json", "--http", http])
        .arg("--data-dir")
        .arg(folder.join("pg"))
        .arg("--handlers")
        .arg(handlers)
        .arg("--config")
        .arg(folder.join("rouse.toml"))
        .current_dir(folder);
    command
}

async fn enqueue_and_read(client: &Client, workspace: &Workspace, thumbnails: &Path) -> Result<()> {
    announce(3, "enqueueing jobs through SQL");
    let expected = jobs::enqueue(client, &workspace.root).await?;

    announce(4, "waiting until all jobs have finished");
    report::watch(client, expected.jobs, DONE_TIMEOUT).await?;

    announce(5, "reading the results from the database");
    report::print(client, expected.jobs).await?;
    let files = fs::read_dir(thumbnails)?.count();
    ensure!(
        files == expected.thumbnails,
        "expected {} thumbnails in {}, found {files}",
        expected.thumbnails,
        thumbnails.display()
    );
    println!("      image.thumbnail has written {files} files to the folder that it was granted");
    Ok(())
}

fn announce(step: u32, title: &str) {
    println!("[{step}/6] {title}");
}
