//! A `rouse serve` process under measurement.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rouse_workbench::host_process::HostProcess;
use rustix::process::{Pid, Signal, kill_process};

use super::Bench;
use super::cpu::{self, HostCpu};
use super::server::Server;

/// Compiling the modules takes seconds on a busy machine.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_EVERY: Duration = Duration::from_millis(20);

/// Options of a host.
#[derive(Clone, Default)]
pub(super) struct HostOptions {
    pub(super) handlers: PathBuf,
    /// `None` uses the host's default.
    pub(super) slots: Option<u16>,
    pub(super) no_notify: bool,
    /// Empty means all queues.
    pub(super) queues: Vec<String>,
    /// The text of its rouse.toml.
    pub(super) config: Option<String>,
    /// How long running attempts may continue after a stop request.
    pub(super) drain_timeout: Option<&'static str>,
}

impl HostOptions {
    pub(super) fn new(handlers: &Path) -> Self {
        Self {
            handlers: handlers.to_owned(),
            ..Self::default()
        }
    }
}

/// A host that has registered.
pub(super) struct Host {
    process: HostProcess,
    pid: u32,
    worker_id: String,
}

/// Memory of a process, in bytes.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    pub(super) resident: u64,
    pub(super) resident_peak: u64,
}

impl Memory {
    pub(super) fn of(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/status");
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let bytes = |field: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(field))?;
            let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
            Some(kib << 10)
        };
        Ok(Self {
            resident: bytes("VmRSS:").with_context(|| format!("find VmRSS in {path}"))?,
            resident_peak: bytes("VmHWM:").with_context(|| format!("find VmHWM in {path}"))?,
        })
    }
}

impl Host {
    /// Starts a host, and waits until it has loaded its handlers and registered.
    pub(super) async fn start(
        bench: &Bench,
        server: &Server,
        options: &HostOptions,
    ) -> Result<Self> {
        let worker_id = server.next_worker_id();
        let folder = server.folder.join(&worker_id);
        std::fs::create_dir(&folder)?;
        if let Some(text) = &options.config {
            std::fs::write(folder.join("rouse.toml"), text)?;
        }
        let mut command = Command::new(&bench.rouse);
        command
            .args(["serve", "--http", "off", "--worker-id", &worker_id])
            .arg("--handlers")
            .arg(&options.handlers)
            .env("DATABASE_URL", &server.url)
            .current_dir(folder);
        if let Some(slots) = options.slots {
            command.args(["--slots", &slots.to_string()]);
        }
        if options.no_notify {
            command.arg("--no-notify");
        }
        for queue in &options.queues {
            command.args(["--queue", queue]);
        }
        if let Some(time) = options.drain_timeout {
            command.args(["--drain-timeout", time]);
        }
        let mut process = HostProcess::start(command)?;
        process
            .during(until(
                server,
                &worker_id,
                "EXISTS (SELECT FROM rouse.worker WHERE worker_id = $1)",
            ))
            .await
            .context("wait until the host has registered")?;
        let pid = process.pid().context("the host has just exited")?;
        Ok(Self {
            process,
            pid,
            worker_id,
        })
    }

    /// Starts several hosts with the same options.
    pub(super) async fn start_many(
        bench: &Bench,
        server: &Server,
        options: &HostOptions,
        count: usize,
    ) -> Result<Vec<Self>> {
        let mut hosts = Vec::new();
        for _ in 0..count {
            hosts.push(Self::start(bench, server, options).await?);
        }
        Ok(hosts)
    }

    /// Waits until the host has registered as a sleeper.
    pub(super) async fn asleep(&mut self, server: &Server) -> Result<()> {
        let asleep = "EXISTS (SELECT FROM rouse.sleeper AS s JOIN rouse.worker AS w ON w.incarnation = s.worker
                      WHERE w.worker_id = $1)";
        self.process
            .during(until(server, &self.worker_id, asleep))
            .await
            .context("wait until the host sleeps")
    }

    /// Stops the process (SIGSTOP) until [`thaw`](Self::thaw).
    pub(super) fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    pub(super) fn thaw(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.pid.try_into()?).context("the process id is 0")?;
        kill_process(pid, signal).with_context(|| format!("signal {}", self.worker_id))
    }

    pub(super) fn cpu(&self) -> Result<HostCpu> {
        cpu::host(self.pid)
    }

    pub(super) fn memory(&self) -> Result<Memory> {
        Memory::of(self.pid)
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Does `work` while the host runs. If the host exits on its own, the error contains its log.
    pub(super) async fn during<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.process.during(work).await
    }

    /// Stops the host gracefully.
    pub(super) async fn stop(mut self) -> Result<()> {
        let status = self.process.stop().await?;
        ensure!(
            status.success(),
            "`rouse serve` exited with {status}\n{}",
            self.process.end().await
        );
        Ok(())
    }
}

/// Does `work` while all hosts run.
pub(super) async fn during<'a, T: 'a>(
    hosts: &'a mut [Host],
    mut work: Pin<Box<dyn Future<Output = Result<T>> + 'a>>,
) -> Result<T> {
    for host in hosts {
        work = Box::pin(host.during(work));
    }
    work.await
}

/// Stops all hosts.
pub(super) async fn stop_all(hosts: Vec<Host>) -> Result<()> {
    for host in hosts {
        host.stop().await?;
    }
    Ok(())
}

/// CPU time of all hosts together.
pub(super) fn cpu_of(hosts: &[Host]) -> Result<HostCpu> {
    hosts
        .iter()
        .try_fold(HostCpu::default(), |sum, host| Ok(sum.plus(host.cpu()?)))
}

/// Waits for a condition of the worker `$1`.
async fn until(server: &Server, worker_id: &str, condition: &str) -> Result<()> {
    let started = Instant::now();
    let statement = server
        .client
        .prepare(&format!("SELECT {condition}"))
        .await?;
    while !server
        .client
        .query_one(&statement, &[&worker_id])
        .await?
        .get::<_, bool>(0)
    {
        if started.elapsed() > REGISTRATION_TIMEOUT {
            bail!("{worker_id} was not ready after {REGISTRATION_TIMEOUT:?}");
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
    Ok(())
}
