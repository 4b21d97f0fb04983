//! Which fault happens when: made of the seed alone.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::random::Random;

/// Hosts come up and take their first jobs before anything happens to them.
const QUIET_MS: u64 = 4_000;

/// What can go wrong, or be done from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Fault {
    /// kill -9 of a host; another one is started in its place
    KillHost,
    /// SIGSTOP of a host until its leases have run out, then SIGCONT
    FreezeHost,
    /// SIGTERM of a host, which drains; another one is started in its place
    StopHost,
    /// pg_terminate_backend of a few connections
    TerminateBackends,
    /// Postgres is stopped with `-m immediate`, and started again
    CrashServer,
    /// kill -9 of one backend: Postgres ends all others and recovers
    KillBackend,
    /// The rows of rouse.sleeper are deleted: nobody is notified any more
    ForgetSleepers,
    /// Another build of the module is put into the handlers folder
    ReplaceModule,
    /// A queue is paused, and resumed a little later
    PauseQueue,
    /// A job is cancelled
    Cancel,
    /// A job is completed from outside
    Complete,
    /// A job is failed from outside
    Fail,
    /// A finished job is retried
    Retry,
    /// A job is moved to another time
    Reschedule,
    /// More jobs than a host has slots for; those that it has claimed and cannot start yet are cancelled in one statement
    CancelLine,
    /// All listening connections are cut, and jobs that run are cancelled before and after they stand again
    CutListeners,
    /// SIGSTOP of a host while it claims 64 jobs of 64 KiB, until long after its leases have run out; some are cancelled meanwhile
    FreezeInClaim,
    /// Two hosts with one id and one key file, each of which is started again when it ends
    SameId,
}

impl Fault {
    /// From one to the next, in the middle, in a long run.
    fn every_ms(self) -> u64 {
        match self {
            Self::KillHost => 15_000,
            Self::FreezeHost => 25_000,
            Self::StopHost => 40_000,
            Self::TerminateBackends => 8_000,
            Self::CrashServer | Self::KillBackend => 30_000,
            Self::FreezeInClaim => 30_000,
            Self::CancelLine | Self::CutListeners => 20_000,
            Self::SameId => 60_000,
            Self::ForgetSleepers => 4_000,
            Self::ReplaceModule | Self::PauseQueue => 15_000,
            Self::Cancel => 700,
            Self::Complete | Self::Fail => 1_500,
            Self::Retry | Self::Reschedule => 1_200,
        }
    }

    /// As it is written on the command line.
    pub(super) fn name(self) -> String {
        self.to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// One fault, and when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Planned {
    /// After the start of the load.
    pub(super) at_ms: u64,
    pub(super) fault: Fault,
    /// Decides what is left to chance: how long, which of them.
    pub(super) draw: u64,
}

/// All faults of a run of this length, in order. In a short one, what is rare in a long one comes two or three times.
pub(super) fn plan(seed: u64, length_ms: u64, faults: &[Fault]) -> Vec<Planned> {
    let mut planned = Vec::new();
    let end_ms = length_ms.max(QUIET_MS + 1);
    for fault in faults {
        let mut random = Random::new(seed, &fault.name());
        let every_ms = fault.every_ms().min((end_ms - QUIET_MS) / 3);
        let mut at_ms = QUIET_MS + random.below(every_ms + 1);
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
    fn a_plan_is_made_of_the_seed_alone_and_has_every_fault() {
        let all = Fault::value_variants();
        for length_ms in [20_000, 60_000, 300_000] {
            let one = plan(3, length_ms, all);
            assert_eq!(one, plan(3, length_ms, all));
            assert_ne!(one, plan(4, length_ms, all));
            for fault in all {
                let of_it: Vec<_> = one.iter().filter(|p| p.fault == *fault).collect();
                assert!(!of_it.is_empty(), "{fault:?} in {length_ms} ms");
                assert!(
                    of_it
                        .iter()
                        .all(|p| p.at_ms >= QUIET_MS && p.at_ms < length_ms)
                );
            }
        }
    }

    #[test]
    fn leaving_faults_out_leaves_the_others_where_they_were() {
        let all = plan(5, 60_000, Fault::value_variants());
        let kills = plan(5, 60_000, &[Fault::KillHost]);
        let of_all: Vec<_> = all
            .into_iter()
            .filter(|p| p.fault == Fault::KillHost)
            .collect();
        assert_eq!(of_all, kills);
    }
}
