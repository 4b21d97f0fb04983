//! A run in progress: carries out the plan, and tries again if other sessions hold locks that it needs.

use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::Client;

use super::apply::apply;
use super::error::{Login, owned, sql};
use super::ledger::record;
use super::lock::{self, Blockers, Lock, watched};
use super::plan::Plan;
use super::{DEFINITIONS, MigrateError, Migration, Report, Sources};

/// The pause after the first try that was blocked; each later pause is twice as long, up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// The longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// A run in progress.
pub(super) struct Work<'a> {
    pub(super) sources: Sources<'a>,
    pub(super) login: Login,
    pub(super) started: Instant,
    pub(super) wait: Duration,
    pub(super) blockers: Blockers,
    pub(super) report: Report,
}

impl Work<'_> {
    /// Carries out one part of the plan: one migration outside a transaction, or everything that fits into one
    /// transaction.
    pub(super) async fn advance(
        &mut self,
        client: &mut Client,
        lock: &Lock<'_>,
        plan: Plan<'_>,
    ) -> Result<(), MigrateError> {
        if let Some(first) = plan.missing.first()
            && first.is_outside_a_transaction()
            && !plan.first
        {
            self.run_outside(client, lock, first).await?;
            self.report.applied.push(first.name.to_string());
            return Ok(());
        }
        let batch: Vec<&Migration> = plan
            .missing
            .iter()
            .take_while(|migration| !migration.is_outside_a_transaction())
            .copied()
            .collect();
        let definitions = plan.definitions && batch.len() == plan.missing.len();
        let mut pause = PAUSE_MIN;
        loop {
            match self
                .try_batch(client, lock, plan.first, &batch, definitions)
                .await
            {
                Ok(()) => break,
                Err(error) if error.is_blocked() => {
                    let name = batch
                        .first()
                        .map_or(DEFINITIONS, |migration| migration.name);
                    self.pause(name, &mut pause).await?;
                }
                Err(error) => return Err(error),
            }
        }
        self.report
            .applied
            .extend(batch.iter().map(|migration| migration.name.to_string()));
        if definitions {
            self.report.applied.push(DEFINITIONS.to_string());
            self.report.restored = plan.differences.iter().map(ToString::to_string).collect();
        }
        Ok(())
    }

    /// Waits before the next try, without holding any lock that producers or workers need; fails if there is no time
    /// left.
    async fn pause(&mut self, name: &str, pause: &mut Duration) -> Result<(), MigrateError> {
        let by = self.blockers.latest();
        let left = self.wait.saturating_sub(self.started.elapsed());
        if left.is_zero() {
            return Err(MigrateError::Blocked {
                operation: name.to_string(),
                waited: self.wait,
                by,
            });
        }
        tracing::warn!(
            migration = name,
            "waiting for locks that other sessions hold: {}; retrying for {} s",
            by.join(", "),
            left.as_secs()
        );
        tokio::time::sleep((*pause).min(left)).await;
        *pause = (*pause * 2).min(PAUSE_MAX);
        Ok(())
    }

    /// Applies the batch in one transaction; an error undoes all of it.
    async fn try_batch(
        &mut self,
        client: &mut Client,
        lock: &Lock<'_>,
        first: bool,
        migrations: &[&Migration],
        definitions: bool,
    ) -> Result<(), MigrateError> {
        let pid = lock::pid(client).await?;
        let transaction = lock::begin(client).await?;
        let applying = apply(
            &transaction,
            self.sources,
            &self.login,
            first,
            migrations,
            definitions,
        );
        let applied = match watched(applying, lock.keeper(), pid, &mut self.blockers).await {
            // Without the lock, another host may be migrating too.
            Ok(()) => lock.check().await,
            Err(error) => Err(error),
        };
        match applied {
            Ok(()) => transaction.commit().await.map_err(sql("commit")),
            Err(error) => {
                // The first error is more useful than a possible error of the rollback.
                let _ = transaction.rollback().await;
                Err(error)
            }
        }
    }

    /// Runs a migration statement by statement. Its lock timeout is the remaining time, because statements that can run
    /// outside a transaction do not block any other session. It does not check which sessions block it: a check takes a
    /// snapshot, and a concurrent index would wait for its transaction.
    async fn run_outside(
        &mut self,
        client: &mut Client,
        lock: &Lock<'_>,
        migration: &Migration,
    ) -> Result<(), MigrateError> {
        let left = self.wait.saturating_sub(self.started.elapsed());
        let left_ms = left.as_millis().max(1);
        let running = async {
            client
                .batch_execute(&format!(
                    "SET search_path = pg_catalog, pg_temp; SET statement_timeout = 0; SET lock_timeout = {left_ms};
                     SET default_tablespace = ''; SET default_table_access_method = heap; SET ROLE rouse_owner"
                ))
                .await
                .map_err(owned("act as rouse_owner", &self.login))?;
            for statement in migration.statements() {
                client
                    .batch_execute(statement)
                    .await
                    .map_err(sql(migration.name))?;
            }
            lock.check().await?;
            record(client, migration).await
        };
        let result = running.await;
        let reset = client
            .batch_execute(
                "RESET ROLE; RESET lock_timeout; RESET statement_timeout; RESET search_path;
                 RESET default_tablespace; RESET default_table_access_method",
            )
            .await
            .map_err(sql("reset the session"));
        match result {
            Ok(()) => reset,
            Err(error) if error.is_blocked() => Err(MigrateError::Blocked {
                operation: migration.name.to_string(),
                waited: self.wait,
                by: lock::with_open_transactions(client).await?,
            }),
            Err(error) => Err(error),
        }
    }
}
