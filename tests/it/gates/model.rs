//! The model of gates in the simulator (`tests/simulate/src/gates.rs`) answers as Postgres does.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime};

use rouse::job::Fence;
use rouse::store::{ClaimOrder, ClaimResult, ClaimedJob, Locked, Store};
use rouse_simulate::gates::{Gates, Key, Limit, Order, Rate, tokens};

use crate::support::TestDb;
use crate::support::claims::{rand, result, settlement};

use super::{enqueue, gate, set_gate};

/// 30 days: while a test runs, no start leaves the window, and no bucket gets a token.
const PERIOD_MS: i64 = 30 * 24 * 3600 * 1000;

/// Random numbers that a seed determines (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: i64) -> i64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end.unsigned_abs()) as i64
    }

    fn shuffle<T>(&mut self, list: &mut [T]) {
        for place in (1..list.len()).rev() {
            list.swap(place, self.below(place as i64 + 1) as usize);
        }
    }
}

/// A time, in microseconds since 1970.
fn time(us: i64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_micros(us.unsigned_abs())
}

#[tokio::test]
async fn postgres_and_the_model_count_the_same_tokens() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut random = Random(7);
    for _ in 0..1000 {
        let period_ms = [1, 7, 1000, 60_000, 3_600_000, PERIOD_MS][random.below(6) as usize];
        let bound = [5, 1000][random.below(2) as usize];
        let rate = Rate {
            max: 1 + random.below(bound) as i32,
            period_ms,
            burst: (random.below(2) == 0).then_some(1 + random.below(40) as i32),
        };
        let at = 1_700_000_000_000_000 + random.below(10_000_000_000);
        // Some at the edges of the window, and of a token.
        let ages = [0, 1000 * period_ms - 1, 1000 * period_ms];
        let mut starts: Vec<i64> = (0..random.below(10))
            .map(|_| match random.below(6) {
                edge @ 0..3 => at - ages[edge as usize],
                _ => at - random.below(2000 * period_ms),
            })
            .collect();
        starts.sort_unstable();
        let until = match random.below(4) {
            0 => None,
            1 => Some(at - random.below(1_000_000)),
            2 => Some(at + random.below(2000 * period_ms)),
            _ => {
                let token_us = period_ms as f64 / f64::from(rate.max) * 1000.0;
                Some(at + (random.below(60) as f64 * token_us).round_ties_even() as i64)
            }
        };
        let times: Vec<SystemTime> = starts.iter().map(|start| time(*start)).collect();
        let row = client
            .query_one(
                "SELECT t.tokens, t.wait_ms FROM rouse._tokens($1, $2, $3, $4, $5, $6) AS t",
                &[
                    &rate.max,
                    &rate.period_ms,
                    &rate.burst,
                    &times,
                    &until.map(time),
                    &time(at),
                ],
            )
            .await
            .unwrap();
        let response: (i32, Option<i64>) = (row.get(0), row.get(1));
        assert_eq!(
            response,
            tokens(rate, &starts, until, at),
            "{rate:?}, starts {starts:?}, until {until:?}, at {at}"
        );
    }
}

/// A lane, as the model knows it.
struct Lane {
    order: ClaimOrder,
    keys: Vec<Key>,
    /// The jobs that wait, and those that run.
    ready: usize,
    running: Vec<ClaimedJob>,
}

/// The number of jobs of each lane, and the gates that close it, by their numbers: until a job ends (`true`), or for a
/// time.
type Response = BTreeMap<usize, (usize, BTreeMap<usize, bool>)>;

/// Claims in Postgres. `gates`: the names of the gates, by their numbers.
async fn claim(
    store: &Store,
    gates: &[&str],
    lanes: &mut [Lane],
    orders: &[Order],
    wanted: usize,
) -> Response {
    let asked: Vec<ClaimOrder> = orders
        .iter()
        .map(|order| ClaimOrder {
            max: order.max,
            ..lanes[order.lane as usize].order
        })
        .collect();
    let claimed = store.claim(Fence(rand()), &asked, wanted, None).await;
    let ClaimResult::Jobs(jobs, closed) = claimed.unwrap() else {
        panic!("leases were not checked");
    };
    let ids: Vec<_> = lanes.iter().map(|lane| lane.order.lane).collect();
    let place = |id| ids.iter().position(|lane| *lane == id).unwrap();
    let mut response = Response::new();
    for job in jobs {
        let place = place(job.lane);
        response.entry(place).or_default().0 += 1;
        lanes[place].running.push(job);
    }
    for closed in closed {
        let number = |name: &str| gates.iter().position(|gate| *gate == name).unwrap();
        let by = closed.by.iter();
        let by = by.map(|gate| (number(&gate.name), gate.wait.is_none()));
        response.entry(place(closed.lane)).or_default().1 = by.collect();
    }
    response
}

/// Claims in the model.
fn model(gates: &mut Gates, lanes: &mut [Lane], orders: &[Order], wanted: usize) -> Response {
    let mut orders = orders.to_vec();
    let keys = |lane: u32| lanes[lane as usize].keys.as_slice();
    let gated = gates.restrict(&mut orders, wanted, 0, keys, |lane| {
        lanes[lane as usize].ready
    });
    let mut left = wanted;
    let mut claimed: HashMap<u32, usize> = HashMap::new();
    for order in &orders {
        let lane = &mut lanes[order.lane as usize];
        let jobs = order.max.unwrap_or(left).min(left).min(lane.ready);
        left -= jobs;
        lane.ready -= jobs;
        for key in lane.keys.iter().filter(|_| jobs > 0) {
            (0..jobs).for_each(|_| gates.started(*key));
        }
        if jobs > 0 {
            claimed.insert(order.lane, jobs);
        }
    }
    let mut response = Response::new();
    for (lane, jobs) in &claimed {
        response.entry(*lane as usize).or_default().0 = *jobs;
    }
    for closed in gates.charge(&gated, &claimed, 0) {
        let by = closed.by.iter();
        let by = by.map(|(key, wait_ms)| (key.gate, wait_ms.is_none()));
        response.entry(closed.lane as usize).or_default().1 = by.collect();
    }
    response
}

#[tokio::test]
async fn postgres_and_the_model_claim_the_same_jobs_and_close_the_same_lanes() {
    for seed in [1, 2, 4, 7] {
        let mut random = Random(seed);
        let (few, all) = (1 + random.below(4) as i32, 4 + random.below(10) as i32);
        let (window, burst) = (3 + random.below(12) as i32, 2 + random.below(12) as i32);
        let rate = |max, burst| {
            let period_ms = PERIOD_MS;
            Limit::Starts(Rate {
                max,
                period_ms,
                burst,
            })
        };
        let set = format!("'few', 'max_concurrent', key => '{{tenant}}', max => {few}");
        let (db, client) = gate(&set).await;
        let mut limits = vec![Limit::Running { max: few }];
        let mut names = vec!["few"];
        // Whether each tenant is a key.
        let mut by_tenant = vec![true];
        let others = [
            (
                "all",
                format!("'all', 'max_concurrent', max => {all}"),
                Limit::Running { max: all },
                false,
            ),
            (
                "window",
                format!(
                    "'window', 'throttle', key => '{{tenant}}', max => {window}, period => '30 days'"
                ),
                rate(window, None),
                true,
            ),
            (
                "bucket",
                format!("'bucket', 'throttle', max => 60, period => '30 days', burst => {burst}"),
                rate(60, Some(burst)),
                false,
            ),
        ];
        for (nth, (name, set, limit, is_by_tenant)) in (0_u64..).zip(others) {
            if seed & (1 << nth) != 0 {
                set_gate(&client, &set).await;
                names.push(name);
                limits.push(limit);
                by_tenant.push(is_by_tenant);
            }
        }
        for tenant in 0..4 {
            for priority in ["high", "normal"] {
                for _ in 0..=random.below(20) {
                    let arguments = format!(", tenant => '{tenant}', priority => '{priority}'");
                    enqueue(&client, "a", &arguments).await;
                }
            }
        }
        let store = db.worker().await;
        let mut lanes = Vec::new();
        for lane in store.catalog_after(i64::MIN, None).await.unwrap().lanes {
            let Some(tenant) = lane.values.get("tenant") else {
                continue;
            };
            let key = |is_by_tenant: &bool| match is_by_tenant {
                true => tenant.parse().unwrap(),
                false => 0,
            };
            let keys = by_tenant.iter().map(key).enumerate();
            let ready = "SELECT count(*) FROM rouse.job WHERE lane = $1";
            let ready: i64 = client.query_one(ready, &[&lane.id.0]).await.unwrap().get(0);
            lanes.push(Lane {
                order: ClaimOrder {
                    lane: lane.id,
                    after: i64::MIN,
                    lease_ms: 60_000,
                    max: None,
                    overdue: None,
                },
                keys: keys.map(|(gate, key)| Key { gate, key }).collect(),
                ready: ready as usize,
                running: Vec::new(),
            });
        }
        assert_eq!(lanes.len(), 8);
        let mut gates = Gates::new(limits);
        for claims in 0..40 {
            let mut orders: Vec<Order> = (0..8)
                .map(|lane| Order {
                    lane,
                    max: (random.below(2) == 0).then_some(1 + random.below(5) as usize),
                })
                .collect();
            random.shuffle(&mut orders);
            orders.truncate(1 + random.below(8) as usize);
            let wanted = 1 + random.below(20) as usize;
            let expected = model(&mut gates, &mut lanes, &orders, wanted);
            let response = claim(&store, &names, &mut lanes, &orders, wanted).await;
            assert_eq!(
                response, expected,
                "seed {seed}, claim {claims}: {orders:?}"
            );
            for lane in &mut lanes {
                let ended = random.below(lane.running.len() as i64 + 1) as usize;
                for job in lane.running.drain(..ended) {
                    let done = settlement(&job, result("1"));
                    store.settle(&[&done], Locked::Wait).await.unwrap();
                    lane.keys.iter().for_each(|key| gates.ended(*key));
                }
            }
        }
    }
}
