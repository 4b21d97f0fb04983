//! The checker: pure functions over the requests, the attempts that really ran, and the rows of the database.
//!
//! Each rule counts its cases. A rule without a case proves nothing and fails the run.

mod history;
mod known;

mod accepted;
mod admin_actions;
mod attempts;
mod backoff;
mod cancellations;
mod children;
mod debounces;
mod dependencies;
mod effects;
mod flows;
mod frozen;
mod keys;
mod limits;
mod order;
mod recovery;
mod schedules;
mod settled;
mod signals;
mod singletons;
mod steps;
mod suspensions;
mod throttles;
mod times;

#[cfg(test)]
mod tests;

use rouse_workbench::percentiles::Percentiles;

use super::ledger::Run;
use super::plan::Fault;
pub(super) use history::job_history;
pub(super) use known::Known;

/// The findings of one rule.
#[derive(Default)]
pub(super) struct Found {
    /// Number of cases that were checked.
    pub(super) checked: u64,
    pub(super) violations: Vec<Violation>,
    /// Measurements, in milliseconds; empty if the rule does not measure anything.
    pub(super) measured_ms: Vec<f64>,
    /// The measured interval, as text.
    pub(super) measures: &'static str,
    /// The longest time in microseconds, and its job.
    slowest: Option<(i64, i64)>,
}

/// A case that breaks the rule.
#[derive(Debug)]
pub(super) struct Violation {
    pub(super) job: Option<i64>,
    pub(super) message: String,
}

impl Found {
    /// Counts a case. If it has `violated` the rule, records this with a message.
    fn case(
        &mut self,
        job: impl Into<Option<i64>>,
        violated: bool,
        message: impl FnOnce() -> String,
    ) {
        self.checked += 1;
        self.unless(job, violated, message);
    }

    /// Adds the cases and violations of another part of the rule.
    fn add(&mut self, other: Self) {
        self.checked += other.checked;
        self.violations.extend(other.violations);
    }

    /// Counts a case that took `us` microseconds.
    fn took(&mut self, job: i64, us: i64) {
        self.checked += 1;
        self.measured_ms.push(us as f64 / 1000.0);
        self.slowest = self.slowest.max(Some((us, job)));
    }

    /// Records a violation if the 99th percentile of the measurements is above the limit.
    fn p99_within(mut self, limit_us: i64, measures: &'static str) -> Self {
        self.measures = measures;
        let limit_ms = limit_us as f64 / 1000.0;
        if let Ok(Percentiles { p99, .. }) = Percentiles::of(self.measured_ms.clone())
            && p99 > limit_ms
        {
            let job = self.slowest.map(|(_, job)| job);
            self.violations.push(Violation {
                job,
                message: format!(
                    "p99 {measures} is {p99:.0} ms, more than {limit_ms:.0} ms; the slowest is job {job:?}"
                ),
            });
        }
        self
    }

    /// Records a violation if a case has `violated` the rule, without counting the case.
    fn unless(
        &mut self,
        job: impl Into<Option<i64>>,
        violated: bool,
        message: impl FnOnce() -> String,
    ) {
        if violated {
            self.violations.push(Violation {
                job: job.into(),
                message: message(),
            });
        }
    }
}

/// A guarantee, and the function that checks it.
pub(super) struct Rule {
    /// Stable, for scripts and tests.
    pub(super) name: &'static str,
    /// The guarantee as text, as docs/explanation/reliability.md lists it.
    pub(super) guarantee: &'static str,
    needs: Needs,
    check: fn(&Known<'_>) -> Found,
}

/// The runs in which a rule must have a case.
#[derive(Clone, Copy)]
enum Needs {
    /// Every run.
    Nothing,
    /// Runs of at least this many minutes.
    Minutes(f64),
    /// Runs with any of these faults.
    AnyOf(&'static [Fault]),
    /// Runs of at least this many minutes with any of these faults; a shorter run may lack a case by chance.
    For(f64, &'static [Fault]),
}

/// Every rule.
pub(super) const RULES: [Rule; 51] = [
    Rule {
        name: "accepted_jobs_exist",
        guarantee: "a job exists if its enqueue returned its id",
        needs: Needs::Nothing,
        check: accepted::kept,
    },
    Rule {
        name: "refused_leaves_nothing",
        guarantee: "an enqueue that was refused or rolled back leaves no job, and one without a response at most one",
        needs: Needs::Nothing,
        check: accepted::nothing_else,
    },
    Rule {
        name: "settled_once",
        guarantee: "a job is live or has ended once, and each of its attempts has ended at most once",
        needs: Needs::Nothing,
        check: settled::once,
    },
    Rule {
        name: "stale_outcome",
        guarantee: "an outcome is written by the attempt whose claim is recorded with it",
        needs: Needs::Nothing,
        check: settled::by_its_claim,
    },
    Rule {
        name: "no_start_after_end",
        guarantee: "no attempt starts after its job has ended",
        needs: Needs::Nothing,
        check: settled::no_start_after_end,
    },
    Rule {
        name: "revoked",
        guarantee: "an attempt that has lost its job changes nothing outside the database",
        needs: Needs::AnyOf(&[Fault::FreezeHost]),
        check: settled::revoked,
    },
    Rule {
        name: "stale_step",
        guarantee: "only the attempt that holds the job records the result of a step",
        needs: Needs::Nothing,
        check: steps::stale_step,
    },
    Rule {
        name: "steps_are_kept",
        guarantee: "a recorded step is not repeated, and every later attempt gets its result",
        needs: Needs::Nothing,
        check: steps::steps_are_kept,
    },
    Rule {
        name: "stale_progress",
        guarantee: "only the attempt that holds the job reports progress",
        needs: Needs::Nothing,
        check: steps::stale_progress,
    },
    Rule {
        name: "no_early_start",
        guarantee: "no job starts before its run_at",
        needs: Needs::Nothing,
        check: times::no_early_start,
    },
    Rule {
        name: "pause_holds",
        guarantee: "no job of a paused queue is claimed",
        needs: Needs::AnyOf(&[Fault::PauseQueue]),
        check: times::pause_holds,
    },
    Rule {
        name: "attempts_within_max",
        guarantee: "no more attempts fail than max_attempts allows; each crash of the server may add one started attempt",
        needs: Needs::Nothing,
        check: attempts::within_max,
    },
    Rule {
        name: "lost_after_crashes",
        guarantee: "a job fails as lost after lost_max crashes of its workers, and not before; other losses do not count",
        needs: Needs::AnyOf(&[Fault::CrashJob]),
        check: attempts::lost_after_crashes,
    },
    Rule {
        name: "ends_as_decided",
        guarantee: "a job that no admin action ended ends as its handler decided",
        needs: Needs::Nothing,
        check: attempts::ends_as_decided,
    },
    Rule {
        name: "admin_ends_hold",
        guarantee: "a job keeps the end that an admin action gave it, if the action returned true",
        needs: Needs::AnyOf(&[Fault::Cancel, Fault::Complete, Fault::Fail]),
        check: admin_actions::answers_hold,
    },
    Rule {
        name: "admin_ends_were_requested",
        guarantee: "no job is ended by an admin action that was not requested",
        needs: Needs::AnyOf(&[Fault::Cancel, Fault::Complete, Fault::Fail]),
        check: admin_actions::were_requested,
    },
    Rule {
        name: "ended_in_line",
        guarantee: "a job that an admin action ended while its claim waited in line does not start",
        needs: Needs::AnyOf(&[Fault::CancelLine]),
        check: cancellations::ended_in_line,
    },
    Rule {
        name: "cancels_arrive",
        guarantee: "an attempt whose job was cancelled while its host could not listen stops: p99 within 2.5 s",
        needs: Needs::For(10.0, &[Fault::CutListeners]),
        check: cancellations::cancels_arrive,
    },
    Rule {
        name: "unique_key",
        guarantee: "no two live jobs of a handler and a tenant have the same unique key",
        needs: Needs::Nothing,
        check: keys::one_live_job,
    },
    Rule {
        name: "one_retry",
        guarantee: "a finished job has at most one live retry",
        needs: Needs::AnyOf(&[Fault::Retry]),
        check: keys::one_live_retry,
    },
    Rule {
        name: "nothing_stuck",
        guarantee: "after the run, no job is running and no due job is waiting",
        needs: Needs::Nothing,
        check: recovery::nothing_stuck,
    },
    Rule {
        name: "runs_again_after_kill",
        guarantee: "a job whose host was killed runs again, while the server is up: p99 within the lease plus 2 s",
        needs: Needs::AnyOf(&[Fault::KillHost]),
        check: recovery::runs_again_after_kill,
    },
    Rule {
        name: "orphans_first",
        guarantee: "a worker that adopts an orphan, and served its handler before, claims no queued job between the end of the orphan's lease and the adoption",
        needs: Needs::For(5.0, &[Fault::KillHost]),
        check: order::orphans_first,
    },
    Rule {
        name: "one_backoff",
        guarantee: "all connection attempts of a host with one login share one backoff during an outage: 1, 2, 4 … 60 s",
        needs: Needs::For(10.0, &[Fault::CrashServer]),
        check: backoff::one_backoff,
    },
    Rule {
        name: "frozen_claims_run",
        guarantee: "jobs claimed by a host that was frozen during the claim run elsewhere: p99 within the lease plus 2 s",
        needs: Needs::For(10.0, &[Fault::FreezeInClaim]),
        check: frozen::claims_run,
    },
    Rule {
        name: "frozen_blocks_nothing",
        guarantee: "jobs claimed by a host that is frozen during the claim can be cancelled within 2 s",
        needs: Needs::For(10.0, &[Fault::FreezeInClaim]),
        check: frozen::blocks_nothing,
    },
    Rule {
        name: "stop_loses_nothing",
        guarantee: "a host that is stopped cleanly loses no running attempt",
        needs: Needs::For(5.0, &[Fault::StopHost]),
        check: recovery::stop_loses_nothing,
    },
    Rule {
        name: "hosts_stay_up",
        guarantee: "no host exits on its own unless another host has its id, and every host stops on request",
        needs: Needs::Nothing,
        check: recovery::hosts_stay_up,
    },
    Rule {
        name: "one_holder",
        guarantee: "of two hosts with the same id and key only one exits, however often it is restarted",
        needs: Needs::For(5.0, &[Fault::SameId]),
        check: recovery::one_holder,
    },
    Rule {
        name: "no_child_before_parents",
        guarantee: "no job is claimed before the chains that it waits for have ended in a way that lets it run",
        needs: Needs::Nothing,
        check: dependencies::no_child_before_parents,
    },
    Rule {
        name: "no_child_stranded",
        guarantee: "no job waits for chains that have all ended, and none is cancelled for a failure that did not happen",
        needs: Needs::Nothing,
        check: dependencies::no_child_stranded,
    },
    Rule {
        name: "each_due_time_once",
        guarantee: "each due time of a schedule has one job, and none is left out",
        needs: Needs::Nothing,
        check: schedules::each_due_time_once,
    },
    Rule {
        name: "children_only_of_successes",
        guarantee: "a job that has succeeded has the children that it announces, and no other job has any",
        needs: Needs::Nothing,
        check: children::only_of_successes,
    },
    Rule {
        name: "chain_continues_once",
        guarantee: "a chain has one further job for each success that continues it, and none for other attempts",
        needs: Needs::Nothing,
        check: children::chain_continues_once,
    },
    Rule {
        name: "calls_once",
        guarantee: "a call makes one job, and returns how that job has ended",
        needs: Needs::Nothing,
        check: children::calls_once,
    },
    Rule {
        name: "signals_not_lost",
        guarantee: "a signal that was accepted ends one wait, or is kept; no wait times out while it is there",
        needs: Needs::Nothing,
        check: signals::not_lost,
    },
    Rule {
        name: "suspended_not_stranded",
        guarantee: "no job stays suspended once its time has passed, its calls have ended, or its signal has arrived",
        needs: Needs::Nothing,
        check: suspensions::not_stranded,
    },
    Rule {
        name: "suspensions_not_counted",
        guarantee: "the attempts of a suspended job that do not count are exactly those that were lost, suspended, or given back after their start",
        needs: Needs::Nothing,
        check: suspensions::not_counted,
    },
    Rule {
        name: "steps_once",
        guarantee: "an attempt after a suspension repeats no recorded step",
        needs: Needs::Nothing,
        check: suspensions::steps_once,
    },
    Rule {
        name: "effects_once",
        guarantee: "the effects of a job are committed once if it has succeeded, otherwise never; those of a step, with its record",
        needs: Needs::Nothing,
        check: effects::once,
    },
    Rule {
        name: "sums_are_exact",
        guarantee: "the balance of each account is the sum of the effects of the jobs",
        needs: Needs::Nothing,
        check: effects::sums_are_exact,
    },
    Rule {
        name: "limit_holds",
        guarantee: "no more jobs of a key run at the same time than its gate permits",
        needs: Needs::Nothing,
        check: limits::hold,
    },
    Rule {
        name: "throttle_holds",
        guarantee: "no more jobs of a key are claimed in a period than its gate permits, and starts follow claims within 1.5 s",
        needs: Needs::Nothing,
        check: throttles::hold,
    },
    Rule {
        name: "singleton_holds",
        guarantee: "while a job of a singleton waits, or has not ended, no other job of its key is enqueued",
        needs: Needs::Nothing,
        check: singletons::hold,
    },
    Rule {
        name: "debounce_holds",
        guarantee: "the last job of a burst runs, and not before the burst has ended",
        needs: Needs::Nothing,
        check: debounces::hold,
    },
    Rule {
        name: "flow_whole",
        guarantee: "each job of a flow is enqueued once if the call was accepted, and none if it was refused",
        needs: Needs::Nothing,
        check: flows::whole,
    },
    Rule {
        name: "flow_in_order",
        guarantee: "no job of a flow starts before those that it waits for have ended in a way that its on_failure permits",
        needs: Needs::Nothing,
        check: flows::in_order,
    },
    Rule {
        name: "flow_cancel_holds",
        guarantee: "each job of a cancelled flow has ended, and none starts 2.5 s later",
        needs: Needs::Minutes(1.0),
        check: flows::cancelled_rests,
    },
    Rule {
        name: "flow_retry_repeats_failures",
        guarantee: "a retry of a flow repeats once each job that failed or was cancelled, and none that has succeeded",
        needs: Needs::Minutes(1.0),
        check: flows::retries,
    },
    Rule {
        name: "flow_not_stranded",
        guarantee: "no job of a flow waits at the end, except for the retry of one that has failed",
        needs: Needs::Nothing,
        check: flows::not_stranded,
    },
    Rule {
        name: "flow_delete_leaves_nothing",
        guarantee: "a deleted flow has no live job and no dependency, and none of its jobs starts 2.5 s later",
        needs: Needs::Minutes(5.0),
        check: flows::deleted,
    },
];

impl Rule {
    /// Whether this run has a gap if the rule had no case.
    pub(super) fn is_needed(&self, run: &Run) -> bool {
        match self.needs {
            Needs::Nothing => true,
            Needs::Minutes(minutes) => run.minutes >= minutes,
            Needs::AnyOf(faults) => has_any(run, faults),
            Needs::For(minutes, faults) => run.minutes >= minutes && has_any(run, faults),
        }
    }
}

fn has_any(run: &Run, faults: &[Fault]) -> bool {
    faults.iter().any(|fault| run.faults.contains(fault))
}

/// Checks all rules.
pub(super) fn check(known: &Known<'_>) -> Vec<(&'static Rule, Found)> {
    RULES
        .iter()
        .map(|rule| (rule, (rule.check)(known)))
        .collect()
}
