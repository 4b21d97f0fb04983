//! A private, durable Postgres for one benchmark.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result, bail, ensure};
use rouse_workbench::database;
use rouse_workbench::host_process::{self, HostProcess};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_postgres::Client;

use super::{Bench, counts, cpu};

/// The server, with connections that stay open.
pub(super) struct Server {
    pub(super) url: String,
    /// Connected to the database of the jobs. Its statements are counted there; see `counts.rs`.
    pub(super) client: Client,
    /// Connected to another database of the same server, so that reading statistics does not change them.
    pub(super) observer: Client,
    /// A folder for this benchmark's files.
    pub(super) folder: PathBuf,
    postmaster: u32,
    /// The backends of `client` and `observer`, whose CPU time is excluded.
    own_backends: [u32; 2],
    settings: Value,
    hosts: AtomicU32,
}

impl Server {
    /// Starts a migrated server with fsync and synchronous_commit on, runs `work`, stops the server, and removes its
    /// data.
    pub(super) async fn during<T>(
        bench: &Bench,
        work: impl AsyncFnOnce(&Server) -> Result<T>,
    ) -> Result<T> {
        let scratch = host_process::scratch_folder()?;
        let label = format!(
            "starting a private Postgres in {}",
            scratch.path().display()
        );
        bench.progress.step(&label);
        let mut command = Command::new(&bench.rouse);
        command
            .args(["postgres", "--json", "--data-dir"])
            .arg(scratch.path().join("pg"));
        let mut process = HostProcess::start(command)?;
        let ready = process.ready().await?;
        let url = ready
            .url
            .context("`rouse postgres` printed no connection URL")?;
        let done = process
            .during(async {
                let server = Self::connect(url, &scratch).await?;
                work(&server).await
            })
            .await?;
        let status = process.stop().await?;
        ensure!(
            status.success(),
            "`rouse postgres` exited with {status}\n{}",
            process.end().await
        );
        scratch
            .close()
            .context("remove the data of the benchmark")?;
        Ok(done)
    }

    async fn connect(url: String, scratch: &TempDir) -> Result<Self> {
        let client = database::connect(&url).await?;
        let observer = database::connect_to(&url, "postgres").await?;
        Ok(Self {
            settings: settings(&client).await?,
            own_backends: [backend(&client).await?, backend(&observer).await?],
            postmaster: database::postmaster(&observer).await?,
            folder: scratch.path().to_owned(),
            hosts: AtomicU32::new(0),
            url,
            client,
            observer,
        })
    }

    /// CPU time of all processes of the server, except the two backends of the benchmark.
    pub(super) fn cpu(&self) -> Result<cpu::Seconds> {
        cpu::postgres(self.postmaster, &self.own_backends)
    }

    /// Ends all sessions except those of the benchmark.
    pub(super) async fn end_other_sessions(&self) -> Result<()> {
        counts::end_sessions(&self.observer, &self.own_backends).await
    }

    /// The settings that the figures depend on.
    pub(super) fn settings(&self) -> Value {
        self.settings.clone()
    }

    /// The worker id of the next host.
    pub(super) fn next_worker_id(&self) -> String {
        format!("bench-{}", self.hosts.fetch_add(1, Ordering::Relaxed))
    }

    /// A handlers folder with exactly these modules. The same modules always result in the same folder.
    pub(super) fn handlers(&self, guests: &Path, modules: &[&str]) -> Result<PathBuf> {
        let folder = self.folder.join(format!("handlers-{}", modules.join("-")));
        std::fs::create_dir_all(&folder)?;
        for module in modules {
            let file = format!("{module}.wasm");
            std::fs::copy(guests.join(&file), folder.join(&file))
                .with_context(|| format!("copy the guest {file}"))?;
        }
        Ok(folder)
    }

    /// Suspends autovacuum, which would be counted as work for the hosts.
    pub(super) async fn suspend_autovacuum(&self) -> Result<()> {
        self.observer
            .batch_execute("ALTER SYSTEM SET autovacuum_naptime = '1h'")
            .await
            .context("set autovacuum_naptime")?;
        self.observer
            .batch_execute("SELECT pg_reload_conf()")
            .await
            .context("reload the settings of the server")
    }

    /// Makes sessions that start after this call log each statement that takes at least this many milliseconds.
    pub(super) async fn log_statements(&self, over_ms: u32) -> Result<()> {
        let name: String = self
            .client
            .query_one("SELECT current_database()::text", &[])
            .await?
            .get(0);
        let set = format!("ALTER DATABASE \"{name}\" SET log_min_duration_statement = {over_ms}");
        self.client
            .batch_execute(&set)
            .await
            .context("log slow statements")
    }

    /// The duration of the slowest statement in the server's log, in milliseconds, and the beginning of its text.
    /// `None` if there is none.
    pub(super) fn slowest_logged(&self) -> Result<Option<(f64, String)>> {
        let log = std::fs::read(self.folder.join("pg/server.log")).context("read the log")?;
        let log = String::from_utf8_lossy(&log);
        let statements = log.split("LOG:  duration: ").skip(1).filter_map(|rest| {
            let (duration, statement) = rest.split_once(" ms")?;
            let words = statement.split_whitespace().take(24);
            Some((duration.parse().ok()?, words.collect::<Vec<_>>().join(" ")))
        });
        Ok(statements.max_by(|left: &(f64, String), right| left.0.total_cmp(&right.0)))
    }

    /// Writes all dirty pages, so that the next measurement does not pay for earlier ones.
    pub(super) async fn checkpoint(&self) -> Result<()> {
        self.observer
            .batch_execute("CHECKPOINT")
            .await
            .context("run CHECKPOINT")
    }
}

async fn backend(client: &Client) -> Result<u32> {
    let pid: i32 = client
        .query_one("SELECT pg_backend_pid()", &[])
        .await?
        .get(0);
    Ok(u32::try_from(pid)?)
}

/// Reads the settings. Fails if the server is not durable, because its figures would be meaningless.
async fn settings(client: &Client) -> Result<Value> {
    let row = client
        .query_one(
            "SELECT current_setting('server_version'), current_setting('fsync'),
                    current_setting('synchronous_commit'), current_setting('full_page_writes')",
            &[],
        )
        .await
        .context("read the settings of the server")?;
    let [version, fsync, synchronous_commit, full_page_writes]: [String; 4] =
        std::array::from_fn(|column| row.get(column));
    if [&fsync, &synchronous_commit, &full_page_writes] != ["on"; 3] {
        bail!(
            "fsync is {fsync}, synchronous_commit {synchronous_commit}, full_page_writes {full_page_writes}: \
             turn all of them on for a benchmark"
        );
    }
    Ok(json!({
        "postgres": version,
        "fsync": fsync,
        "synchronous_commit": synchronous_commit,
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
    }))
}
