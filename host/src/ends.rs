//! Waits for the ends of jobs, on behalf of HTTP callers, with one look for all of them.
//!
//! A waiter does not need its own statement. All jobs that have waiters are looked at together: at once if they are new
//! here or have just ended on this host, otherwise after a tenth of the time that the newest waiter has waited. Without
//! waiters there are no looks. An outage of the database does not end any wait.

mod registry;

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::{debug, warn};

use self::registry::{LookResult, Next, Registry};
use crate::job::JobId;
use crate::store::{JobStatus, Store, StoreError};

/// The maximum number of callers that wait at once. Each keeps a connection open.
pub const WAITERS_MAX: usize = 2000;

/// The minimum time that a caller waits for the first look, even if its own timeout is shorter.
const FIRST_LOOK_TIMEOUT: Duration = Duration::from_secs(5);
/// The pauses between two looks at all jobs.
const POLL_MIN: Duration = Duration::from_millis(100);
const POLL_MAX: Duration = Duration::from_secs(1);
/// The pause after each look: jobs that become due during the pause are looked at together.
const PAUSE: Duration = Duration::from_millis(10);
/// The pause after a look that failed.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// The maximum number of ended jobs in one statement. Each may have a result of 4 MiB.
const READ_TOGETHER_MAX: usize = 16;

/// The known state of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Seen {
    /// Nothing: the database has not sent a response yet.
    #[default]
    Nothing,
    /// There is no such job, or it is no longer kept.
    Unknown,
    /// It had not ended at the last look: its row of `rouse.outcomes`, as JSON. Shared by all that wait for it.
    Live(Bytes),
    /// It has ended: its row of `rouse.outcomes`.
    Ended(Bytes),
    /// The database refuses the look: its login lacks a permission, or the schema is not migrated.
    Refused(Arc<str>),
    /// The database cannot read the job: its page is damaged, for instance.
    Unreadable(Arc<str>),
}

impl Seen {
    /// The state after an error that is not temporary.
    fn failed(error: &StoreError) -> Self {
        let why = error.to_string().into();
        // 42 syntax error or access rule violation.
        match error.code() {
            Some(code) if code.code().starts_with("42") => Self::Refused(why),
            _ => Self::Unreadable(why),
        }
    }
}

/// Too many callers wait.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

/// The jobs that callers wait for. Cheap to clone.
#[derive(Clone)]
pub struct Ends(Arc<Shared>);

struct Shared {
    waiters_max: usize,
    /// The number of waiters in the registry, which can be read without the lock.
    waiters: AtomicUsize,
    registry: Mutex<Registry>,
    changed: Notify,
}

impl Default for Ends {
    fn default() -> Self {
        Self::with(WAITERS_MAX, POLL_MIN..=POLL_MAX)
    }
}

impl std::fmt::Debug for Ends {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ends")
            .field("waiters", &self.waiters())
            .finish_non_exhaustive()
    }
}

impl Ends {
    /// At most `waiters_max` callers may wait at once, and the pauses between looks at all jobs are in this range.
    pub fn with(waiters_max: usize, pauses: RangeInclusive<Duration>) -> Self {
        Self(Arc::new(Shared {
            waiters_max,
            waiters: AtomicUsize::new(0),
            registry: Mutex::new(Registry::new(pauses)),
            changed: Notify::new(),
        }))
    }

    /// The number of callers that wait.
    pub fn waiters(&self) -> usize {
        self.0.waiters.load(Ordering::Relaxed)
    }

    /// Waits until the job has ended, or until `timeout` has passed, and at least until the first look at the job.
    /// Returns what is known about it then. Dropping the future ends the wait.
    ///
    /// # Errors
    /// If too many callers wait.
    pub async fn wait(&self, id: JobId, timeout: Duration) -> Result<Seen, Full> {
        let start = Instant::now();
        let mut waiter = self.enter(id, start)?;
        loop {
            let result = waiter.results.borrow_and_update().clone();
            let is_current = result.is_current(waiter.looks_before);
            let seen = result.seen;
            let deadline = match &seen {
                _ if !is_current => start + timeout.max(FIRST_LOOK_TIMEOUT),
                Seen::Unknown | Seen::Ended(_) | Seen::Refused(_) | Seen::Unreadable(_) => {
                    return Ok(seen);
                }
                Seen::Nothing | Seen::Live(_) => start + timeout,
            };
            match tokio::time::timeout_at(deadline, waiter.results.changed()).await {
                // The sender is in the registry, as long as this waiter is.
                Ok(changed) => changed.expect("the job is in the registry"),
                Err(_) if is_current => return Ok(seen),
                Err(_) => return Ok(Seen::Nothing),
            }
        }
    }

    /// Notes that a job has ended on this host: its waiters get the result at once. Costs nothing without waiters.
    pub fn job_ended(&self, id: JobId) {
        if self.waiters() > 0 && self.registry().mark_due(id) {
            self.0.changed.notify_one();
        }
    }

    /// Looks at the jobs that callers wait for, as long as the task runs.
    pub async fn look_forever(self, store: Store) {
        loop {
            let next = self.registry().next(Instant::now());
            match next {
                Next::Look(ids) => {
                    let pause = self.look_or_explain(&store, &ids).await;
                    tokio::time::sleep(pause).await;
                }
                // Something may be due at once after a change.
                Next::At(at) => _ = tokio::time::timeout_at(at, self.0.changed.notified()).await,
                Next::Never => self.0.changed.notified().await,
            }
        }
    }

    /// Looks once at these jobs. Returns the pause after it.
    async fn look_or_explain(&self, store: &Store, ids: &[i64]) -> Duration {
        let Err(error) = self.look(store, ids).await else {
            return PAUSE;
        };
        let mut registry = self.registry();
        if error.is_transient() {
            debug!(%error, jobs = ids.len(), "cannot read jobs that callers wait for; trying again");
            for id in ids {
                registry.mark_due(JobId(*id));
            }
            return RETRY_AFTER;
        }
        warn!(%error, jobs = ids.len(), "cannot read jobs that callers wait for");
        let failed = Seen::failed(&error);
        for id in ids {
            registry.show(JobId(*id), failed.clone());
        }
        PAUSE
    }

    async fn look(&self, store: &Store, ids: &[i64]) -> Result<(), StoreError> {
        let mut unknown: HashSet<JobId> = ids.iter().map(|id| JobId(*id)).collect();
        let mut ended = Vec::new();
        for (id, status) in store.statuses(ids).await? {
            unknown.remove(&id);
            match status {
                JobStatus::Live(row) => self.registry().show(id, Seen::Live(row.0.into())),
                JobStatus::Ended => ended.push(id.0),
            }
        }
        for id in unknown {
            self.registry().show(id, Seen::Unknown);
        }
        let mut postponed = Ok(());
        for some in ended.chunks(READ_TOGETHER_MAX) {
            match self.show_outcomes(store, some).await {
                Ok(()) => continue,
                Err(error) if concerns_all(&error) => return Err(error),
                Err(_) => {}
            }
            // One result that cannot be read, or all of them together, must not affect the callers of other jobs.
            for id in some {
                match self.show_outcomes(store, &[*id]).await {
                    Ok(()) => {}
                    Err(error) if !error.is_transient() => {
                        warn!(%error, job.id = *id, "cannot read a job that callers wait for");
                        self.registry().show(JobId(*id), Seen::failed(&error));
                    }
                    Err(error) if error.may_be_one_rows_fault() => postponed = Err(error),
                    Err(error) => return Err(error),
                }
            }
        }
        postponed
    }

    /// Passes the outcomes of these ended jobs to their callers.
    async fn show_outcomes(&self, store: &Store, ids: &[i64]) -> Result<(), StoreError> {
        for (id, row) in store.outcomes(ids).await? {
            self.registry().show(id, Seen::Ended(row.0.into()));
        }
        Ok(())
    }

    fn enter(&self, id: JobId, now: Instant) -> Result<Waiter, Full> {
        let mut registry = self.registry();
        if self.waiters() >= self.0.waiters_max {
            return Err(Full);
        }
        self.0.waiters.fetch_add(1, Ordering::Relaxed);
        let (results, looks_before) = registry.enter(id, now);
        drop(registry);
        self.0.changed.notify_one();
        Ok(Waiter {
            id,
            results,
            looks_before,
            ends: self.clone(),
        })
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        // Only the allocator can panic while the lock is held.
        let registry = self.0.registry.lock();
        registry.unwrap_or_else(PoisonError::into_inner)
    }
}

/// True if a smaller statement would not work either.
fn concerns_all(error: &StoreError) -> bool {
    error.is_transient() && !error.may_be_one_rows_fault() && !error.is_silence()
}

/// One caller. It leaves the registry when it is dropped.
struct Waiter {
    id: JobId,
    results: watch::Receiver<LookResult>,
    looks_before: u64,
    ends: Ends,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.ends.registry().leave(self.id);
        self.ends.0.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}
