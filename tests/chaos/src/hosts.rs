//! The hosts of a run: each seat has one `rouse serve` process after the other.

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

use super::folder::Folder;
use super::ledger::{Ledger, What, now_us};
use super::settings::{self, Role};

/// A host that came up a moment ago is left alone.
const SETTLED_AFTER: Duration = Duration::from_secs(3);
/// Drain time, grace, and a database that may not answer.
const STOPS_WITHIN: Duration = Duration::from_secs(60);
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A supervisor does not start what ends at once in a tight loop.
pub(super) const RESTART_AFTER: Duration = Duration::from_millis(500);
/// How long a fault waits for a host that nothing else happens to.
const WAITS_FOR_A_HOST: Duration = Duration::from_secs(10);

/// What every host of a run is started with.
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
    /// None while something is being done to its host.
    life: Option<Life>,
}

/// One process.
pub(super) struct Life {
    pub(super) worker: String,
    child: Child,
    born: Instant,
}

/// A host that was taken out of its seat.
pub(super) struct Taken {
    seat: usize,
    life: Life,
}

impl Taken {
    pub(super) fn worker(&self) -> &str {
        &self.life.worker
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
            let life = Some(hosts.give_birth(role)?);
            hosts.lock().push(Seat { role, life });
        }
        Ok(hosts)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Seat>> {
        // Nothing panics while it holds the lock.
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many hosts nothing is being done to.
    pub(super) fn serving(&self) -> usize {
        self.lock().iter().filter(|s| s.life.is_some()).count()
    }

    /// The seats of hosts that have settled, and to which something can be done; none where that would leave no other.
    fn settled(seats: &[Seat]) -> Vec<usize> {
        let is_main = |seat: &Seat| matches!(seat.role, Role::Main(_));
        let settled: Vec<usize> = (0..seats.len())
            .filter(|seat| {
                let life = seats[*seat].life.as_ref();
                is_main(&seats[*seat]) && life.is_some_and(|l| l.born.elapsed() > SETTLED_AFTER)
            })
            .collect();
        let all = seats.iter().filter(|seat| is_main(seat)).count();
        match settled.len() < 2.min(all) {
            true => Vec::new(),
            false => settled,
        }
    }

    /// Takes a host that has settled, so that something can be done to it; this one, where it has a name.
    fn try_take(&self, worker: Option<&str>, draw: u64) -> Option<Taken> {
        let mut seats = self.lock();
        let settled = Self::settled(&seats);
        let named = |seat: &usize| {
            let life = seats[*seat].life.as_ref();
            life.is_some_and(|life| Some(life.worker.as_str()) == worker)
        };
        let seat = match worker {
            Some(_) => settled.iter().copied().find(named)?,
            None => *settled.get((draw % settled.len().max(1) as u64) as usize)?,
        };
        let life = seats[seat].life.take()?;
        Some(Taken { seat, life })
    }

    /// As [`Self::try_take`], any of them, and waits for one.
    async fn take(&self, draw: u64) -> Option<Taken> {
        match self.is_one_settled().await {
            true => self.try_take(None, draw),
            false => None,
        }
    }

    /// Waits until something can be done to a host; false where that takes too long.
    pub(super) async fn is_one_settled(&self) -> bool {
        let started = Instant::now();
        loop {
            if !Self::settled(&self.lock()).is_empty() {
                return true;
            }
            if started.elapsed() > WAITS_FOR_A_HOST {
                return false;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// kill -9. False: no host was there for it.
    pub(super) async fn kill(&self, draw: u64) -> Result<bool> {
        let Some(Taken { seat, mut life }) = self.take(draw).await else {
            return Ok(false);
        };
        let from_us = now_us();
        life.child.kill().await.context("kill a host")?;
        let worker = life.worker.clone();
        self.ledger.happened(from_us, What::HostKilled { worker })?;
        self.replace(seat)?;
        Ok(true)
    }

    /// SIGSTOP, and SIGCONT after so long.
    pub(super) async fn freeze(&self, draw: u64, length: Duration) -> Result<bool> {
        let Some(taken) = self.take(draw).await else {
            return Ok(false);
        };
        let frozen = self.stop_the_clock(taken)?;
        tokio::time::sleep(length).await;
        frozen.thaw(self, Vec::new())?;
        Ok(true)
    }

    /// SIGSTOP of this host, or of any where it has none; none: that cannot be done now.
    pub(super) fn freeze_now(&self, worker: Option<&str>, draw: u64) -> Result<Option<Frozen>> {
        match self.try_take(worker, draw) {
            Some(taken) => self.stop_the_clock(taken).map(Some),
            None => Ok(None),
        }
    }

    fn stop_the_clock(&self, taken: Taken) -> Result<Frozen> {
        let from_us = now_us();
        taken.life.signal(Signal::STOP)?;
        Ok(Frozen { taken, from_us })
    }

    /// SIGTERM, and another one as soon as it has ended.
    pub(super) async fn restart(&self, draw: u64) -> Result<bool> {
        let Some(Taken { seat, mut life }) = self.take(draw).await else {
            return Ok(false);
        };
        self.stop_one(&mut life).await?;
        self.replace(seat)?;
        Ok(true)
    }

    pub(super) async fn stop_one(&self, life: &mut Life) -> Result<()> {
        let from_us = now_us();
        life.signal(Signal::TERM)?;
        let (status, clean) = match timeout(STOPS_WITHIN, life.child.wait()).await {
            Ok(status) => status.map(|status| (status.to_string(), status.success()))?,
            Err(_elapsed) => {
                life.child.kill().await?;
                (format!("it did not stop within {STOPS_WITHIN:?}"), false)
            }
        };
        let worker = life.worker.clone();
        self.ledger.happened(
            from_us,
            What::HostStopped {
                worker,
                status,
                clean,
            },
        )
    }

    /// Starts another host where one has ended that was not told to, as a supervisor would.
    pub(super) async fn supervise(&self) -> Result<()> {
        loop {
            let ended: Vec<usize> = {
                let mut seats = self.lock();
                let mut ended = Vec::new();
                for (number, seat) in seats.iter_mut().enumerate() {
                    if let Some(life) = &mut seat.life
                        && self.has_ended(life)?.is_some()
                    {
                        seat.life = None;
                        ended.push(number);
                    }
                }
                ended
            };
            for seat in ended {
                tokio::time::sleep(RESTART_AFTER).await;
                self.replace(seat)?;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// From when on it was up, where it has ended of itself; that is written down.
    pub(super) fn has_ended(&self, life: &mut Life) -> Result<Option<i64>> {
        let Some(status) = life.child.try_wait()? else {
            return Ok(None);
        };
        let up_us = life.born.elapsed().as_micros() as i64;
        let from_us = now_us() - up_us;
        let what = What::HostEnded {
            worker: life.worker.clone(),
            status: status.to_string(),
            up_us,
        };
        self.ledger.happened(from_us, what)?;
        Ok(Some(from_us))
    }

    /// Stops all of them in order, at the same time.
    pub(super) async fn stop_all(self: &Arc<Self>) -> Result<()> {
        let lives: Vec<Life> = self
            .lock()
            .iter_mut()
            .filter_map(|seat| seat.life.take())
            .collect();
        let mut stopping = JoinSet::new();
        for mut life in lives {
            let hosts = self.clone();
            stopping.spawn(async move { hosts.stop_one(&mut life).await });
        }
        while let Some(stopped) = stopping.join_next().await {
            stopped??;
        }
        Ok(())
    }

    fn replace(&self, seat: usize) -> Result<()> {
        let role = self.lock()[seat].role;
        let life = self.give_birth(role)?;
        self.lock()[seat].life = Some(life);
        Ok(())
    }

    fn give_birth(&self, role: Role) -> Result<Life> {
        self.launch(role, self.name(role))
    }

    /// The worker id of the next host in this role.
    pub(super) fn name(&self, role: Role) -> String {
        settings::worker_id(role, self.started.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn launch(&self, role: Role, worker: String) -> Result<Life> {
        let evidence = self.folder.evidence().join(&worker);
        let own = self.folder.hosts().join(&worker);
        for folder in [&evidence, &own] {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        }
        let text = settings::of(role, &evidence.to_string_lossy());
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
            // So that its connections can be told from those of others.
            .env(
                "DATABASE_URL",
                format!("{}?application_name={worker}", self.url),
            )
            // Each connection that does not open.
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
        host_process::end_with_us(&mut command);
        let child = command.spawn().context("start `rouse serve`")?;
        Ok(Life {
            worker,
            child,
            born: Instant::now(),
        })
    }
}

/// A host that is frozen.
pub(super) struct Frozen {
    taken: Taken,
    from_us: i64,
}

impl Frozen {
    pub(super) fn worker(&self) -> &str {
        self.taken.worker()
    }

    /// SIGCONT. `jobs`: those that it was claiming, where it was frozen in a claim.
    pub(super) fn thaw(self, hosts: &Hosts, jobs: Vec<i64>) -> Result<()> {
        let Taken { seat, life } = self.taken;
        life.signal(Signal::CONT)?;
        let worker = life.worker.clone();
        hosts
            .ledger
            .happened(self.from_us, What::HostFrozen { worker, jobs })?;
        hosts.lock()[seat].life = Some(life);
        Ok(())
    }
}

impl Life {
    fn signal(&self, signal: Signal) -> Result<()> {
        let id = self.child.id().context("the host has ended")?;
        let Some(pid) = Pid::from_raw(id.try_into()?) else {
            bail!("a process has a number");
        };
        kill_process(pid, signal).with_context(|| format!("signal {}", self.worker))
    }
}
