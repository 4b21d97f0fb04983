//! A private Postgres with fsync on, which is crashed and restarted.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rouse_workbench::database;
use rouse_workbench::host_process::HostProcess;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::Mutex;

use super::ledger::now_us;

/// Recovery replays the WAL since the last checkpoint.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_EVERY: Duration = Duration::from_millis(20);
/// By then, the server has noticed a killed backend, and refuses connections until it has recovered.
const NOTICED_AFTER: Duration = Duration::from_millis(200);

pub(super) struct Server {
    pub(super) url: String,
    rouse: PathBuf,
    data: PathBuf,
    process: Mutex<HostProcess>,
}

impl Server {
    pub(super) async fn start(rouse: &Path, data: &Path) -> Result<Self> {
        let (process, url) = launch(rouse, data).await?;
        Ok(Self {
            url,
            rouse: rouse.to_owned(),
            data: data.to_owned(),
            process: Mutex::new(process),
        })
    }

    /// Stops the server like `pg_ctl stop -m immediate`, waits for `down`, and starts it. Returns the time of the stop.
    pub(super) async fn crash(&self, down: Duration) -> Result<i64> {
        let mut process = self.process.lock().await;
        let client = database::connect(&self.url).await?;
        let postmaster = database::postmaster(&client).await?;
        let from_us = now_us();
        signal(i32::try_from(postmaster)?, Signal::QUIT)?;
        // `rouse postgres` has lost its server and exits with an error.
        let _ = process.stop().await?;
        tokio::time::sleep(down).await;
        let started = Instant::now();
        loop {
            match launch(&self.rouse, &self.data).await {
                Ok((launched, _)) => {
                    *process = launched;
                    break;
                }
                // `rouse postgres` reads the schema, and gives up if another fault cuts its connection.
                Err(error) if started.elapsed() > RECOVERY_TIMEOUT => return Err(error),
                Err(_) => tokio::time::sleep(POLL_EVERY).await,
            }
        }
        self.answers().await?;
        Ok(from_us)
    }

    /// Sends SIGKILL to a backend, after which the server ends all others and recovers. Returns the time of the kill.
    pub(super) async fn kill_backend(&self, draw: u64) -> Result<i64> {
        // Waits while the server is being started.
        let _process = self.process.lock().await;
        let client = database::connect(&self.url).await?;
        let draw = draw.to_string();
        let row = client
            .query_opt(
                "SELECT pid FROM pg_stat_activity
                 WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
                 ORDER BY md5(pid::text || $1::text) LIMIT 1",
                &[&draw],
            )
            .await?
            .context("there is no other connection")?;
        let from_us = now_us();
        signal(row.get(0), Signal::KILL)?;
        tokio::time::sleep(NOTICED_AFTER).await;
        self.answers().await?;
        Ok(from_us)
    }

    /// Sends SIGKILL to this backend. False if another fault restarts the server.
    pub(super) async fn kill_this_backend(&self, pid: i32) -> Result<bool> {
        let Ok(_process) = self.process.try_lock() else {
            return Ok(false);
        };
        signal(pid, Signal::KILL)?;
        tokio::time::sleep(NOTICED_AFTER).await;
        self.answers().await?;
        Ok(true)
    }

    /// Waits until the server accepts connections and answers queries.
    pub(super) async fn answers(&self) -> Result<()> {
        let started = Instant::now();
        loop {
            if let Ok(client) = database::connect(&self.url).await
                && client.batch_execute("SELECT 1").await.is_ok()
            {
                return Ok(());
            }
            if started.elapsed() > RECOVERY_TIMEOUT {
                bail!("Postgres did not answer within {RECOVERY_TIMEOUT:?} after it was crashed");
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    }

    pub(super) async fn stop(&self) -> Result<()> {
        self.process.lock().await.stop().await?;
        Ok(())
    }
}

async fn launch(rouse: &Path, data: &Path) -> Result<(HostProcess, String)> {
    let mut command = Command::new(rouse);
    command.args(["postgres", "--json", "--data-dir"]).arg(data);
    let mut process = HostProcess::start(command)?;
    let ready = process.ready().await?;
    let url = ready
        .url
        .context("`rouse postgres` printed no connection URL")?;
    Ok((process, url))
}

fn signal(pid: i32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(pid).context("the process id is 0")?;
    kill_process(pid, signal).context("signal a process of Postgres")
}
