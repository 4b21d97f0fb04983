//! Two hosts with one worker id and one key file, each with a supervisor that starts it again.

use std::time::{Duration, Instant};

use anyhow::Result;
use rouse_workbench::database;

use super::hosts::{Hosts, LOOK_EVERY, Life, RESTART_AFTER};
use super::ledger::{Exit, What, now_us};
use super::settings::Role;

/// Compiling the module takes seconds on a busy machine.
const REGISTERED_WITHIN: Duration = Duration::from_secs(20);
/// How long they go on once one of them has ended: long enough for some restarts.
const GO_ON_FOR: Duration = Duration::from_secs(5);
/// One that starts again when all is over ends by itself, or was to be stopped.
const ENDS_WITHIN: Duration = Duration::from_secs(15);

/// One of the two, and its supervisor.
struct Twin {
    life: Option<Life>,
    ended: Instant,
    exits: usize,
}

impl Twin {
    fn of(life: Life) -> Self {
        Self {
            life: Some(life),
            ended: Instant::now(),
            exits: 0,
        }
    }
}

impl Hosts {
    /// False: the first of them has not come up, so that there was nothing to share.
    pub(super) async fn share_an_id(&self) -> Result<bool> {
        let worker = self.name(Role::Twin);
        let mut first = self.launch(Role::Twin, worker.clone())?;
        if !self.has_come_up(&worker).await {
            if self.has_ended(&mut first)?.is_none() {
                self.stop_one(&mut first).await?;
            }
            // The server was down: that it ends then is excused as that of all others.
            return Ok(false);
        }
        let from_us = now_us();
        let second = self.launch(Role::Twin, worker.clone())?;
        let mut twins = [Twin::of(first), Twin::of(second)];
        let mut exits = Vec::new();
        let started = Instant::now();
        let mut until = started + REGISTERED_WITHIN;
        while Instant::now() < until {
            for (host, twin) in twins.iter_mut().enumerate() {
                let had_none = exits.is_empty();
                exits.extend(self.has_exited(host, twin)?);
                if had_none && !exits.is_empty() {
                    until = Instant::now() + GO_ON_FOR;
                }
                if twin.life.is_none() && twin.ended.elapsed() > RESTART_AFTER {
                    twin.life = Some(self.launch(Role::Twin, worker.clone())?);
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        // Whoever has not got the id ends by itself, and would not stop in order while it starts.
        let loser = usize::from(twins[1].exits > twins[0].exits);
        let ending = Instant::now();
        while twins[loser].exits > 0
            && twins[loser].life.is_some()
            && ending.elapsed() < ENDS_WITHIN
        {
            exits.extend(self.has_exited(loser, &mut twins[loser])?);
            tokio::time::sleep(LOOK_EVERY).await;
        }
        for (host, twin) in twins.iter_mut().enumerate() {
            exits.extend(self.has_exited(host, twin)?);
        }
        for life in twins.iter_mut().filter_map(|twin| twin.life.as_mut()) {
            self.stop_one(life).await?;
        }
        self.ledger
            .happened(from_us, What::IdShared { worker, exits })?;
        Ok(true)
    }

    fn has_exited(&self, host: usize, twin: &mut Twin) -> Result<Option<Exit>> {
        let Some(life) = &mut twin.life else {
            return Ok(None);
        };
        let Some(from_us) = self.has_ended(life)? else {
            return Ok(None);
        };
        twin.life = None;
        twin.ended = Instant::now();
        twin.exits += 1;
        Ok(Some(Exit {
            host,
            from_us,
            until_us: now_us(),
        }))
    }

    async fn has_come_up(&self, worker: &str) -> bool {
        let started = Instant::now();
        let sql = "SELECT count(*) FROM rouse.worker WHERE worker_id = $1";
        while started.elapsed() < REGISTERED_WITHIN {
            if let Ok(client) = database::connect(&self.url).await
                && let Ok(row) = client.query_one(sql, &[&worker]).await
                && row.get::<_, i64>(0) > 0
            {
                return true;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        false
    }
}
