//! `cargo xtask screenshots`: the screenshots in the README and the guides, taken from a dashboard with the jobs of the
//! demo.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rouse_workbench::database;
use rouse_workbench::guests;
use rouse_workbench::host_process::{self, HostProcess};
use rouse_workbench::workspace::Workspace;
use tokio_postgres::Client;

use crate::demo::{dev, jobs};

/// The folder of the screenshots, from the root of the clone.
const FOLDER: &str = "docs/images";

/// The size of a screenshot, in pixels.
const SIZE: &str = "1280,800";

/// The chart of the overview needs several seconds of data.
const ROUNDS: usize = 12;
const ROUND: Duration = Duration::from_secs(2);

/// The programs that can take a screenshot, under the names that distributions give them.
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// A flow in which one job fails, some succeed, and others wait.
const FLOW: &str = include_str!("screenshots/flow.json");

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let has = |name: &&&str| Command::new(name).arg("--version").output().is_ok();
    let browser = BROWSERS.iter().find(has).context(
        "neither Chromium nor Chrome is installed (on Debian: apt-get install chromium)",
    )?;
    let rouse = workspace.build_rouse()?;
    let handlers = workspace.root.join("handlers-wasm");
    guests::build_handlers(workspace, &handlers)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    runtime.block_on(take(workspace, &rouse, &handlers, browser))
}

async fn take(workspace: &Workspace, rouse: &Path, handlers: &Path, browser: &str) -> Result<()> {
    let scratch = host_process::scratch_folder()?;
    let thumbnails = scratch.path().join("thumbnails");
    fs::create_dir(&thumbnails)?;
    let config = scratch.path().join("rouse.toml");
    fs::write(&config, jobs::config(&workspace.root, &thumbnails))?;
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let mut command = dev(rouse, handlers, scratch.path(), &address.to_string());
    command
        .env("ROUSE_UI_NAME", "shop")
        .env("ROUSE_UI_COLOUR", "#0f766e");
    let mut host = HostProcess::start(command)?;
    let ready = host.ready().await?;
    let url = ready
        .url
        .context("`rouse dev` did not print a connection URL")?;
    let flow = host
        .during(async {
            let client = database::connect(&url).await?;
            fill(&client, workspace).await
        })
        .await?;
    let folder = workspace.root.join(FOLDER);
    fs::create_dir_all(&folder)?;
    for (name, page) in [
        ("overview", String::new()),
        ("flow", format!("flows/{flow}")),
    ] {
        let file = folder.join(format!("{name}.png"));
        let page = format!("http://{address}/ui/{page}");
        shoot(browser, &page, &file, scratch.path())?;
        println!("{}", file.display());
    }
    let status = host.stop().await?;
    ensure!(status.success(), "`rouse dev` exited with {status}");
    Ok(())
}

/// Enqueues jobs in rounds, so that the chart shows a throughput. Returns the flow.
async fn fill(client: &Client, workspace: &Workspace) -> Result<i64> {
    for round in 0..ROUNDS {
        let count = 200 + 60 * i32::try_from(round % 5)?;
        let sql = "SELECT count(rouse.enqueue('text.stats', jsonb_build_object('text', 'order ' || n), tenant => 'tenant-' || n % 7)) \
                   FROM generate_series(1, $1::integer) AS n";
        client.query(sql, &[&count]).await?;
        tokio::time::sleep(ROUND).await;
    }
    jobs::enqueue(client, &workspace.root).await?;
    let flow: i64 = client
        .query_one(
            "SELECT rouse.enqueue_flow($1::text::jsonb, 'monthly report', tenant => 'acme')",
            &[&FLOW],
        )
        .await
        .context("enqueue the flow")?
        .get(0);
    client
        .batch_execute(
            "SELECT rouse.schedule('nightly-report', 'text.stats', '{\"text\": \"x\"}', '30 2 * * *', time_zone => 'Europe/Berlin');
             SELECT rouse.enqueue('csv.summary', '{\"path\": \"/data/missing.csv\"}', queue => 'imports', max_attempts => 1) FROM generate_series(1, 3);",
        )
        .await
        .context("enqueue the other jobs")?;
    tokio::time::sleep(2 * ROUND).await;
    Ok(flow)
}

/// Takes a screenshot of a page.
fn shoot(browser: &str, page: &str, file: &Path, scratch: &Path) -> Result<()> {
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--disable-gpu",
        ])
        .arg(format!(
            "--user-data-dir={}",
            scratch.join("browser").display()
        ))
        .arg(format!("--window-size={SIZE}"))
        .arg(format!("--screenshot={}", file.display()))
        .arg(page)
        .output()
        .with_context(|| format!("run {browser}"))?;
    ensure!(
        output.status.success() && file.is_file(),
        "{browser} did not take a screenshot of {page}:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
