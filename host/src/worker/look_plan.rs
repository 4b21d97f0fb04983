//! Decides what the next look does. A pure state machine: the caller passes in the time and the results of looks.

use std::time::{Duration, Instant, SystemTime};

use super::Intervals;
use super::lanes::After;

/// The trigger of a look.
#[derive(Debug, Clone, Copy)]
pub(super) enum Trigger {
    /// The last look has left jobs, or may have.
    More,
    /// A notification, or an event in this host.
    Wakeup,
    /// The poll.
    Poll,
}

/// Restarts take at most 5 % of the time: re-reading is expensive while an open transaction keeps dead rows from being
/// removed.
const RESTART_SHARE: u32 = 20;
/// Periodic restarts, which have no reason other than the time since the last one, take at most 1 % of the time.
const PERIODIC_RESTART_SHARE: u32 = 100;
/// The search for due jobs and expired leases starts this long before the last look that left none.
pub(super) const WINDOW_MARGIN: Duration = Duration::from_secs(2);
/// The time after which a due job that was locked is searched for again.
const LOCKED_RETRY_AFTER: Duration = Duration::from_secs(1);

/// The work of a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Read behind the cursors.
    Sweep(Sweep),
    /// Peek first.
    Peek,
    /// Claim at once. `promote`: promote due jobs first.
    Claim { after: After, promote: bool },
}

/// A look that reads behind the cursors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sweep {
    /// Every lane is read from its start, instead of from the cursor two sweeps ago.
    pub(super) restart: bool,
    /// The catalog of lanes is re-read.
    pub(super) rereads_catalog: bool,
    started: Instant,
}

/// A due job that was left because it was locked.
#[derive(Debug)]
struct Locked {
    /// The time at which it was due, by the database's clock.
    due_at: SystemTime,
    /// The time of the next search that covers it.
    retry_at: Instant,
    /// The time from that search to the next one.
    pause: Duration,
}

/// The times at which each kind of work is due.
#[derive(Debug)]
pub(super) struct LookPlan {
    intervals: Intervals,
    look_back_at: Instant,
    sweep_at: Instant,
    /// A restart has a reason: jobs were committed late.
    needs_restart: bool,
    /// The earliest restart that has a reason.
    restart_at: Instant,
    /// The next periodic restart.
    periodic_restart_at: Instant,
    catalog_at: Instant,
    /// The earliest restart because of an empty wakeup.
    wakeup_restart_at: Instant,
    /// A wakeup was empty, and its restart has to wait until one is permitted.
    wakeup_waits: bool,
    /// The earliest check for overdue jobs.
    overdue_at: Instant,
    /// The next check for overdue jobs from the start of the lanes.
    overdue_restart_at: Instant,
    due_at: Option<Instant>,
    /// The time of the last look that left no due job (database clock): after the machine was suspended, this is long
    /// ago. `None` if there was none.
    none_due_at: Option<SystemTime>,
    /// The first due job that looks up to that time have left.
    locked: Option<Locked>,
}

impl LookPlan {
    pub(super) fn new(now: Instant, intervals: Intervals) -> Self {
        Self {
            intervals,
            look_back_at: now,
            sweep_at: now,
            needs_restart: false,
            restart_at: now,
            periodic_restart_at: now,
            catalog_at: now,
            wakeup_restart_at: now,
            wakeup_waits: false,
            overdue_at: now,
            overdue_restart_at: now,
            due_at: None,
            none_due_at: None,
            locked: None,
        }
    }

    /// True if the recent cursors have to be updated before this look.
    pub(super) fn looks_back(&mut self, now: Instant) -> bool {
        let is_time = now >= self.look_back_at;
        if is_time {
            self.look_back_at = now + self.intervals.look_back;
        }
        is_time
    }

    /// Decides the work of the look that starts now. `known`: jobs are known to exist.
    pub(super) fn next(&mut self, now: Instant, trigger: Trigger, known: bool) -> Step {
        let delay_max = match trigger {
            // A job that was announced is claimed first; the sweep follows with the next look.
            Trigger::Wakeup => self.intervals.sweep,
            Trigger::More | Trigger::Poll => Duration::ZERO,
        };
        if now >= self.sweep_at + delay_max {
            self.retry_locked(now);
            return Step::Sweep(self.sweep(now));
        }
        if !known {
            self.retry_locked(now);
            return Step::Peek;
        }
        Step::Claim {
            after: match trigger {
                Trigger::More => After::Cursor,
                Trigger::Wakeup | Trigger::Poll => After::Recent,
            },
            promote: self.due_at.is_some_and(|due| now >= due),
        }
    }

    fn sweep(&mut self, now: Instant) -> Sweep {
        self.sweep_at = now + self.intervals.sweep;
        let restart =
            now >= self.periodic_restart_at || self.needs_restart && now >= self.restart_at;
        let rereads_catalog = now >= self.catalog_at;
        if rereads_catalog {
            self.catalog_at = now + self.intervals.restart;
        }
        if restart {
            self.needs_restart = false;
            self.wakeup_waits = false;
            self.none_due_at = None;
        }
        Sweep {
            restart,
            rereads_catalog,
            started: now,
        }
    }

    /// Schedules the next sweeps after this one. `late`: a late transaction has ended, whose jobs short sweeps miss.
    pub(super) fn swept(&mut self, now: Instant, sweep: Sweep, late: bool) {
        if late {
            self.needs_restart = true;
            // If this was a restart, the next one waits for the next regular sweep.
            if !sweep.restart {
                self.sweep_at = now;
            }
        }
        if sweep.restart {
            let took = now.saturating_duration_since(sweep.started);
            let Intervals {
                restart,
                restart_max,
                ..
            } = self.intervals;
            self.restart_at = now + (took * RESTART_SHARE).min(restart);
            // Cheap restarts may follow each wakeup that finds nothing.
            if self.restart_at > now + self.intervals.sweep {
                self.wakeup_restart_at = self.wakeup_restart_at.max(self.restart_at);
            }
            let period = (took * PERIODIC_RESTART_SHARE)
                .max(restart)
                .min(restart_max);
            self.periodic_restart_at = now + period;
        }
    }

    /// Notes that a restart got no response in time: dead rows that an open transaction keeps make it too slow. Short
    /// sweeps follow, which read less; the next restart is tried only after a while.
    pub(super) fn restart_failed(&mut self, now: Instant) {
        self.needs_restart = true;
        self.restart_at = now + self.intervals.restart_max;
        self.periodic_restart_at = self.restart_at;
        self.wakeup_restart_at = self.restart_at;
    }

    /// Called when a notification announced a job that the look did not find: its producer may have committed it late,
    /// behind the cursors or after it was due, or another worker has claimed it. True if the next look has to follow at
    /// once; it is a restart. At most once per short sweep, and for at most 5 % of the time: if such restarts are
    /// expensive, a sweep becomes one as soon as that is permitted.
    pub(super) fn restart_after_empty_wakeup(&mut self, now: Instant) -> bool {
        if now < self.wakeup_restart_at {
            self.wakeup_waits |= now < self.restart_at;
            self.needs_restart |= self.wakeup_waits;
            return false;
        }
        self.wakeup_restart_at = now + self.intervals.sweep;
        self.start_over(now);
        true
    }

    /// Makes the next look that no notification triggers a restart.
    pub(super) fn start_over(&mut self, now: Instant) {
        self.sweep_at = now;
        self.needs_restart = true;
        self.restart_at = now;
    }

    /// Called after a sweep that may have skipped lanes, because its claims were filled or gates have closed some.
    /// Returns the turn after which to check for overdue jobs; `None` if no check is due.
    pub(super) fn checks_overdue(&mut self, now: Instant, sweep: Sweep) -> Option<After> {
        if now < self.overdue_at {
            return None;
        }
        if sweep.restart && now >= self.overdue_restart_at {
            self.overdue_restart_at = now + self.intervals.restart;
            return Some(After::Recent);
        }
        Some(After::Reached)
    }

    /// Schedules the next check for overdue jobs. While an open transaction keeps many dead rows, a check is as
    /// expensive as a restart, and is limited to the same share of the time.
    pub(super) fn checked_overdue(&mut self, started: Instant, now: Instant) {
        let pause = now.saturating_duration_since(started) * RESTART_SHARE;
        self.overdue_at = now + pause.min(self.intervals.restart);
    }

    /// When the restart because of an empty wakeup is permitted. `None` if none waits for that.
    pub(super) fn restart_at(&self) -> Option<Instant> {
        self.wakeup_waits
            .then_some(self.restart_at.max(self.sweep_at))
    }

    /// When the next scheduled job or retry is due. `None` if none is known.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.due_at
    }

    /// Records the wait until the next scheduled job or retry is due. `None` means that there is none.
    pub(super) fn next_due(&mut self, now: Instant, wait: Option<Duration>) {
        self.due_at = wait.map(|wait| now + wait);
    }

    /// Records that a look at this time (database clock) found no due job, or promoted those that it found. Both count:
    /// while jobs become due all the time, few looks find none, and an open transaction keeps the entries of all
    /// promoted jobs.
    pub(super) fn none_due(&mut self, at: SystemTime) {
        if self.covers_locked() {
            self.locked = None;
        }
        self.none_due_at = Some(at);
    }

    /// Records that a look at this time (database clock) promoted the due jobs that it found, except locked ones, the
    /// first of which was due at `due_at`. It is searched for again after a second, then after waits that double, up to
    /// the interval of restarts.
    pub(super) fn left_locked(&mut self, now: Instant, due_at: SystemTime, at: SystemTime) {
        let is_known = |locked: &Locked| locked.due_at == due_at || !self.covers_locked();
        if !self.locked.as_ref().is_some_and(is_known) {
            self.locked = Some(Locked {
                due_at,
                retry_at: now + LOCKED_RETRY_AFTER,
                pause: LOCKED_RETRY_AFTER * 2,
            });
        }
        self.none_due_at = Some(at);
    }

    /// True if the search for due jobs covers a locked one that was left.
    fn covers_locked(&self) -> bool {
        let locked = self.locked.as_ref();
        locked.is_some_and(|locked| self.due_since() < Some(locked.due_at))
    }

    /// Lets the next search for due jobs cover a locked one that was left, if it is time.
    fn retry_locked(&mut self, now: Instant) {
        if let Some(locked) = self.locked.as_mut().filter(|it| now >= it.retry_at) {
            locked.retry_at = now + locked.pause;
            locked.pause = (locked.pause * 2).min(self.intervals.restart);
            self.none_due_at = self.none_due_at.min(Some(locked.due_at));
        }
    }

    /// The time, by the database's clock, after which the jobs to search for became due. `None` means any time.
    pub(super) fn due_since(&self) -> Option<SystemTime> {
        Some(self.none_due_at? - WINDOW_MARGIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const MS: Duration = Duration::from_millis(1);

    /// A plan after its first sweep, a restart that took a millisecond; and the time after it.
    fn started() -> (LookPlan, Instant) {
        let start = Instant::now();
        let mut plan = LookPlan::new(start, Intervals::default());
        let sweep = expect_sweep(plan.next(start, Trigger::Poll, false));
        assert!(sweep.restart && sweep.rereads_catalog);
        let now = start + MS;
        plan.swept(now, sweep, false);
        (plan, now)
    }

    fn expect_sweep(step: Step) -> Sweep {
        match step {
            Step::Sweep(sweep) => sweep,
            Step::Peek | Step::Claim { .. } => panic!("{step:?} is not a sweep"),
        }
    }

    /// Follows the plan for this many seconds. `took`: the duration of each restart. Returns for each sweep whether it
    /// was a restart.
    fn sweep_for(
        plan: &mut LookPlan,
        mut now: Instant,
        seconds: u64,
        took: Duration,
        late: bool,
    ) -> Vec<bool> {
        let end = now + SECOND * u32::try_from(seconds).unwrap();
        let mut restarts = Vec::new();
        while now < end {
            if let Step::Sweep(sweep) = plan.next(now, Trigger::Poll, false) {
                restarts.push(sweep.restart);
                let took = if sweep.restart { took } else { MS };
                now += took;
                plan.swept(now, sweep, late);
            }
            now += 100 * MS;
        }
        restarts
    }

    #[test]
    fn after_a_restart_that_was_not_answered_short_sweeps_follow() {
        let (mut plan, now) = started();
        let now = now + 400 * SECOND;
        assert!(expect_sweep(plan.next(now, Trigger::Poll, false)).restart);
        plan.restart_failed(now);
        for after in [2, 100, 299] {
            let sweep = plan.next(now + after * SECOND, Trigger::Poll, false);
            assert!(!expect_sweep(sweep).restart, "after {after} s");
            assert!(!plan.restart_after_empty_wakeup(now + after * SECOND));
        }
        let sweep = plan.next(now + 300 * SECOND, Trigger::Poll, false);
        assert!(expect_sweep(sweep).restart);
    }

    #[test]
    fn between_sweeps_a_poll_peeks_and_known_jobs_are_claimed_at_once() {
        let (mut plan, now) = started();
        assert_eq!(plan.next(now, Trigger::Poll, false), Step::Peek);
        let claim = |after, promote| Step::Claim { after, promote };
        assert_eq!(
            plan.next(now, Trigger::More, true),
            claim(After::Cursor, false)
        );
        assert_eq!(
            plan.next(now, Trigger::Wakeup, true),
            claim(After::Recent, false)
        );
        plan.next_due(now, Some(5 * MS));
        assert_eq!(
            plan.next(now + 4 * MS, Trigger::Wakeup, true),
            claim(After::Recent, false)
        );
        assert_eq!(
            plan.next(now + 5 * MS, Trigger::Wakeup, true),
            claim(After::Recent, true)
        );
    }

    #[test]
    fn a_sweep_is_due_each_second_and_a_known_job_delays_it_by_up_to_a_second() {
        let (mut plan, now) = started();
        let later = now + SECOND;
        assert!(matches!(
            plan.next(later, Trigger::Wakeup, true),
            Step::Claim { .. }
        ));
        assert!(!expect_sweep(plan.next(later, Trigger::More, true)).restart);
        assert_eq!(plan.next(later, Trigger::Poll, false), Step::Peek);
        expect_sweep(plan.next(later + 2 * SECOND, Trigger::Wakeup, true));
    }

    #[test]
    fn late_commits_cause_a_restart_at_once_and_then_for_5_percent_of_the_time() {
        let (mut plan, now) = started();
        let later = now + SECOND;
        let sweep = expect_sweep(plan.next(later, Trigger::Poll, false));
        plan.swept(later, sweep, true);
        assert!(
            expect_sweep(plan.next(later, Trigger::Poll, false)).restart,
            "at once"
        );
        // With restarts of 0.5 s that are always followed by another late commit, there is one in ten seconds.
        let (mut plan, now) = started();
        let restarts = sweep_for(&mut plan, now, 40, 500 * MS, true);
        assert_eq!(
            restarts.iter().filter(|restart| **restart).count(),
            4,
            "{restarts:?}"
        );
    }

    #[test]
    fn periodic_restarts_come_every_thirty_seconds_or_less_often_if_they_are_slow() {
        let restarts_in = |seconds, took| {
            let (mut plan, now) = started();
            let restarts = sweep_for(&mut plan, now, seconds, took, false);
            restarts.iter().filter(|restart| **restart).count()
        };
        assert_eq!(restarts_in(29, MS), 0);
        assert_eq!(restarts_in(95, MS), 3);
        // Restarts of one second: 1 % of the time.
        assert_eq!(restarts_in(125, SECOND), 1);
        assert_eq!(restarts_in(145, SECOND), 2);
        // Restarts of a minute would be one in 100 minutes, but the maximum is five minutes.
        assert_eq!(restarts_in(30 + 60 + 310, 60 * SECOND), 2);
    }

    #[test]
    fn a_wakeup_that_finds_nothing_causes_a_restart_at_most_once_a_second() {
        let (mut plan, now) = started();
        assert!(plan.restart_after_empty_wakeup(now));
        let sweep = expect_sweep(plan.next(now, Trigger::Poll, false));
        assert!(sweep.restart && !sweep.rereads_catalog);
        plan.swept(now, sweep, false);
        assert!(!plan.restart_after_empty_wakeup(now + 999 * MS));
        assert!(plan.restart_after_empty_wakeup(now + SECOND));
    }

    /// Each job of a queue wakes all idle workers, and only one of them finds it.
    #[test]
    fn slow_restarts_after_wakeups_that_find_nothing_take_at_most_5_percent_of_the_time() {
        let (mut plan, now) = started();
        assert!(plan.restart_after_empty_wakeup(now));
        let sweep = expect_sweep(plan.next(now, Trigger::Poll, false));
        assert!(sweep.restart);
        let ended = now + 500 * MS;
        plan.swept(ended, sweep, false);
        for after in [1, 5, 9] {
            let later = ended + after * SECOND;
            assert!(!plan.restart_after_empty_wakeup(later), "after {after} s");
            let sweep = expect_sweep(plan.next(later, Trigger::Poll, false));
            assert!(!sweep.restart, "after {after} s");
        }
        assert_eq!(plan.restart_at(), Some(ended + 10 * SECOND));
        let sweep = expect_sweep(plan.next(ended + 10 * SECOND, Trigger::Poll, false));
        assert!(sweep.restart, "a wakeup has found nothing in the meantime");
        plan.swept(ended + 10 * SECOND + MS, sweep, false);
        assert_eq!(plan.restart_at(), None);
        assert!(
            plan.restart_after_empty_wakeup(ended + 11 * SECOND),
            "cheap"
        );
    }

    #[test]
    fn checks_for_overdue_jobs_take_5_percent_of_the_time_and_start_over_every_thirty_seconds() {
        let (mut plan, now) = started();
        let restart = Sweep {
            restart: true,
            rereads_catalog: false,
            started: now,
        };
        let short = Sweep {
            restart: false,
            ..restart
        };
        assert_eq!(plan.checks_overdue(now, short), Some(After::Reached));
        plan.checked_overdue(now, now + 10 * MS);
        assert_eq!(plan.checks_overdue(now + 209 * MS, short), None);
        assert_eq!(
            plan.checks_overdue(now + 210 * MS, restart),
            Some(After::Recent)
        );
        assert_eq!(
            plan.checks_overdue(now + SECOND, restart),
            Some(After::Reached)
        );
        assert_eq!(
            plan.checks_overdue(now + 31 * SECOND, restart),
            Some(After::Recent)
        );
    }

    #[test]
    fn the_search_for_due_jobs_starts_shortly_before_the_last_look_that_left_none() {
        let (mut plan, now) = started();
        assert_eq!(plan.due_since(), None, "all due jobs");
        let at = SystemTime::UNIX_EPOCH + 1_000_000 * SECOND;
        plan.none_due(at);
        assert_eq!(plan.due_since(), Some(at - 2 * SECOND));
        plan.start_over(now);
        expect_sweep(plan.next(now, Trigger::Poll, false));
        assert_eq!(
            plan.due_since(),
            None,
            "a restart searches for all due jobs"
        );
    }

    #[test]
    fn a_locked_due_job_is_searched_for_again_after_a_second_and_then_less_and_less_often() {
        let (mut plan, now) = started();
        let at = |seconds: u32| SystemTime::UNIX_EPOCH + (1_000_000 + seconds) * SECOND;
        let look = |plan: &mut LookPlan, after: u32| {
            plan.next(now + after * SECOND, Trigger::Poll, false);
            plan.due_since()
        };
        plan.left_locked(now, at(0), at(10));
        assert_eq!(look(&mut plan, 0), Some(at(8)), "others are due");
        assert_eq!(look(&mut plan, 1), Some(at(0) - 2 * SECOND));
        plan.left_locked(now + SECOND, at(0), at(11));
        assert_eq!(look(&mut plan, 2), Some(at(9)));
        // A later job is locked too, which the next search for the first one covers.
        plan.left_locked(now + 2 * SECOND, at(11), at(12));
        assert_eq!(look(&mut plan, 3), Some(at(0) - 2 * SECOND));
        // The first one was promoted.
        plan.left_locked(now + 3 * SECOND, at(11), at(20));
        assert_eq!(look(&mut plan, 3), Some(at(18)));
        assert_eq!(look(&mut plan, 4), Some(at(9)));
        plan.none_due(at(21));
        assert_eq!(look(&mut plan, 20), Some(at(19)));
    }

    #[test]
    fn recent_cursors_are_updated_every_tenth_of_a_second() {
        let (mut plan, now) = started();
        assert!(plan.looks_back(now));
        assert!(!plan.looks_back(now + 99 * MS));
        assert!(plan.looks_back(now + 100 * MS));
    }
}
