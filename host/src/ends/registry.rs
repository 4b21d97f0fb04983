//! The jobs that callers wait for, and the choice of those to look at next. Without I/O.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::Seen;
use crate::job::JobId;

/// The jobs that callers wait for.
pub(super) struct Registry {
    pauses: RangeInclusive<Duration>,
    jobs: HashMap<JobId, Watched>,
    /// The number of looks that have started.
    looks: u64,
    /// The start of the last look at all jobs.
    looked_at_all: Option<Instant>,
    /// The arrival of the newest caller.
    newest: Option<Instant>,
}

struct Watched {
    callers: usize,
    seen: watch::Sender<LookResult>,
    /// The next look has to include it, without a pause.
    is_due: bool,
}

/// The result of a look.
#[derive(Debug, Clone, Default)]
pub(super) struct LookResult {
    /// The number of the look; 0: none.
    look: u64,
    pub(super) seen: Seen,
}

impl LookResult {
    /// True if it is recent enough for a caller that arrived after this many looks had started.
    pub(super) fn is_current(&self, looks: u64) -> bool {
        self.look > looks || matches!(self.seen, Seen::Ended(_))
    }
}

/// The next action.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Look at these jobs now.
    Look(Vec<i64>),
    /// Decide again at this time, or earlier if something changes.
    At(Instant),
    /// There are no waiters: decide again when something changes.
    Never,
}

impl Registry {
    /// The pauses between two looks at all jobs are in this range.
    pub(super) fn new(pauses: RangeInclusive<Duration>) -> Self {
        Self {
            pauses,
            jobs: HashMap::new(),
            looks: 0,
            looked_at_all: None,
            newest: None,
        }
    }

    /// A caller waits for this job: the next look includes it, unless its end is known. Returns the results of looks at
    /// it, and the number of looks that have started so far.
    pub(super) fn enter(&mut self, id: JobId, now: Instant) -> (watch::Receiver<LookResult>, u64) {
        self.newest = Some(now);
        let watched = self.jobs.entry(id).or_insert_with(|| Watched {
            callers: 0,
            seen: watch::Sender::default(),
            is_due: false,
        });
        watched.callers += 1;
        watched.is_due = true;
        (watched.seen.subscribe(), self.looks)
    }

    /// A caller has stopped waiting.
    pub(super) fn leave(&mut self, id: JobId) {
        if let Some(watched) = self.jobs.get_mut(&id) {
            watched.callers -= 1;
            if watched.callers == 0 {
                self.jobs.remove(&id);
            }
        }
    }

    /// Requests a look at this job without a pause. Returns false if the job has no waiters.
    pub(super) fn mark_due(&mut self, id: JobId) -> bool {
        let watched = self.jobs.get_mut(&id);
        watched.map(|watched| watched.is_due = true).is_some()
    }

    /// Passes the result of the look that started last to the callers of this job.
    pub(super) fn show(&self, id: JobId, seen: Seen) {
        if let Some(watched) = self.jobs.get(&id) {
            let look = self.looks;
            watched.seen.send_replace(LookResult { look, seen });
        }
    }

    /// Chooses the next action. A look starts with this call.
    pub(super) fn next(&mut self, now: Instant) -> Next {
        let is_open = |watched: &Watched| !matches!(watched.seen.borrow().seen, Seen::Ended(_));
        let any = self.jobs.values().any(is_open);
        let Some(newest) = self.newest.filter(|_| any) else {
            self.looked_at_all = None;
            return Next::Never;
        };
        let tenth = now.saturating_duration_since(newest) / 10;
        let pause = tenth.clamp(*self.pauses.start(), *self.pauses.end());
        let at = *self.looked_at_all.get_or_insert(now) + pause;
        let is_of_all = now >= at;
        let mut ids = Vec::new();
        for (id, watched) in &mut self.jobs {
            if is_open(watched) && (is_of_all || watched.is_due) {
                watched.is_due = false;
                ids.push(id.0);
            }
        }
        if ids.is_empty() {
            return Next::At(at);
        }
        if is_of_all {
            self.looked_at_all = Some(now);
        }
        self.looks += 1;
        Next::Look(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    const PAUSE: Duration = Duration::from_millis(100);

    fn start() -> (Registry, Instant) {
        let pauses = PAUSE..=Duration::from_secs(1);
        (Registry::new(pauses), Instant::now())
    }

    fn row() -> Bytes {
        "{}".into()
    }

    fn look(registry: &mut Registry, now: Instant) -> Vec<i64> {
        match registry.next(now) {
            Next::Look(mut ids) => {
                ids.sort_unstable();
                ids
            }
            Next::At(_) | Next::Never => Vec::new(),
        }
    }

    #[test]
    fn a_job_is_looked_at_when_it_is_new_or_has_ended_here_and_otherwise_with_all_others() {
        let (mut registry, now) = start();
        assert_eq!(registry.next(now), Next::Never);
        for id in 1..=3 {
            let _ = registry.enter(JobId(id), now);
        }
        assert_eq!(look(&mut registry, now), [1, 2, 3]);
        for id in 1..=3 {
            registry.show(JobId(id), Seen::Live(row()));
        }
        assert_eq!(registry.next(now), Next::At(now + PAUSE));
        assert!(registry.mark_due(JobId(2)) && !registry.mark_due(JobId(9)));
        assert_eq!(look(&mut registry, now), [2]);
        registry.show(JobId(2), Seen::Ended(row()));
        assert_eq!(look(&mut registry, now + PAUSE), [1, 3], "2 has ended");
    }

    #[test]
    fn a_job_that_ends_during_a_look_is_looked_at_again_at_once() {
        let (mut registry, now) = start();
        let _ = registry.enter(JobId(1), now);
        assert_eq!(look(&mut registry, now), [1]);
        registry.mark_due(JobId(1));
        registry.show(JobId(1), Seen::Live(row()));
        assert_eq!(look(&mut registry, now), [1]);
    }

    #[test]
    fn looks_become_less_frequent_while_the_newest_caller_waits() {
        let (mut registry, start) = start();
        let _ = registry.enter(JobId(1), start);
        assert_eq!(look(&mut registry, start), [1]);
        for (waited, pause) in [(200, 100), (4_000, 400), (60_000, 1_000)] {
            let now = start + Duration::from_millis(waited);
            assert_eq!(look(&mut registry, now), [1], "after {waited} ms");
            let at = now + Duration::from_millis(pause);
            assert_eq!(registry.next(now), Next::At(at), "after {waited} ms");
        }
        registry.leave(JobId(1));
        assert_eq!(registry.next(start), Next::Never);
    }

    #[test]
    fn a_later_caller_accepts_a_known_end_but_no_other_earlier_result() {
        let (mut registry, now) = start();
        let _first = registry.enter(JobId(1), now);
        assert_eq!(look(&mut registry, now), [1]);
        // During that look, and after it.
        let (second, before) = registry.enter(JobId(1), now);
        registry.show(JobId(1), Seen::Unknown);
        assert!(!second.borrow().is_current(before));
        assert_eq!(look(&mut registry, now), [1]);
        registry.show(JobId(1), Seen::Ended(row()));
        assert!(second.borrow().is_current(before));
        let (third, before) = registry.enter(JobId(1), now);
        assert!(third.borrow().is_current(before));
        assert_eq!(registry.next(now), Next::Never);
    }
}
