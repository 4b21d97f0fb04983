//! Where store and sandbox meet: claims jobs, runs their attempts, settles the outcomes.
//!
//! One job's journey is in `attempt.rs`: claim → dispatch → sandbox run (within the middlewares) → `RunEnd` →
//! `Outcome` → settle.
//! Around it run loops, each in its own file: the claimer, the slots, the settler, the leases,
//! the wakeups, the heartbeats, the challenges, the progress, the log lines, the usage and the maintenance. They share `Shared` and nothing else.
//!
//! Promises: at least once (an attempt whose lease is lost may run twice); a job is settled at
//! most once, by the owner of its fence; no time of this machine's clock decides anything.

mod ageing;
mod attempt;
mod audit_outbox;
mod challenges;
mod claimer;
mod claims;
mod database_metrics;
mod events;
mod heartbeat;
mod journal;
mod lanes;
mod leases;
mod logs;
mod look;
mod maintenance;
mod meters;
mod middleware;
mod policy;
mod poll;
mod prefetch;
mod progress;
mod reach;
mod schedule;
mod settings;
mod settler;
mod sleeper;
mod slots;
mod state;
mod unbound;
mod usage;
mod waits;
mod wakeups;
mod writers;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

pub use meters::{OutcomeCounts, OutcomeLabel};
pub use middleware::{AttemptInfo, Middleware, Next, Running};
pub use policy::{Override, Overrides, Policy};
pub use schedule::Intervals;
pub use settings::{QueueOrder, Settings};

use crate::job::AbortReason;
use crate::sandbox::{Catalog, Sandbox};
use crate::store::connect::Connector;
use crate::store::{Store, StoreError};

/// During an outage, how long a worker waits at its end for one more try to unregister.
const UNREGISTER_WITHIN: Duration = Duration::from_secs(5);
/// After the order to stop at once, the last outcomes may take so long, and so may the end of the registration.
const LAST_WITHIN: Duration = Duration::from_secs(5);

/// What a worker stands on.
pub struct Parts {
    /// The database.
    pub store: Store,
    /// For the listening connection.
    pub listen_at: Connector,
    /// Where attempts run.
    pub sandbox: Arc<Sandbox>,
    /// The handlers.
    pub catalog: Arc<Catalog>,
    /// What is to happen around each attempt, the outermost first.
    pub middlewares: Vec<Arc<dyn Middleware>>,
}

/// Tells whatever runs attempts to stop. Dropping it does not.
#[derive(Clone, Default)]
pub struct Stop {
    drain: CancellationToken,
    now: CancellationToken,
}

impl Stop {
    /// Claim nothing more, finish what runs.
    pub fn drain(&self) {
        self.drain.cancel();
    }

    /// One that is told all that this one is told, and may be told more.
    pub fn child(&self) -> Self {
        Self {
            drain: self.drain.child_token(),
            now: self.now.child_token(),
        }
    }

    /// Waits until it is told to stop.
    pub async fn told(&self) {
        self.drain.cancelled().await;
    }

    /// Waits until what runs is to be aborted.
    pub async fn told_now(&self) {
        self.now.cancelled().await;
    }

    /// True once it was told to stop.
    pub fn is_stopping(&self) -> bool {
        self.drain.is_cancelled()
    }

    /// Also abort what runs (with `shutdown`), and give those jobs back.
    pub fn now(&self) {
        self.drain.cancel();
        self.now.cancel();
    }
}

/// What the loops of one worker share. Each part belongs to the file that its type is in.
struct Shared {
    settings: Settings,
    store: Store,
    sandbox: Arc<Sandbox>,
    catalog: Arc<Catalog>,
    slots: slots::Slots,
    leases: leases::Leases,
    attempts: attempt::Attempts,
    wakeups: wakeups::Wakeups,
    listener: wakeups::ListenerState,
    presence: heartbeat::Presence,
    calls: Calls,
    reports: Reports,
    health: Health,
    stop: Stop,
}

/// How many calls of a kind may use a connection at a time, so that claims, settlements and renewals find one free.
struct Calls {
    /// Calls of guests about recorded steps.
    steps: Semaphore,
    /// Calls of guests about the state of handlers.
    state: Semaphore,
    /// Calls that can wait (progress, usage, lines, metrics, partitions): one at a time.
    patient: Semaphore,
}

/// What attempts report while they run, gathered for the next statement.
#[derive(Default)]
struct Reports {
    progress: progress::Progress,
    logs: logs::Logs,
}

impl Shared {
    /// True if the error says that the database no longer knows this worker. The next heartbeat, which is sent now, finds out why.
    fn doubted(&self, error: &StoreError) -> bool {
        let doubted = error.is_over() || error.is_superseded();
        if doubted {
            self.presence.heartbeat_now.notify_one();
        }
        doubted
    }
}

/// How a worker fares, for who has started it; and what that one wants to know.
#[derive(Clone, Default)]
pub struct Health {
    /// True while the last word from the database was a good one.
    pub database_answers: Arc<AtomicBool>,
    /// What has become of its attempts so far.
    pub outcomes: Arc<OutcomeCounts>,
    /// Jobs that it has claimed and whose attempt has not ended. One that is being claimed or settled is not among them.
    pub in_hand: Arc<AtomicUsize>,
    /// Is notified by whoever has asked for the metrics, and wants them to be up to date the next time.
    pub metrics_asked: Arc<Notify>,
}

/// Runs a worker until `stop`; returns when everything is settled and unregistered.
pub async fn run(
    settings: Settings,
    parts: Parts,
    health: Health,
    stop: Stop,
) -> anyhow::Result<()> {
    let Parts {
        store,
        listen_at,
        sandbox,
        catalog,
        middlewares,
    } = parts;
    store
        .prepare_partitions()
        .await
        .context("make the partitions of the history")?;
    let (incarnation, heartbeat) = store
        .register(&heartbeat::registration(
            &settings,
            &catalog.current(),
            heartbeat::Tally::at_start(&catalog),
        ))
        .await
        .context("register the worker")?;
    events::worker("started", &settings, incarnation);
    health.database_answers.store(true, Ordering::Relaxed);

    let (settlements, outcomes) = mpsc::channel(settler::QUEUE_MAX);
    let meters = meters::Meters::new(health.outcomes.clone());
    let shared = Arc::new(Shared {
        slots: slots::Slots::new(settings.slots, health.in_hand.clone()),
        leases: leases::Leases::default(),
        attempts: attempt::Attempts {
            middlewares: meters.around(middlewares),
            meters,
            settlements,
            tasks: TaskTracker::new(),
        },
        wakeups: wakeups::Wakeups::default(),
        listener: wakeups::ListenerState::default(),
        presence: heartbeat::Presence::new(incarnation),
        calls: Calls {
            steps: Semaphore::new(journal::CALLS_MAX),
            state: Semaphore::new(journal::CALLS_MAX),
            patient: Semaphore::new(1),
        },
        reports: Reports::default(),
        settings,
        store,
        sandbox,
        catalog,
        health,
        stop: stop.clone(),
    });

    let around = TaskTracker::new();
    let around_stop = CancellationToken::new();
    let spawn = |task: Pin<Box<dyn Future<Output = ()> + Send>>| {
        let stop = around_stop.clone();
        around.spawn(async move { stop.run_until_cancelled(task).await });
    };
    spawn(Box::pin(leases::renew_forever(shared.clone())));
    spawn(Box::pin(reach::report_forever(shared.clone())));
    spawn(Box::pin(reach::hurry_when_stopping(shared.clone())));
    spawn(Box::pin(progress::run_forever(shared.clone())));
    around.spawn(logs::run_until(shared.clone(), around_stop.clone()));
    spawn(Box::pin(usage::run_forever(shared.clone())));
    spawn(Box::pin(slots::give_back_late_claims(shared.clone())));
    spawn(Box::pin(maintenance::run_forever(shared.clone())));
    spawn(Box::pin(database_metrics::run_forever(shared.clone())));
    spawn(Box::pin(heartbeat::run_forever(shared.clone(), heartbeat)));
    spawn(Box::pin(challenges::answer_forever(shared.clone())));
    spawn(Box::pin(wakeups::listen_forever(shared.clone(), listen_at)));
    let all_sent = CancellationToken::new();
    let mut settler = tokio::spawn(settler::run(shared.clone(), outcomes, all_sent.clone()));

    tokio::select! {
        () = claimer::run(&shared) => {}
        // A host that can settle nothing had better not claim anything.
        ended = &mut settler => anyhow::bail!(
            "the settler has ended before its time ({ended:?}); the jobs are taken over when their leases run out"
        ),
    }
    events::worker(
        "stopping",
        &shared.settings,
        *shared.presence.incarnation.borrow(),
    );
    slots::give_back_all(&shared).await;
    shared.attempts.tasks.close();
    wait_for_attempts(&shared).await;
    // Every attempt has sent its outcome; the settler ends once it has written them all.
    all_sent.cancel();
    match hurried(&shared.stop.now, &mut settler).await {
        Some(ended) => ended.context("the settler has failed")?,
        None => {
            settler.abort();
            warn!(
                job.ids = ?shared.leases.ids(),
                "outcomes could not be written before the end; these jobs run again once their leases have ended"
            );
        }
    }

    around_stop.cancel();
    around.close();
    around.wait().await;
    shared.store.try_now();
    logs::finish(&shared).await;
    if let Some(why) = shared.presence.fatal.get() {
        anyhow::bail!("{why}");
    }
    match hurried(&shared.stop.now, unregister(&shared)).await {
        Some(Ok(())) => {}
        Some(Err(error)) => {
            warn!(%error, "could not unregister; this worker is listed as dead in 90 s");
        }
        None => warn!("could not unregister in time; this worker is listed as dead in 90 s"),
    }
    events::worker(
        "stopped",
        &shared.settings,
        *shared.presence.incarnation.borrow(),
    );
    Ok(())
}

/// The end of this work; none where it takes more than [`LAST_WITHIN`] after the order to stop at once.
async fn hurried<T>(now: &CancellationToken, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        done = work => Some(done),
        () = async {
            now.cancelled().await;
            tokio::time::sleep(LAST_WITHIN).await;
        } => None,
    }
}

/// Unregisters, despite the backoff: otherwise attempts that were lost in an outage count as crashes. During an outage it tries twice.
async fn unregister(shared: &Shared) -> Result<(), StoreError> {
    let store = &shared.store;
    store.try_now();
    match store.unregister().await {
        Err(error) if error.is_unreachable() => {
            // Try again in either case.
            let _ = tokio::time::timeout(UNREGISTER_WITHIN, store.ready()).await;
            store.try_now();
            store.unregister().await
        }
        said => said,
    }
}

/// Waits until nothing runs any more, for as long as the settings allow; then aborts the rest.
async fn wait_for_attempts(shared: &Arc<Shared>) {
    let running = shared.slots.in_hand();
    if running > 0 {
        info!(running, "finishing what runs");
    }
    tokio::select! {
        () = shared.attempts.tasks.wait() => return,
        () = shared.stop.now.cancelled() => {}
        () = tokio::time::sleep(shared.settings.drain_timeout) => {}
    }
    let ids = shared.leases.abort_all(AbortReason::Shutdown);
    if !ids.is_empty() {
        warn!(job.ids = ?ids, "stopping attempts that have not finished; their jobs are given back");
    }
    shared.attempts.tasks.wait().await;
}
