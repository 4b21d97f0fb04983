//! The checker: pure functions over what was asked, what really ran, and what the database says.
//!
//! Each rule counts what it has looked at. One that has looked at nothing has shown nothing, and fails the run.

mod file;
mod known;

mod accepted;
mod admin_actions;
mod attempts;
mod backoff;
mod frozen;
mod heard;
mod keys;
mod order;
mod recovery;
mod settled;
mod steps;
mod times;

#[cfg(test)]
mod tests;

use rouse_workbench::percentiles::Percentiles;

use super::ledger::Run;
use super::plan::Fault;
pub(super) use file::file_on;
pub(super) use known::Known;

/// What a rule has found.
#[derive(Default)]
pub(super) struct Found {
    /// How many cases it has looked at.
    pub(super) checked: u64,
    pub(super) violations: Vec<Violation>,
    /// Milliseconds, where the rule measures something.
    pub(super) measured_ms: Vec<f64>,
    /// From what to what.
    pub(super) measures: &'static str,
    /// The job that has taken longest, and how long that was.
    slowest: Option<(i64, i64)>,
}

/// One case that is against the rule.
#[derive(Debug)]
pub(super) struct Violation {
    pub(super) job: Option<i64>,
    pub(super) what: String,
}

impl Found {
    /// One case, which might have been against the rule; where it is, `what` says how.
    fn case(&mut self, job: impl Into<Option<i64>>, wrong: bool, what: impl FnOnce() -> String) {
        self.checked += 1;
        self.unless(job, wrong, what);
    }

    /// One case that has taken so long.
    fn took(&mut self, job: i64, us: i64) {
        self.checked += 1;
        self.measured_ms.push(us as f64 / 1000.0);
        self.slowest = self.slowest.max(Some((us, job)));
    }

    /// Ninety-nine of a hundred cases have taken no longer than this.
    fn p99_within(mut self, limit_us: i64, measures: &'static str) -> Self {
        self.measures = measures;
        let limit_ms = limit_us as f64 / 1000.0;
        if let Ok(Percentiles { p99, .. }) = Percentiles::of(self.measured_ms.clone())
            && p99 > limit_ms
        {
            let job = self.slowest.map(|(_, job)| job);
            self.violations.push(Violation {
                job,
                what: format!(
                    "p99 {measures} is {p99:.0} ms; {limit_ms:.0} ms are allowed; the slowest is job {job:?}"
                ),
            });
        }
        self
    }

    /// What is against the rule where it is, and shows nothing where it is not.
    fn unless(&mut self, job: impl Into<Option<i64>>, wrong: bool, what: impl FnOnce() -> String) {
        if wrong {
            self.violations.push(Violation {
                job: job.into(),
                what: what(),
            });
        }
    }
}

/// A promise, and the function that looks whether it was kept.
pub(super) struct Rule {
    /// Stable, for scripts and tests.
    pub(super) name: &'static str,
    /// A promise, in words.
    pub(super) promise: &'static str,
    needs: Needs,
    check: fn(&Known<'_>) -> Found,
}

/// What a run has to be like for a rule to have a case in it for sure.
#[derive(Clone, Copy)]
enum Needs {
    /// There is always something to look at.
    Nothing,
    /// Any of these faults.
    AnyOf(&'static [Fault]),
    /// The same, for so many minutes: in a shorter run there may be none by chance.
    For(f64, &'static [Fault]),
}

/// Every rule.
pub(super) const RULES: [Rule; 29] = [
    Rule {
        name: "accepted_is_kept",
        promise: "a job whose enqueue was answered with its id is there",
        needs: Needs::Nothing,
        check: accepted::kept,
    },
    Rule {
        name: "refused_leaves_nothing",
        promise: "what was refused or rolled back has left no job, what is unknown at most one",
        needs: Needs::Nothing,
        check: accepted::nothing_else,
    },
    Rule {
        name: "settled_once",
        promise: "a job is live or has ended once, and so has each of its attempts",
        needs: Needs::Nothing,
        check: settled::once,
    },
    Rule {
        name: "stale_outcome",
        promise: "an outcome is that of the attempt whose claim stands with it",
        needs: Needs::Nothing,
        check: settled::by_its_claim,
    },
    Rule {
        name: "over_at_its_end",
        promise: "no attempt starts after its job has ended",
        needs: Needs::Nothing,
        check: settled::over_at_its_end,
    },
    Rule {
        name: "revoked",
        promise: "an attempt that has lost its job changes nothing outside of the database any more",
        needs: Needs::AnyOf(&[Fault::FreezeHost]),
        check: settled::revoked,
    },
    Rule {
        name: "stale_step",
        promise: "the result of a step is recorded by the attempt that has the job",
        needs: Needs::Nothing,
        check: steps::stale_step,
    },
    Rule {
        name: "steps_are_kept",
        promise: "a step that was recorded is not done again, and each later attempt gets its result",
        needs: Needs::Nothing,
        check: steps::steps_are_kept,
    },
    Rule {
        name: "stale_progress",
        promise: "progress is said by the attempt that has the job",
        needs: Needs::Nothing,
        check: steps::stale_progress,
    },
    Rule {
        name: "not_early",
        promise: "no job starts before its run_at",
        needs: Needs::Nothing,
        check: times::not_early,
    },
    Rule {
        name: "pause_holds",
        promise: "nothing of a paused queue is claimed",
        needs: Needs::AnyOf(&[Fault::PauseQueue]),
        check: times::pause_holds,
    },
    Rule {
        name: "attempts_within_max",
        promise: "no more attempts fail than may; of started ones, one more for each crash of the server",
        needs: Needs::Nothing,
        check: attempts::within_max,
    },
    Rule {
        name: "losses_end",
        promise: "a job whose workers crash so often fails, and no sooner; other losses do not count",
        needs: Needs::For(10.0, &[Fault::KillHost]),
        check: attempts::losses_end,
    },
    Rule {
        name: "ends_as_asked",
        promise: "a job that was left alone ends as its handler says",
        needs: Needs::Nothing,
        check: attempts::ends_as_asked,
    },
    Rule {
        name: "admin_ends_hold",
        promise: "a call from outside that was answered is how the job has ended",
        needs: Needs::AnyOf(&[Fault::Cancel, Fault::Complete, Fault::Fail]),
        check: admin_actions::answers_hold,
    },
    Rule {
        name: "admin_ends_were_requested",
        promise: "no job was ended from outside without being asked to",
        needs: Needs::AnyOf(&[Fault::Cancel, Fault::Complete, Fault::Fail]),
        check: admin_actions::were_asked,
    },
    Rule {
        name: "ended_in_line",
        promise: "a job that was ended from outside while its claim stood in line does not start",
        needs: Needs::AnyOf(&[Fault::CancelLine]),
        check: heard::ended_in_line,
    },
    Rule {
        name: "cancels_arrive",
        promise: "an attempt whose job was cancelled while its host could not listen does nothing any more: p99 within 2.5 s",
        needs: Needs::For(10.0, &[Fault::CutListeners]),
        check: heard::cancels_arrive,
    },
    Rule {
        name: "unique_key",
        promise: "no two live jobs of a tenant have the same unique key",
        needs: Needs::Nothing,
        check: keys::one_live_job,
    },
    Rule {
        name: "one_retry",
        promise: "of a finished job no two retries are live",
        needs: Needs::AnyOf(&[Fault::Retry]),
        check: keys::one_live_retry,
    },
    Rule {
        name: "nothing_stuck",
        promise: "in the end nothing runs, and nothing waits whose time has come",
        needs: Needs::Nothing,
        check: recovery::nothing_stuck,
    },
    Rule {
        name: "taken_up_again",
        promise: "from a kill to the job running again, while the server is up: p99 within the lease and 2 s",
        needs: Needs::AnyOf(&[Fault::KillHost]),
        check: recovery::taken_up_again,
    },
    Rule {
        name: "orphans_first",
        promise: "between the end of an orphan's lease and its adoption, who adopts it claims no queued job",
        needs: Needs::For(5.0, &[Fault::KillHost]),
        check: order::orphans_first,
    },
    Rule {
        name: "one_backoff",
        promise: "all that a host does on an outage tries to connect on one ladder: 1, 2, 4 … 60 s",
        needs: Needs::For(10.0, &[Fault::CrashServer]),
        check: backoff::one_backoff,
    },
    Rule {
        name: "frozen_claims_run",
        promise: "what a host had claimed that is frozen in its claim runs elsewhere: p99 within the lease and 2 s",
        needs: Needs::For(10.0, &[Fault::FreezeInClaim]),
        check: frozen::claims_run,
    },
    Rule {
        name: "frozen_holds_nothing",
        promise: "what a host had claimed that is frozen in its claim can be cancelled meanwhile, within 2 s",
        needs: Needs::For(10.0, &[Fault::FreezeInClaim]),
        check: frozen::holds_nothing,
    },
    Rule {
        name: "stop_burns_nothing",
        promise: "a host that is stopped in order loses no attempt that runs",
        needs: Needs::For(5.0, &[Fault::StopHost]),
        check: recovery::stop_burns_nothing,
    },
    Rule {
        name: "hosts_live",
        promise: "no host ends by itself but one whose id another has, and each stops when it is told to",
        needs: Needs::Nothing,
        check: recovery::hosts_live,
    },
    Rule {
        name: "one_holder",
        promise: "of two hosts with one id and key only one ends, however often it is started again",
        needs: Needs::For(5.0, &[Fault::SameId]),
        check: recovery::one_holder,
    },
];

impl Rule {
    /// Whether this run has shown nothing where the rule had no case.
    pub(super) fn is_needed(&self, run: &Run) -> bool {
        match self.needs {
            Needs::Nothing => true,
            Needs::AnyOf(faults) => has_any(run, faults),
            Needs::For(minutes, faults) => run.minutes >= minutes && has_any(run, faults),
        }
    }
}

fn has_any(run: &Run, faults: &[Fault]) -> bool {
    faults.iter().any(|fault| run.faults.contains(fault))
}

/// All rules over all that is known.
pub(super) fn check(known: &Known<'_>) -> Vec<(&'static Rule, Found)> {
    RULES
        .iter()
        .map(|rule| (rule, (rule.check)(known)))
        .collect()
}
