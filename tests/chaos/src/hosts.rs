//! The hosts of a run. Each seat has one `rouse serve` process at a time.

use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::process::{Command as StdCommand, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rouse_workbench::host_process;
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::bank;
use super::folder::Folder;
use super::ledger::{Event, Ledger, now_us};
use super::settings::{self, Role};

/// Faults leave a host alone for this long after its start.
const SETTLED_AFTER: Duration = Duration::from_secs(3);
/// Covers the drain timeout, the grace, and a database that does not answer.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);
pub(super) const POLL_EVERY: Duration = Duration::from_millis(100);
/// The supervisor's pause before a restart, so that a host that exits at once is not restarted in a tight loop.
pub(super) const RESTART_AFTER: Duration = Duration::from_millis(500);
/// How long a fault waits for a host that no other fault uses.
const HOST_AVAILABLE_TIMEOUT: Duration = Duration::from_secs(10);

/// The hosts, and the settings that they are started with.
pub(super) struct Hosts {
    rouse: PathBuf,
    pub(super) url: String,
    folder: Arc<Folder>,
    pub(super) ledger: Arc<Ledger>,
    seats: Mutex<Vec<Seat>>,
    started: AtomicUsize,
}

struct Seat {
    role: Role,
    /// `None` while a fault uses the host.
    process: Option<Process>,
}

/// One host process.
pub(super) struct Process {
    pub(super) worker: String,
    child: Child,
    started_at: Instant,
}

/// A host that a fault has taken out of its seat.
pub(super) struct Taken {
    seat: usize,
    process: Process,
}

impl Taken {
    pub(super) fn worker(&self) -> &str {
        &self.process.worker
    }
}

impl Hosts {
    pub(super) fn start(
        rouse: PathBuf,
        url: String,
        folder: Arc<Folder>,
        ledger: Arc<Ledger>,
        count: usize,
    ) -> Result<Self> {
        let hosts = Self {
            rouse,
            url,
            folder,
            ledger,
            seats: Mutex::default(),
            started: AtomicUsize::new(0),
        };
        let main = (0..count).map(Role::Main);
        for role in main.chain((0..settings::LINE_HOSTS).map(Role::Line)) {
            let process = Some(hosts.spawn(role)?);
            hosts.lock().push(Seat { role, process });
        }
        Ok(hosts)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Seat>> {
        // Nothing panics while it holds the lock.
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of hosts that no fault uses.
    pub(super) fn serving(&self) -> usize {
        self.lock().iter().filter(|s| s.process.is_some()).count()
    }

    /// The seats of hosts that have settled and are available for faults. Empty if a fault would leave no other settled
    /// host, unless the run has only one.
    fn settled(seats: &[Seat]) -> Vec<usize> {
        let is_main = |seat: &Seat| matches!(seat.role, Role::Main(_));
        let settled: Vec<usize> = (0..seats.len())
            .filter(|seat| {
                let process = seats[*seat].process.as_ref();
                is_main(&seats[*seat])
                    && process.is_some_and(|p| p.started_at.elapsed() > SETTLED_AFTER)
            })
            .collect();
        let all = seats.iter().filter(|seat| is_main(seat)).count();
        match settled.len() < 2.min(all) {
            true => Vec::new(),
            false => settled,
        }
    }

    /// Takes a settled host for a fault: the host named `worker`, or any.
    fn try_take(&self, worker: Option<&str>, draw: u64) -> Option<Taken> {
        let mut seats = self.lock();
        let settled = Self::settled(&seats);
        let named = |seat: &usize| {
            let process = seats[*seat].process.as_ref();
            process.is_some_and(|process| Some(process.worker.as_str()) == worker)
        };
        let seat = match worker {
            Some(_) => settled.iter().copied().find(named)?,
            None => *settled.get((draw % settled.len().max(1) as u64) as usize)?,
        };
        let process = seats[seat].process.take()?;
        Some(Taken { seat, process })
    }

    /// Like [`Self::try_take`] with any host, but waits until one is available.
    async fn take(&self, draw: u64) -> Option<Taken> {
        match self.wait_until_settled().await {
            true => self.try_take(None, draw),
            false => None,
        }
    }

    /// Waits until a host is available for a fault. False if that takes too long.
    pub(super) async fn wait_until_settled(&self) -> bool {
        let started = Instant::now();
        loop {
            if !Self::settled(&self.lock()).is_empty() {
                return true;
            }
            if started.elapsed() > HOST_AVAILABLE_TIMEOUT {
                return false;
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    }

    /// Sends SIGKILL to a host. False if no host is available.
    pub(super) async fn kill(&self, draw: u64) -> Result<bool> {
        match self.take(draw).await {
            Some(taken) => self.kill_taken(taken).await,
            None => Ok(false),
        }
    }

    /// Sends SIGKILL to this host. False if it is not available.
    pub(super) async fn kill_now(&self, worker: &str) -> Result<bool> {
        match self.try_take(Some(worker), 0) {
            Some(taken) => self.kill_taken(taken).await,
            None => Ok(false),
        }
    }

    async fn kill_taken(&self, taken: Taken) -> Result<bool> {
        let Taken { seat, mut process } = taken;
        let from_us = now_us();
        process.child.kill().await.context("kill a host")?;
        let worker = process.worker.clone();
        self.ledger
            .happened(from_us, Event::HostKilled { worker })?;
        self.replace(seat)?;
        Ok(true)
    }

    /// Sends SIGSTOP, and SIGCONT after `length`.
    pub(super) async fn freeze(&self, draw: u64, length: Duration) -> Result<bool> {
        let Some(taken) = self.take(draw).await else {
            return Ok(false);
        };
        let frozen = self.suspend(taken)?;
        tokio::time::sleep(length).await;
        frozen.thaw(self, Vec::new())?;
        Ok(true)
    }

    /// Sends SIGSTOP to the host named `worker`, or to any host if that is `None`. Returns `None` if no such host is
    /// available.
    pub(super) fn freeze_now(&self, worker: Option<&str>, draw: u64) -> Result<Option<Frozen>> {
        match self.try_take(worker, draw) {
            Some(taken) => self.suspend(taken).map(Some),
            None => Ok(None),
        }
    }

    fn suspend(&self, taken: Taken) -> Result<Frozen> {
        let from_us = now_us();
        taken.process.signal(Signal::STOP)?;
        Ok(Frozen { taken, from_us })
    }

    /// Sends SIGTERM, and replaces the host as soon as it has exited.
    pub(super) async fn restart(&self, draw: u64) -> Result<bool> {
        let Some(Taken { seat, mut process }) = self.take(draw).await else {
            return Ok(false);
        };
        self.stop_process(&mut process).await?;
        self.replace(seat)?;
        Ok(true)
    }

    pub(super) async fn stop_process(&self, process: &mut Process) -> Result<()> {
        let from_us = now_us();
        process.signal(Signal::TERM)?;
        let (status, clean) = match timeout(STOP_TIMEOUT, process.child.wait()).await {
            Ok(status) => status.map(|status| (status.to_string(), status.success()))?,
            Err(_elapsed) => {
                process.child.kill().await?;
                (format!("it did not stop within {STOP_TIMEOUT:?}"), false)
            }
        };
        let worker = process.worker.clone();
        self.ledger.happened(
            from_us,
            Event::HostStopped {
                worker,
                status,
                clean,
            },
        )
    }

    /// Replaces hosts that have exited without a request, as a supervisor would.
    pub(super) async fn supervise(&self) -> Result<()> {
        loop {
            let ended: Vec<usize> = {
                let mut seats = self.lock();
                let mut ended = Vec::new();
                for (number, seat) in seats.iter_mut().enumerate() {
                    if let Some(process) = &mut seat.process
                        && self.has_ended(process)?.is_some()
                    {
                        seat.process = None;
                        ended.push(number);
                    }
                }
                ended
            };
            for seat in ended {
                tokio::time::sleep(RESTART_AFTER).await;
                self.replace(seat)?;
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    }

    /// If the host has exited on its own, records that in the ledger and returns when it was started.
    pub(super) fn has_ended(&self, process: &mut Process) -> Result<Option<i64>> {
        let Some(status) = process.child.try_wait()? else {
            return Ok(None);
        };
        let up_us = process.started_at.elapsed().as_micros() as i64;
        let from_us = now_us() - up_us;
        let event = Event::HostEnded {
            worker: process.worker.clone(),
            status: status.to_string(),
            up_us,
        };
        self.ledger.happened(from_us, event)?;
        Ok(Some(from_us))
    }

    /// Stops all hosts gracefully, in parallel.
    pub(super) async fn stop_all(self: &Arc<Self>) -> Result<()> {
        let processes: Vec<Process> = self
            .lock()
            .iter_mut()
            .filter_map(|seat| seat.process.take())
            .collect();
        let mut stopping = JoinSet::new();
        for mut process in processes {
            let hosts = self.clone();
            stopping.spawn(async move { hosts.stop_process(&mut process).await });
        }
        while let Some(stopped) = stopping.join_next().await {
            stopped??;
        }
        Ok(())
    }

    fn replace(&self, seat: usize) -> Result<()> {
        let role = self.lock()[seat].role;
        let process = self.spawn(role)?;
        self.lock()[seat].process = Some(process);
        Ok(())
    }

    fn spawn(&self, role: Role) -> Result<Process> {
        self.launch(role, self.name(role))
    }

    /// The worker id of the next host in this role.
    pub(super) fn name(&self, role: Role) -> String {
        settings::worker_id(role, self.started.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn launch(&self, role: Role, worker: String) -> Result<Process> {
        let evidence = self.folder.evidence().join(&worker);
        let own = self.folder.hosts().join(&worker);
        for folder in [&evidence, &own] {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        }
        let login = bank::login_url(&self.url, &worker)?;
        let text = settings::for_role(role, &evidence.to_string_lossy(), &login);
        fs::write(own.join("rouse.toml"), text)?;
        let log = OpenOptions::new()
            .append(true)
            .create(true)
            .open(own.join("log"))?;
        let mut command = StdCommand::new(&self.rouse);
        command
            .args(["serve", "--http", "off", "--worker-id", &worker])
            .arg("--handlers")
            .arg(self.folder.handlers())
            // Identifies its connections.
            .env(
                "DATABASE_URL",
                format!("{}?application_name={worker}", self.url),
            )
            // Logs each failed connection attempt.
            .env(
                "ROUSE_LOG",
                "info,wasmtime_wasi_http=error,rouse::store::connect::backoff=debug",
            )
            .current_dir(&own)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut command = Command::from(command);
        command.process_group(0).kill_on_drop(true);
        host_process::stop_with_parent(&mut command);
        let child = command.spawn().context("start `rouse serve`")?;
        Ok(Process {
            worker,
            child,
            started_at: Instant::now(),
        })
    }
}

/// A frozen host.
pub(super) struct Frozen {
    taken: Taken,
    from_us: i64,
}

impl Frozen {
    pub(super) fn worker(&self) -> &str {
        self.taken.worker()
    }

    /// Sends SIGCONT. `jobs`: the jobs that it was claiming, if it was frozen during a claim.
    pub(super) fn thaw(self, hosts: &Hosts, jobs: Vec<i64>) -> Result<()> {
        let Taken { seat, process } = self.taken;
        process.signal(Signal::CONT)?;
        let worker = process.worker.clone();
        hosts
            .ledger
            .happened(self.from_us, Event::HostFrozen { worker, jobs })?;
        hosts.lock()[seat].process = Some(process);
        Ok(())
    }
}

impl Process {
    fn signal(&self, signal: Signal) -> Result<()> {
        let id = self.child.id().context("the host has ended")?;
        let Some(pid) = Pid::from_raw(id.try_into()?) else {
            bail!("the process id is 0");
        };
        kill_process(pid, signal).with_context(|| format!("signal {}", self.worker))
    }
}
