//! The gates of claims: the rules of `migrations/functions/gates.sql`, over values.
//!
//! The module follows the SQL, function by function: [`tokens`] is `rouse._tokens`, [`Gates::restrict`] is
//! `rouse._within_gates`, [`Gates::charge`] is `rouse._charge_gates`. `tests/it/gates/model.rs` compares their
//! responses with those of a real Postgres. Times are microseconds, as in Postgres.

use std::collections::HashMap;

/// A limit on the jobs of each key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// At most this many run at the same time (`max_concurrent`).
    Running {
        /// The maximum number of running jobs of a key.
        max: i32,
    },
    /// At most this many start in a period (`throttle`).
    Starts(Rate),
}

/// How often jobs of a key may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// The number of starts in a period.
    pub max: i32,
    /// The period, in milliseconds.
    pub period_ms: i64,
    /// The starts that are permitted at once after a pause: a token bucket. `None`: a sliding window.
    pub burst: Option<i32>,
}

/// A key of a gate: the number of the gate, and that of the key within it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The gate.
    pub gate: usize,
    /// The key.
    pub key: u32,
}

/// A lane in a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// The lane.
    pub lane: u32,
    /// The maximum number of jobs; `None`: only the limit of the claim applies.
    pub max: Option<usize>,
}

/// A lane behind a gate, in a claim: `rouse.gated_lane`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gated {
    lane: u32,
    of: Key,
    /// The room when the lane had its turn. `None` for gates that limit starts.
    room: Option<i32>,
    wait_ms: Option<i64>,
}

/// A lane from which no job may start now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClosedLane {
    /// The lane.
    pub lane: u32,
    /// The keys that have no room for it, each with the milliseconds until it has; `None`: until one of its jobs ends.
    pub by: Vec<(Key, Option<i64>)>,
}

impl ClosedLane {
    /// True if this key has no room for the lane.
    pub fn is_closed_by(&self, key: &Key) -> bool {
        self.by.iter().any(|(closed, _)| closed == key)
    }
}

/// The starts of a key that count: a row of `rouse.gate_key`.
#[derive(Debug, Clone, Default)]
struct Starts {
    starts: Vec<i64>,
    /// When the bucket is full again.
    until: Option<i64>,
}

/// The gates, with the counts of each key.
#[derive(Debug, Default)]
pub struct Gates {
    limits: Vec<Limit>,
    running: HashMap<Key, i32>,
    starts: HashMap<Key, Starts>,
}

/// The number of jobs of a key that may start now, and if that is 0, the number of milliseconds after which one may.
/// Without a burst, `starts` contains the last starts. With one, `until` is the time at which the bucket is full again.
pub fn tokens(rate: Rate, starts: &[i64], until: Option<i64>, at: i64) -> (i32, Option<i64>) {
    let Rate {
        max,
        period_ms,
        burst,
    } = rate;
    let (tokens, wait) = match burst {
        None => {
            let since = at - period_ms * 1000;
            let recent = starts.iter().filter(|start| **start > since).count();
            let recent = i32::try_from(recent).unwrap_or(i32::MAX);
            // The start that makes room when it leaves the window; SQL counts from 1.
            let first = (starts.len() + 1)
                .checked_sub(usize::try_from(max).unwrap_or(0))
                .and_then(|place| starts.get(place.wrapping_sub(1)));
            let wait = first.map(|start| period_ms as f64 + seconds(start - at) * 1000.0);
            ((max - recent).max(0), wait)
        }
        Some(burst) => {
            // The number of starts by which the bucket is short of being full.
            let short = seconds(until.unwrap_or(at) - at).max(0.0) * 1000.0 * f64::from(max)
                / period_ms as f64;
            // A bucket is never short of so many, unless the clock has been set back.
            let short = if short > f64::from(2 * burst) {
                0.0
            } else {
                short
            };
            let tokens = (f64::from(burst) - short + 1e-6).floor().max(0.0);
            let wait = (short - f64::from(burst) + 1.0) * period_ms as f64 / f64::from(max);
            (tokens as i32, Some(wait))
        }
    };
    let wait_ms = (tokens == 0).then(|| wait.map_or(1, |wait| wait.ceil().max(1.0) as i64));
    (tokens, wait_ms)
}

fn seconds(us: i64) -> f64 {
    us as f64 / 1e6
}

/// An interval of `factor` milliseconds, as Postgres rounds it.
fn interval_us(factor: f64) -> i64 {
    (1000.0 * factor).round_ties_even() as i64
}

impl Gates {
    /// Gates with these limits, through which no job has passed.
    pub fn new(limits: Vec<Limit>) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Records that a job behind this gate runs.
    pub fn started(&mut self, of: Key) {
        *self.running.entry(of).or_default() += 1;
    }

    /// Records that a job behind this gate no longer runs.
    pub fn ended(&mut self, of: Key) {
        if let Some(running) = self.running.get_mut(&of) {
            *running -= 1;
        }
    }

    /// The number of jobs of a key that may start, and if that is 0, the number of milliseconds after which one may,
    /// unless a job has to end first.
    pub fn room(&self, of: Key, at: i64) -> (i32, Option<i64>) {
        match self.limits[of.gate] {
            Limit::Running { max } => {
                let running = self.running.get(&of).copied().unwrap_or(0);
                ((max - running).max(0), None)
            }
            Limit::Starts(rate) => {
                let none = Starts::default();
                let of = self.starts.get(&of).unwrap_or(&none);
                tokens(rate, &of.starts, of.until, at)
            }
        }
    }

    /// Restricts a claim of `wanted` jobs to what the gates permit: each order gets at most as many jobs as all gates
    /// of its lane permit. If several lanes have the same key, the first ones that have ready jobs get what is left.
    /// `keys` are the keys of a lane, and `ready` the number of its ready jobs. Keys with room for more than the whole
    /// claim do not restrict anything, and are only charged.
    pub fn restrict<'a>(
        &self,
        orders: &mut [Order],
        wanted: usize,
        at: i64,
        keys: impl Fn(u32) -> &'a [Key],
        ready: impl Fn(u32) -> usize,
    ) -> Vec<Gated> {
        struct Group {
            room: i32,
            wait_ms: Option<i64>,
            lanes: usize,
            is_scarce: bool,
        }
        let mut groups: HashMap<Key, Group> = HashMap::new();
        for of in orders.iter().flat_map(|order| keys(order.lane)) {
            let group = groups.entry(*of).or_insert_with(|| {
                let (room, wait_ms) = self.room(*of, at);
                Group {
                    room,
                    wait_ms,
                    lanes: 0,
                    is_scarce: whole(room) <= wanted,
                }
            });
            group.lanes += 1;
        }
        // Based on the room that is left before any lane has taken from it.
        let ready: Vec<Option<usize>> = orders
            .iter()
            .map(|order| {
                let of = keys(order.lane).iter().map(|of| &groups[of]);
                let scarce: Vec<&Group> = of.filter(|group| group.is_scarce).collect();
                let is_shared = scarce.iter().any(|group| group.lanes > 1);
                let room = scarce.iter().map(|group| group.room).min()?;
                let most = order.max.unwrap_or(wanted).min(wanted).min(whole(room));
                is_shared.then(|| ready(order.lane).min(most))
            })
            .collect();
        let mut gated = Vec::new();
        for (order, ready) in orders.iter_mut().zip(ready) {
            let of = keys(order.lane);
            if of.is_empty() {
                continue;
            }
            let mut most = order.max.into_iter().chain(ready).min();
            for of in of {
                let group = &groups[of];
                let is_limit = matches!(self.limits[of.gate], Limit::Running { .. });
                if !group.is_scarce && is_limit {
                    continue;
                }
                if group.is_scarce {
                    let room = whole(group.room);
                    most = Some(most.map_or(room, |most| most.min(room)));
                }
                gated.push(Gated {
                    lane: order.lane,
                    of: *of,
                    room: is_limit.then_some(group.room),
                    wait_ms: group.wait_ms,
                });
            }
            order.max = most;
            if ready.is_some() {
                let taken = i32::try_from(most.unwrap_or(0)).unwrap_or(i32::MAX);
                for of in of {
                    if let Some(group) = groups.get_mut(of) {
                        group.room -= taken;
                    }
                }
            }
        }
        gated
    }

    /// Charges the keys that limit starts for the jobs that a claim took from each lane. Returns the lanes from which
    /// no job may start now.
    pub fn charge(
        &mut self,
        gated: &[Gated],
        claimed: &HashMap<u32, usize>,
        at: i64,
    ) -> Vec<ClosedLane> {
        let jobs = |lane: u32| claimed.get(&lane).copied().unwrap_or(0);
        let mut charged: HashMap<Key, usize> = HashMap::new();
        for pair in gated.iter().filter(|pair| pair.room.is_none()) {
            let jobs = jobs(pair.lane);
            if jobs > 0 {
                *charged.entry(pair.of).or_default() += jobs;
            }
        }
        let mut waits: HashMap<Key, i64> = HashMap::new();
        for (of, starts) in charged {
            if let Some(wait_ms) = self.charge_key(of, starts, at) {
                waits.insert(of, wait_ms);
            }
        }
        let mut closed = Vec::new();
        for of_lane in gated.chunk_by(|one, other| one.lane == other.lane) {
            let lane = of_lane[0].lane;
            let is_full = |pair: &Gated| pair.room.is_some_and(|room| jobs(lane) >= whole(room));
            let wait = |pair: &Gated| waits.get(&pair.of).copied().or(pair.wait_ms);
            let by: Vec<(Key, Option<i64>)> = of_lane
                .iter()
                .filter(|pair| is_full(pair) || wait(pair).is_some())
                .map(|pair| (pair.of, wait(pair)))
                .collect();
            if !by.is_empty() {
                closed.push(ClosedLane { lane, by });
            }
        }
        closed
    }

    /// Charges a key for these starts. Returns the number of milliseconds after which the next job may start, if no job
    /// may start now.
    fn charge_key(&mut self, of: Key, starts: usize, at: i64) -> Option<i64> {
        let Limit::Starts(rate) = self.limits[of.gate] else {
            return None;
        };
        let key = self.starts.entry(of).or_default();
        match rate.burst {
            None => {
                key.starts.extend(std::iter::repeat_n(at, starts));
                let since = at - rate.period_ms * 1000;
                key.starts.retain(|start| *start > since);
                key.until = Some(at + rate.period_ms * 1000);
            }
            Some(_) => {
                let factor = starts as f64 / f64::from(rate.max) * rate.period_ms as f64;
                let rest = key.until.map_or(0, |until| (until - at).max(0));
                key.until = Some(at + interval_us(factor) + rest);
            }
        }
        tokens(rate, &key.starts, key.until, at).1
    }
}

fn whole(room: i32) -> usize {
    usize::try_from(room).unwrap_or(0)
}

#[cfg(test)]
mod tests;
