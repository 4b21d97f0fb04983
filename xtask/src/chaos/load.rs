//! What the jobs of a run are like: the n-th job of a producer, made of the seed alone.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::random::Random;

pub(super) const QUEUES: [&str; 3] = ["default", "mail", "bulk"];
/// The tag that some jobs require and some hosts have.
pub(super) const TAG: &str = "blue";
pub(super) const WORK: &str = "chaos.work";
pub(super) const SPIN: &str = "chaos.spin";
/// Attempts of a job that says nothing of it, as the hosts are told.
pub(super) const ATTEMPTS_MAX: i32 = 4;
/// The same for those that run into their time-out.
pub(super) const SPIN_ATTEMPTS_MAX: i32 = 2;
/// Jobs of another producer begin here.
const PRODUCER_STRIDE: i64 = 1_000_000_000;
/// Keys are few, so that they meet.
const KEYS: u64 = 12;

/// What a producer asks for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Wish {
    /// Unique in the run, and part of the payload: the job is recognised by it, whatever its id is.
    pub(super) n: i64,
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
    /// Not before so many milliseconds from now.
    pub(super) run_in_ms: Option<i64>,
    pub(super) unique_key: Option<String>,
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
        match random.below(1000) {
            // Quick.
            0..540 => {}
            540..640 => wish.sleep_ms = random.between(1, 3_000),
            640..750 => {
                wish.steps = true;
                wish.sleep_ms = random.between(1, 3_000);
                // In some, a later attempt finds the step done.
                wish.fail_attempts = random.below(2) as u32;
            }
            // Longer than a lease.
            750..760 => {
                wish.steps = true;
                wish.sleep_ms = random.between(5_500, 9_000);
            }
            760..840 => {
                wish.fail_attempts = random.between(1, 3) as u32;
                wish.sleep_ms = random.below(300);
            }
            // Fails more often than it may.
            840..860 => {
                wish.max_attempts = Some(random.between(1, 3) as i32);
                wish.fail_attempts = 1_000;
            }
            860..890 => wish.hopeless = true,
            890..950 => wish.run_in_ms = Some(random.between(200, 6_000) as i64),
            // Far ahead: still live when all is over.
            950..955 => wish.run_in_ms = Some(24 * 3_600_000),
            955..990 => {
                wish.unique_key = Some(format!("key-{}", random.below(KEYS)));
                wish.sleep_ms = random.below(1_500);
            }
            990..994 => wish.rolled_back = true,
            994..998 => wish.hangs_up_us = Some(random.between(100, 4_000)),
            _ => wish.handler = SPIN.into(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mix_has_something_of_everything_and_no_number_twice() {
        let wishes: Vec<_> = (0..2)
            .flat_map(|producer| (0..2_000).map(move |place| Wish::nth(1, producer, place)))
            .collect();
        let has = |what: fn(&Wish) -> bool| wishes.iter().any(what);
        assert!(has(|w| w.sleep_ms > 5_000));
        assert!(has(|w| w.hopeless));
        assert!(has(|w| w.steps && w.fail_attempts > 0));
        assert!(has(|w| w.fail_attempts > 3));
        assert!(has(|w| w.run_in_ms.is_some()));
        assert!(has(|w| w.unique_key.is_some()));
        assert!(has(|w| w.rolled_back));
        assert!(has(|w| w.hangs_up_us.is_some()));
        assert!(has(|w| w.handler == SPIN));
        assert!(has(|w| !w.tags.is_empty()));
        let numbers: std::collections::HashSet<_> = wishes.iter().map(|w| w.n).collect();
        assert_eq!(numbers.len(), wishes.len());
        assert_eq!(Wish::nth(1, 0, 5), Wish::nth(1, 0, 5));
    }
}
