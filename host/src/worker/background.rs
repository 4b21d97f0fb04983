//! The tasks that run beside the claimer.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Shared;
use super::{
    challenges, cron, database_metrics, deadlines, declared, direct, heartbeat, leases, logs,
    maintenance, progress, reach, releases, shards, slots, sql, usage, wakeups,
};
use crate::store::connect::Connector;

/// The tasks of one worker beside its claimer and its settler. They run until [`Background::stop`].
pub(super) struct Background {
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Background {
    /// Starts all of them. `heartbeat`: the interval of the heartbeats.
    pub(super) fn start(shared: &Arc<Shared>, heartbeat: Duration, listen_at: Connector) -> Self {
        let background = Self {
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        };
        background.spawn(leases::renew_forever(shared.clone()));
        background.spawn(reach::report_forever(shared.clone()));
        background.spawn(reach::shorten_backoff_when_stopping(shared.clone()));
        background.spawn(shards::lease_until_stopped(shared.clone()));
        background.spawn(releases::run_forever(shared.clone()));
        background.spawn(deadlines::run_forever(shared.clone()));
        background.spawn(direct::recover_forever(shared.clone()));
        background.spawn(sql::run_forever(shared.clone()));
        background.spawn(cron::run_forever(shared.clone()));
        background.spawn(declared::run_forever(shared.clone()));
        background.spawn(progress::run_forever(shared.clone()));
        // It ends by itself, so that a stop does not interrupt a write.
        let logging = logs::run_until(shared.clone(), background.stop.clone());
        background.tasks.spawn(logging);
        background.spawn(usage::run_forever(shared.clone()));
        background.spawn(slots::release_late_claims(shared.clone()));
        background.spawn(maintenance::run_forever(shared.clone()));
        background.spawn(database_metrics::run_forever(shared.clone()));
        background.spawn(heartbeat::run_forever(shared.clone(), heartbeat));
        background.spawn(challenges::answer_forever(shared.clone()));
        background.spawn(wakeups::listen_forever(shared.clone(), listen_at));
        background
    }

    /// Spawns a task that the stop interrupts.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        self.tasks
            .spawn(async move { stop.run_until_cancelled(task).await });
    }

    /// Stops the tasks, and waits until they have ended. A drop stops them too: otherwise the heartbeats would register the
    /// worker again.
    pub(super) async fn stop(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
