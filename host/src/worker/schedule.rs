//! What the next look is for: a function of what is known and of the time, which is handed in.

use std::time::{Duration, Instant};

use super::lanes::After;
use super::look::Why;

/// A restart takes at most one part in so many of the time: re-reading is expensive while somebody's open transaction keeps old rows
/// from being cleaned up.
const RESTART_SHARE: u32 = 20;
/// A restart without a reason takes at most one part in so many.
const RESTART_ANYWAY_SHARE: u32 = 100;
/// Due jobs and expired leases are looked for from this long before the last look that found none.
pub(super) const WINDOW_MARGIN: Duration = Duration::from_secs(2);

/// How often a worker looks behind its cursors. An operator does not set these; tests do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intervals {
    /// Turns are given before their jobs are committed, and those of a few milliseconds are committed in any order. Where there is no
    /// backlog, looks start where the cursors were this long ago, or up to twice as long.
    pub look_back: Duration,
    /// Between two short sweeps: what was committed late is found within about two of these.
    pub sweep: Duration,
    /// A restart re-reads everything. It waits no longer than this; it also comes without any reason this long after the last one; and
    /// after this long the catalog of lanes is re-read.
    pub restart: Duration,
    /// A restart without a reason comes at the latest after this long: what the last one took may have been a server that was slow once.
    pub restart_max: Duration,
}

impl Default for Intervals {
    /// 0.1 s, 1 s, 30 s, 5 minutes.
    fn default() -> Self {
        Self {
            look_back: Duration::from_millis(100),
            sweep: Duration::from_secs(1),
            restart: Duration::from_secs(30),
            restart_max: Duration::from_secs(300),
        }
    }
}

/// What a look does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// It goes back behind the cursors.
    Sweep(Sweep),
    /// It asks whether there is anything to do.
    Peek,
    /// It claims at once; `promote`: after it has given due jobs their turn.
    Claim { after: After, promote: bool },
}

/// A look that goes back behind the cursors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sweep {
    /// To the start, instead of a little.
    pub(super) restart: bool,
    /// The catalog of lanes is re-read.
    pub(super) rereads_catalog: bool,
    started: Instant,
}

/// When what is due.
#[derive(Debug)]
pub(super) struct Schedule {
    intervals: Intervals,
    look_back_at: Instant,
    sweep_at: Instant,
    /// Somebody has committed late.
    is_behind: bool,
    /// Before then no restart for that reason.
    restart_at: Instant,
    /// From then on one without a reason.
    restart_anyway_at: Instant,
    catalog_at: Instant,
    /// Before then no notification brings a sweep.
    behind_at: Instant,
    /// Before then it is not asked what has waited too long.
    overdue_at: Instant,
    /// From then on it is asked from the start of the lanes once.
    overdue_anew_at: Instant,
    due_at: Option<Instant>,
    /// When nothing was due any more; none: not known.
    none_due_since: Option<Instant>,
}

impl Schedule {
    pub(super) fn new(now: Instant, intervals: Intervals) -> Self {
        Self {
            intervals,
            look_back_at: now,
            sweep_at: now,
            is_behind: false,
            restart_at: now,
            restart_anyway_at: now,
            catalog_at: now,
            behind_at: now,
            overdue_at: now,
            overdue_anew_at: now,
            due_at: None,
            none_due_since: None,
        }
    }

    /// Whether "recent" is to be moved on before this look.
    pub(super) fn looks_back(&mut self, now: Instant) -> bool {
        let is_time = now >= self.look_back_at;
        if is_time {
            self.look_back_at = now + self.intervals.look_back;
        }
        is_time
    }

    /// What a look does that starts now. `known`: there is something to claim.
    pub(super) fn next(&mut self, now: Instant, why: Why, known: bool) -> Step {
        let patience = match why {
            // A job that somebody says is there comes first, and the sweep with the next look.
            Why::Woken => self.intervals.sweep,
            Why::More | Why::Poll => Duration::ZERO,
        };
        if now >= self.sweep_at + patience {
            return Step::Sweep(self.sweep(now));
        }
        if !known {
            return Step::Peek;
        }
        Step::Claim {
            after: match why {
                Why::More => After::Cursor,
                Why::Woken | Why::Poll => After::Recent,
            },
            promote: self.due_at.is_some_and(|due| now >= due),
        }
    }

    fn sweep(&mut self, now: Instant) -> Sweep {
        self.sweep_at = now + self.intervals.sweep;
        let restart = now >= self.restart_anyway_at || self.is_behind && now >= self.restart_at;
        let rereads_catalog = now >= self.catalog_at;
        if rereads_catalog {
            self.catalog_at = now + self.intervals.restart;
        }
        if restart {
            self.is_behind = false;
            self.none_due_since = None;
        }
        Sweep {
            restart,
            rereads_catalog,
            started: now,
        }
    }

    /// A sweep has ended. `late`: a transaction has ended whose jobs no short sweep finds. `is_cut`: it has perhaps not looked into all
    /// lanes.
    pub(super) fn swept(&mut self, now: Instant, sweep: Sweep, late: bool, is_cut: bool) {
        if late {
            self.is_behind = true;
            // After a restart the next one comes with the next sweep.
            if !sweep.restart {
                self.sweep_at = now;
            }
        }
        if sweep.restart {
            // A restart that has not looked into all lanes is none.
            self.is_behind |= is_cut;
            let took = now.saturating_duration_since(sweep.started);
            let Intervals {
                restart,
                restart_max,
                ..
            } = self.intervals;
            self.restart_at = now + (took * RESTART_SHARE).min(restart);
            let anyway = (took * RESTART_ANYWAY_SHARE).max(restart).min(restart_max);
            self.restart_anyway_at = now + anyway;
        }
    }

    /// Somebody says that there is a job, and it is not where one was looked for: its producer may have committed late, behind the
    /// cursors, or after it was due. True: the next look is to be made at once, and is a sweep from the start. At most once for each short
    /// sweep.
    pub(super) fn is_behind(&mut self, now: Instant) -> bool {
        if now < self.behind_at {
            return false;
        }
        self.behind_at = now + self.intervals.sweep;
        self.start_over(now);
        true
    }

    /// Makes the next look that is not an answer to a notification a sweep from the start.
    pub(super) fn start_over(&mut self, now: Instant) {
        self.sweep_at = now;
        self.is_behind = true;
        self.restart_at = now;
    }

    /// After a sweep whose claims were filled, which has perhaps not reached some lanes: from where on it is asked what has waited too
    /// long; none: it is not asked.
    pub(super) fn asks_overdue(&mut self, now: Instant, sweep: Sweep) -> Option<After> {
        if now < self.overdue_at {
            return None;
        }
        if sweep.restart && now >= self.overdue_anew_at {
            self.overdue_anew_at = now + self.intervals.restart;
            return Some(After::Recent);
        }
        Some(After::Reached)
    }

    /// It was asked what has waited too long. Where an open transaction keeps many dead rows that is as expensive as a restart, and takes
    /// as small a share of the time.
    pub(super) fn asked_overdue(&mut self, asked: Instant, now: Instant) {
        let again = now.saturating_duration_since(asked) * RESTART_SHARE;
        self.overdue_at = now + again.min(self.intervals.restart);
    }

    /// When the next scheduled job or retry is due; none: none is known.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.due_at
    }

    /// The next scheduled job or retry is due after this wait; none: there is none.
    pub(super) fn next_due(&mut self, now: Instant, wait: Option<Duration>) {
        self.due_at = wait.map(|wait| now + wait);
    }

    /// A look that started then has found nothing due.
    pub(super) fn none_was_due(&mut self, started: Instant) {
        self.none_due_since = Some(started);
    }

    /// How far back jobs are looked for that have become due; none: everything.
    pub(super) fn due_within(&self, now: Instant) -> Option<Duration> {
        let since = self.none_due_since?;
        Some(now.saturating_duration_since(since) + WINDOW_MARGIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const MS: Duration = Duration::from_millis(1);

    /// A schedule whose first sweep, which re-reads everything, took a millisecond, and the time after it.
    fn started() -> (Schedule, Instant) {
        let start = Instant::now();
        let mut schedule = Schedule::new(start, Intervals::default());
        let sweep = expect_sweep(schedule.next(start, Why::Poll, false));
        assert!(sweep.restart && sweep.rereads_catalog);
        let now = start + MS;
        schedule.swept(now, sweep, false, false);
        (schedule, now)
    }

    fn expect_sweep(step: Step) -> Sweep {
        match step {
            Step::Sweep(sweep) => sweep,
            Step::Peek | Step::Claim { .. } => panic!("{step:?} is not a sweep"),
        }
    }

    /// The sweeps of so many seconds, each of which takes this long: which of them were restarts.
    fn sweep_for(
        schedule: &mut Schedule,
        mut now: Instant,
        seconds: u64,
        took: Duration,
        late: bool,
    ) -> Vec<bool> {
        let end = now + SECOND * u32::try_from(seconds).unwrap();
        let mut restarts = Vec::new();
        while now < end {
            if let Step::Sweep(sweep) = schedule.next(now, Why::Poll, false) {
                restarts.push(sweep.restart);
                let took = if sweep.restart { took } else { MS };
                now += took;
                schedule.swept(now, sweep, late, false);
            }
            now += 100 * MS;
        }
        restarts
    }

    #[test]
    fn between_sweeps_a_poll_asks_and_what_is_known_is_claimed_at_once() {
        let (mut schedule, now) = started();
        assert_eq!(schedule.next(now, Why::Poll, false), Step::Peek);
        let claim = |after, promote| Step::Claim { after, promote };
        assert_eq!(
            schedule.next(now, Why::More, true),
            claim(After::Cursor, false)
        );
        assert_eq!(
            schedule.next(now, Why::Woken, true),
            claim(After::Recent, false)
        );
        schedule.next_due(now, Some(5 * MS));
        assert_eq!(
            schedule.next(now + 4 * MS, Why::Woken, true),
            claim(After::Recent, false)
        );
        assert_eq!(
            schedule.next(now + 5 * MS, Why::Woken, true),
            claim(After::Recent, true)
        );
    }

    #[test]
    fn a_sweep_comes_each_second_and_waits_a_second_longer_for_a_job_that_is_known() {
        let (mut schedule, now) = started();
        let later = now + SECOND;
        assert!(matches!(
            schedule.next(later, Why::Woken, true),
            Step::Claim { .. }
        ));
        assert!(!expect_sweep(schedule.next(later, Why::More, true)).restart);
        assert_eq!(schedule.next(later, Why::Poll, false), Step::Peek);
        expect_sweep(schedule.next(later + 2 * SECOND, Why::Woken, true));
    }

    #[test]
    fn what_was_committed_late_brings_a_restart_at_once_and_then_for_a_twentieth_of_the_time() {
        let (mut schedule, now) = started();
        let later = now + SECOND;
        let sweep = expect_sweep(schedule.next(later, Why::Poll, false));
        schedule.swept(later, sweep, true, false);
        assert!(
            expect_sweep(schedule.next(later, Why::Poll, false)).restart,
            "at once"
        );
        // Restarts of 0.5 s each that always find that somebody was late again: one in ten seconds.
        let (mut schedule, now) = started();
        let restarts = sweep_for(&mut schedule, now, 40, 500 * MS, true);
        assert_eq!(
            restarts.iter().filter(|restart| **restart).count(),
            4,
            "{restarts:?}"
        );
    }

    #[test]
    fn a_restart_without_a_reason_comes_after_thirty_seconds_or_later_where_it_is_expensive() {
        let restarts_in = |seconds, took| {
            let (mut schedule, now) = started();
            let restarts = sweep_for(&mut schedule, now, seconds, took, false);
            restarts.iter().filter(|restart| **restart).count()
        };
        assert_eq!(restarts_in(29, MS), 0);
        assert_eq!(restarts_in(95, MS), 3);
        // One second each: a hundredth of the time.
        assert_eq!(restarts_in(125, SECOND), 1);
        assert_eq!(restarts_in(145, SECOND), 2);
        // A minute each would be one in 100 minutes: five minutes are the most.
        assert_eq!(restarts_in(30 + 60 + 310, 60 * SECOND), 2);
    }

    #[test]
    fn a_restart_that_has_not_looked_into_all_lanes_is_made_again() {
        let start = Instant::now();
        let mut schedule = Schedule::new(start, Intervals::default());
        let sweep = expect_sweep(schedule.next(start, Why::Poll, false));
        schedule.swept(start, sweep, false, true);
        assert!(expect_sweep(schedule.next(start + SECOND, Why::Poll, false)).restart);
    }

    #[test]
    fn a_notification_that_finds_nothing_brings_a_restart_once_a_second() {
        let (mut schedule, now) = started();
        assert!(schedule.is_behind(now));
        let sweep = expect_sweep(schedule.next(now, Why::Poll, false));
        assert!(sweep.restart && !sweep.rereads_catalog);
        schedule.swept(now, sweep, false, false);
        assert!(!schedule.is_behind(now + 999 * MS));
        assert!(schedule.is_behind(now + SECOND));
    }

    #[test]
    fn what_has_waited_too_long_is_asked_for_a_twentieth_of_the_time_and_from_the_start_each_thirty_seconds()
     {
        let (mut schedule, now) = started();
        let restart = Sweep {
            restart: true,
            rereads_catalog: false,
            started: now,
        };
        let short = Sweep {
            restart: false,
            ..restart
        };
        assert_eq!(schedule.asks_overdue(now, short), Some(After::Reached));
        schedule.asked_overdue(now, now + 10 * MS);
        assert_eq!(schedule.asks_overdue(now + 209 * MS, short), None);
        assert_eq!(
            schedule.asks_overdue(now + 210 * MS, restart),
            Some(After::Recent)
        );
        assert_eq!(
            schedule.asks_overdue(now + SECOND, restart),
            Some(After::Reached)
        );
        assert_eq!(
            schedule.asks_overdue(now + 31 * SECOND, restart),
            Some(After::Recent)
        );
    }

    #[test]
    fn due_jobs_are_looked_for_from_before_the_last_look_that_found_none() {
        let (mut schedule, now) = started();
        assert_eq!(schedule.due_within(now), None, "everything");
        schedule.none_was_due(now);
        assert_eq!(schedule.due_within(now + SECOND), Some(3 * SECOND));
        schedule.start_over(now);
        expect_sweep(schedule.next(now, Why::Poll, false));
        assert_eq!(
            schedule.due_within(now),
            None,
            "a restart looks for everything"
        );
    }

    #[test]
    fn recent_is_moved_on_each_tenth_of_a_second() {
        let (mut schedule, now) = started();
        assert!(schedule.looks_back(now));
        assert!(!schedule.looks_back(now + 99 * MS));
        assert!(schedule.looks_back(now + 100 * MS));
    }
}
