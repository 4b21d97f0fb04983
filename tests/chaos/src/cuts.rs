//! Cuts the transaction of an attempt's effects at a known moment.

use std::time::Duration;

use anyhow::{Context as _, Result};
use rouse_workbench::database;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout};
use tokio_postgres::Client;

use super::bank::LOGIN;
use super::faults::Faults;
use super::ledger::{Event, now_us};
use super::plan::Fault;
use super::random::Random;

/// A transaction takes a few milliseconds, and there are a few of them each second.
const FIND_TIMEOUT: Duration = Duration::from_secs(10);
/// A backend that is frozen while it changes its row of pg_stat_activity keeps all readers of the view waiting.
const READ_TIMEOUT: Duration = Duration::from_millis(300);

/// How far the transaction has got, as the server sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum At {
    /// It checks the fence, and settles the attempt or records the step.
    Fence,
    /// It runs an effect.
    Statement,
    /// The server has responded to everything, and COMMIT has not arrived yet.
    Answered,
    /// It commits.
    Commit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum How {
    /// pg_terminate_backend of its session.
    Terminate,
    /// kill -9 of its host.
    KillHost,
    /// kill -9 of its backend: Postgres ends all others and recovers.
    CrashServer,
}

impl At {
    pub(super) const ALL: [Self; 4] = [Self::Fence, Self::Statement, Self::Answered, Self::Commit];

    fn of(state: &str, query: &str) -> Option<Self> {
        match query {
            _ if query.contains("_with_effects(") && state == "active" => Some(Self::Fence),
            "COMMIT" if state == "active" => Some(Self::Commit),
            _ if !query.contains(" bank.") => None,
            _ if state == "active" => Some(Self::Statement),
            _ if state == "idle in transaction" => Some(Self::Answered),
            _ => None,
        }
    }
}

impl How {
    pub(super) const ALL: [Self; 3] = [Self::Terminate, Self::KillHost, Self::CrashServer];

    fn draw(random: &mut Random) -> Self {
        // A crash stops everything else for a while.
        match random.below(10) {
            0..5 => Self::Terminate,
            5..8 => Self::KillHost,
            _ => Self::CrashServer,
        }
    }
}

/// A backend that is stopped by SIGSTOP, until this is dropped.
struct Frozen {
    pid: i32,
    worker: String,
    at: Option<At>,
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // It may have been killed.
        let _ = signal(self.pid, Signal::CONT);
    }
}

impl Faults {
    pub(super) async fn cut_effects(&self, mut random: Random) -> Result<()> {
        let (at, how) = (*random.pick(&At::ALL), How::draw(&mut random));
        let skipped = |why: &str| self.skipped(Fault::CutEffects, why);
        let Ok(client) = database::connect(&self.server.url).await else {
            return skipped("the server is down");
        };
        let until = Instant::now() + FIND_TIMEOUT;
        let frozen = loop {
            match freeze(&client).await {
                Ok(Some(frozen)) if frozen.at == Some(at) => break frozen,
                Ok(_) if Instant::now() < until => {}
                Ok(_) => return skipped("no transaction was found at this point"),
                Err(_) => return skipped("the server is down"),
            }
        };
        let from_us = now_us();
        let worker = frozen.worker.clone();
        let is_done = match how {
            How::Terminate => {
                let sql = "SELECT pg_terminate_backend($1)";
                client
                    .query_one(sql, &[&frozen.pid])
                    .await
                    .is_ok_and(|row| row.get(0))
            }
            How::KillHost => self.hosts.kill_now(&worker).await?,
            How::CrashServer => self.server.kill_this_backend(frozen.pid).await?,
        };
        drop(frozen);
        if !is_done {
            return skipped("another fault uses the host or the server");
        }
        if how == How::CrashServer {
            let how = Fault::KillBackend;
            self.ledger
                .happened(from_us, Event::ServerCrashed { how })?;
        }
        let event = Event::EffectsCut { at, how, worker };
        self.ledger.happened(from_us, event)
    }
}

/// Freezes a backend that is in a transaction with effects. The backend has continued until then, so its state is read
/// again.
async fn freeze(client: &Client) -> Result<Option<Frozen>> {
    let found = "SELECT pid FROM pg_stat_activity WHERE usename = $1 AND state <> 'idle' AND xact_start IS NOT NULL ORDER BY random() LIMIT 1";
    let Some(row) = client.query_opt(found, &[&LOGIN]).await? else {
        return Ok(None);
    };
    let pid: i32 = row.get(0);
    if signal(pid, Signal::STOP).is_err() {
        return Ok(None);
    }
    let mut frozen = Frozen {
        pid,
        worker: String::new(),
        at: None,
    };
    let now =
        "SELECT application_name, coalesce(state, ''), query FROM pg_stat_activity WHERE pid = $1";
    let Ok(row) = timeout(READ_TIMEOUT, client.query_opt(now, &[&pid])).await else {
        return Ok(None);
    };
    if let Some(row) = row? {
        frozen.worker = row.get(0);
        frozen.at = At::of(row.get(1), row.get(2));
    }
    Ok(Some(frozen))
}

fn signal(pid: i32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(pid).context("the process id is 0")?;
    kill_process(pid, signal).context("signal a process of Postgres")
}
