//! How many jobs to claim beyond the free slots.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Jobs are claimed this far ahead of their start.
const AHEAD: Duration = Duration::from_millis(100);
/// The maximum number of jobs claimed ahead. A claim of 1,000 jobs costs Postgres half as much per job as a claim of
/// 50; larger claims save little more.
const PREFETCH_MAX: f64 = 2000.0;
/// A claim of less than 128 KiB returns its jobs in its answer, without a second statement to read them. This limit,
/// and the size of a job's columns, are those of `rouse.claim` (migrations/functions/claim.sql); it is a little lower,
/// because jobs differ in size.
const INLINE_BYTES: f64 = (124 << 10) as f64;
/// If fewer jobs than this fit inline, one large claim with a second statement is cheaper than many small claims.
const INLINE_JOBS_MIN: f64 = 100.0;
/// The minimum time over which the pace is measured.
const MEASURED_OVER: Duration = Duration::from_millis(20);

/// Claims as many jobs ahead as this worker finishes in a tenth of a second, at the slowest pace since each slot has ended
/// a job. So short jobs do not wait for a round trip, and jobs that take much longer than a tenth of a second are not
/// claimed ahead: in the time of one such job there is a moment in which few or none end. If a few of them end within
/// milliseconds, or all of them because they started together, that alone is not a pace.
#[derive(Debug)]
pub struct Prefetch {
    slots: usize,
    since: Instant,
    ended: usize,
    /// The paces during the last ends, as many as there are slots: jobs in a second, with the count of ends until then. A
    /// later slower one replaces those before it, so the first is the slowest.
    paces: VecDeque<(usize, f64)>,
    jobs: f64,
    /// The average size of payload, tenant, source and grants of a job in the last claim.
    bytes_per_job: f64,
    /// The maximum size of a claim.
    bytes_max: f64,
    /// The size of a job's other columns.
    columns_bytes: f64,
}

impl Prefetch {
    /// `slots`: how many jobs run at a time. `bytes_max`: the size with which a claim ends. `columns_bytes`: the size of the
    /// columns that every job has.
    pub fn new(now: Instant, slots: usize, bytes_max: usize, columns_bytes: usize) -> Self {
        Self {
            slots,
            since: now,
            ended: 0,
            paces: VecDeque::new(),
            jobs: 0.0,
            bytes_per_job: 0.0,
            bytes_max: bytes_max as f64,
            columns_bytes: columns_bytes as f64,
        }
    }

    /// Records a claim of this many jobs, with this many bytes of payload, tenant, source and grants in all.
    pub fn claimed(&mut self, jobs: usize, bytes: usize) {
        if jobs > 0 {
            self.bytes_per_job = bytes as f64 / jobs as f64;
        }
    }

    /// The maximum number of jobs for one claim, if jobs are as large as in the last claim.
    pub fn claim_max(&self) -> usize {
        let fit = INLINE_BYTES / (self.columns_bytes + self.bytes_per_job);
        match fit >= INLINE_JOBS_MIN {
            true => whole(fit),
            false => usize::MAX,
        }
    }

    /// How many to claim ahead. `ended` counts the attempts that have ended so far.
    pub fn jobs(&mut self, ended: usize, now: Instant) -> usize {
        let passed = now.saturating_duration_since(self.since);
        if passed >= MEASURED_OVER {
            #[expect(
                clippy::cast_precision_loss,
                reason = "a count of jobs in a few milliseconds is small"
            )]
            let pace = ended.wrapping_sub(self.ended) as f64 / passed.as_secs_f64();
            self.jobs = (self.slowest(ended, pace) * AHEAD.as_secs_f64())
                .min(PREFETCH_MAX)
                .min(self.bytes_max / self.bytes_per_job);
            self.since = now;
            self.ended = ended;
        }
        whole(self.jobs)
    }

    /// Adds a pace, and returns the slowest one of the last ends.
    fn slowest(&mut self, ended: usize, pace: f64) -> f64 {
        while self.paces.back().is_some_and(|(_, other)| *other >= pace) {
            self.paces.pop_back();
        }
        self.paces.push_back((ended, pace));
        let slots = self.slots;
        let is_old = |(until, _): &(usize, f64)| ended.wrapping_sub(*until) > slots;
        while self.paces.front().is_some_and(is_old) {
            self.paces.pop_front();
        }
        self.paces.front().map_or(pace, |(_, slowest)| *slowest)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between 0 and 2000"
)]
fn whole(jobs: f64) -> usize {
    jobs as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefetch(now: Instant) -> Prefetch {
        Prefetch::new(now, 8, 8 << 20, 120)
    }

    /// What a model of a worker with a backlog has done. Its claims take no time.
    #[derive(Debug, Default)]
    struct Report {
        started: usize,
        /// Claims that were given back, because no slot was free within a second.
        released: usize,
        /// The largest number of jobs to claim ahead.
        ahead_max: usize,
        /// When this was first half of what the slots finish in a tenth of a second.
        half_pace_at_ms: Option<usize>,
    }

    /// Runs jobs of about this many milliseconds, give or take `percent`, for a while.
    fn run(slots: usize, job_ms: usize, percent: usize, for_ms: usize) -> Report {
        let start = Instant::now();
        let mut prefetch = Prefetch::new(start, slots, 8 << 20, 120);
        let mut report = Report::default();
        let (mut random, mut ended) = (12_345_usize, 0);
        let mut running: Vec<usize> = Vec::new();
        let mut line: VecDeque<usize> = VecDeque::new();
        for now in 0..for_ms {
            let before = running.len();
            running.retain(|end| *end > now);
            ended += before - running.len();
            while line.front().is_some_and(|claimed| now - claimed > 1000) {
                line.pop_front();
                report.released += 1;
            }
            let at = start + Duration::from_millis(u64::try_from(now).unwrap());
            let ahead = prefetch.jobs(ended, at);
            report.ahead_max = report.ahead_max.max(ahead);
            if ahead * job_ms >= slots * 50 {
                report.half_pace_at_ms.get_or_insert(now);
            }
            let capacity = (slots + ahead).saturating_sub(running.len() + line.len());
            if capacity >= (ahead / 2).max(1) {
                line.extend(std::iter::repeat_n(now, capacity));
            }
            while running.len() < slots && line.pop_front().is_some() {
                // A linear congruential generator, so that each run is the same.
                random = (random * 1_103_515_245 + 12_345) % (1 << 31);
                let spread = job_ms * percent / 100;
                running.push(now + job_ms - spread + (random >> 8) % (2 * spread + 1));
                report.started += 1;
            }
        }
        report
    }

    #[test]
    fn long_jobs_are_not_claimed_ahead_even_if_some_of_them_end_together() {
        for (slots, job_ms, percent) in [
            (8, 5000, 0),
            (8, 5000, 5),
            (8, 5000, 50),
            (100, 1500, 3),
            (100, 1500, 50),
        ] {
            let report = run(slots, job_ms, percent, 20_000);
            let all = 20_000 / (2 * job_ms) * slots;
            assert!(
                report.released == 0 && report.ahead_max == 0 && report.started > all,
                "{slots} slots, {job_ms} ms, {percent} %: {report:?}"
            );
        }
    }

    #[test]
    fn two_long_jobs_that_end_one_after_the_other_are_not_a_pace() {
        let start = Instant::now();
        let mut prefetch = prefetch(start);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(prefetch.jobs(0, at(30)), 0);
        assert_eq!(prefetch.jobs(1, at(5000)), 0);
        assert_eq!(prefetch.jobs(2, at(5025)), 0);
    }

    #[test]
    fn a_new_worker_of_short_jobs_reaches_its_pace_within_a_fraction_of_a_second() {
        for (slots, job_ms, within_ms) in [(8, 2, 50), (100, 10, 50), (8, 50, 200)] {
            let report = run(slots, job_ms, 30, 1000);
            assert!(
                report.half_pace_at_ms.is_some_and(|at| at <= within_ms),
                "{slots} slots, {job_ms} ms: {report:?}"
            );
            assert_eq!(report.released, 0);
        }
        // After a pause, too.
        let start = Instant::now();
        let mut prefetch = prefetch(start);
        let at = |ms| start + Duration::from_millis(ms);
        prefetch.jobs(0, at(60_000));
        assert_eq!(prefetch.jobs(80, at(60_020)), 400);
    }

    #[test]
    fn a_worker_of_long_jobs_claims_nothing_ahead() {
        let start = Instant::now();
        let mut prefetch = prefetch(start);
        assert_eq!(prefetch.jobs(8, start + Duration::from_secs(10)), 0);
    }

    #[test]
    fn a_worker_of_short_jobs_claims_a_tenth_of_a_second_ahead() {
        let start = Instant::now();
        let mut prefetch = prefetch(start);
        assert_eq!(prefetch.jobs(100, start + Duration::from_millis(100)), 100);
        assert_eq!(prefetch.jobs(100, start + Duration::from_millis(101)), 100);
        assert_eq!(
            prefetch.jobs(90_000, start + Duration::from_millis(200)),
            2000
        );
        assert_eq!(prefetch.jobs(90_000, start + Duration::from_millis(400)), 0);
    }

    #[test]
    fn a_claim_of_small_jobs_wants_as_many_as_fit_its_answer() {
        let mut prefetch = prefetch(Instant::now());
        assert_eq!(prefetch.claim_max(), 1058, "assuming empty payloads");
        prefetch.claimed(500, 500 * 200);
        assert_eq!(prefetch.claim_max(), 396);
        prefetch.claimed(10, 10 * (16 << 10));
        assert_eq!(prefetch.claim_max(), usize::MAX, "a second statement");
    }

    #[test]
    fn fewer_jobs_with_large_payloads_are_claimed_ahead() {
        let start = Instant::now();
        let mut prefetch = prefetch(start);
        prefetch.claimed(10, 10 * (256 << 10));
        assert_eq!(prefetch.jobs(100, start + Duration::from_millis(100)), 32);
        prefetch.claimed(0, 0);
        assert_eq!(prefetch.jobs(200, start + Duration::from_millis(200)), 32);
    }
}
