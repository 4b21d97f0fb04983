//! How many jobs to claim beyond the free slots.

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

/// Claims as many jobs ahead as this worker has recently finished in a tenth of a second. So long jobs are never
/// claimed ahead, and short jobs never wait for a round trip.
#[derive(Debug)]
pub struct Prefetch {
    since: Instant,
    ended: usize,
    jobs: f64,
    /// The average size of payload, tenant, source and grants of a job in the last claim.
    bytes_per_job: f64,
    /// The maximum size of a claim.
    bytes_max: f64,
    /// The size of a job's other columns.
    columns_bytes: f64,
}

impl Prefetch {
    /// `bytes_max`: the size with which a claim ends. `columns_bytes`: the size of the columns that every job has.
    pub fn new(now: Instant, bytes_max: usize, columns_bytes: usize) -> Self {
        Self {
            since: now,
            ended: 0,
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
            self.jobs = (pace * AHEAD.as_secs_f64())
                .min(PREFETCH_MAX)
                .min(self.bytes_max / self.bytes_per_job);
            self.since = now;
            self.ended = ended;
        }
        whole(self.jobs)
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
        Prefetch::new(now, 8 << 20, 120)
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
