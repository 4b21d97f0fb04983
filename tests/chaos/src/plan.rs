//! The schedule of faults. The seed alone determines it.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::random::Random;

/// Hosts start and take their first jobs before the first fault.
const QUIET_MS: u64 = 4_000;

/// A fault, or an admin action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Fault {
    /// kill -9 of a host; another one replaces it
    KillHost,
    /// SIGSTOP of a host until its leases have expired, then SIGCONT
    FreezeHost,
    /// SIGTERM of a host, which drains; another one replaces it
    StopHost,
    /// pg_terminate_backend of a few connections
    TerminateBackends,
    /// Postgres is stopped with `-m immediate`, and started again
    CrashServer,
    /// kill -9 of one backend: Postgres ends all others and recovers
    KillBackend,
    /// The rows of rouse.sleeper are deleted: no worker is notified until it registers as a sleeper again
    ForgetSleepers,
    /// Another build of the module is put into the handlers folder
    ReplaceModule,
    /// A queue is paused, and resumed a little later
    PauseQueue,
    /// A job is cancelled
    Cancel,
    /// An operator completes a job
    Complete,
    /// An operator fails a job
    Fail,
    /// A finished job is retried
    Retry,
    /// A job is moved to another time
    Reschedule,
    /// More jobs than a host has slots; claims that wait in line are cancelled in one statement
    CancelLine,
    /// All listening connections are cut; running jobs are cancelled before and after hosts listen again
    CutListeners,
    /// SIGSTOP of a host while it claims 64 jobs of 64 KiB, until long after its leases have expired; some of the jobs
    /// are cancelled
    FreezeInClaim,
    /// Two hosts with the same id and key file, each restarted when it exits
    SameId,
    /// kill -9 of each host that runs a certain job, until that job fails as lost
    CrashJob,
    /// The transaction of an attempt's effects is stopped at its fence, at a statement, before or at its COMMIT; then
    /// its session is terminated, its host is killed or the server is crashed
    CutEffects,
}

impl Fault {
    /// The mean interval between two such faults in a long run.
    fn every_ms(self) -> u64 {
        match self {
            Self::KillHost => 15_000,
            Self::FreezeHost => 25_000,
            Self::StopHost => 40_000,
            Self::TerminateBackends | Self::CutEffects => 8_000,
            Self::CrashServer | Self::KillBackend => 30_000,
            Self::FreezeInClaim => 30_000,
            Self::CancelLine | Self::CutListeners => 20_000,
            Self::SameId => 60_000,
            Self::CrashJob => 120_000,
            Self::ForgetSleepers => 4_000,
            Self::ReplaceModule | Self::PauseQueue => 15_000,
            Self::Cancel => 700,
            Self::Complete | Self::Fail => 1_500,
            Self::Retry | Self::Reschedule => 1_200,
        }
    }

    /// The name on the command line.
    pub(super) fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// A fault with its time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Planned {
    /// After the start of the load.
    pub(super) at_ms: u64,
    pub(super) fault: Fault,
    /// Seeds the random choices of the fault: durations and targets.
    pub(super) draw: u64,
}

/// All faults of a run of this length, in order. In a short run, rare faults happen two or three times, and
/// `crash-job` once.
pub(super) fn plan(seed: u64, length_ms: u64, faults: &[Fault]) -> Vec<Planned> {
    let mut planned = Vec::new();
    let end_ms = length_ms.max(QUIET_MS + 1);
    for fault in faults {
        let mut random = Random::new(seed, &fault.name());
        let third_ms = (end_ms - QUIET_MS) / 3;
        let every_ms = match fault {
            // It takes about 30 s, during which it kills hosts that other faults need: once is enough.
            Fault::CrashJob => fault.every_ms(),
            _ => fault.every_ms().min(third_ms),
        };
        let mut at_ms = QUIET_MS + random.below(every_ms.min(third_ms) + 1);
        while at_ms < end_ms {
            planned.push(Planned {
                at_ms,
                fault: *fault,
                draw: random.next(),
            });
            at_ms += random.between(every_ms / 2, every_ms * 3 / 2);
        }
    }
    planned.sort_by_key(|planned| (planned.at_ms, planned.fault));
    planned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_alone_determines_a_plan_that_has_every_fault() {
        let all = Fault::value_variants();
        for length_ms in [20_000, 60_000, 300_000] {
            let planned = plan(3, length_ms, all);
            assert_eq!(planned, plan(3, length_ms, all));
            assert_ne!(planned, plan(4, length_ms, all));
            for fault in all {
                let times: Vec<_> = planned.iter().filter(|p| p.fault == *fault).collect();
                assert!(!times.is_empty(), "{fault:?} in {length_ms} ms");
                assert!(
                    times
                        .iter()
                        .all(|p| p.at_ms >= QUIET_MS && p.at_ms < length_ms)
                );
            }
        }
    }

    #[test]
    fn leaving_faults_out_does_not_move_the_others() {
        let all = plan(5, 60_000, Fault::value_variants());
        let kills = plan(5, 60_000, &[Fault::KillHost]);
        let of_all: Vec<_> = all
            .into_iter()
            .filter(|p| p.fault == Fault::KillHost)
            .collect();
        assert_eq!(of_all, kills);
    }
}
