//! The hosts of a run: each seat has one `rouse serve` process after the other.

use std::fs::{self, OpenOptions};
use std::path::PathBuf;
use std::process::{Command as StdCommand, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::folder::Folder;
use super::ledger::{Ledger, What, now_us};
use super::settings;
use crate::host_process;

/// A host that came up a moment ago is left alone.
const SETTLED_AFTER: Duration = Duration::from_secs(3);
/// Drain time, grace, and a database that may not answer.
const STOPS_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A supervisor does not start what ends at once in a tight loop.
const RESTART_AFTER: Duration = Duration::from_millis(500);

/// What every host of a run is started with.
pub(super) struct Hosts {
    rouse: PathBuf,
    url: String,
    folder: Arc<Folder>,
    ledger: Arc<Ledger>,
    seats: Mutex<Vec<Seat>>,
    started: AtomicUsize,
}

/// None while something is being done to its host.
struct Seat(Option<Life>);

/// One process.
pub(super) struct Life {
    seat: usize,
    worker: String,
    child: Child,
    born: Instant,
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
        for seat in 0..count {
            let life = hosts.give_birth(seat)?;
            hosts.lock().push(Seat(Some(life)));
        }
        Ok(hosts)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Seat>> {
        // Nothing panics while it holds the lock.
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many hosts nothing is being done to.
    pub(super) fn serving(&self) -> usize {
        self.lock().iter().filter(|seat| seat.0.is_some()).count()
    }

    /// Takes a host that has settled, so that something can be done to it. None where that would leave no other.
    fn take(&self, draw: u64) -> Option<Life> {
        let mut seats = self.lock();
        let settled: Vec<usize> = (0..seats.len())
            .filter(|seat| {
                let life = seats[*seat].0.as_ref();
                life.is_some_and(|life| life.born.elapsed() > SETTLED_AFTER)
            })
            .collect();
        if settled.len() < 2.min(seats.len()) {
            return None;
        }
        seats[settled[(draw % settled.len() as u64) as usize]]
            .0
            .take()
    }

    /// kill -9. False: no host was there for it.
    pub(super) async fn kill(&self, draw: u64) -> Result<bool> {
        let Some(mut life) = self.take(draw) else {
            return Ok(false);
        };
        let from_us = now_us();
        life.child.kill().await.context("kill a host")?;
        let worker = life.worker.clone();
        self.ledger.happened(from_us, What::HostKilled { worker })?;
        self.replace(life)?;
        Ok(true)
    }

    /// SIGSTOP, and SIGCONT after so long.
    pub(super) async fn freeze(&self, draw: u64, length: Duration) -> Result<bool> {
        let Some(life) = self.take(draw) else {
            return Ok(false);
        };
        let from_us = now_us();
        life.signal(Signal::STOP)?;
        tokio::time::sleep(length).await;
        life.signal(Signal::CONT)?;
        let worker = life.worker.clone();
        self.ledger.happened(from_us, What::HostFrozen { worker })?;
        let seat = life.seat;
        self.lock()[seat].0 = Some(life);
        Ok(true)
    }

    /// SIGTERM, and another one as soon as it has ended.
    pub(super) async fn restart(&self, draw: u64) -> Result<bool> {
        let Some(mut life) = self.take(draw) else {
            return Ok(false);
        };
        self.stop_one(&mut life).await?;
        self.replace(life)?;
        Ok(true)
    }

    async fn stop_one(&self, life: &mut Life) -> Result<()> {
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
            let ended: Vec<(Life, String)> = {
                let mut seats = self.lock();
                let mut ended = Vec::new();
                for seat in seats.iter_mut() {
                    if let Some(life) = &mut seat.0
                        && let Some(status) = life.child.try_wait()?
                        && let Some(life) = seat.0.take()
                    {
                        ended.push((life, status.to_string()));
                    }
                }
                ended
            };
            for (life, status) in ended {
                let up_us = life.born.elapsed().as_micros() as i64;
                let worker = life.worker.clone();
                let what = What::HostEnded {
                    worker,
                    status,
                    up_us,
                };
                self.ledger.happened(now_us() - up_us, what)?;
                tokio::time::sleep(RESTART_AFTER).await;
                self.replace(life)?;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Stops all of them in order, at the same time.
    pub(super) async fn stop_all(self: &Arc<Self>) -> Result<()> {
        let lives: Vec<Life> = self
            .lock()
            .iter_mut()
            .filter_map(|seat| seat.0.take())
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

    fn replace(&self, gone: Life) -> Result<()> {
        let life = self.give_birth(gone.seat)?;
        self.lock()[gone.seat].0 = Some(life);
        Ok(())
    }

    fn give_birth(&self, seat: usize) -> Result<Life> {
        let born = self.started.fetch_add(1, Ordering::Relaxed);
        let worker = settings::worker_id(seat, born);
        let evidence = self.folder.evidence().join(&worker);
        let own = self.folder.hosts().join(&worker);
        for folder in [&evidence, &own] {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        }
        let text = settings::of(seat, &evidence.to_string_lossy());
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
            .env("DATABASE_URL", &self.url)
            .current_dir(&own)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut command = Command::from(command);
        command.process_group(0).kill_on_drop(true);
        host_process::end_with_us(&mut command);
        let child = command.spawn().context("start `rouse serve`")?;
        Ok(Life {
            seat,
            worker,
            child,
            born: Instant::now(),
        })
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
