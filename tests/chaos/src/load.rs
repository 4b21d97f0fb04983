//! The jobs of a run. The seed alone determines the n-th job of each producer.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::bank::Payment;
use super::gates::Gated;
use super::random::Random;
use super::suspending::Suspending;

pub(super) const QUEUES: [&str; 3] = ["default", "mail", "bulk"];
/// The tag that some jobs require and some hosts have.
pub(super) const TAG: &str = "blue";
pub(super) const WORK: &str = "chaos.work";
pub(super) const SPIN: &str = "chaos.spin";
/// Its lease is so long that an attempt of a few seconds ends before the first renewal.
pub(super) const PATIENT: &str = "chaos.patient";
/// Its attempts are suspended, and it enqueues others.
pub(super) const SUSPENDING: &str = "chaos.suspending";
/// Its effects move money between accounts.
pub(super) const PAY: &str = "chaos.pay";
/// Its jobs pass gates.
pub(super) const GATED: &str = "chaos.gated";
/// The queue, and the tag, of hosts with few slots that serve nothing else, so that claims wait in line.
pub(super) const LINE: &str = "line";
/// `max_attempts` of the handlers, for jobs without their own.
pub(super) const ATTEMPTS_MAX: i32 = 4;
/// `max_attempts` of the handler whose attempts time out.
pub(super) const SPIN_ATTEMPTS_MAX: i32 = 2;
/// Distance between the job numbers of two producers.
const PRODUCER_STRIDE: i64 = 1_000_000_000;
/// The first number of jobs that faults enqueue: below those of all producers.
pub(super) const FAULT_JOBS_START: i64 = 1;
/// Few unique keys, so that they collide.
const KEYS: u64 = 12;

/// The purpose of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    #[default]
    Quick,
    Sleeps,
    HasSteps,
    /// It runs longer than a lease.
    IsLong,
    Fails,
    /// It fails more often than `max_attempts` allows.
    FailsTooOften,
    IsHopeless,
    IsScheduled,
    /// Scheduled so far ahead that it is still live at the end of the run.
    IsFarAhead,
    HasKey,
    IsRolledBack,
    HangsUp,
    Spins,
    /// It waits for jobs that its producer has enqueued before.
    Waits,
    /// It is suspended, enqueues jobs, calls one and continues its chain.
    Suspends,
    /// It waits for a signal that nobody sends, and is suspended at the end of the run.
    IsNeverSignalled,
    /// Its effects, with its outcome or with a step, move money.
    Pays,
    /// It passes gates, or gives way to an earlier job.
    PassesGates,
    /// Enqueued by a fault; no producer draws it.
    FromFault,
    /// A job of a flow; no producer draws it.
    IsInFlow,
}

impl Kind {
    /// Each kind with its share of a thousand jobs.
    pub(super) const ALL: [(Self, u64); 18] = [
        (Self::Quick, 105),
        (Self::Sleeps, 100),
        (Self::HasSteps, 110),
        (Self::IsLong, 10),
        (Self::Fails, 80),
        (Self::FailsTooOften, 20),
        (Self::IsHopeless, 30),
        (Self::IsScheduled, 60),
        (Self::IsFarAhead, 5),
        (Self::HasKey, 35),
        (Self::IsRolledBack, 4),
        (Self::HangsUp, 4),
        (Self::Spins, 2),
        (Self::Waits, 60),
        (Self::Suspends, 50),
        (Self::IsNeverSignalled, 5),
        (Self::Pays, 200),
        (Self::PassesGates, 120),
    ];

    fn draw(random: &mut Random) -> Self {
        let mut left = random.below(Self::ALL.iter().map(|(_, share)| share).sum());
        for (kind, share) in Self::ALL {
            if left < share {
                return kind;
            }
            left -= share;
        }
        Self::Quick
    }
}

/// A job as its producer enqueues it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct JobSpec {
    /// Unique in the run, and part of the payload, so that the job can be recognised regardless of its id.
    pub(super) n: i64,
    pub(super) kind: Kind,
    pub(super) handler: String,
    pub(super) queue: String,
    pub(super) priority: String,
    pub(super) tags: Vec<String>,
    pub(super) sleep_ms: u64,
    pub(super) fail_attempts: u32,
    pub(super) hopeless: bool,
    /// It fails permanently before this time, so that a retry of it may succeed.
    #[serde(default)]
    pub(super) fails_until_us: Option<i64>,
    /// Whether it does a step and reports progress.
    #[serde(default)]
    pub(super) steps: bool,
    /// Whether it writes evidence every 100 ms while it sleeps.
    #[serde(default)]
    pub(super) ticks: bool,
    /// Size in bytes of an incompressible part of the payload.
    #[serde(default)]
    pub(super) pad_bytes: usize,
    /// The number of recent jobs of its producer that it waits for.
    #[serde(default)]
    pub(super) parents: usize,
    /// Whether it runs if one of these fails; otherwise it is cancelled.
    #[serde(default)]
    pub(super) runs_on_failure: bool,
    /// Those jobs, by name; set by the producer.
    #[serde(default)]
    pub(super) after: Option<Value>,
    /// Delay of `run_at` from now, in milliseconds.
    pub(super) run_in_ms: Option<i64>,
    pub(super) unique_key: Option<String>,
    /// The tenant within which the key is unique, or whose jobs a gate limits.
    #[serde(default)]
    pub(super) tenant: Option<String>,
    pub(super) max_attempts: Option<i32>,
    /// What it does if its handler is [`SUSPENDING`].
    #[serde(default)]
    pub(super) suspending: Option<Suspending>,
    /// What it does if its handler is [`PAY`].
    #[serde(default)]
    pub(super) payment: Option<Payment>,
    /// The keys of its gates.
    #[serde(default)]
    pub(super) gated: Option<Gated>,
    /// Whether the enqueueing transaction is rolled back.
    pub(super) rolled_back: bool,
    /// The producer disconnects after this many microseconds, with or without a response.
    pub(super) hangs_up_us: Option<u64>,
}

impl JobSpec {
    /// The job with this index of the producer.
    pub(super) fn nth(seed: u64, producer: usize, index: u32) -> Self {
        let mut random = Random::new(seed, &format!("job {producer} {index}"));
        let mut spec = Self {
            n: (producer as i64 + 1) * PRODUCER_STRIDE + i64::from(index),
            handler: WORK.into(),
            queue: (*random.pick(&QUEUES)).into(),
            priority: (*random.pick(&["high", "normal", "normal", "low"])).into(),
            ..Self::default()
        };
        spec.kind = Kind::draw(&mut random);
        match spec.kind {
            Kind::Quick => {}
            Kind::Sleeps => spec.sleep_ms = random.between(1, 3_000),
            Kind::HasSteps => {
                spec.steps = true;
                spec.sleep_ms = random.between(1, 3_000);
                // In some jobs, a later attempt finds the step done.
                spec.fail_attempts = random.below(2) as u32;
            }
            Kind::IsLong => {
                spec.steps = true;
                spec.sleep_ms = random.between(5_500, 9_000);
            }
            Kind::Fails => {
                spec.fail_attempts = random.between(1, 3) as u32;
                spec.sleep_ms = random.below(300);
            }
            Kind::FailsTooOften => {
                spec.max_attempts = Some(random.between(1, 3) as i32);
                spec.fail_attempts = 1_000;
            }
            Kind::IsHopeless => spec.hopeless = true,
            Kind::IsScheduled => spec.run_in_ms = Some(random.between(200, 6_000) as i64),
            Kind::IsFarAhead => spec.run_in_ms = Some(24 * 3_600_000),
            Kind::HasKey => {
                spec.unique_key = Some(format!("key-{}", random.below(KEYS)));
                spec.sleep_ms = random.below(1_500);
                spec.tenant = random
                    .pick(&[None, Some("a"), Some("b")])
                    .map(str::to_owned);
            }
            Kind::IsRolledBack => spec.rolled_back = true,
            Kind::HangsUp => spec.hangs_up_us = Some(random.between(100, 4_000)),
            Kind::Spins => spec.handler = SPIN.into(),
            Kind::Waits => {
                spec.parents = random.between(1, 4) as usize;
                spec.runs_on_failure = random.per_mille(500);
            }
            Kind::Suspends => spec.take(Suspending::draw(&mut random)),
            Kind::IsNeverSignalled => spec.take(Suspending::never_signalled()),
            Kind::Pays => {
                let payment = Payment::draw(&mut random);
                spec.handler = PAY.into();
                spec.steps = payment.staged;
                spec.payment = Some(payment);
                spec.sleep_ms = random.below(300);
                // In some jobs, a later attempt finds the step done.
                spec.fail_attempts = u32::from(random.per_mille(100));
            }
            Kind::PassesGates => {
                let gated = Gated::draw(&mut random, index);
                spec.handler = GATED.into();
                spec.queue = gated.door.queue().into();
                // Each key has a lane of each of these priorities.
                spec.priority = (*random.pick(&["normal", "low"])).into();
                spec.tenant = Some(gated.tenant.clone());
                spec.sleep_ms = random.between(200, 2_200);
                spec.fail_attempts = u32::from(random.per_mille(150));
                spec.gated = Some(gated);
            }
            Kind::FromFault | Kind::IsInFlow => {}
        }
        // A tag would double the lanes of the keys.
        if spec.gated.is_none() && random.per_mille(60) {
            spec.tags = vec![TAG.into()];
        }
        spec
    }

    fn take(&mut self, suspending: Suspending) {
        self.handler = SUSPENDING.into();
        self.suspending = Some(suspending);
    }

    /// Whether it ends on its own soon, so that others may wait for it.
    pub(super) fn ends_soon(&self) -> bool {
        self.run_in_ms.is_none() && self.kind != Kind::IsNeverSignalled
    }

    pub(super) fn payload(&self) -> Value {
        if let Some(suspending) = &self.suspending {
            return suspending.payload(self);
        }
        if let Some(payment) = &self.payment {
            return payment.payload(self);
        }
        let mut payload = json!({
            "n": self.n,
            "sleep_ms": self.sleep_ms,
            "fail_attempts": self.fail_attempts,
            "hopeless": self.hopeless,
            "fails_until_us": self.fails_until_us.unwrap_or(0),
            "steps": self.steps,
            "ticks": self.ticks,
            "pad": pad(self.n, self.pad_bytes),
        });
        if let Some(gated) = &self.gated {
            payload["api"] = json!(gated.api);
            payload["doc"] = json!(gated.doc);
        }
        payload
    }

    /// The maximum number of failed attempts.
    pub(super) fn attempts_max(&self) -> i32 {
        let default = match self.handler.as_str() {
            SPIN => SPIN_ATTEMPTS_MAX,
            _ => ATTEMPTS_MAX,
        };
        self.max_attempts.unwrap_or(default)
    }
}

/// Hexadecimal digits of random numbers, in which the compression of Postgres finds no repetitions.
fn pad(n: i64, bytes: usize) -> String {
    let mut random = Random::new(n as u64, "pad");
    let mut text = String::with_capacity(bytes + 16);
    while text.len() < bytes {
        text.push_str(&format!("{:016x}", random.next()));
    }
    text.truncate(bytes);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mix_has_every_kind_of_job_and_no_duplicate_number() {
        let specs: Vec<_> = (0..2)
            .flat_map(|producer| (0..2_000).map(move |index| JobSpec::nth(1, producer, index)))
            .collect();
        for (kind, share) in Kind::ALL {
            let there = specs.iter().filter(|w| w.kind == kind).count() as u64;
            // 4,000 jobs in all.
            assert!((share..=share * 8).contains(&there), "{kind:?}: {there}");
        }
        assert_eq!(Kind::ALL.iter().map(|(_, share)| share).sum::<u64>(), 1000);
        let has = |test: fn(&JobSpec) -> bool| specs.iter().any(test);
        assert!(has(|w| w.sleep_ms > 5_000));
        assert!(has(|w| w.steps && w.fail_attempts > 0));
        assert!(has(|w| w.fail_attempts > 3));
        assert!(has(|w| !w.tags.is_empty()));
        let numbers: std::collections::HashSet<_> = specs.iter().map(|w| w.n).collect();
        assert_eq!(numbers.len(), specs.len());
        assert_eq!(JobSpec::nth(1, 0, 5), JobSpec::nth(1, 0, 5));
        assert!(numbers.iter().all(|n| *n >= PRODUCER_STRIDE));
    }
}
