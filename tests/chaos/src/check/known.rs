//! The world with indexes: what is known of one job, of one worker, of one moment.

use std::collections::HashMap;

use serde_json::Value;

use super::super::ledger::{Answer, Ask, Happened, What};
use super::super::load::Wish;
use super::super::settings;
use super::super::world::{Attempt, Call, Evidence, Job, Record, Step, World};

/// A claim commits asynchronously, and the server writes what is committed within some tenths of a second. What it had
/// not written when it crashed, it has forgotten.
pub(super) const FORGOTTEN_WITHIN_US: i64 = 3_000_000;
/// A claim that has not started within a second is given back; it is looked for such ones every quarter of a second.
pub(super) const IN_LINE_US: i64 = 1_500_000;

/// A host listens again a second after it was cut off, or half a second; then it tries out whether it hears.
pub(super) const DEAF_AFTER_A_CUT_US: i64 = 2_000_000;
/// While the server is down it waits longer each time: 1 s, 2 s, 4 s.
pub(super) const DEAF_AFTER_A_CRASH_US: i64 = 6_000_000;

/// A host says that it lives when it has lost a lease, or has reached the server again, at which it tries every second.
const HEARD_WITHIN_US: i64 = 2_000_000;

pub(crate) struct Known<'a> {
    pub(crate) world: &'a World,
    evidence: HashMap<i64, Vec<&'a Evidence>>,
    attempts: HashMap<i64, Vec<&'a Attempt>>,
    records: HashMap<i64, Vec<&'a Record>>,
    steps: HashMap<i64, Vec<&'a Step>>,
    calls: HashMap<i64, Vec<&'a Call>>,
    jobs: HashMap<i64, Vec<&'a Job>>,
    originals: HashMap<i64, Vec<&'a Job>>,
    wishes: HashMap<i64, &'a Wish>,
    worker_ids: HashMap<i64, &'a str>,
}

impl<'a> Known<'a> {
    pub(crate) fn of(world: &'a World) -> Self {
        Self {
            world,
            evidence: by(&world.evidence, |e| Some(e.job)),
            attempts: by(&world.attempts, |a| Some(a.job)),
            records: by(&world.records, |r| r.job),
            steps: by(&world.steps, |s| Some(s.job)),
            calls: by(&world.calls, job_of),
            jobs: by(&world.jobs, |j| Some(j.id)),
            originals: by(&world.jobs, |j| j.retried_from.is_none().then_some(j.n)),
            wishes: wishes(world),
            worker_ids: world
                .workers
                .iter()
                .map(|w| (w.incarnation, w.worker_id.as_str()))
                .collect(),
        }
    }

    pub(super) fn evidence(&self, job: i64) -> &[&'a Evidence] {
        self.evidence.get(&job).map_or(&[], Vec::as_slice)
    }

    pub(super) fn attempts(&self, job: i64) -> &[&'a Attempt] {
        self.attempts.get(&job).map_or(&[], Vec::as_slice)
    }

    pub(super) fn records(&self, job: i64) -> &[&'a Record] {
        self.records.get(&job).map_or(&[], Vec::as_slice)
    }

    pub(super) fn steps(&self, job: i64) -> &[&'a Step] {
        self.steps.get(&job).map_or(&[], Vec::as_slice)
    }

    /// Rows with this id: one, where all is well.
    pub(super) fn rows(&self, job: i64) -> &[&'a Job] {
        self.jobs.get(&job).map_or(&[], Vec::as_slice)
    }

    /// Rows that the enqueue of this number has made; retries are not among them.
    pub(super) fn originals(&self, n: i64) -> &[&'a Job] {
        self.originals.get(&n).map_or(&[], Vec::as_slice)
    }

    /// Calls about this job, its enqueue not among them.
    pub(super) fn calls(&self, job: i64) -> &[&'a Call] {
        self.calls.get(&job).map_or(&[], Vec::as_slice)
    }

    /// What its producer has asked for.
    pub(super) fn wish(&self, job: &Job) -> Option<&'a Wish> {
        self.wishes.get(&job.n).copied()
    }

    pub(super) fn worker_id(&self, incarnation: i64) -> &'a str {
        self.worker_ids.get(&incarnation).copied().unwrap_or("?")
    }

    /// How many crashes of the server overlap this time.
    pub(super) fn crashes(&self, from_us: i64, until_us: i64) -> usize {
        let crashes = self.world.happened.iter().filter(|h| {
            matches!(h.what, What::ServerCrashed { .. })
                && h.from_us <= until_us
                && h.until_us >= from_us
        });
        crashes.count()
    }

    /// Whether the server may have forgotten the claim of this attempt.
    pub(super) fn forgotten(&self, evidence: &Evidence) -> bool {
        let started = evidence.started_us;
        self.crashes(started - IN_LINE_US, started + FORGOTTEN_WITHIN_US) > 0
    }

    /// When the database took this attempt to be over; none: it never did.
    pub(super) fn over_us(&self, evidence: &Evidence) -> Option<i64> {
        let started = evidence.started_us;
        let number = evidence.attempt;
        let of_attempts = self.attempts(evidence.job).iter();
        let of_attempts = of_attempts
            .filter(|a| a.attempt == number)
            .map(|a| a.ended_us);
        let of_records = self.records(evidence.job).iter();
        let of_records = of_records
            .filter(|r| r.event == "released" && r.attempt == Some(number))
            .map(|r| r.at_us);
        let of_the_end = self
            .rows(evidence.job)
            .iter()
            .filter_map(|job| job.finished_us);
        let next = self.evidence(evidence.job).iter().map(|e| e.started_us);
        of_attempts
            .chain(of_records)
            .chain(of_the_end)
            .chain(next)
            .filter(|at| *at > started)
            .min()
    }

    /// Whether this host has ended in this time, however that came.
    pub(super) fn is_gone(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        self.world.happened.iter().any(|h| {
            let (ended, at_us) = match &h.what {
                // It is told a little after it was done.
                What::HostKilled { worker } => (worker, h.from_us),
                What::HostStopped { worker, .. } | What::HostEnded { worker, .. } => {
                    (worker, h.until_us)
                }
                What::HostFrozen { .. }
                | What::BackendsTerminated { .. }
                | What::ListenersCut { .. }
                | What::LineCancelled { .. }
                | What::IdShared { .. }
                | What::ServerCrashed { .. }
                | What::SleepersForgotten { .. }
                | What::ModuleReplaced { .. }
                | What::Skipped { .. }
                | What::LoadEnded => return false,
            };
            ended == worker && (from_us..=until_us).contains(&at_us)
        })
    }

    /// Whether this host was frozen, or has ended however that came, at any moment of this time.
    pub(super) fn is_disturbed(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        self.is_frozen(worker, from_us, until_us) || self.is_gone(worker, from_us, until_us)
    }

    /// Whether this host was frozen at any moment of this time.
    pub(super) fn is_frozen(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        self.world.happened.iter().any(|h| {
            matches!(&h.what, What::HostFrozen { worker: frozen, .. } if frozen == worker)
                && h.from_us <= until_us
                && h.until_us >= from_us
        })
    }

    /// Whether this host has ended in this time without being told to.
    pub(super) fn crashed(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        self.world.happened.iter().any(|h| match &h.what {
            What::HostKilled { worker: killed } => {
                killed == worker && (from_us..=until_us).contains(&h.from_us)
            }
            // One that gives up says so with its exit code.
            What::HostEnded {
                worker: ended,
                status,
                ..
            } => {
                ended == worker
                    && status.starts_with("signal")
                    && (from_us..=until_us).contains(&h.until_us)
            }
            _ => false,
        })
    }

    /// Whether this host was there for a while in which nothing kept it from saying that it lives.
    pub(super) fn was_heard(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        let all = self.world.happened.iter();
        let keeps = |h: &&Happened| match &h.what {
            What::ServerCrashed { .. }
            | What::BackendsTerminated { .. }
            | What::ListenersCut { .. } => true,
            What::HostFrozen { worker: frozen, .. } => frozen == worker,
            _ => false,
        };
        let since = all.filter(keeps).map(|h| h.until_us);
        since.filter(|at| *at > from_us).chain([from_us]).any(|at| {
            let then = at + HEARD_WITHIN_US;
            then <= until_us
                && !self.is_disturbed(worker, at + 1, then)
                && !self.is_gone(worker, from_us, then)
                && !self.cuts(at + 1, then)
                && self.crashes(at + 1, then) == 0
        })
    }

    /// Whether connections were cut in this time, that of those who listen or any.
    pub(super) fn cuts(&self, from_us: i64, until_us: i64) -> bool {
        self.world.happened.iter().any(|h| {
            let cuts = matches!(
                h.what,
                What::BackendsTerminated { .. } | What::ListenersCut { .. }
            );
            cuts && h.from_us <= until_us && h.until_us >= from_us
        })
    }

    /// Whether a host has heard of all that was notified to it in this time.
    pub(super) fn hears(&self, worker: &str, from_us: i64, until_us: i64) -> bool {
        settings::listens(worker)
            && !self.cuts(from_us - DEAF_AFTER_A_CUT_US, until_us)
            && self.crashes(from_us - DEAF_AFTER_A_CRASH_US, until_us) == 0
    }

    /// As [`Self::hears`], of any host; that all who listen were cut off does not count.
    pub(super) fn has_other_trouble(&self, from_us: i64, until_us: i64) -> bool {
        let is_cut = self.world.happened.iter().any(|h| {
            matches!(h.what, What::BackendsTerminated { .. })
                && h.from_us <= until_us
                && h.until_us >= from_us - DEAF_AFTER_A_CUT_US
        });
        is_cut || self.crashes(from_us - DEAF_AFTER_A_CRASH_US, until_us) > 0
    }

    /// Whether two hosts had this id.
    pub(super) fn is_shared(&self, worker: &str) -> bool {
        self.world
            .happened
            .iter()
            .any(|h| matches!(&h.what, What::IdShared { worker: shared, .. } if shared == worker))
    }

    /// Whether a worker of this id has ever registered.
    pub(super) fn has_registered(&self, worker: &str) -> bool {
        self.worker_ids.values().any(|id| *id == worker)
    }

    /// When this queue was certainly paused: from the answer to the pause to the question of the next resume.
    pub(super) fn pauses(&self, queue: &str) -> Vec<(i64, i64)> {
        let resumes: Vec<&Call> = self
            .world
            .calls
            .iter()
            .filter(|call| matches!(&call.ask, Ask::Resume { queue: of } if of == queue))
            .collect();
        let pauses = self.world.calls.iter().filter(|call| {
            matches!(&call.ask, Ask::Pause { queue: of } if of == queue)
                && matches!(call.answer, Answer::Ok(_))
        });
        pauses
            .filter_map(|pause| {
                // One that was under way may have come after it.
                let until = resumes
                    .iter()
                    .filter(|resume| resume.answered_us >= pause.asked_us)
                    .map(|resume| resume.asked_us)
                    .min()
                    .unwrap_or(self.world.dumped_us);
                (pause.answered_us < until).then_some((pause.answered_us, until))
            })
            .collect()
    }
}

/// The nonce that a result or the details of an error carry.
pub(super) fn nonce(job: Option<&Value>, error: Option<&Value>) -> Option<String> {
    let result = job.and_then(|result| result["nonce"].as_str());
    let details = error.and_then(|error| error["details"]["nonce"].as_str());
    result.or(details).map(str::to_owned)
}

pub(super) fn kind(error: Option<&Value>) -> &str {
    error
        .and_then(|error| error["kind"].as_str())
        .unwrap_or_default()
}

/// Whether a call from outside has ended the job, as its row says.
pub(super) fn ended_by_an_admin(job: &Job) -> bool {
    job.state == "cancelled"
        || kind(job.error.as_ref()) == "admin"
        || job
            .result
            .as_ref()
            .is_some_and(|r| r.get("by_admin").is_some())
}

/// Which job a call is about.
fn job_of(call: &Call) -> Option<i64> {
    match &call.ask {
        Ask::Cancel { job }
        | Ask::Complete { job, .. }
        | Ask::Fail { job, .. }
        | Ask::Retry { job }
        | Ask::Reschedule { job, .. } => Some(*job),
        Ask::Enqueue { .. } | Ask::Pause { .. } | Ask::Resume { .. } => None,
    }
}

fn wishes(world: &World) -> HashMap<i64, &Wish> {
    let wishes = world.calls.iter().filter_map(|call| match &call.ask {
        Ask::Enqueue { wish, .. } => Some((wish.n, wish)),
        _ => None,
    });
    wishes.collect()
}

fn by<T>(all: &[T], key: impl Fn(&T) -> Option<i64>) -> HashMap<i64, Vec<&T>> {
    let mut found: HashMap<i64, Vec<&T>> = HashMap::new();
    for one in all {
        if let Some(key) = key(one) {
            found.entry(key).or_default().push(one);
        }
    }
    found
}
