//! How the database knows this worker: its registration, its heartbeats, and a new incarnation if the old one is over.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use metrics::gauge;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tracing::{error, info, warn};

use super::policy::Policy;
use super::reach::warn_unless_unreachable;
use super::{Settings, Shared, audit_outbox, challenges, slots};
use crate::job::{AbortReason, Incarnation, Outcome};
use crate::sandbox::{Catalog, HandlerSet};
use crate::store::connect::backoff;
use crate::store::{Heartbeat, Registration, Stats, StoreError};

/// What a worker says of itself.
pub(super) fn registration(
    settings: &Settings,
    handlers: &HandlerSet,
    stats: Stats,
) -> Registration {
    Registration {
        worker_id: settings.worker_id.clone(),
        key: settings.key.clone(),
        hostname: settings.hostname.clone(),
        platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        version: env!("CARGO_PKG_VERSION").into(),
        capabilities: capabilities(settings, handlers),
        slots: settings.slots,
        queues: settings.queues.clone(),
        tags: settings.tags.clone(),
        stats: Some(stats),
    }
}

/// Payload keys of all handlers in one registration, bytes; beyond that they are left out.
const KEYS_BYTES_MAX: usize = 256 << 10;

/// `{"handler": {"version": …, "grants": […], "max_attempts": …, "payload_keys": […]}, …}`
fn capabilities(settings: &Settings, handlers: &HandlerSet) -> Value {
    let mut keys_bytes = 0;
    let of = |name: &String| {
        let handler = handlers.get(name)?;
        let mut said = json!({
            "version": handler.manifest.version,
            "sha256": handler.module.digest.to_string(),
            "grants": handler.granted(),
            "max_attempts": Policy::resolve(&handler.manifest, &settings.overrides).retry.max_attempts,
        });
        if let Some(keys) = &handler.manifest.payload_keys {
            // With quotes and a comma.
            keys_bytes += keys.iter().map(|key| key.len() + 4).sum::<usize>();
            if keys_bytes <= KEYS_BYTES_MAX {
                said["payload_keys"] = json!(keys);
            }
        }
        Some((name.clone(), said))
    };
    Value::Object(handlers.names().iter().filter_map(of).collect())
}

/// How the database knows this worker.
pub(super) struct Presence {
    /// The current incarnation.
    pub(super) incarnation: watch::Sender<Incarnation>,
    /// Sends the next heartbeat at once: the database has refused this worker, or has not heard of it for a while. A host that is heard of
    /// after it has lost attempts has not crashed.
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
    born: Instant,
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
            born: Instant::now(),
            completed: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            attempts_failed: AtomicU64::new(0),
            timed_out: AtomicU64::new(0),
            attempts: AtomicU64::new(0),
            attempts_us: AtomicU64::new(0),
        }
    }

    /// An attempt has run for so long.
    pub(super) fn ran(&self, wall: Duration) {
        let us = u64::try_from(wall.as_micros()).unwrap_or(u64::MAX);
        self.attempts.fetch_add(1, Ordering::Relaxed);
        self.attempts_us.fetch_add(us, Ordering::Relaxed);
    }

    /// An attempt ran into its run timeout.
    pub(super) fn timed_out(&self) {
        self.timed_out.fetch_add(1, Ordering::Relaxed);
    }

    /// An outcome was accepted.
    pub(super) fn settled(&self, outcome: &Outcome) {
        let counts: &[&AtomicU64] = match outcome {
            Outcome::Succeeded(_) => &[&self.completed],
            Outcome::Failed(_) | Outcome::TimedOut(_) => &[&self.failed, &self.attempts_failed],
            Outcome::Retry { .. } => &[&self.attempts_failed],
            Outcome::Released => &[],
        };
        for count in counts {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Of a worker that is about to register for the first time.
    pub(super) fn at_start(catalog: &Catalog) -> Stats {
        Stats {
            memory_bytes: resident_bytes(),
            disk_free_bytes: catalog.disk_free_bytes(),
            loading: catalog.current().is_loading(),
            ..Stats::default()
        }
    }

    fn stats(&self, shared: &Shared, used: Option<f64>) -> Stats {
        let attempts = self.attempts.load(Ordering::Relaxed);
        let us = self.attempts_us.load(Ordering::Relaxed);
        Stats {
            active: shared.slots.running(),
            completed: self.completed.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            attempts_failed: self.attempts_failed.load(Ordering::Relaxed),
            timed_out: self.timed_out.load(Ordering::Relaxed),
            average_ms: (attempts > 0).then(|| us as f64 / attempts as f64 / 1000.0),
            cpu_cores: used,
            memory_bytes: resident_bytes(),
            disk_free_bytes: shared.catalog.disk_free_bytes(),
            uptime_s: self.born.elapsed().as_secs(),
            loading: shared.catalog.current().is_loading(),
        }
    }
}

/// The resident memory of this process; none where the system does not say (no /proc).
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * u64::try_from(rustix::param::page_size()).ok()?)
}

/// CPU time of this process.
fn cpu_time() -> Duration {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(used.tv_sec).unwrap_or(0),
        u32::try_from(used.tv_nsec).unwrap_or(0),
    )
}

/// Heartbeats for as long as the worker lives; registers again where the database says that this life is over.
pub(super) async fn run_forever(shared: Arc<Shared>, every: Duration) {
    let (mut asked, mut used) = (Instant::now(), cpu_time());
    let mut changes = shared.catalog.changed();
    // Nor is a worker that drains to be taken for one that claims: it says so once, at once.
    let mut draining = false;
    // Heartbeats that failed since the last one that did not.
    let mut failures = 0;
    // What the fleet was told last that this worker can run. It is not sent, nor written, with each heartbeat: it may be megabytes.
    let mut told = None;
    // What was done while no host was there.
    audit_outbox::log_all(&shared).await;
    loop {
        // Where nothing is heard of this worker, what it loses counts as lost in a crash: a failed heartbeat is repeated soon.
        let wait = match failures {
            0 => every,
            failures => backoff(failures - 1, rand::random()).min(every),
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = shared.presence.heartbeat_now.notified() => {}
            // The others are to know at once what this worker can run. The catalog lives as long as the worker.
            _ = changes.changed() => shared.wakeups.ring(None),
            () = shared.stop.drain.cancelled(), if !draining => {}
        }
        let (now, cpu) = (Instant::now(), cpu_time());
        let cores = (cpu - used).as_secs_f64() / (now - asked).as_secs_f64().max(0.001);
        (asked, used) = (now, cpu);
        let stats = shared.presence.tally.stats(&shared, Some(cores));
        let capabilities = Some(capabilities(&shared.settings, &shared.catalog.current()));
        draining = shared.stop.is_stopping();
        let news = capabilities.as_ref().filter(|_| capabilities != told);
        match shared.store.heartbeat(news, &stats, draining).await {
            Ok(Heartbeat { expired, timeouts }) => {
                failures = 0;
                told = capabilities;
                timeout_flag(timeouts);
                if expired > 0 {
                    warn!(
                        expired,
                        "workers were not heard of for 90 s; what they had claimed is free"
                    );
                }
                challenges::look_where_deaf(&shared);
                audit_outbox::log_all(&shared).await;
            }
            Err(error) if error.is_over() || error.is_superseded() => {
                failures = 0;
                told = None;
                start_again(&shared, &error).await
            }
            // What this worker can run is for people. That it lives is for its jobs.
            Err(error) if error.is_about_data() && news.is_some() => {
                error!(%error, "the database refuses what this worker says that it can run; the fleet goes on seeing what it could run before");
                told = capabilities;
                shared.presence.heartbeat_now.notify_one();
            }
            Err(error) => {
                if failures == 0 {
                    warn_unless_unreachable!(
                        error,
                        "heartbeat failed; it is repeated, first within a second, then less and less often"
                    );
                }
                failures += 1;
            }
        }
    }
}

/// Shows for how many attempts this worker has its timeout flag.
fn timeout_flag(timeouts: i64) {
    #[expect(clippy::cast_precision_loss, reason = "timeouts are few")]
    gauge!("rouse_worker_timeouts").set(timeouts as f64);
}

/// Everything that the worker had claimed is lost. Where it may, it goes on under a new incarnation.
async fn start_again(shared: &Arc<Shared>, why: &StoreError) {
    let ids = shared.leases.lose_all(AbortReason::Error);
    warn!(error = %why, job.ids = ?ids, "this life of the worker is over; what it runs is stopped");
    // What waits in line is refused when it is given back: it is others' already.
    slots::give_back_all(shared).await;
    // This host has not crashed: what it has lost is not held against the jobs.
    if let Err(error) = shared.store.outlived().await {
        warn_unless_unreachable!(
            error,
            "cannot report that this host is alive; the attempts that it has lost count as crashes"
        );
    }
    if why.is_superseded() {
        error!(
            worker.id = %shared.settings.worker_id,
            "another host runs with the worker id and the key file of this one; give each host its own (worker_id, worker_key_file). This host stops"
        );
        let _ = shared.presence.fatal.set(why.to_string());
        shared.stop.now();
        return;
    }
    let stats = shared.presence.tally.stats(shared, None);
    let registration = registration(&shared.settings, &shared.catalog.current(), stats);
    match shared.store.register(&registration).await {
        Ok((incarnation, _)) => {
            info!(worker.id = %registration.worker_id, incarnation = incarnation.0, "registered again");
            shared.presence.incarnation.send_replace(incarnation);
        }
        Err(error) if error.is_taken() => {
            error!(%error, "the worker's id was taken meanwhile");
            let _ = shared.presence.fatal.set(error.to_string());
            shared.stop.now();
        }
        Err(error) => warn_unless_unreachable!(
            error,
            "cannot register again; trying with the next heartbeat"
        ),
    }
}
