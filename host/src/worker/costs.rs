//! The costs of the jobs of a lane, for fair queues that charge CPU time.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::job::LaneId;

/// The weight of the newest attempt in the average of a lane.
const NEWEST: f64 = 0.125;
/// The number of attempts in the average of a queue. If it followed individual attempts, those that a key had just run
/// would change the cost of its next ones.
const ALL: f64 = 1000.0;
/// The minimum and the maximum cost of a job, relative to the average of its queue: the ratio of a millisecond to ten
/// seconds, and its inverse.
const COSTS: std::ops::RangeInclusive<f64> = 0.0001..=10_000.0;

/// The average CPU time of the last attempts of each lane, by queue: the keys of a queue share its turns, regardless of
/// the CPU time of other queues.
#[derive(Debug, Default)]
pub(super) struct Costs {
    queues: Mutex<HashMap<String, QueueCosts>>,
}

/// Averages in microseconds.
#[derive(Debug, Default)]
struct QueueCosts {
    lanes: HashMap<LaneId, f64>,
    all: f64,
    /// The number of attempts in `all`, up to `ALL`.
    attempts: f64,
}

impl Costs {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, QueueCosts>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an attempt that has ended.
    pub(super) fn record(&self, queue: &str, lane: LaneId, cpu: Duration) {
        let us = cpu.as_secs_f64() * 1e6;
        let mut queues = self.lock();
        let costs = queues.entry(queue.to_owned()).or_default();
        costs.attempts = (costs.attempts + 1.0).min(ALL);
        costs.all += (us - costs.all) / costs.attempts;
        let average = costs.lanes.entry(lane).or_insert(us);
        *average += (us - *average) * NEWEST;
    }

    /// The cost of the next job of a lane of this queue, in average jobs: 1 if nothing is known.
    pub(super) fn cost(&self, queue: &str, lane: LaneId) -> f64 {
        let queues = self.lock();
        let Some(costs) = queues.get(queue) else {
            return 1.0;
        };
        match costs.lanes.get(&lane) {
            Some(average) if costs.all > 0.0 => {
                (average / costs.all).clamp(*COSTS.start(), *COSTS.end())
            }
            _ => 1.0,
        }
    }

    /// Keeps only the lanes for which `keep` returns true.
    pub(super) fn retain(&self, keep: impl Fn(LaneId) -> bool) {
        self.lock().retain(|_, costs| {
            costs.lanes.retain(|lane, _| keep(*lane));
            !costs.lanes.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_costs_the_cpu_time_of_the_last_ones_of_its_lane_relative_to_all() {
        let costs = Costs::default();
        let (cheap, expensive, new) = (LaneId(1), LaneId(2), LaneId(3));
        assert!((costs.cost("mail", cheap) - 1.0).abs() < 1e-9);
        for _ in 0..500 {
            costs.record("mail", cheap, Duration::from_micros(500));
            costs.record("mail", expensive, Duration::from_micros(1500));
        }
        assert!((costs.cost("mail", cheap) - 0.5).abs() < 0.01);
        assert!((costs.cost("mail", expensive) - 1.5).abs() < 0.01);
        assert!((costs.cost("mail", new) - 1.0).abs() < 1e-9);
        // The cost follows a change, and stays within its bounds.
        for _ in 0..150 {
            costs.record("mail", expensive, Duration::ZERO);
        }
        assert!((costs.cost("mail", expensive) - 0.0001).abs() < 1e-9);
        costs.retain(|lane| lane == cheap);
        assert!((costs.cost("mail", expensive) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_jobs_of_a_queue_are_compared_with_each_other_and_not_with_those_of_other_queues() {
        let costs = Costs::default();
        let (video, short, long) = (LaneId(1), LaneId(2), LaneId(3));
        for _ in 0..500 {
            costs.record("videos", video, Duration::from_secs(10));
            costs.record("mail", short, Duration::from_millis(1));
            costs.record("mail", long, Duration::from_millis(5));
        }
        assert!((costs.cost("videos", video) - 1.0).abs() < 0.01);
        let ratio = costs.cost("mail", long) / costs.cost("mail", short);
        assert!((ratio - 5.0).abs() < 0.01, "{ratio}");
        costs.retain(|lane| lane != video);
        assert!(!costs.lock().contains_key("videos"));
    }

    #[test]
    fn jobs_of_one_queue_may_differ_by_a_factor_of_thousands() {
        let costs = Costs::default();
        let (video, mail) = (LaneId(1), LaneId(2));
        for _ in 0..500 {
            costs.record("default", video, Duration::from_secs(10));
            costs.record("default", mail, Duration::from_millis(5));
        }
        let ratio = costs.cost("default", video) / costs.cost("default", mail);
        assert!((ratio - 2000.0).abs() < 1.0, "{ratio}");
    }

    #[test]
    fn the_attempts_of_one_lane_do_not_change_the_cost_of_jobs_of_others() {
        let costs = Costs::default();
        let (cheap, expensive) = (LaneId(1), LaneId(2));
        for _ in 0..500 {
            costs.record("mail", cheap, Duration::from_micros(500));
            costs.record("mail", expensive, Duration::from_micros(1500));
        }
        let before = costs.cost("mail", cheap);
        for _ in 0..20 {
            costs.record("mail", expensive, Duration::from_micros(1500));
        }
        let change = costs.cost("mail", cheap) / before;
        assert!((0.98..1.0).contains(&change), "{change}");
    }
}
