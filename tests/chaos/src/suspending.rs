//! Jobs that are suspended and that enqueue others: what they do, and the signals that they receive.

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio_postgres::types::Json;

use super::calls::Caller;
use super::ledger::{Ledger, Request};
use super::load::{JobSpec, WORK};
use super::random::Random;

/// Distance between the number of a job and those of the jobs that it enqueues: above the numbers of all producers.
const PART_STRIDE: i64 = 1_000_000_000_000;
const SIGNAL: &str = "SELECT rouse.signal($1, 'go', $2)::int::bigint";

/// The role of a job that a suspending job enqueues. The number of the enqueued job shows its role, regardless of what
/// the database contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Child(u8),
    Next,
    Call,
}

/// What a job of the handler [`SUSPENDING`](super::load::SUSPENDING) does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Suspending {
    pub(super) nap_ms: u64,
    /// The number of signals that it waits for.
    pub(super) waits: u32,
    pub(super) timeout_ms: Option<u64>,
    /// The load sends signals this long after the job was accepted.
    pub(super) signals_ms: Vec<u64>,
    pub(super) stumbles: bool,
    pub(super) traps: bool,
    pub(super) calls: bool,
    /// The job that it calls fails.
    pub(super) call_fails: bool,
    pub(super) children: u8,
    pub(super) continues: bool,
}

impl Suspending {
    pub(super) fn draw(random: &mut Random) -> Self {
        let nap_ms = random.between(2_100, 4_000);
        let timeout_ms = random.between(2_000, 6_000);
        // Early, late, at the moment of the timeout, twice for one wait, twice for two waits, never.
        let (waits, signals_ms) = match random.below(6) {
            0 => (1, vec![random.below(500)]),
            1 => (1, vec![nap_ms + random.between(300, timeout_ms)]),
            2 => (1, vec![nap_ms + timeout_ms + random.below(300)]),
            3 => (1, vec![random.below(2_000), nap_ms + random.below(3_000)]),
            4 => {
                let late = nap_ms + random.between(500, 4_000);
                (2, vec![random.below(2_000), late])
            }
            _ => (1, Vec::new()),
        };
        Self {
            nap_ms,
            waits,
            timeout_ms: Some(timeout_ms),
            signals_ms,
            stumbles: random.per_mille(200),
            traps: random.per_mille(200),
            calls: random.per_mille(800),
            call_fails: random.per_mille(200),
            children: random.pick(&[0, 2, 2, 2]).to_owned(),
            continues: random.per_mille(700),
        }
    }

    pub(super) fn never_signalled() -> Self {
        Self {
            nap_ms: 2_100,
            waits: 1,
            children: 2,
            ..Self::default()
        }
    }

    pub(super) fn payload(&self, spec: &JobSpec) -> Value {
        let payload = |part| Self::part(spec, part).payload();
        let children: Vec<Value> = (1..=self.children)
            .map(|nth| payload(Part::Child(nth)))
            .collect();
        json!({
            "n": spec.n,
            "nap_ms": self.nap_ms,
            "waits": self.waits,
            "timeout_ms": self.timeout_ms,
            "stumbles": self.stumbles,
            "traps": self.traps,
            "call": self.calls.then(|| payload(Part::Call)),
            "children": children,
            "next": self.continues.then(|| payload(Part::Next)),
        })
    }

    /// The jobs that it enqueues.
    pub(super) fn parts(&self) -> Vec<Part> {
        let mut parts: Vec<Part> = (1..=self.children).map(Part::Child).collect();
        parts.extend(self.continues.then_some(Part::Next));
        parts.extend(self.calls.then_some(Part::Call));
        parts
    }

    /// The number of a job that the job with this number enqueues.
    pub(super) fn number(n: i64, part: Part) -> i64 {
        n + part.digit() * PART_STRIDE
    }

    /// The number of the job that enqueues the one with this number; of a job that no other enqueues, its own.
    pub(super) fn root(n: i64) -> i64 {
        n % PART_STRIDE
    }

    /// The job that this job enqueues, exactly as its attempt enqueues it.
    pub(super) fn part(spec: &JobSpec, part: Part) -> JobSpec {
        let suspending = spec.suspending.as_ref();
        JobSpec {
            n: Self::number(spec.n, part),
            kind: spec.kind,
            handler: WORK.into(),
            queue: spec.queue.clone(),
            priority: spec.priority.clone(),
            sleep_ms: spec.n.unsigned_abs() % 500,
            hopeless: part == Part::Call && suspending.is_some_and(|it| it.call_fails),
            ..JobSpec::default()
        }
    }
}

impl Part {
    fn digit(self) -> i64 {
        match self {
            Self::Next => 1,
            Self::Call => 2,
            Self::Child(nth) => 2 + i64::from(nth),
        }
    }

    /// The role of the job with this number. `None`: no job enqueues it.
    pub(super) fn of(n: i64) -> Option<Self> {
        match n / PART_STRIDE {
            1 => Some(Self::Next),
            2 => Some(Self::Call),
            digit @ 3.. => u8::try_from(digit - 2).ok().map(Self::Child),
            _ => None,
        }
    }
}

/// Sends one signal to a job, after `delay`.
pub(super) async fn signal(
    url: &str,
    ledger: &Ledger,
    job: i64,
    mark: i64,
    delay: Duration,
) -> Result<()> {
    tokio::time::sleep(delay).await;
    let mut caller = Caller::new(url, ledger);
    let payload = Json(json!({ "mark": mark }));
    // Without a connection, nothing is sent: the wait times out.
    caller
        .call(Request::Signal { job, mark }, SIGNAL, &[&job, &payload])
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_job_shows_as_which_part_it_is_enqueued() {
        let spec = JobSpec {
            n: 2_000_000_017,
            ..JobSpec::default()
        };
        assert_eq!(Part::of(spec.n), None);
        for part in [Part::Child(1), Part::Child(2), Part::Next, Part::Call] {
            let n = Suspending::part(&spec, part).n;
            assert_eq!((Part::of(n), Suspending::root(n)), (Some(part), spec.n));
        }
    }

    #[test]
    fn suspending_jobs_have_every_kind_of_signal_and_of_part() {
        let mut random = Random::new(1, "suspending");
        let drawn: Vec<Suspending> = (0..200).map(|_| Suspending::draw(&mut random)).collect();
        let has = |test: fn(&Suspending) -> bool| drawn.iter().any(test);
        assert!(has(|f| f.signals_ms.is_empty()));
        assert!(has(|f| f.waits == 1 && f.signals_ms.len() == 2));
        assert!(has(|f| f.waits == 2));
        assert!(has(|f| f.stumbles && f.traps && f.calls && f.continues));
        assert!(has(|f| f.children == 0) && has(|f| f.parts().len() == 4));
        assert!(drawn.iter().all(|f| f.timeout_ms.is_some()));
        assert_eq!(Suspending::never_signalled().timeout_ms, None);
    }
}
