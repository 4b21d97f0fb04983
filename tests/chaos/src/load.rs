//! What the jobs of a run are like: the n-th job of a producer, made of the seed alone.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::random::Random;

pub(super) const QUEUES: [&str; 3] = ["default", "mail", "bulk"];
/// The tag that some jobs require and some hosts have.
pub(super) const TAG: &str = "blue";
pub(super) const WORK: &str = "chaos.work";
pub(super) const SPIN: &str = "chaos.spin";
/// Its lease is not renewed while an attempt of a few seconds runs.
pub(super) const PATIENT: &str = "chaos.patient";
/// The queue, and the tag, of hosts with few slots that serve nothing else: claims stand in line there.
pub(super) const LINE: &str = "line";
/// Attempts of a job that says nothing of it, as the hosts are told.
pub(super) const ATTEMPTS_MAX: i32 = 4;
/// The same for those that run into their time-out.
pub(super) const SPIN_ATTEMPTS_MAX: i32 = 2;
/// Jobs of another producer start here.
const PRODUCER_STRIDE: i64 = 1_000_000_000;
/// And those that faults bring with them here: before those of all producers.
pub(super) const FAULTS_BEGIN: i64 = 1;
/// Keys are few, so that they meet.
const KEYS: u64 = 12;

/// What a job is there for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    #[default]
    Quick,
    Sleeps,
    HasSteps,
    /// Longer than a lease.
    IsLong,
    Fails,
    /// More often than it may.
    FailsTooOften,
    IsHopeless,
    IsScheduled,
    /// Far ahead: still live when all is over.
    IsFarAhead,
    HasAKey,
    IsRolledBack,
    HangsUp,
    Spins,
    /// A fault has brought it; no producer draws it.
    OfAFault,
}

impl Kind {
    /// Each, and how many of a thousand jobs are like that.
    pub(super) const ALL: [(Self, u64); 13] = [
        (Self::Quick, 540),
        (Self::Sleeps, 100),
        (Self::HasSteps, 110),
        (Self::IsLong, 10),
        (Self::Fails, 80),
        (Self::FailsTooOften, 20),
        (Self::IsHopeless, 30),
        (Self::IsScheduled, 60),
        (Self::IsFarAhead, 5),
        (Self::HasAKey, 35),
        (Self::IsRolledBack, 4),
        (Self::HangsUp, 4),
        (Self::Spins, 2),
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

/// What a producer asks for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Wish {
    /// Unique in the run, and part of the payload: the job is recognised by it, whatever its id is.
    pub(super) n: i64,
    pub(super) kind: Kind,
    pub(super) handler: String,
    pub(super) queue: String,
    pub(super) priority: String,
    pub(super) tags: Vec<String>,
    pub(super) sleep_ms: u64,
    pub(super) fail_attempts: u32,
    pub(super) hopeless: bool,
    /// A step in the middle, and progress.
    #[serde(default)]
    pub(super) steps: bool,
    /// Evidence every tenth of a second while it sleeps.
    #[serde(default)]
    pub(super) ticks: bool,
    /// So many bytes that do not compress are in the payload too.
    #[serde(default)]
    pub(super) pad_bytes: usize,
    /// Not before so many milliseconds from now.
    pub(super) run_in_ms: Option<i64>,
    pub(super) unique_key: Option<String>,
    /// Of those with a key: it is unique within the tenant.
    #[serde(default)]
    pub(super) tenant: Option<String>,
    pub(super) max_attempts: Option<i32>,
    /// Enqueued in a transaction that is rolled back.
    pub(super) rolled_back: bool,
    /// The producer hangs up after so long, whatever has become of its question.
    pub(super) hangs_up_us: Option<u64>,
}

impl Wish {
    /// The wish with this place in the producer's line.
    pub(super) fn nth(seed: u64, producer: usize, place: u32) -> Self {
        let mut random = Random::new(seed, &format!("job {producer} {place}"));
        let mut wish = Self {
            n: (producer as i64 + 1) * PRODUCER_STRIDE + i64::from(place),
            handler: WORK.into(),
            queue: (*random.pick(&QUEUES)).into(),
            priority: (*random.pick(&["high", "normal", "normal", "low"])).into(),
            ..Self::default()
        };
        wish.kind = Kind::draw(&mut random);
        match wish.kind {
            Kind::Quick => {}
            Kind::Sleeps => wish.sleep_ms = random.between(1, 3_000),
            Kind::HasSteps => {
                wish.steps = true;
                wish.sleep_ms = random.between(1, 3_000);
                // In some, a later attempt finds the step done.
                wish.fail_attempts = random.below(2) as u32;
            }
            Kind::IsLong => {
                wish.steps = true;
                wish.sleep_ms = random.between(5_500, 9_000);
            }
            Kind::Fails => {
                wish.fail_attempts = random.between(1, 3) as u32;
                wish.sleep_ms = random.below(300);
            }
            Kind::FailsTooOften => {
                wish.max_attempts = Some(random.between(1, 3) as i32);
                wish.fail_attempts = 1_000;
            }
            Kind::IsHopeless => wish.hopeless = true,
            Kind::IsScheduled => wish.run_in_ms = Some(random.between(200, 6_000) as i64),
            Kind::IsFarAhead => wish.run_in_ms = Some(24 * 3_600_000),
            Kind::HasAKey => {
                wish.unique_key = Some(format!("key-{}", random.below(KEYS)));
                wish.sleep_ms = random.below(1_500);
                wish.tenant = random
                    .pick(&[None, Some("a"), Some("b")])
                    .map(str::to_owned);
            }
            Kind::IsRolledBack => wish.rolled_back = true,
            Kind::HangsUp => wish.hangs_up_us = Some(random.between(100, 4_000)),
            Kind::Spins => wish.handler = SPIN.into(),
            Kind::OfAFault => {}
        }
        if random.per_mille(60) {
            wish.tags = vec![TAG.into()];
        }
        wish
    }

    pub(super) fn payload(&self) -> Value {
        json!({
            "n": self.n,
            "sleep_ms": self.sleep_ms,
            "fail_attempts": self.fail_attempts,
            "hopeless": self.hopeless,
            "steps": self.steps,
            "ticks": self.ticks,
            "pad": pad(self.n, self.pad_bytes),
        })
    }

    /// How many attempts may fail.
    pub(super) fn attempts_max(&self) -> i32 {
        let default = match self.handler.as_str() {
            SPIN => SPIN_ATTEMPTS_MAX,
            _ => ATTEMPTS_MAX,
        };
        self.max_attempts.unwrap_or(default)
    }
}

/// Hexadecimal digits of random numbers: the compression of Postgres looks for repetitions and finds none.
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
    fn the_mix_has_something_of_everything_and_no_number_twice() {
        let wishes: Vec<_> = (0..2)
            .flat_map(|producer| (0..2_000).map(move |place| Wish::nth(1, producer, place)))
            .collect();
        for (kind, share) in Kind::ALL {
            let there = wishes.iter().filter(|w| w.kind == kind).count() as u64;
            // Four jobs for each of a thousand.
            assert!((share..=share * 8).contains(&there), "{kind:?}: {there}");
        }
        assert_eq!(Kind::ALL.iter().map(|(_, share)| share).sum::<u64>(), 1000);
        let has = |what: fn(&Wish) -> bool| wishes.iter().any(what);
        assert!(has(|w| w.sleep_ms > 5_000));
        assert!(has(|w| w.steps && w.fail_attempts > 0));
        assert!(has(|w| w.fail_attempts > 3));
        assert!(has(|w| !w.tags.is_empty()));
        let numbers: std::collections::HashSet<_> = wishes.iter().map(|w| w.n).collect();
        assert_eq!(numbers.len(), wishes.len());
        assert_eq!(Wish::nth(1, 0, 5), Wish::nth(1, 0, 5));
        assert!(numbers.iter().all(|n| *n >= PRODUCER_STRIDE));
    }
}
