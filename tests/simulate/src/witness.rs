//! The witness, which checks the guarantees by counting claims, starts and ends. It does not use the turns; it uses the
//! model of the gates only to see whether stuck tenants had room.
//!
//! Shares are compared with those of an ideal fluid: tenants that have waiting jobs throughout a window get jobs in
//! proportion to their weights. A clock of each pool (tenants of one group, served by the same hosts) shows the number
//! of jobs to which such a tenant of weight 1 is entitled: a claim advances the clock by the number of jobs that the
//! claim takes from such tenants, divided by the sum of their weights. The jobs of other tenants do not count: those
//! tenants got everything that they wanted.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use crate::gates::{Key, Limit, Rate};
use crate::histogram::Histogram;
use crate::lanes::Lane;
use crate::server::{Job, Server};
use crate::{Nanos, SECOND, Scenario, US};

/// Starts and ends are counted this long after they have happened: by then, all are known.
const KNOWN_AFTER: Nanos = 10 * crate::MS;
/// A tenant is stuck if it is entitled to this many jobs, but none of them started within a window.
const STUCK_AFTER_JOBS: f64 = 64.0;

/// The counts of a tenant.
#[derive(Debug, Clone, Default)]
struct Seen {
    /// The clock of its pool at the start of the window, if it has had waiting jobs since then.
    since: Option<f64>,
    /// The clock of its pool at the last claim of one of its jobs.
    served: f64,
    /// True if it had room at the end of the last window, while slots were free.
    had_room: bool,
    is_stuck: bool,
    /// Jobs claimed in this window, while it had waiting jobs.
    received: f64,
    /// The same, of all windows throughout which it had waiting jobs, and the jobs to which it was entitled.
    all_received: f64,
    all_entitled: f64,
}

/// Tenants of one group that are served by the same hosts.
#[derive(Debug, Clone, Default)]
struct Pool {
    clock: f64,
    /// The weights of the tenants that have had waiting jobs since the start of the window.
    weights: f64,
}

/// The counts of a class.
#[derive(Debug, Clone, Default)]
pub(crate) struct OfClass {
    pub(crate) ended: u64,
    /// When the last of them has ended.
    pub(crate) ended_at: Nanos,
    pub(crate) delays: Histogram,
    pub(crate) received: f64,
    pub(crate) entitled: f64,
    /// The largest deviation of a tenant from its share, as a fraction of the share.
    pub(crate) worst: Option<f64>,
    pub(crate) stuck: u64,
}

/// The witness.
#[derive(Debug)]
pub(crate) struct Witness {
    limits: Vec<Limit>,
    seen: Vec<Seen>,
    /// The starts of each lane in this window.
    started: Vec<u32>,
    /// The pools of all groups on the first host, then those on the next.
    pools: Vec<Pool>,
    groups: usize,
    pub(crate) classes: Vec<OfClass>,
    /// Starts and ends of attempts behind limits that are not counted yet; ends first.
    moves: BinaryHeap<Reverse<(Nanos, bool, u32)>>,
    running: HashMap<Key, i64>,
    windows: HashMap<Key, VecDeque<i64>>,
    buckets: HashMap<Key, (i64, f64)>,
    pub(crate) starts: u64,
    pub(crate) exceeded: u64,
    /// The first time that a limit was exceeded, as text.
    pub(crate) first_exceeded: Option<String>,
    /// Jain's index of each window.
    pub(crate) jain: Vec<f64>,
    pub(crate) adopted: u64,
    pub(crate) released: u64,
}

impl Witness {
    pub(crate) fn new(scenario: &Scenario, lanes: &[Lane]) -> Self {
        let pools = if scenario.sharded { scenario.hosts } else { 1 };
        let groups = lanes.iter().filter_map(|lane| lane.group).max();
        let groups = groups.map_or(1, |last| last + 1);
        Self {
            limits: scenario.gates.iter().map(|gate| gate.limit).collect(),
            seen: vec![Seen::default(); lanes.len()],
            started: vec![0; lanes.len()],
            pools: vec![Pool::default(); pools * groups],
            groups,
            classes: vec![OfClass::default(); scenario.classes.len()],
            moves: BinaryHeap::new(),
            running: HashMap::new(),
            windows: HashMap::new(),
            buckets: HashMap::new(),
            starts: 0,
            exceeded: 0,
            first_exceeded: None,
            jain: Vec::new(),
            adopted: 0,
            released: 0,
        }
    }

    /// Starts the first window.
    pub(crate) fn start(
        &mut self,
        lanes: &[Lane],
        server: &Server,
        pool_of: impl Fn(u32) -> usize,
    ) {
        for (number, of) in (0_u32..).zip(lanes) {
            self.watch(number, of, server, pool_of(number));
        }
    }

    /// Watches a lane in the next window, if it has waiting jobs.
    fn watch(&mut self, lane: u32, of: &Lane, server: &Server, pool: usize) {
        let seen = &mut self.seen[lane as usize];
        if let Some(group) = of.group
            && server.waiting(lane) > 0
        {
            let pool = &mut self.pools[pool * self.groups + group];
            pool.weights += of.weight;
            seen.since = Some(pool.clock);
            seen.received = 0.0;
        }
    }

    /// Stops watching a lane, because it has no more waiting jobs, or leaves its pool.
    pub(crate) fn unwatch(&mut self, lane: u32, of: &Lane, pool: usize) {
        if let Some(group) = of.group
            && self.seen[lane as usize].since.take().is_some()
        {
            self.pools[pool * self.groups + group].weights -= of.weight;
        }
    }

    /// Records that a claim took jobs from lanes, and left this many in each.
    pub(crate) fn claimed(
        &mut self,
        at: Nanos,
        taken: &[(u32, usize, usize)],
        lanes: &[Lane],
        pool: usize,
    ) {
        let mut shared = vec![0.0; self.groups];
        for (lane, jobs, left) in taken {
            let of = &lanes[*lane as usize];
            if *left == 0 {
                self.unwatch(*lane, of, pool);
            }
            let seen = &mut self.seen[*lane as usize];
            if let Some(group) = of.group
                && seen.since.is_some()
            {
                seen.received += *jobs as f64;
                shared[group] += *jobs as f64;
            }
            for key in &of.keys {
                if let Limit::Starts(rate) = self.limits[key.gate] {
                    (0..*jobs).for_each(|_| self.count_start(*key, rate, (at / US) as i64));
                }
            }
        }
        let pools = &mut self.pools[pool * self.groups..][..self.groups];
        for (pool, shared) in pools.iter_mut().zip(shared) {
            if shared > 0.0 {
                pool.clock += shared / pool.weights;
            }
        }
        for (lane, ..) in taken {
            if let Some(group) = lanes[*lane as usize].group {
                self.seen[*lane as usize].served = pools[group].clock;
            }
        }
    }

    /// An attempt started.
    pub(crate) fn started(&mut self, at: Nanos, job: Job) {
        self.starts += 1;
        self.started[job.lane as usize] += 1;
        if job.is_new {
            let class = &mut self.classes[usize::from(job.class)];
            class.delays.record(at - job.enqueued_at);
        }
        if job.is_limited {
            self.moves.push(Reverse((at, true, job.lane)));
        }
    }

    /// An attempt ended, or was killed.
    pub(crate) fn ended(&mut self, at: Nanos, job: Job) {
        if job.is_limited {
            self.moves.push(Reverse((at, false, job.lane)));
        }
    }

    /// Counts the running attempts of all keys, up to a moment ago.
    pub(crate) fn count_running(&mut self, now: Nanos, lanes: &[Lane]) {
        while let Some(Reverse((at, is_start, lane))) = self.moves.peek().copied() {
            if at + KNOWN_AFTER > now {
                break;
            }
            self.moves.pop();
            for key in &lanes[lane as usize].limits {
                let running = self.running.entry(*key).or_default();
                *running += if is_start { 1 } else { -1 };
                let running = *running;
                if let Limit::Running { max } = self.limits[key.gate]
                    && is_start
                    && running > i64::from(max)
                {
                    self.exceed(
                        *key,
                        at,
                        &format!("{running} are running; the limit is {max}"),
                    );
                }
            }
        }
    }

    /// Counts a start behind a limit on starts.
    fn count_start(&mut self, key: Key, rate: Rate, at_us: i64) {
        let period_us = rate.period_ms * 1000;
        match rate.burst {
            None => {
                let starts = self.windows.entry(key).or_default();
                let before = match starts.len() >= rate.max as usize {
                    true => starts.pop_front(),
                    false => None,
                };
                starts.push_back(at_us);
                if let Some(before) = before.filter(|before| at_us - before < period_us) {
                    let within_us = at_us - before;
                    let text = format!("{} starts in {within_us} µs", rate.max + 1);
                    self.exceed(key, at_us as Nanos * US, &text);
                }
            }
            Some(burst) => {
                let (last, level) = self.buckets.entry(key).or_insert((at_us, 0.0));
                let refilled = (at_us - *last) as f64 * f64::from(rate.max) / period_us as f64;
                *level = (*level - refilled).max(0.0) + 1.0;
                *last = at_us;
                // Postgres rounds to microseconds.
                let excess = *level - f64::from(burst);
                if excess > 0.001 {
                    let text = format!("{excess:.3} starts more than the bucket had");
                    self.exceed(key, at_us as Nanos * US, &text);
                }
            }
        }
    }

    fn exceed(&mut self, key: Key, at: Nanos, what: &str) {
        self.exceeded += 1;
        if self.first_exceeded.is_none() {
            let seconds = at as f64 / SECOND as f64;
            let Key { gate, key } = key;
            self.first_exceeded =
                Some(format!("gate {gate}, key {key}, at {seconds:.6} s: {what}"));
        }
    }

    /// Ends a window: compares shares, and looks for tenants that are stuck. `is_idle`: whether hosts of a pool have
    /// free slots.
    pub(crate) fn end_window(
        &mut self,
        now: Nanos,
        lanes: &[Lane],
        server: &Server,
        pool_of: impl Fn(u32) -> usize,
        is_idle: impl Fn(usize) -> bool,
    ) {
        let (mut sum, mut squares, mut count) = (0.0, 0.0, 0_u64);
        for (number, of) in (0_u32..).zip(lanes) {
            let seen = &mut self.seen[number as usize];
            let has_started = std::mem::take(&mut self.started[number as usize]) > 0;
            let pool = pool_of(number);
            if let Some(since) = seen.since
                && let Some(group) = of.group
            {
                let clock = self.pools[pool * self.groups + group].clock;
                let entitled = (clock - since) * of.weight;
                if entitled >= 1.0 {
                    let share = seen.received / entitled;
                    sum += share;
                    squares += share * share;
                    count += 1;
                    seen.all_received += seen.received;
                    seen.all_entitled += entitled;
                }
                let missed = (clock - seen.served) * of.weight;
                seen.is_stuck |= !has_started && missed >= STUCK_AFTER_JOBS;
            }
            if !of.keys.is_empty() {
                let at_us = (now / US) as i64;
                let has_room = |key: &Key| server.gates.room(*key, at_us).0 > 0;
                let has_room =
                    server.waiting(number) > 0 && of.keys.iter().all(has_room) && is_idle(pool);
                seen.is_stuck |= seen.had_room && has_room && !has_started;
                seen.had_room = has_room;
            }
            self.unwatch(number, of, pool);
        }
        if count > 1 {
            self.jain.push(sum * sum / (count as f64 * squares));
        }
        // So that rounding errors do not accumulate.
        self.pools.iter_mut().for_each(|pool| pool.weights = 0.0);
        for (number, of) in (0_u32..).zip(lanes) {
            self.watch(number, of, server, pool_of(number));
        }
    }

    /// Ends the simulation. `is_over`: whether jobs that still wait are stuck.
    pub(crate) fn finish(&mut self, lanes: &[Lane], server: &Server, is_over: bool) {
        self.count_running(Nanos::MAX, lanes);
        for (number, of) in (0_u32..).zip(lanes) {
            let seen = &self.seen[number as usize];
            let class = &mut self.classes[usize::from(of.class)];
            class.received += seen.all_received;
            class.entitled += seen.all_entitled;
            // With fewer jobs, a single turn would make a noticeable difference.
            if seen.all_entitled >= 1000.0 {
                let off = seen.all_received / seen.all_entitled - 1.0;
                if class.worst.is_none_or(|worst| off.abs() > worst.abs()) {
                    class.worst = Some(off);
                }
            }
            class.stuck += u64::from(seen.is_stuck || is_over && server.waiting(number) > 0);
        }
    }
}
