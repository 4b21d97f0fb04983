//! The tasks that run alongside the claimer.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::error;

use super::heartbeat::Reported;
use super::{Shared, Stop};
use super::{
    challenges, cron, database_metrics, deadlines, declared, direct, heartbeat, leases, logs,
    maintenance, progress, reach, releases, shards, shutdown, slots, sql, usage, wakeups,
};
use crate::store::connect::Connector;

/// The tasks of one worker other than its claimer and its settler. They run until [`Background::stop`].
#[derive(Default)]
pub(super) struct Background {
    tasks: TaskTracker,
    stop: CancellationToken,
    /// Cancelled when one of them has panicked.
    panicked: CancellationToken,
}

impl Background {
    /// Starts the tasks. `heartbeat`: the interval of the heartbeats. `reported`: what the worker has registered.
    pub(super) fn start(
        shared: &Arc<Shared>,
        heartbeat: Duration,
        reported: Reported,
        listen_connector: Connector,
    ) -> Self {
        let background = Self::default();
        background.stop_after_a_panic(shared.stop.clone());
        background.spawn(leases::renew_forever(shared.clone()));
        background.spawn(reach::report_forever(shared.clone()));
        background.spawn(reach::shorten_backoff_when_stopping(shared.clone()));
        background.spawn(shutdown::time_out(shared.clone()));
        background.spawn(shards::lease_until_stopped(shared.clone()));
        background.spawn(releases::run_forever(shared.clone()));
        background.spawn(deadlines::run_forever(shared.clone()));
        background.spawn(direct::recover_forever(shared.clone()));
        background.spawn(sql::run_forever(shared.clone()));
        background.spawn(cron::run_forever(shared.clone()));
        background.spawn(declared::run_forever(shared.clone()));
        background.spawn(progress::run_forever(shared.clone()));
        // This task notices the stop itself, so that the stop does not interrupt a write.
        background.spawn_to_its_end(logs::run_until(shared.clone(), background.stop.clone()));
        background.spawn(usage::run_forever(shared.clone()));
        background.spawn(slots::release_late_claims(shared.clone()));
        background.spawn(maintenance::run_forever(shared.clone()));
        background.spawn(database_metrics::run_forever(shared.clone()));
        background.spawn(heartbeat::run_forever(shared.clone(), heartbeat, reported));
        background.spawn(challenges::answer_forever(shared.clone()));
        background.spawn(wakeups::listen_forever(shared.clone(), listen_connector));
        background
    }

    /// Spawns a task that the stop interrupts.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.spawn_to_its_end(async move {
            // `None`: it was interrupted.
            let _: Option<()> = stop.run_until_cancelled(task).await;
        });
    }

    fn spawn_to_its_end(&self, task: impl Future<Output = ()> + Send + 'static) {
        let panics = OnPanic(self.panicked.clone());
        self.tasks.spawn(async move {
            let _panics = panics;
            task.await;
        });
    }

    /// Stops the worker at once when one of the tasks has panicked. Otherwise a worker that, for instance, no longer
    /// renews leases would look alive, and keep claiming jobs.
    fn stop_after_a_panic(&self, worker: Stop) {
        let (stop, panicked) = (self.stop.clone(), self.panicked.clone());
        self.tasks.spawn(async move {
            let panicked = stop.run_until_cancelled(panicked.cancelled()).await;
            if panicked.is_some() {
                error!("a task of the worker has panicked, so the worker stops");
                worker.now();
            }
        });
    }

    /// Stops the tasks, and waits until they have ended. Dropping this stops them, too: otherwise the heartbeats would
    /// register the worker again.
    ///
    /// # Errors
    /// If one of them has panicked.
    pub(super) async fn stop(self) -> anyhow::Result<()> {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        anyhow::ensure!(
            !self.panicked.is_cancelled(),
            "a task of the worker has panicked, which is a bug in Rouse; the message of the panic is on standard error"
        );
        Ok(())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Cancels its token if the task that holds it panics.
struct OnPanic(CancellationToken);

impl Drop for OnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test]
    async fn a_task_that_panics_stops_the_worker_and_is_an_error() {
        let (background, worker) = (Background::default(), Stop::default());
        background.stop_after_a_panic(worker.clone());
        background.spawn(pending());
        background.spawn(async { panic!("on purpose") });
        worker.aborting().await;
        assert!(background.stop().await.is_err());
    }

    #[tokio::test]
    async fn tasks_that_end_or_are_stopped_are_not_errors() {
        let (background, worker) = (Background::default(), Stop::default());
        background.stop_after_a_panic(worker.clone());
        background.spawn(pending());
        background.spawn(async {});
        let stopped = background.stop.clone();
        background.spawn_to_its_end(async move { stopped.cancelled().await });
        background.stop().await.unwrap();
        assert!(!worker.is_stopping());
    }
}
