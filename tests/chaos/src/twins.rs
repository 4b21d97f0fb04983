//! Two hosts with the same worker id and key file, each with a supervisor that restarts it.

use std::time::{Duration, Instant};

use anyhow::Result;
use rouse_workbench::database;

use super::hosts::{Hosts, POLL_EVERY, Process, RESTART_AFTER};
use super::ledger::{Event, Exit, now_us};
use super::settings::Role;

/// Compiling the module takes seconds on a busy machine.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(20);
/// How long both continue after the first exit: long enough for some restarts.
const CONTINUE_FOR: Duration = Duration::from_secs(5);
/// How long to wait for the exit of the host without the id, if it is starting again at the end.
const END_TIMEOUT: Duration = Duration::from_secs(15);

/// One of the two hosts, with the state of its supervisor.
struct Twin {
    process: Option<Process>,
    ended: Instant,
    exits: usize,
}

impl Twin {
    fn of(process: Process) -> Self {
        Self {
            process: Some(process),
            ended: Instant::now(),
            exits: 0,
        }
    }
}

impl Hosts {
    /// False if the first host did not start, so that there was no id to share.
    pub(super) async fn share_an_id(&self) -> Result<bool> {
        let worker = self.name(Role::Twin);
        let mut first = self.launch(Role::Twin, worker.clone())?;
        if !self.has_registered(&worker).await {
            if self.has_ended(&mut first)?.is_none() {
                self.stop_process(&mut first).await?;
            }
            // The server was down, which excuses the exit of any host.
            return Ok(false);
        }
        let from_us = now_us();
        let second = self.launch(Role::Twin, worker.clone())?;
        let mut twins = [Twin::of(first), Twin::of(second)];
        let mut exits = Vec::new();
        let started = Instant::now();
        let mut until = started + REGISTRATION_TIMEOUT;
        while Instant::now() < until {
            for (host, twin) in twins.iter_mut().enumerate() {
                let had_none = exits.is_empty();
                exits.extend(self.has_exited(host, twin)?);
                if had_none && !exits.is_empty() {
                    until = Instant::now() + CONTINUE_FOR;
                }
                if twin.process.is_none() && twin.ended.elapsed() > RESTART_AFTER {
                    twin.process = Some(self.launch(Role::Twin, worker.clone())?);
                }
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
        // The host without the id exits on its own, and would not shut down gracefully while it starts.
        let loser = usize::from(twins[1].exits > twins[0].exits);
        let ending = Instant::now();
        while twins[loser].exits > 0
            && twins[loser].process.is_some()
            && ending.elapsed() < END_TIMEOUT
        {
            exits.extend(self.has_exited(loser, &mut twins[loser])?);
            tokio::time::sleep(POLL_EVERY).await;
        }
        for (host, twin) in twins.iter_mut().enumerate() {
            exits.extend(self.has_exited(host, twin)?);
        }
        for process in twins.iter_mut().filter_map(|twin| twin.process.as_mut()) {
            self.stop_process(process).await?;
        }
        self.ledger
            .happened(from_us, Event::IdShared { worker, exits })?;
        Ok(true)
    }

    fn has_exited(&self, host: usize, twin: &mut Twin) -> Result<Option<Exit>> {
        let Some(process) = &mut twin.process else {
            return Ok(None);
        };
        let Some(from_us) = self.has_ended(process)? else {
            return Ok(None);
        };
        twin.process = None;
        twin.ended = Instant::now();
        twin.exits += 1;
        Ok(Some(Exit {
            host,
            from_us,
            until_us: now_us(),
        }))
    }

    async fn has_registered(&self, worker: &str) -> bool {
        let started = Instant::now();
        let sql = "SELECT count(*) FROM rouse.worker WHERE worker_id = $1";
        while started.elapsed() < REGISTRATION_TIMEOUT {
            if let Ok(client) = database::connect(&self.url).await
                && let Ok(row) = client.query_one(sql, &[&worker]).await
                && row.get::<_, i64>(0) > 0
            {
                return true;
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
        false
    }
}
