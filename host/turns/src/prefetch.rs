//! Decides the number of jobs to claim beyond the free slots.

use std::time::{Duration, Instant};

/// Jobs are claimed this far ahead of their start.
const AHEAD: Duration = Duration::from_millis(100);
/// The maximum number of jobs claimed ahead. A claim of 1,000 jobs costs Postgres half as much per job as a claim of
/// 50; larger claims save little more.
const PREFETCH_MAX: f64 = 2000.0;
/// A claim of less than 128 KiB returns its jobs directly, without a second statement to read them. This limit, and the
/// size of a job's columns, are those of `rouse.claim` (migrations/functions/claim.sql); this value is a little lower,
/// because jobs differ in size.
const INLINE_BYTES: f64 = (124 << 10) as f64;
/// If fewer jobs than this fit inline, one large claim with a second statement is cheaper than many small claims.
const INLINE_JOBS_MIN: f64 = 100.0;
/// Each average is measured over at least this many ends, except the first one.
const ENDS_MIN: usize = 16;
/// The minimum time over which the pace is measured.
const MEASURED_OVER: Duration = Duration::from_millis(20);
/// The pace may grow at most by this factor from one measurement to the next. Growth is needed because slots that had
/// to wait for the last claim have finished fewer jobs than they can.
const GROWTH: f64 = 2.0;
/// If jobs take longer than this on average, none are claimed ahead: claims that have waited that long are given back
/// ([`START_TIMEOUT`](crate::START_TIMEOUT)), and the wait for a round trip costs such jobs little.
const LONG: f64 = 1.0;

/// Claims as many jobs ahead as the slots of this worker finish in a tenth of a second, if each takes as long as the
/// average of the last ones, but at most twice as many as it has recently finished in that time. So short jobs hardly
/// wait for round trips, and a few long jobs that end within milliseconds of each other do not count as a pace.
#[derive(Debug)]
pub struct Prefetch {
    slots: usize,
    since: Instant,
    ended: usize,
    /// The number of jobs that ended per second in the last measurement, and in the one before.
    paces: [f64; 2],
    /// The number of ends, and the time for which all slots together had been taken, when the average was measured.
    measured: (usize, Duration),
    /// The average time of a job in its slot, in seconds. `None` before enough jobs have ended.
    average: Option<f64>,
    /// The average size of payload, tenant, source and grants of a job in the last claim.
    bytes_per_job: f64,
    /// The maximum size of a claim.
    bytes_max: f64,
    /// The size of a job's other columns.
    columns_bytes: f64,
}

impl Prefetch {
    /// `slots`: the maximum number of concurrent jobs. `bytes_max`: the size at which a claim ends. `columns_bytes`:
    /// the size of the columns that every job has.
    pub fn new(now: Instant, slots: usize, bytes_max: usize, columns_bytes: usize) -> Self {
        Self {
            slots,
            since: now,
            ended: 0,
            paces: [0.0; 2],
            measured: (0, Duration::ZERO),
            average: None,
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

    /// The number of jobs to claim ahead. `ended` counts the attempts that have ended so far, `taken` is the total time
    /// for which slots have been taken.
    #[expect(clippy::cast_precision_loss, reason = "counts of jobs and slots")]
    pub fn jobs(&mut self, ended: usize, taken: Duration, now: Instant) -> usize {
        let passed = now.saturating_duration_since(self.since);
        if passed >= MEASURED_OVER {
            let pace = ended.wrapping_sub(self.ended) as f64 / passed.as_secs_f64();
            self.paces = [pace, self.paces[0]];
            (self.since, self.ended) = (now, ended);
        }
        let average = self.average(ended, taken);
        let Some(average) = average.filter(|average| *average < LONG) else {
            return 0;
        };
        // If the slots were idle until the response to the last claim, the measurement before shows the pace. Otherwise
        // the next claim would be sent too late, and they would be idle again.
        let recent = self.paces[0].max(self.paces[1]);
        let pace = (self.slots as f64 / average).min(GROWTH * recent);
        let jobs = (pace * AHEAD.as_secs_f64())
            .min(PREFETCH_MAX)
            .min(self.bytes_max / self.bytes_per_job);
        whole(jobs)
    }

    /// The average duration of a job, in seconds: over at least as many ends as there are slots, since a long job is
    /// seen only when it ends. If nothing ends for a long time, the average rises at once.
    #[expect(clippy::cast_precision_loss, reason = "counts of jobs and slots")]
    fn average(&mut self, ended: usize, taken: Duration) -> Option<f64> {
        let (before, taken_before) = self.measured;
        let ends = ended.wrapping_sub(before);
        let seconds = taken.saturating_sub(taken_before).as_secs_f64();
        let enough = match self.average {
            Some(_) => self.slots.max(ENDS_MIN),
            // A new worker should not wait for a long time.
            None => self.slots,
        };
        if ends >= enough {
            self.measured = (ended, taken);
            self.average = Some(seconds / ends as f64);
            return self.average;
        }
        let at_least = seconds / (ends + self.slots) as f64;
        self.average.map(|average| average.max(at_least))
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
    use std::collections::VecDeque;

    use super::*;

    fn prefetch(now: Instant) -> Prefetch {
        Prefetch::new(now, 8, 8 << 20, 120)
    }

    /// The results of a model of a worker with a backlog.
    #[derive(Debug, Default)]
    struct Report {
        started: usize,
        /// Claims that were given back, because no slot was free within a second.
        released: usize,
        /// The largest number of jobs to claim ahead.
        ahead_max: usize,
        /// The time at which the number of jobs to claim ahead was first half of what the slots finish in a tenth of a
        /// second.
        half_pace_at_ms: Option<usize>,
    }

    /// The worker and its jobs.
    #[derive(Debug, Clone, Copy)]
    struct Model {
        slots: usize,
        /// Jobs take about this many milliseconds, give or take `percent`.
        job_ms: usize,
        percent: usize,
        /// The duration of a claim.
        claim_ms: usize,
    }

    /// Runs the model for a while.
    fn run(model: Model, for_ms: usize) -> Report {
        let Model {
            slots,
            job_ms,
            percent,
            claim_ms,
        } = model;
        let start = Instant::now();
        let mut prefetch = Prefetch::new(start, slots, 8 << 20, 120);
        let mut report = Report::default();
        let (mut random, mut ended, mut taken_ms) = (12_345_usize, 0, 0);
        let mut running: Vec<usize> = Vec::new();
        let mut line: VecDeque<usize> = VecDeque::new();
        // The claim under way: when it is answered, and its size.
        let mut claim: Option<(usize, usize)> = None;
        for now in 0..for_ms {
            taken_ms += running.len();
            let before = running.len();
            running.retain(|end| *end > now);
            ended += before - running.len();
            while line.front().is_some_and(|claimed| now - claimed > 1000) {
                line.pop_front();
                report.released += 1;
            }
            if let Some((_, jobs)) = claim.take_if(|(at, _)| *at <= now) {
                line.extend(std::iter::repeat_n(now, jobs));
            }
            if claim.is_none() {
                let at = start + Duration::from_millis(u64::try_from(now).unwrap());
                let taken = Duration::from_millis(u64::try_from(taken_ms).unwrap());
                let ahead = prefetch.jobs(ended, taken, at);
                report.ahead_max = report.ahead_max.max(ahead);
                if ahead * job_ms >= slots * 50 {
                    report.half_pace_at_ms.get_or_insert(now);
                }
                let capacity = (slots + ahead).saturating_sub(running.len() + line.len());
                if capacity >= (ahead / 2).max(1) {
                    claim = Some((now + claim_ms, capacity));
                }
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

    fn model(slots: usize, job_ms: usize, percent: usize, claim_ms: usize) -> Model {
        Model {
            slots,
            job_ms,
            percent,
            claim_ms,
        }
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
            let report = run(model(slots, job_ms, percent, 5), 20_000);
            let all = 20_000 / (2 * job_ms) * slots;
            assert!(
                report.released == 0 && report.ahead_max == 0 && report.started > all,
                "{slots} slots, {job_ms} ms, {percent} %: {report:?}"
            );
        }
    }

    #[test]
    fn jobs_of_less_than_a_second_are_not_given_back() {
        for (slots, job_ms, percent) in [(8, 900, 0), (100, 900, 3), (16, 400, 50)] {
            let report = run(model(slots, job_ms, percent, 5), 20_000);
            assert_eq!(report.released, 0, "{slots} slots, {job_ms} ms: {report:?}");
        }
    }

    /// Without claims ahead, the slots would be idle for as long as each claim takes.
    #[test]
    fn slow_claims_do_not_slow_down_short_jobs() {
        for (slots, job_ms, claim_ms) in [(2, 1, 50), (8, 10, 100), (100, 10, 100), (8, 100, 20)] {
            let report = run(model(slots, job_ms, 30, claim_ms), 20_000);
            let max = slots * 20_000 / job_ms;
            // At most as many jobs as the slots finish in a tenth of a second are claimed ahead.
            let expected = max * 100 / (100 + claim_ms) * 7 / 10;
            assert!(
                report.started >= expected,
                "{slots} slots, {job_ms} ms, {claim_ms} ms: {report:?}, {expected} expected"
            );
        }
    }

    #[test]
    fn the_line_is_refilled_early_even_if_it_was_empty_during_the_last_claim() {
        let start = Instant::now();
        let mut prefetch = prefetch(start);
        let at = |ms| start + Duration::from_millis(ms);
        let taken = Duration::from_millis;
        assert_eq!(prefetch.jobs(8_000, taken(800), at(100)), 2000);
        // Nothing ends until the response to the claim arrives.
        assert_eq!(prefetch.jobs(8_000, taken(800), at(160)), 2000);
    }

    #[test]
    fn two_long_jobs_that_end_one_after_the_other_are_not_a_pace() {
        let start = Instant::now();
        let mut prefetch = prefetch(start);
        let at = |ms| start + Duration::from_millis(ms);
        let taken = Duration::from_millis;
        assert_eq!(prefetch.jobs(0, taken(0), at(30)), 0);
        // The long jobs follow many short ones.
        assert_eq!(prefetch.jobs(80, taken(800), at(130)), 80);
        assert_eq!(prefetch.jobs(81, taken(40_800), at(5130)), 0);
        assert_eq!(prefetch.jobs(82, taken(41_000), at(5155)), 0);
    }

    #[test]
    fn a_new_worker_of_short_jobs_reaches_its_pace_within_a_fraction_of_a_second() {
        for (slots, job_ms, within_ms) in [(8, 2, 50), (100, 10, 50), (8, 50, 200)] {
            let report = run(model(slots, job_ms, 30, 1), 1000);
            assert!(
                report.half_pace_at_ms.is_some_and(|at| at <= within_ms),
                "{slots} slots, {job_ms} ms: {report:?}"
            );
            assert_eq!(report.released, 0);
        }
    }

    #[test]
    fn a_worker_of_short_jobs_claims_a_tenth_of_a_second_ahead() {
        let start = Instant::now();
        let mut prefetch = prefetch(start);
        let at = |ms| start + Duration::from_millis(ms);
        let taken = Duration::from_millis;
        assert_eq!(prefetch.jobs(100, taken(800), at(100)), 100);
        assert_eq!(prefetch.jobs(100, taken(800), at(101)), 100);
        assert_eq!(prefetch.jobs(90_000, taken(1600), at(200)), 2000);
        assert_eq!(prefetch.jobs(90_000, taken(1600), at(400)), 2000);
        assert_eq!(prefetch.jobs(90_000, taken(1600), at(450)), 0, "it is idle");
        // As many jobs start as a gate permits, which is less than what the slots could do.
        assert_eq!(prefetch.jobs(90_030, taken(1610), at(550)), 60);
    }

    #[test]
    fn a_claim_of_small_jobs_wants_as_many_as_fit_into_its_response() {
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
        let taken = Duration::from_millis;
        assert_eq!(prefetch.jobs(100, taken(800), start + taken(100)), 32);
        prefetch.claimed(0, 0);
        assert_eq!(prefetch.jobs(200, taken(1600), start + taken(200)), 32);
    }
}
