//! `cargo xtask demo`: one whole run that a newcomer can watch, from the build to an empty process list.

mod jobs;
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

/// All jobs together take a few seconds; a machine that needs longer than this has a fault to show.
const DONE_WITHIN: Duration = Duration::from_secs(120);

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    say(1, "building the host and the handlers");
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

    say(
        2,
        "starting `rouse dev`: a private Postgres, the schema, the host",
    );
    let mut command = Command::new(rouse);
    command
        .args(["dev", "--json", "--http", "127.0.0.1:0"])
        .arg("--data-dir")
        .arg(scratch.path().join("pg"))
        .arg("--handlers")
        .arg(handlers)
        .arg("--config")
        .arg(&config)
        .current_dir(scratch.path());
    let mut host = HostProcess::start(command)?;
    let ready = host.ready().await?;
    let url = ready
        .url
        .context("`rouse dev` did not say how to connect")?;
    println!("      {url}\n      handlers: {}", ready.handlers.join(", "));

    let postmaster = host
        .during(async {
            let client = database::connect(&url).await?;
            enqueue_and_read(&client, workspace, &thumbnails).await?;
            database::postmaster(&client).await
        })
        .await?;

    say(6, "stopping everything");
    let pid = host.pid();
    let status = host.stop().await?;
    if !status.success() {
        bail!("`rouse dev` ended with {status}\n{}", host.end().await);
    }
    for (name, id) in [("rouse", pid), ("postgres", Some(postmaster))] {
        if let Some(id) = id.filter(|id| host_process::is_alive(*id)) {
            bail!("{name} still runs as process {id}, although `rouse dev` has ended");
        }
    }
    scratch.close().context("remove the data of the demo")?;
    println!("      nothing is left running, and the data are removed");
    Ok(())
}

async fn enqueue_and_read(client: &Client, workspace: &Workspace, thumbnails: &Path) -> Result<()> {
    say(3, "enqueueing through SQL");
    let expected = jobs::enqueue(client, &workspace.root).await?;

    say(4, "waiting for them");
    report::watch(client, expected.jobs, DONE_WITHIN).await?;

    say(5, "what the database says");
    report::print(client, expected.jobs).await?;
    let files = fs::read_dir(thumbnails)?.count();
    ensure!(
        files == expected.thumbnails,
        "{files} of {} thumbnails are in {}",
        expected.thumbnails,
        thumbnails.display()
    );
    println!("      {files} thumbnails are in the folder that image.thumbnail may write to");
    Ok(())
}

fn say(step: u32, what: &str) {
    println!("[{step}/6] {what}");
}
