//! What the claimer knows of the lanes: which it serves, in which order, and from which turn on.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::job::LaneId;
use crate::store::{ClaimOrder, Lane};

/// The most lanes that one claim looks at; more are looked at by further claims. An empty lane costs a claim
/// one look into the index.
const LANES_PER_CLAIM: usize = 256;
/// The catalog is read again from this far behind its known end, because a lane's row may be
/// committed after one that was numbered later.
const CATALOG_WINDOW: i64 = 256;

/// The lanes, and a cursor for each. Cursors are hints: turns are numbered before they are
/// committed, so one that is behind a cursor is found by the next sweep.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    known: HashMap<LaneId, Known>,
    /// Lanes of this host's handlers, queues and tags, with their lease; in the order of their ids.
    served: Vec<(LaneId, i64)>,
    catalog_end: i64,
    /// The served lanes in the order of this look, and how many of them it has taken.
    order: Vec<(LaneId, i64)>,
    taken: usize,
}

#[derive(Debug)]
struct Known {
    lane: Arc<Lane>,
    cursor: i64,
    /// The cursor at the last two sweeps, the older one first.
    marks: [i64; 2],
}

impl Lanes {
    /// From where to read the catalog next.
    pub(super) fn read_after(&self) -> i64 {
        self.catalog_end - CATALOG_WINDOW
    }

    /// Takes in what the catalog said.
    pub(super) fn learn(&mut self, lanes: Vec<Lane>) {
        for lane in lanes {
            self.catalog_end = self.catalog_end.max(lane.seq);
            self.known.entry(lane.id).or_insert(Known {
                lane: Arc::new(lane),
                cursor: i64::MIN,
                marks: [i64::MIN; 2],
            });
        }
    }

    /// Decides anew which lanes are served: those for which `lease_ms` gives a lease.
    pub(super) fn serve(&mut self, lease_ms: impl Fn(&Lane) -> Option<i64>) {
        self.served = self
            .known
            .values()
            .filter_map(|known| Some((known.lane.id, lease_ms(&known.lane)?)))
            .collect();
        self.served.sort_unstable();
    }

    /// The lane of a claimed job, and how long claims from it are good for; none where it is not
    /// served.
    pub(super) fn get(&self, id: LaneId) -> Option<(Arc<Lane>, Duration)> {
        let place = self.served.binary_search_by_key(&id, |(lane, _)| *lane);
        let (_, lease_ms) = self.served.get(place.ok()?)?;
        let lease = Duration::from_millis(u64::try_from(*lease_ms).unwrap_or(0));
        Some((self.known.get(&id)?.lane.clone(), lease))
    }

    /// How many claims it takes to look at every lane once.
    pub(super) fn rounds(&self) -> usize {
        self.served.len().div_ceil(LANES_PER_CLAIM)
    }

    /// Puts the lanes in the order in which one look goes through them: by priority, and within it
    /// the one that has come least far first. Turns are numbered across lanes, so that one has the
    /// oldest jobs.
    pub(super) fn begin_round(&mut self) {
        let place = |(id, _): &(LaneId, i64)| {
            self.known
                .get(id)
                .map(|known| (known.lane.priority, known.cursor))
        };
        self.order.clone_from(&self.served);
        self.order.sort_by_cached_key(place);
        self.taken = 0;
    }

    /// The lanes for the next claim of this look.
    pub(super) fn orders(&mut self) -> Vec<ClaimOrder> {
        let rest = self.order.get(self.taken..).unwrap_or_default();
        let orders: Vec<ClaimOrder> = rest
            .iter()
            .take(LANES_PER_CLAIM)
            .filter_map(|(id, lease_ms)| {
                Some(ClaimOrder {
                    lane: *id,
                    after: self.known.get(id)?.cursor,
                    lease_ms: *lease_ms,
                })
            })
            .collect();
        self.taken += LANES_PER_CLAIM;
        orders
    }

    /// Every served lane, for adoption.
    pub(super) fn all(&self) -> Vec<ClaimOrder> {
        self.served
            .iter()
            .map(|(lane, lease_ms)| ClaimOrder {
                lane: *lane,
                after: i64::MIN,
                lease_ms: *lease_ms,
            })
            .collect()
    }

    /// A claim has come this far in the lane.
    pub(super) fn advance(&mut self, lane: LaneId, turn: i64) {
        if let Some(known) = self.known.get_mut(&lane) {
            known.cursor = known.cursor.max(turn);
        }
    }

    /// The short sweep: every cursor goes back to where it was two sweeps ago.
    pub(super) fn rewind(&mut self) {
        for known in self.known.values_mut() {
            let [oldest, newer] = known.marks;
            known.marks = [newer, known.cursor];
            known.cursor = oldest;
        }
    }

    /// The long sweep: every cursor starts over, and the catalog is read from its start, because a
    /// lane may have been committed long after it was numbered.
    pub(super) fn restart(&mut self) {
        self.catalog_end = 0;
        for known in self.known.values_mut() {
            known.cursor = i64::MIN;
            known.marks = [i64::MIN; 2];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Priority;

    fn lane(seq: i64, id: i64, priority: Priority) -> Lane {
        Lane {
            seq,
            id: LaneId(id),
            queue: "default".into(),
            handler: "noop".into(),
            priority,
            tags: Vec::new(),
        }
    }

    fn order(lanes: &mut Lanes) -> Vec<(i64, i64)> {
        lanes.begin_round();
        lanes
            .orders()
            .iter()
            .map(|order| (order.lane.0, order.after))
            .collect()
    }

    #[test]
    fn high_lanes_go_first_and_within_a_priority_the_one_that_has_come_least_far() {
        let mut lanes = Lanes::default();
        lanes.learn(vec![
            lane(1, 10, Priority::Low),
            lane(2, 20, Priority::Normal),
            lane(3, 30, Priority::Normal),
            lane(4, 40, Priority::High),
        ]);
        lanes.serve(|_| Some(1000));
        lanes.advance(LaneId(20), 7);
        lanes.advance(LaneId(30), 5);
        lanes.advance(LaneId(40), 99);
        lanes.advance(LaneId(10), 1);
        assert_eq!(order(&mut lanes), [(40, 99), (30, 5), (20, 7), (10, 1)]);
    }

    #[test]
    fn a_sweep_goes_back_two_sweeps_and_a_restart_goes_back_to_the_start() {
        let mut lanes = Lanes::default();
        lanes.learn(vec![lane(1, 10, Priority::Normal)]);
        lanes.serve(|_| Some(1000));
        lanes.advance(LaneId(10), 100);
        lanes.rewind();
        lanes.advance(LaneId(10), 200);
        lanes.rewind();
        lanes.advance(LaneId(10), 300);
        lanes.rewind();
        assert_eq!(order(&mut lanes), [(10, 100)]);
        lanes.restart();
        assert_eq!(order(&mut lanes), [(10, i64::MIN)]);
        assert!(lanes.read_after() < 0, "the catalog is read from its start");
    }

    #[test]
    fn the_same_lane_catalogued_twice_is_one_lane() {
        let mut lanes = Lanes::default();
        lanes.learn(vec![lane(1, 10, Priority::Normal)]);
        lanes.learn(vec![lane(2, 10, Priority::Normal)]);
        lanes.serve(|_| Some(1000));
        assert_eq!(order(&mut lanes), [(10, i64::MIN)]);
        assert_eq!(lanes.read_after(), 2 - CATALOG_WINDOW);
    }

    #[test]
    fn a_restart_reads_the_catalog_again_for_lanes_that_were_committed_very_late() {
        let mut lanes = Lanes::default();
        lanes.learn(vec![lane(1000, 10, Priority::Normal)]);
        assert!(lanes.read_after() > 1);
        lanes.restart();
        assert!(lanes.read_after() < 1);
        lanes.learn(vec![lane(1, 20, Priority::Normal)]);
        lanes.serve(|_| Some(1000));
        assert_eq!(lanes.all().len(), 2);
    }

    #[test]
    fn a_claim_is_good_for_the_lease_that_its_lane_was_served_with() {
        let mut lanes = Lanes::default();
        lanes.learn(vec![
            lane(1, 20, Priority::Normal),
            lane(2, 10, Priority::Low),
        ]);
        lanes.serve(|lane| (lane.id.0 == 20).then_some(3000));
        let lease = lanes.get(LaneId(20)).map(|(_, lease)| lease);
        assert_eq!(lease, Some(Duration::from_secs(3)));
        assert!(lanes.get(LaneId(10)).is_none(), "it is not served");
    }

    #[test]
    fn priority_holds_also_where_there_are_more_lanes_than_a_claim_may_look_at() {
        let mut lanes = Lanes::default();
        let many = i64::try_from(LANES_PER_CLAIM).unwrap() + 10;
        lanes.learn((1..=many).map(|n| lane(n, n, Priority::Low)).collect());
        lanes.learn(vec![lane(many + 1, many + 1, Priority::High)]);
        lanes.serve(|_| Some(1000));
        assert_eq!(lanes.rounds(), 2);
        lanes.begin_round();
        let mut seen: Vec<i64> = (0..2)
            .flat_map(|_| lanes.orders())
            .map(|order| order.lane.0)
            .collect();
        assert_eq!(seen.remove(0), many + 1);
        seen.sort_unstable();
        assert_eq!(seen, (1..=many).collect::<Vec<_>>(), "each once");
        assert!(lanes.orders().is_empty());
    }
}
