//! The worker connects store and sandbox: it claims jobs, runs their attempts and settles the outcomes.
//!
//! The path of one claim is in `attempt.rs`: slot → sandbox run (within the middleware) → `RunEnd` → `Outcome` →
//! settler. The other loops each have a file: the claimer, the slots, the settler, the leases, the wakeups, the
//! heartbeats, the challenges, the progress, the log lines, the usage, the schedules and the maintenance. They share
//! `Shared` and nothing else. `background.rs` starts the tasks that run alongside the claimer, and `shutdown.rs` has
//! the last steps.
//!
//! Guarantees: a job runs at least once (it may run twice if a lease is lost); it is settled at most once, by the owner
//! of its fence; no decision depends on the wall clock of this machine.

mod ageing;
mod attempt;
mod audit_outbox;
mod background;
mod challenges;
mod claim;
mod claimer;
mod claims;
mod costs;
mod cron;
mod database_metrics;
mod deadlines;
mod declared;
mod declared_gates;
mod direct;
mod effects;
mod events;
mod exemplars;
mod fairness;
mod heartbeat;
mod journal;
mod lanes;
mod leases;
mod line;
mod logs;
mod look;
mod look_plan;
mod maintenance;
mod meters;
mod middleware;
mod policy;
mod poll;
mod progress;
mod reach;
mod recorded;
mod releases;
mod repeats;
mod settings;
mod settler;
mod shards;
mod shutdown;
mod sleeper;
mod slots;
mod sql;
mod state;
mod stop;
mod successes;
mod suspensions;
mod turns;
mod unbound;
mod usage;
mod waits;
mod wakeups;
mod writers;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

pub use exemplars::{Exemplar, Exemplars};
pub use meters::{OutcomeCounts, OutcomeLabel};
pub use middleware::{AttemptInfo, Middleware, Next, Running};
pub use policy::{Override, Overrides, Policy};
pub use settings::{Intervals, QueueOrder, Settings, UnsettledLimits};
pub use stop::Stop;

use self::background::Background;
use self::heartbeat::{Registered, Reported};
use self::settler::SettlerTask;
use crate::ends::Ends;
use crate::job::Incarnation;
use crate::sandbox::{BootTime, Catalog, Sandbox};
use crate::store::connect::Connector;
use crate::store::{FairQueueStats, Store, StoreError};

/// The maximum number of tries of a registration that gets no response.
const REGISTER_TRIES_MAX: u32 = 3;

/// The parts that a worker is built from.
pub struct Parts {
    /// The database.
    pub store: Store,
    /// Opens the listening connection.
    pub listen_connector: Connector,
    /// The sandbox in which attempts run.
    pub sandbox: Arc<Sandbox>,
    /// The handlers.
    pub catalog: Arc<Catalog>,
    /// The logins that run the SQL statements of handlers, by the table of `rouse.toml` that grants them.
    pub sql_logins: BTreeMap<String, Connector>,
    /// The middleware around each attempt, outermost first.
    pub middleware: Vec<Arc<dyn Middleware>>,
}

/// The state that the loops of one worker share. Each field belongs to the file that defines its type.
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
    /// The costs of jobs in fair queues that charge CPU time.
    costs: costs::Costs,
    /// The statistics of claims in fair queues, as of the last sweep.
    fairness: ArcSwap<Vec<FairQueueStats>>,
    sql: sql::Sql,
    /// Jobs whose recorded steps no call has requested yet.
    recorded: recorded::Waiting,
    /// The steps of jobs that were suspended here.
    step_cache: recorded::StepCache,
    /// The shards of sharded queues that this worker has leased.
    shards: shards::Shards,
    /// Notified when there are releases to continue.
    releases: Notify,
    /// Notified when a deadline has passed.
    deadlines: Notify,
    /// Notified when the time at which the next schedule is due may have changed.
    schedules: Notify,
    /// Notified when a write has found that today's partition of the history is missing.
    missing_partitions: Notify,
    /// Notified when new capabilities of this worker have reached the database.
    capabilities_sent: Notify,
    health: Health,
    stop: Stop,
    /// Cancelled when the worker has been stopping for `drain_timeout`.
    drain_timed_out: CancellationToken,
}

/// Limits the number of calls of each kind that use a connection at a time, so that claims, settlements and renewals
/// find a free one.
struct Calls {
    /// Calls by guests about recorded steps.
    steps: Semaphore,
    /// Calls by guests about the state of handlers.
    state: Semaphore,
    /// Lookups of commits that got no response. After an outage, there may be one for each attempt.
    lookups: Semaphore,
    /// Calls that can wait (progress, usage, log lines, metrics, maintenance): one at a time.
    patient: Semaphore,
}

/// Reports of running attempts, gathered for the next statement.
#[derive(Default)]
struct Reports {
    progress: progress::Progress,
    logs: logs::Logs,
}

impl Shared {
    fn new(
        settings: Settings,
        parts: Parts,
        health: Health,
        stop: Stop,
        incarnation: Incarnation,
        registered: BootTime,
        settlements: mpsc::Sender<settler::Unsettled>,
    ) -> Arc<Self> {
        let meters = meters::Meters::new(health.outcomes.clone());
        Arc::new(Self {
            slots: slots::Slots::new(settings.slots, health.in_hand.clone()),
            leases: leases::Leases::new(registered, settings.intervals.silence),
            attempts: attempt::Attempts {
                middleware: meters.around(parts.middleware),
                meters,
                settlements,
                space: Arc::new(Semaphore::new(settings.unsettled_limits.bytes as usize)),
                tasks: TaskTracker::new(),
            },
            wakeups: wakeups::Wakeups::default(),
            listener: wakeups::ListenerState::default(),
            presence: heartbeat::Presence::new(incarnation),
            calls: Calls {
                steps: Semaphore::new(journal::CALLS_MAX),
                state: Semaphore::new(journal::CALLS_MAX),
                lookups: Semaphore::new(effects::LOOKUPS_MAX),
                patient: Semaphore::new(1),
            },
            reports: Reports::default(),
            costs: costs::Costs::default(),
            fairness: ArcSwap::default(),
            sql: sql::Sql::new(parts.sql_logins),
            recorded: recorded::Waiting::default(),
            step_cache: recorded::StepCache::default(),
            shards: shards::Shards::default(),
            releases: Notify::new(),
            deadlines: Notify::new(),
            schedules: Notify::new(),
            missing_partitions: Notify::new(),
            capabilities_sent: Notify::new(),
            settings,
            store: parts.store,
            sandbox: parts.sandbox,
            catalog: parts.catalog,
            health,
            stop,
            drain_timed_out: CancellationToken::new(),
        })
    }

    /// Logs an event of the worker itself.
    fn log_event(&self, event: &str) {
        events::worker(event, &self.settings, *self.presence.incarnation.borrow());
    }

    /// True if the error means that this worker's incarnation has ended. If so, it also triggers a heartbeat, which
    /// registers the worker again or finds out why it cannot.
    fn has_incarnation_ended(&self, error: &StoreError) -> bool {
        let has_ended = error.is_incarnation_ended() || error.is_superseded();
        if has_ended {
            self.presence.heartbeat_now.notify_one();
        }
        has_ended
    }

    /// If the error means that today's partition of the history is missing, the maintenance creates it now.
    fn note_missing_partition(&self, error: &StoreError) {
        if error.is_partition_missing() {
            self.missing_partitions.notify_one();
        }
    }
}

/// State that a worker shares with the code that started it.
#[derive(Clone, Default)]
pub struct Health {
    /// True if the last call to the database succeeded.
    pub database_responds: Arc<AtomicBool>,
    /// The outcomes of its attempts so far.
    pub outcomes: Arc<OutcomeCounts>,
    /// The number of claimed jobs whose attempt has not ended, not counting jobs that are just being claimed or
    /// settled; a batch counts as one.
    pub in_hand: Arc<AtomicUsize>,
    /// Notified when the metrics have been read: the worker then updates the database metrics for the next reading.
    pub metrics_read: Arc<Notify>,
    /// Receives the jobs that have ended on this host.
    pub ends: Ends,
    /// Receives the traces of attempts.
    pub exemplars: Exemplars,
}

/// Runs a worker until `stop`. Returns when all outcomes are settled and the worker is unregistered; after an error,
/// when it is unregistered, or cannot be unregistered.
pub async fn run(
    settings: Settings,
    parts: Parts,
    health: Health,
    stop: Stop,
) -> anyhow::Result<()> {
    let registration = register(&settings, &parts, &stop).await?;
    let store = parts.store.clone();
    let worked = work(settings, parts, health, stop, registration).await;
    if worked.is_err() {
        shutdown::leave_after_failure(&store).await;
    }
    worked
}

/// The part of [`run`] after the registration. After an error, the worker is still registered.
async fn work(
    settings: Settings,
    parts: Parts,
    health: Health,
    stop: Stop,
    registered: Registered,
) -> anyhow::Result<()> {
    for (queue, share) in &settings.fair_share {
        let declared = parts.store.declare_fair_share(queue, share).await;
        declared.with_context(|| {
            format!(
                "set the fair share of queue {queue} (fair_share in rouse.toml, or ROUSE_FAIR_SHARE)"
            )
        })?;
    }
    events::worker("started", &settings, registered.incarnation);
    health.database_responds.store(true, Ordering::Relaxed);

    let listen_connector = parts.listen_connector.clone();
    let (settlements, outcomes) = mpsc::channel(settings.unsettled_limits.count);
    let shared = Shared::new(
        settings,
        parts,
        health,
        stop,
        registered.incarnation,
        registered.sent,
        settlements,
    );
    let Registered {
        every, reported, ..
    } = registered;
    let background = Background::start(&shared, every, reported, listen_connector);
    let mut settler = SettlerTask::start(&shared, outcomes);
    let claiming = shared.clone();
    // The claimer runs in a task of its own, so that a panic in it does not end this task: the worker has to
    // unregister.
    let claiming = tokio::spawn(async move { claimer::run(&claiming).await });
    let mut claiming = AbortOnDropHandle::new(claiming);
    let claimed = tokio::select! {
        ended = &mut claiming => ended,
        // A host that cannot settle must not claim.
        ended = settler.ended() => {
            claiming.abort();
            shutdown::abort_attempts(&shared).await;
            anyhow::bail!("the settler ended early ({ended:?}); other workers take over the jobs");
        }
    };
    if let Err(error) = &claimed {
        tracing::error!(%error, "the claimer has panicked, so the worker stops");
        shared.stop.now();
    }
    shared.log_event("stopping");
    shutdown::drain(&shared).await;
    shutdown::settle_last_outcomes(&shared, settler).await?;
    let stopped = background.stop().await;
    shutdown::leave(&shared).await?;
    shared.log_event("stopped");
    claimed.context("the claimer has panicked, which is a bug in Rouse")?;
    stopped
}

async fn register(settings: &Settings, parts: &Parts, stop: &Stop) -> anyhow::Result<Registered> {
    let Parts { store, catalog, .. } = parts;
    store
        .prepare_partitions()
        .await
        .context("create the partitions of the history")?;
    let registration = heartbeat::registration(
        settings,
        &catalog.current(),
        None,
        heartbeat::Tally::at_start(catalog),
    );
    let mut tries = 0;
    loop {
        tries += 1;
        let sent = BootTime::now();
        match store.register(&registration).await {
            Ok((incarnation, every)) => {
                return Ok(Registered {
                    incarnation,
                    every,
                    sent,
                    reported: Reported::registered(&registration.capabilities),
                });
            }
            // The registration may have been committed. Without a key file, only this process has its key: for all
            // others, the id would be taken for 90 s.
            Err(error)
                if tries < REGISTER_TRIES_MAX
                    && (error.is_unanswered() || (tries > 1 && error.is_unreachable()))
                    && !stop.is_stopping() =>
            {
                tracing::warn!(%error, "cannot register the worker; trying again");
                store.ready().await;
            }
            Err(error) => return Err(error).context("register the worker"),
        }
    }
}
