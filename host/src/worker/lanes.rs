//! What the claimer knows of the lanes: which it serves, which have jobs, and from which turn on.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use crate::job::{LaneId, Priority};
use crate::store::{ClaimOrder, ClaimedJob, Lane};

/// The most lanes that one claim looks at: an empty lane costs it one look into the index. Where
/// more are served, claims go to those that are known to have jobs.
const LANES_PER_CLAIM: usize = 256;
/// The catalog is read again from this far behind its known end, because a lane's row may be
/// committed after one that was numbered later.
const CATALOG_WINDOW: i64 = 256;

/// The lanes, and a cursor for each. Cursors are hints: turns are numbered before they are
/// committed, so one that is behind a cursor is found by the next sweep.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    known: HashMap<LaneId, Known>,
    /// How many of them are served.
    served: usize,
    /// Served lanes that had jobs when somebody last looked.
    active: HashSet<LaneId>,
    /// The newest rows of the catalog that were read: those in the window.
    newest: BTreeSet<i64>,
    catalog_end: i64,
}

/// From which turn on a lane is looked at.
#[derive(Debug, Clone, Copy)]
pub(super) enum From {
    /// From the cursor: there is a backlog, and whatever is committed now stands behind it.
    Cursor,
    /// From where the cursor was a moment ago: it stands among jobs that are being committed now, not in
    /// the order of their turns.
    Recent,
}

#[derive(Debug)]
struct Known {
    lane: Arc<Lane>,
    /// How long claims from it are good for; none: it is not served.
    lease_ms: Option<i64>,
    cursor: i64,
    /// The cursor at the last two calls of [`Lanes::look_back`], the older one first.
    recent: [i64; 2],
    /// The cursor at the last two sweeps, the older one first.
    marks: [i64; 2],
    /// The cursor before the sweep that is under way.
    before: i64,
}

impl Known {
    fn order(&self, from: From) -> Option<ClaimOrder> {
        Some(ClaimOrder {
            lane: self.lane.id,
            after: match from {
                From::Cursor => self.cursor,
                From::Recent => self.cursor.min(self.recent[0]),
            },
            lease_ms: self.lease_ms?,
        })
    }

    /// The place in the order in which lanes are claimed from: by priority, and within it the lane
    /// that has come least far first. Turns are numbered across lanes, so that one has the oldest jobs.
    fn place(&self) -> (Priority, i64, LaneId) {
        (self.lane.priority, self.cursor, self.lane.id)
    }
}

impl Lanes {
    /// From where to read the catalog next.
    pub(super) fn read_after(&self) -> i64 {
        self.catalog_end - CATALOG_WINDOW
    }

    /// How many rows of the catalog after that place have been read.
    pub(super) fn read_rows(&self) -> usize {
        self.newest.len()
    }

    /// From now on the whole catalog is unread: a lane may be committed long after it was numbered.
    pub(super) fn forget_catalog(&mut self) {
        self.catalog_end = 0;
        self.newest.clear();
    }

    /// True for a lane of the catalog, as far as it was read.
    pub(super) fn knows(&self, lane: LaneId) -> bool {
        self.known.contains_key(&lane)
    }

    /// True for a lane that jobs are claimed from.
    pub(super) fn serves(&self, lane: LaneId) -> bool {
        let known = self.known.get(&lane);
        known.is_some_and(|known| known.lease_ms.is_some())
    }

    /// Takes in what the catalog said; true where some of it is new. A new lane counts as one that
    /// has jobs: it is catalogued with its first.
    pub(super) fn learn(&mut self, lanes: Vec<Lane>) -> bool {
        let before = self.known.len();
        for lane in lanes {
            self.catalog_end = self.catalog_end.max(lane.seq);
            self.newest.insert(lane.seq);
            self.known.entry(lane.id).or_insert_with(|| {
                self.active.insert(lane.id);
                Known {
                    lane: Arc::new(lane),
                    lease_ms: None,
                    cursor: i64::MIN,
                    recent: [i64::MIN; 2],
                    marks: [i64::MIN; 2],
                    before: i64::MIN,
                }
            });
        }
        self.newest = self.newest.split_off(&(self.read_after() + 1));
        self.known.len() > before
    }

    /// Decides anew which lanes are served: those for which `lease_ms` gives a lease.
    pub(super) fn serve(&mut self, lease_ms: impl Fn(&Lane) -> Option<i64>) {
        for known in self.known.values_mut() {
            let lease_ms = lease_ms(&known.lane);
            if known.lease_ms.is_none() && lease_ms.is_some() {
                self.active.insert(known.lane.id);
            }
            known.lease_ms = lease_ms;
        }
        let known = &self.known;
        let served = |id: &LaneId| known.get(id).is_some_and(|lane| lane.lease_ms.is_some());
        self.active.retain(served);
        self.served = known.keys().filter(|id| served(id)).count();
    }

    /// No lane is known to have jobs.
    pub(super) fn rest(&mut self) {
        self.active.clear();
    }

    /// The lane of a claimed job, and how long claims from it are good for; none where it is not
    /// served.
    pub(super) fn get(&self, id: LaneId) -> Option<(Arc<Lane>, Duration)> {
        let known = self.known.get(&id)?;
        let lease = Duration::from_millis(u64::try_from(known.lease_ms?).unwrap_or(0));
        Some((known.lane.clone(), lease))
    }

    /// Somebody says that there is a job in this lane. True where the lane is served.
    pub(super) fn touch(&mut self, id: LaneId) -> bool {
        let served = self.serves(id);
        if served {
            self.active.insert(id);
        }
        served
    }

    /// The lanes for the next claim, in order.
    pub(super) fn orders(&self, from: From) -> Vec<ClaimOrder> {
        let mut lanes: Vec<&Known> = if self.served > LANES_PER_CLAIM {
            let active = self.active.iter();
            active.filter_map(|id| self.known.get(id)).collect()
        } else {
            let known = self.known.values();
            known.filter(|lane| lane.lease_ms.is_some()).collect()
        };
        if lanes.len() > LANES_PER_CLAIM {
            lanes.select_nth_unstable_by_key(LANES_PER_CLAIM, |lane| lane.place());
            lanes.truncate(LANES_PER_CLAIM);
        }
        lanes.sort_unstable_by_key(|lane| lane.place());
        let orders = lanes.into_iter().filter_map(|lane| lane.order(from));
        orders.collect()
    }

    /// Takes in what a claim of `wanted` jobs from these lanes found.
    pub(super) fn claimed(&mut self, orders: &[ClaimOrder], jobs: &[ClaimedJob], wanted: usize) {
        let mut gave = HashSet::new();
        for job in jobs {
            self.advance(job.lane, job.turn);
            gave.insert(job.lane);
        }
        // A claim that was filled has not looked into the lanes behind the last that gave something.
        let looked_at = if jobs.len() < wanted {
            orders.len()
        } else {
            let last = orders.iter().rposition(|order| gave.contains(&order.lane));
            last.map_or(0, |last| last + 1)
        };
        for order in &orders[..looked_at] {
            if !gave.contains(&order.lane) {
                self.active.remove(&order.lane);
            }
        }
    }

    /// Every served lane, in the order in which to claim from them.
    pub(super) fn all(&self) -> Vec<ClaimOrder> {
        self.looked_at(|_| true)
    }

    /// Every served lane that is not known to have jobs, in the order in which to claim from them.
    pub(super) fn idle(&self) -> Vec<ClaimOrder> {
        self.looked_at(|lane| !self.active.contains(&lane))
    }

    fn looked_at(&self, wanted: impl Fn(LaneId) -> bool) -> Vec<ClaimOrder> {
        let mut lanes: Vec<&Known> = self
            .known
            .values()
            .filter(|known| wanted(known.lane.id))
            .collect();
        lanes.sort_unstable_by_key(|lane| lane.place());
        let orders = lanes
            .into_iter()
            .filter_map(|lane| lane.order(From::Recent));
        orders.collect()
    }

    /// A claim has come this far in the lane.
    fn advance(&mut self, lane: LaneId, turn: i64) {
        if let Some(known) = self.known.get_mut(&lane) {
            known.cursor = known.cursor.max(turn);
        }
    }

    /// From now on, "recent" is where the cursors were at the call before this one.
    pub(super) fn look_back(&mut self) {
        for known in self.known.values_mut() {
            known.recent = [known.recent[1], known.cursor];
        }
    }

    /// The short sweep: every cursor goes back to where it was two sweeps ago.
    pub(super) fn rewind(&mut self) {
        for known in self.known.values_mut() {
            known.before = known.cursor;
            let [oldest, newer] = known.marks;
            known.marks = [newer, known.cursor];
            known.cursor = oldest;
        }
    }

    /// The long sweep: every cursor starts over.
    pub(super) fn restart(&mut self) {
        for known in self.known.values_mut() {
            known.before = known.cursor;
            known.cursor = i64::MIN;
        }
    }

    /// Whether a claim looks at every lane.
    pub(super) fn fit_one_claim(&self) -> bool {
        self.served <= LANES_PER_CLAIM
    }

    /// The look after a sweep has found all that there was: the cursors are where they had been, so
    /// that the next look does not go through the same rows again.
    pub(super) fn swept(&mut self) {
        for known in self.known.values_mut() {
            known.cursor = known.cursor.max(known.before);
        }
    }

    /// Nothing that is remembered of the database holds any more.
    pub(super) fn forget(&mut self) {
        self.forget_catalog();
        for known in self.known.values_mut() {
            known.cursor = i64::MIN;
            known.recent = [i64::MIN; 2];
            known.marks = [i64::MIN; 2];
            known.before = i64::MIN;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::job::{Attempt, Fence, JobId};
    use crate::store::JsonText;

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

    fn job(lane: i64, turn: i64) -> ClaimedJob {
        ClaimedJob {
            id: JobId(turn),
            fence: Fence(1),
            lane: LaneId(lane),
            turn,
            attempt: Attempt(1),
            lost: 0,
            max_attempts: None,
            tenant: None,
            source: None,
            requested_at: SystemTime::UNIX_EPOCH,
            claimed_at: SystemTime::UNIX_EPOCH,
            payload: JsonText("{}".into()),
        }
    }

    fn order(lanes: &Lanes) -> Vec<(i64, i64)> {
        lanes
            .orders(From::Cursor)
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
        assert_eq!(order(&lanes), [(40, 99), (30, 5), (20, 7), (10, 1)]);
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
        assert_eq!(order(&lanes), [(10, 100)]);
        lanes.restart();
        assert_eq!(order(&lanes), [(10, i64::MIN)]);
    }

    #[test]
    fn the_same_lane_catalogued_twice_is_one_lane() {
        let mut lanes = Lanes::default();
        lanes.learn(vec![lane(1, 10, Priority::Normal)]);
        lanes.learn(vec![lane(2, 10, Priority::Normal)]);
        lanes.serve(|_| Some(1000));
        assert_eq!(order(&lanes), [(10, i64::MIN)]);
        assert_eq!(lanes.read_after(), 2 - CATALOG_WINDOW);
    }

    #[test]
    fn where_jobs_are_being_committed_now_the_cursor_lags_a_moment_behind() {
        let mut lanes = Lanes::default();
        lanes.learn(vec![lane(1, 10, Priority::Normal)]);
        lanes.serve(|_| Some(1000));
        let recent = |lanes: &Lanes| lanes.orders(From::Recent)[0].after;
        for (turn, before) in [(100, i64::MIN), (200, i64::MIN), (300, 100), (400, 200)] {
            lanes.advance(LaneId(10), turn);
            assert_eq!(recent(&lanes), before, "at turn {turn}");
            assert_eq!(lanes.idle().len(), 0, "it has jobs");
            assert_eq!(order(&lanes), [(10, turn)]);
            lanes.look_back();
        }
        lanes.restart();
        assert_eq!(recent(&lanes), i64::MIN);
        lanes.swept();
        assert_eq!(recent(&lanes), 300, "what there was has been found");
        lanes.forget();
        lanes.swept();
        assert_eq!(recent(&lanes), i64::MIN);
    }

    #[test]
    fn the_rows_of_the_catalog_that_were_read_are_counted_from_the_place_where_it_is_read_next() {
        let mut lanes = Lanes::default();
        assert!(lanes.learn((1..=10).map(|n| lane(n, n, Priority::Low)).collect()));
        assert_eq!(
            (lanes.read_after(), lanes.read_rows()),
            (10 - CATALOG_WINDOW, 10)
        );
        let end = CATALOG_WINDOW + 5;
        assert!(!lanes.learn(vec![lane(end, 1, Priority::Low)]), "known");
        assert_eq!((lanes.read_after(), lanes.read_rows()), (5, 6));
        lanes.forget_catalog();
        assert_eq!(
            (lanes.read_after(), lanes.read_rows()),
            (-CATALOG_WINDOW, 0)
        );
        assert!(
            lanes.knows(LaneId(10)),
            "only how far it was read is forgotten"
        );
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

    /// More lanes than a claim looks at, low ones, of which none has jobs; their number.
    fn many_idle() -> (Lanes, i64) {
        let mut lanes = Lanes::default();
        let many = i64::try_from(LANES_PER_CLAIM).unwrap() + 10;
        lanes.learn((1..=many).map(|n| lane(n, n, Priority::Low)).collect());
        lanes.serve(|_| Some(1000));
        while let orders @ [_, ..] = &*lanes.orders(From::Cursor) {
            lanes.claimed(orders, &[], 1);
        }
        (lanes, many)
    }

    #[test]
    fn among_more_lanes_than_a_claim_looks_at_it_goes_to_those_that_have_jobs() {
        let (mut lanes, many) = many_idle();
        assert_eq!(lanes.idle().len(), usize::try_from(many).unwrap());
        assert!(lanes.touch(LaneId(7)));
        assert!(!lanes.touch(LaneId(many + 1)), "it is not known");
        lanes.learn(vec![lane(many + 1, many + 1, Priority::High)]);
        lanes.serve(|_| Some(1000));
        let ids = |lanes: &Lanes| order(lanes).iter().map(|(id, _)| *id).collect::<Vec<_>>();
        assert_eq!(
            ids(&lanes),
            [many + 1, 7],
            "a new lane has jobs, and priority holds"
        );
        let orders = lanes.orders(From::Cursor);
        lanes.claimed(&orders, &[job(7, 70)], 2);
        assert_eq!(order(&lanes), [(7, 70)], "the other one gave nothing");
    }

    #[test]
    fn a_claim_that_was_filled_says_nothing_of_the_lanes_behind() {
        let (mut lanes, _) = many_idle();
        for id in [1, 2, 3] {
            lanes.touch(LaneId(id));
        }
        let orders = lanes.orders(From::Cursor);
        lanes.claimed(&orders, &[job(2, 5)], 1);
        assert_eq!(order(&lanes), [(3, i64::MIN), (2, 5)]);
    }
}
