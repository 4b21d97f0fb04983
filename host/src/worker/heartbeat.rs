//! Keeps this worker registered: the registration, the heartbeats, and a new incarnation if the old one has ended.

mod reported;

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use metrics::gauge;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Map, Value, json};
use tokio::sync::{Notify, watch};
use tracing::{error, info, warn};

pub(super) use self::reported::Reported;
use super::audit_outbox::AuditOutbox;
use super::policy::Policy;
use super::reach::warn_unless_unreachable;
use super::sql::Sql;
use super::{Settings, Shared, challenges, slots};
use crate::job::{AbortReason, Incarnation, Outcome, SILENT_FOR};
use crate::sandbox::{BootTime, Catalog, HandlerSet};
use crate::sanitize::printable;
use crate::store::connect::backoff;
use crate::store::{Heartbeat, Registration, Stats, StoreError};

/// The data with which a worker registers.
pub(super) fn registration(
    settings: &Settings,
    handlers: &HandlerSet,
    sql: Option<&Sql>,
    stats: Stats,
) -> Registration {
    Registration {
        worker_id: settings.worker_id.clone(),
        key: settings.key.clone(),
        hostname: settings.hostname.clone(),
        platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        version: env!("CARGO_PKG_VERSION").into(),
        capabilities: Value::Object(capabilities(settings, handlers, sql)),
        slots: settings.slots,
        queues: settings.queues.clone(),
        tags: settings.tags.clone(),
        stats: Some(stats),
    }
}

/// The maximum size of the reason why a handler is parked, in bytes.
const PARKED_BYTES_MAX: usize = 1 << 10;

/// The maximum size of the payload keys of all handlers in one registration, in bytes. Keys beyond it are left out.
const KEYS_BYTES_MAX: usize = 256 << 10;

/// `{"handler": {"version": …, "grants": […], "max_attempts": …, "concurrency": …, "payload_keys": […], "schedule":
/// {…}, "parked": …, "parked_cause": …}, …}`
fn capabilities(
    settings: &Settings,
    handlers: &HandlerSet,
    sql: Option<&Sql>,
) -> Map<String, Value> {
    let mut keys_bytes = 0;
    let capability = |name: &String| {
        let handler = handlers.get(name)?;
        let policy = Policy::resolve(&handler.manifest, &settings.overrides);
        let mut capability = json!({
            "version": handler.manifest.version,
            "sha256": handler.module.digest.to_string(),
            "grants": handler.granted(),
            "max_attempts": policy.retry.max_attempts,
        });
        if let Some(max) = policy.concurrency {
            capability["concurrency"] = max.into();
        }
        if let Some(schedule) = handler.schedule() {
            capability["schedule"] = json!(schedule);
        }
        if let Some((cause, why)) = sql.and_then(|sql| sql.parked_because(handler)) {
            capability["parked"] = json!(printable(&why, PARKED_BYTES_MAX));
            capability["parked_cause"] = json!(cause.as_str());
        }
        if let Some(keys) = &handler.manifest.payload_keys {
            // Each key is counted with its quotes, a comma and a space.
            keys_bytes += keys.iter().map(|key| key.len() + 4).sum::<usize>();
            if keys_bytes <= KEYS_BYTES_MAX {
                capability["payload_keys"] = json!(keys);
            }
        }
        Some((name.clone(), capability))
    };
    handlers.names().iter().filter_map(capability).collect()
}

/// A registration that the database has accepted.
pub(super) struct Registered {
    pub(super) incarnation: Incarnation,
    /// The interval of the heartbeats.
    pub(super) every: Duration,
    /// When it was sent.
    pub(super) sent: BootTime,
    pub(super) reported: Reported,
}

/// The state of this worker's registration.
pub(super) struct Presence {
    /// The current incarnation.
    pub(super) incarnation: watch::Sender<Incarnation>,
    /// Triggers the next heartbeat at once, because the database has refused this worker or was unreachable, or because
    /// attempts were lost: a heartbeat after the loss shows that the host has not crashed.
    pub(super) heartbeat_now: Notify,
    /// Why this worker cannot continue at all.
    pub(super) fatal: OnceLock<String>,
    pub(super) tally: Tally,
    pub(super) challenges: challenges::Challenges,
}

impl Presence {
    pub(super) fn new(incarnation: Incarnation) -> Self {
        Self {
            incarnation: watch::Sender::new(incarnation),
            heartbeat_now: Notify::new(),
            fatal: OnceLock::new(),
            tally: Tally::new(),
            challenges: challenges::Challenges::default(),
        }
    }
}

/// The statistics that heartbeats report.
pub(super) struct Tally {
    started: Instant,
    completed: AtomicU64,
    failed: AtomicU64,
    attempts_failed: AtomicU64,
    timed_out: AtomicU64,
    attempts: AtomicU64,
    attempts_us: AtomicU64,
}

impl Tally {
    pub(super) fn new() -> Self {
        Self {
            started: Instant::now(),
            completed: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            attempts_failed: AtomicU64::new(0),
            timed_out: AtomicU64::new(0),
            attempts: AtomicU64::new(0),
            attempts_us: AtomicU64::new(0),
        }
    }

    /// Records that an attempt has run for this long.
    pub(super) fn ran(&self, wall: Duration) {
        let us = u64::try_from(wall.as_micros()).unwrap_or(u64::MAX);
        self.attempts.fetch_add(1, Ordering::Relaxed);
        self.attempts_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Records that an attempt exceeded its run timeout.
    pub(super) fn timed_out(&self) {
        self.timed_out.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that an outcome was accepted.
    pub(super) fn settled(&self, outcome: &Outcome) {
        let counts: &[&AtomicU64] = match outcome {
            Outcome::Succeeded(_) => &[&self.completed],
            Outcome::Failed(_) | Outcome::TimedOut(_) => &[&self.failed, &self.attempts_failed],
            Outcome::Retry { .. } => &[&self.attempts_failed],
            Outcome::Suspended(_) | Outcome::Released => &[],
        };
        for count in counts {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The statistics of a worker that registers for the first time.
    pub(super) fn at_start(catalog: &Catalog) -> Stats {
        Stats {
            memory_bytes: resident_bytes(),
            disk_free_bytes: catalog.disk_free_bytes(),
            loading: catalog.current().is_loading(),
            ..Stats::default()
        }
    }

    fn stats(&self, shared: &Shared, cpu_cores: Option<f64>) -> Stats {
        let attempts = self.attempts.load(Ordering::Relaxed);
        let us = self.attempts_us.load(Ordering::Relaxed);
        Stats {
            active: shared.slots.running(),
            completed: self.completed.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            attempts_failed: self.attempts_failed.load(Ordering::Relaxed),
            timed_out: self.timed_out.load(Ordering::Relaxed),
            average_ms: (attempts > 0).then(|| us as f64 / attempts as f64 / 1000.0),
            cpu_cores,
            memory_bytes: resident_bytes(),
            disk_free_bytes: shared.catalog.disk_free_bytes(),
            uptime_s: self.started.elapsed().as_secs(),
            loading: shared.catalog.current().is_loading(),
            fair: shared.fairness.load().to_vec(),
        }
    }
}

/// The resident memory of this process. `None` without /proc.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * u64::try_from(rustix::param::page_size()).ok()?)
}

/// The CPU time of this process.
fn cpu_time() -> Duration {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(used.tv_sec).unwrap_or(0),
        u32::try_from(used.tv_nsec).unwrap_or(0),
    )
}

/// Sends heartbeats until the worker ends, and registers it again if the database reports that its incarnation has
/// ended.
pub(super) async fn run_forever(shared: Arc<Shared>, every: Duration, reported: Reported) {
    let mut heartbeats = Heartbeats::new(&shared, every, reported);
    // Logs admin actions that were taken while no host was running.
    heartbeats.outbox.log_all(&shared).await;
    loop {
        heartbeats.wait().await;
        heartbeats.send().await;
    }
}

/// The heartbeats of one worker.
struct Heartbeats<'a> {
    shared: &'a Arc<Shared>,
    every: Duration,
    changes: watch::Receiver<u64>,
    outbox: AuditOutbox,
    last_at: Instant,
    last_cpu: Duration,
    /// True if the last heartbeat reported that the worker is draining. A worker that starts to drain reports it at
    /// once.
    draining: bool,
    /// The number of consecutive heartbeats that have failed.
    failures: u32,
    /// The time since which the database has not known the worker; `None` while it does.
    unknown_since: Option<Instant>,
    reported: Reported,
}

impl<'a> Heartbeats<'a> {
    fn new(shared: &'a Arc<Shared>, every: Duration, reported: Reported) -> Self {
        Self {
            shared,
            every,
            changes: shared.catalog.changed(),
            outbox: AuditOutbox::default(),
            last_at: Instant::now(),
            last_cpu: cpu_time(),
            draining: false,
            failures: 0,
            unknown_since: None,
            reported,
        }
    }

    /// Waits until the next heartbeat is due.
    async fn wait(&mut self) {
        let shared = self.shared;
        let wait = match self.failures {
            0 => self.every,
            failures => repeat_after(failures, self.every),
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = shared.presence.heartbeat_now.notified() => {}
            // The fleet learns at once which handlers this worker has. There is no error: the catalog outlives the
            // worker.
            _ = self.changes.changed() => shared.wakeups.notify(None),
            () = shared.stop.drain.cancelled(), if !self.draining => {}
        }
    }

    async fn send(&mut self) {
        let shared = self.shared;
        let stats = shared.presence.tally.stats(shared, Some(self.cpu_cores()));
        let current = capabilities(
            &shared.settings,
            &shared.catalog.current(),
            Some(&shared.sql),
        );
        self.draining = shared.stop.is_stopping();
        let sent = BootTime::now();
        let changes = self.reported.changes(&current);
        let beat = shared
            .store
            .heartbeat(changes.as_ref(), &stats, self.draining);
        match beat.await {
            Ok(Heartbeat {
                expired,
                timeouts,
                changes: count,
            }) => {
                let is_in_time = shared.leases.heartbeat_answered(sent, BootTime::now());
                self.failures = 0;
                self.unknown_since = None;
                if !self.reported.accepted(changes.as_ref(), current, count) {
                    warn!(
                        "the database has lost capabilities of this worker, as after a failover; sending all of them again"
                    );
                    shared.presence.heartbeat_now.notify_one();
                }
                if changes.is_some() {
                    shared.capabilities_sent.notify_one();
                }
                show_timeouts(timeouts);
                if expired > 0 {
                    warn!(
                        expired,
                        "other workers sent no heartbeat for 90 s; their jobs can be taken over"
                    );
                }
                challenges::check_without_notifications(shared);
                self.outbox.log_all(shared).await;
                if !is_in_time {
                    self.start_over().await;
                }
            }
            Err(error) if error.is_incarnation_ended() || error.is_superseded() => {
                self.replace(&error).await;
            }
            // The capabilities are informational, so the next heartbeat, which protects the jobs, is sent without them.
            Err(error) if error.is_about_data() && changes.is_some() => {
                error!(%error, "the database refused the capabilities of this worker; the fleet still shows the previous ones");
                self.reported.refused(current);
                shared.presence.heartbeat_now.notify_one();
            }
            Err(error) => {
                // Any other error was an answer: nothing has changed in the database.
                if error.is_unanswered() || error.is_unreachable() {
                    self.reported.lost(current);
                }
                if self.failures == 0 {
                    warn_unless_unreachable!(
                        error,
                        "heartbeat failed; retrying with backoff, first within a second"
                    );
                }
                self.failures += 1;
            }
        }
    }

    /// Frees all claims, because their leases may be long, and continues under a new incarnation. Called when the
    /// worker has been silent for so long that it no longer trusts its claims, but the database does not count it as
    /// dead.
    async fn start_over(&mut self) {
        let shared = self.shared;
        lose_claims(shared, &"no heartbeat was answered for too long").await;
        match shared.store.unregister().await {
            Ok(()) => self.register().await,
            Err(error) if error.is_incarnation_ended() || error.is_superseded() => {
                self.replace(&error).await
            }
            Err(error) => {
                warn_unless_unreachable!(
                    error,
                    "cannot free the claims of this worker; trying with the next heartbeat"
                );
                self.failures += 1;
            }
        }
    }

    /// Called when all claims of the old incarnation are lost. The worker continues under a new one, unless another
    /// host has taken its id.
    async fn replace(&mut self, why: &StoreError) {
        let shared = self.shared;
        if why.is_unknown() && self.unknown_since.is_none() {
            self.unknown_since = Some(Instant::now());
        }
        lose_claims(shared, why).await;
        // This host has not crashed, so its lost attempts must not count as crashes.
        if let Err(error) = shared.store.outlived().await {
            warn_unless_unreachable!(
                error,
                "cannot report that this host is alive; its lost attempts count as crashes"
            );
        }
        if why.is_superseded() {
            error!(
                worker.id = %shared.settings.worker_id,
                "another host has this host's worker id and key file; give each host its own (worker_id, worker_key_file); this host stops"
            );
            self.fail(why);
            return;
        }
        self.register().await;
    }

    /// Registers a new incarnation.
    async fn register(&mut self) {
        let shared = self.shared;
        let stats = shared.presence.tally.stats(shared, None);
        let registration = registration(
            &shared.settings,
            &shared.catalog.current(),
            Some(&shared.sql),
            stats,
        );
        // A database that has lost the registration may still have an earlier registration of this worker, with another
        // key, that had ended. That registration looks alive until its silence has lasted long enough.
        let silence_max = shared.settings.intervals.silence;
        let may_be_our_own = self
            .unknown_since
            .is_some_and(|since| since.elapsed() < silence_max);
        let sent = BootTime::now();
        match shared.store.register(&registration).await {
            Ok((incarnation, _)) => {
                self.failures = 0;
                self.unknown_since = None;
                self.reported = Reported::registered(&registration.capabilities);
                shared.capabilities_sent.notify_one();
                shared.leases.registered(sent);
                info!(worker.id = %registration.worker_id, incarnation = incarnation.0, "registered again");
                shared.presence.incarnation.send_replace(incarnation);
            }
            Err(error) if error.is_taken() && may_be_our_own => {
                warn!(%error, "the database has lost this worker's registration, and may count an earlier one as alive; trying again");
                self.failures += 1;
            }
            Err(error) if error.is_taken() => {
                error!(%error, "another host has taken this worker's id; give each host its own (worker_id); this host stops");
                self.fail(&error);
            }
            Err(error) => {
                warn_unless_unreachable!(
                    error,
                    "cannot register again; trying with the next heartbeat"
                );
                self.failures += 1;
            }
        }
    }

    /// Stops the worker, because it cannot continue.
    fn fail(&self, why: &StoreError) {
        let _ = self.shared.presence.fatal.set(why.to_string());
        self.shared.stop.now();
    }

    /// The average number of cores that this process has used since the last heartbeat.
    fn cpu_cores(&mut self) -> f64 {
        let (now, cpu) = (Instant::now(), cpu_time());
        let wall = (now - self.last_at).as_secs_f64().max(0.001);
        let cores = (cpu - self.last_cpu).as_secs_f64() / wall;
        (self.last_at, self.last_cpu) = (now, cpu);
        cores
    }
}

/// The wait after this many failed heartbeats: at most half of [`SILENT_FOR`], so that the host reports in time that it
/// has not crashed. While the server is unreachable, the store fails at once without trying it.
fn repeat_after(failures: u32, every: Duration) -> Duration {
    let longest = every.min(SILENT_FOR / 2);
    backoff(failures - 1, rand::random()).min(longest)
}

/// Exports the number of timeouts that caused this worker's timeout flag.
fn show_timeouts(timeouts: i64) {
    #[expect(clippy::cast_precision_loss, reason = "timeouts are few")]
    gauge!("rouse_worker_timeouts").set(timeouts as f64);
}

/// Loses all claims of this incarnation, which has ended.
async fn lose_claims(shared: &Arc<Shared>, why: &(dyn Display + Sync)) {
    let ids = shared.leases.lose_all(AbortReason::Error);
    warn!(error = %why, job.ids = ?ids, "this incarnation of the worker has ended; aborting its attempts");
    // Empties the line. These claims are no longer settled: they are free, or already belong to other workers.
    slots::release_all(shared).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_heartbeat_is_retried_before_a_loss_counts_as_a_crash() {
        let every = Duration::from_secs(30);
        assert!(repeat_after(1, every) <= Duration::from_secs(1));
        for failures in 1..=20 {
            assert!(repeat_after(failures, every) * 2 <= SILENT_FOR);
            assert!(repeat_after(failures, every / 30) <= every / 30);
        }
    }
}
