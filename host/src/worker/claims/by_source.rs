//! Claims jobs by their source from lanes whose own handler this host does not have.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::dispatch::InLine;
use super::{Claims, Found};
use crate::job::{Fence, LaneId};
use crate::sandbox::BootTime;
use crate::store::{BoundSearch, ClaimedJob, StoreError};

/// A search by source that finds nothing is retried after this multiple of its duration.
const BY_SOURCE_SHARE: u32 = 20;
/// The longest wait before it is retried.
const BY_SOURCE_PAUSE_MAX: Duration = Duration::from_secs(30);
/// The shortest wait between two searches from the start of the lanes.
const RESTART_PAUSE_MIN: Duration = Duration::from_secs(1);

/// A position in the order of a search: those of a lane and of a source.
type Place = (usize, usize);

/// The lanes and the sources that a search covers.
#[derive(Debug, Default)]
struct Covered {
    /// In this order.
    lanes: Vec<LaneId>,
    /// Those whose handlers may start another attempt on this host, in this order.
    sources: Vec<String>,
    /// For each of these sources, the position of its handler in `rooms`.
    handlers: Vec<usize>,
    /// All bound handlers, and how many attempts of each may still start on this host. `None`: as many as there are
    /// slots.
    rooms: Vec<(String, Option<usize>)>,
}

impl Covered {
    /// `bound`: the sources, each with its handler. `room`: how many attempts of a handler may still start.
    fn new<'a>(
        lanes: Vec<LaneId>,
        bound: impl Iterator<Item = (&'a str, &'a str)>,
        room: impl Fn(&str) -> Option<usize>,
    ) -> Self {
        let mut covered = Self {
            lanes,
            ..Self::default()
        };
        let mut positions: HashMap<&str, usize> = HashMap::new();
        for (source, handler) in bound {
            let position = *positions.entry(handler).or_insert_with(|| {
                covered.rooms.push((handler.to_owned(), room(handler)));
                covered.rooms.len() - 1
            });
            if covered.rooms[position].1 != Some(0) {
                covered.sources.push(source.to_owned());
                covered.handlers.push(position);
            }
        }
        covered
    }

    /// By handler: the maximum number of its jobs in a search for this many jobs.
    fn limits(&self, wanted: usize) -> Vec<usize> {
        let rooms = self.rooms.iter().map(|(_, room)| *room);
        rooms
            .map(|room| room.map_or(wanted, |room| room.min(wanted)))
            .collect()
    }

    /// Where these jobs were found.
    fn places(&self, jobs: &[ClaimedJob]) -> Vec<Place> {
        let lanes: HashMap<LaneId, usize> = self.lanes.iter().copied().zip(0..).collect();
        let sources = self.sources.iter().map(String::as_str);
        let sources: HashMap<&str, usize> = sources.zip(0..).collect();
        let place = |job: &ClaimedJob| {
            let source = job.source.as_deref()?;
            Some((*lanes.get(&job.lane)?, *sources.get(source)?))
        };
        jobs.iter().filter_map(place).collect()
    }

    /// By handler: the number of jobs that were found at these places, and the last of the places.
    fn by_handler(&self, places: &[Place]) -> Vec<(usize, Option<Place>)> {
        let mut handlers: Vec<(usize, Option<Place>)> = vec![(0, None); self.rooms.len()];
        for place in places {
            let (count, last) = &mut handlers[self.handlers[place.1]];
            *count += 1;
            *last = (*last).max(Some(*place));
        }
        handlers
    }

    /// The handlers that have no room left after a search that has found these jobs.
    fn full(&self, jobs: &[ClaimedJob]) -> HashSet<String> {
        let found = self.by_handler(&self.places(jobs));
        let rooms = self.rooms.iter().zip(found);
        let full = rooms.filter(|((_, room), (count, _))| *room == Some(*count));
        full.map(|((handler, _), _)| handler.clone()).collect()
    }
}

/// How far jobs have been claimed by their source. The next search starts there: a transaction that is open all day
/// keeps the index entries of all jobs that have ended since. Now and then, each lane is searched from its start again.
/// This finds jobs that were committed late, or were locked.
pub(super) struct Reached {
    /// By lane and source. Where no job was claimed yet, each search starts at the beginning.
    pairs: HashMap<LaneId, HashMap<String, Pair>>,
    /// The time from which everything is searched from the start again.
    restart_at: Instant,
    /// The same if a job was announced: its producer may have committed it late, before the claimed turns.
    announced_restart_at: Instant,
    /// True if a job was announced, and no search has found a job or read everything from the start since then.
    is_announced: bool,
}

/// How far jobs of a source have been claimed from a lane.
struct Pair {
    /// The last claimed turn.
    turn: i64,
    /// True if it is still to be searched from the start again.
    restarts: bool,
}

impl Reached {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            pairs: HashMap::new(),
            restart_at: now,
            announced_restart_at: now,
            is_announced: false,
        }
    }

    /// Notes that a notification has announced a job in a lane that is searched.
    fn announce(&mut self) {
        self.is_announced = true;
    }

    /// The time of the search from the start that an announced job requires.
    fn announced_restart(&self) -> Option<Instant> {
        self.is_announced.then_some(self.announced_restart_at)
    }

    /// Lets everything be searched from the start again, if it is time. `serves`: true for a lane that is still
    /// searched.
    fn restart(&mut self, now: Instant, serves: impl Fn(LaneId) -> bool) {
        if now < self.announced_restart().unwrap_or(self.restart_at) {
            return;
        }
        self.is_announced = false;
        self.restart_at = now + RESTART_PAUSE_MIN;
        self.pairs.retain(|lane, _| serves(*lane));
        let pairs = self.pairs.values_mut().flat_map(HashMap::values_mut);
        pairs.for_each(|pair| pair.restarts = true);
    }

    /// For each lane, and in it for each source, the turn after which to search.
    fn after(&self, covered: &Covered) -> Vec<i64> {
        let mut after = Vec::with_capacity(covered.lanes.len() * covered.sources.len());
        for lane in &covered.lanes {
            let pairs = self.pairs.get(lane);
            for source in &covered.sources {
                let pair = pairs.and_then(|pairs| pairs.get(source));
                let pair = pair.filter(|pair| !pair.restarts);
                after.push(pair.map_or(i64::MIN, |pair| pair.turn));
            }
        }
        after
    }

    /// Notes the result of a search. `is_filled`: it ended with the last of these jobs, and there may be more. For a
    /// handler that has no room left, it ended with the last of its jobs.
    fn searched(
        &mut self,
        covered: &Covered,
        jobs: &[ClaimedJob],
        is_filled: bool,
        started: Instant,
        now: Instant,
    ) {
        self.is_announced &= jobs.is_empty();
        let places = covered.places(jobs);
        let by_handler = covered.by_handler(&places);
        let last = places.iter().copied().max();
        let end = |handler: usize| {
            let (count, last_of_handler) = by_handler[handler];
            match covered.rooms[handler].1 == Some(count) {
                true => last_of_handler,
                false => last.filter(|_| is_filled),
            }
        };
        let mut has_restarted = false;
        for (lane_place, lane) in covered.lanes.iter().enumerate() {
            let Some(pairs) = self.pairs.get_mut(lane) else {
                continue;
            };
            for (source_place, source) in covered.sources.iter().enumerate() {
                let end = end(covered.handlers[source_place]);
                let is_complete = end.is_none_or(|end| (lane_place, source_place) < end);
                if is_complete && let Some(pair) = pairs.get_mut(source) {
                    has_restarted |= std::mem::take(&mut pair.restarts);
                }
            }
        }
        for job in jobs {
            let Some(source) = &job.source else {
                continue;
            };
            let pairs = self.pairs.entry(job.lane).or_default();
            let pair = pairs.entry(source.clone()).or_insert(Pair {
                turn: job.turn,
                restarts: false,
            });
            // Where the search ended, there may be more jobs after these, before the turn that was reached earlier.
            let is_first = std::mem::take(&mut pair.restarts);
            has_restarted |= is_first;
            pair.turn = match is_first {
                true => job.turn,
                false => pair.turn.max(job.turn),
            };
        }
        if has_restarted {
            let pause = pause_after(now.saturating_duration_since(started));
            self.announced_restart_at = now + pause;
            self.restart_at = self.restart_at.max(now + pause);
        }
    }
}

impl Claims<'_> {
    /// True if this worker may run jobs of a lane whose own handler it does not have, because their source is bound.
    pub(super) fn finds_by_source(&self) -> bool {
        !self.sources.is_empty() && self.lanes.serves_by_source()
    }

    /// Claims jobs of bound sources from lanes whose own handler this host does not have. Without such lanes it sends
    /// no query.
    pub(in crate::worker) async fn claim_by_source(
        &mut self,
        wanted: usize,
    ) -> Result<Found, StoreError> {
        let started = Instant::now();
        let lanes = match wanted > 0 && self.finds_by_source() && started >= self.by_source_at {
            true => self.lanes.by_source(),
            false => Vec::new(),
        };
        // Any of these lanes will do: all of them have the same lease.
        let Some(served) = lanes.first().and_then(|lane| self.lanes.get(*lane)) else {
            return Ok(Found::default());
        };
        let bound = self.sources.iter().map(String::as_str);
        let bound = bound.filter_map(|source| Some((source, self.handler_of(source)?)));
        let covered = Covered::new(lanes, bound, |handler| self.room(handler));
        if covered.sources.is_empty() {
            self.full_handlers = covered.full(&[]);
            return Ok(Found::default());
        }
        let fence = Fence(rand::random());
        let sent = BootTime::now();
        let shared = self.shared;
        let in_flight = shared.leases.claiming();
        let known = &self.lanes;
        self.reached_by_source
            .restart(started, |lane| known.is_served_by_source(lane));
        let search = BoundSearch {
            lanes: &covered.lanes,
            sources: &covered.sources,
            after: &self.reached_by_source.after(&covered),
            handlers: &covered.handlers,
            rooms: &covered.limits(wanted),
        };
        let jobs = shared
            .store
            .claim_bound(fence, search, served.lease, wanted)
            .await?;
        let is_cut = self.record_size(&jobs);
        let is_filled = is_cut || jobs.len() >= wanted;
        let now = Instant::now();
        self.reached_by_source
            .searched(&covered, &jobs, is_filled, started, now);
        // The search is expensive if it covers many lanes or reads past dead rows.
        self.by_source_at = match jobs.is_empty() {
            true => started + pause_after(now.saturating_duration_since(started)),
            false => started,
        };
        self.full_handlers = covered.full(&jobs);
        // The sources take turns going first.
        self.sources.rotate_left(1);
        let jobs = self
            .dispatch(in_flight, jobs, sent, InLine::Queued(&[]), None)
            .await;
        Ok(Found {
            jobs,
            is_cut,
            ..Found::default()
        })
    }

    /// The handler to which a source is bound.
    fn handler_of(&self, source: &str) -> Option<&str> {
        let handler = self.shared.settings.sources.get(source);
        handler.map(String::as_str)
    }

    /// How many attempts of a handler may still start on this host. `None`: as many as there are slots.
    fn room(&self, handler: &str) -> Option<usize> {
        let limit = self.host_limits.get(handler)?;
        let in_hand = self.shared.slots.in_hand_of(&limit.handler);
        Some(limit.max.saturating_sub(in_hand))
    }

    /// True if the handler of a source may start no other attempt on this host now.
    fn is_full(&self, source: &str) -> bool {
        let handler = self.handler_of(source);
        handler.and_then(|handler| self.room(handler)) == Some(0)
    }

    /// True if jobs of a bound source may wait for the end of an attempt of its handler on this host. The last search
    /// may have left the source out although the attempt has ended since.
    pub(in crate::worker) fn sources_wait(&self) -> bool {
        let is_any_full = || self.sources.iter().any(|source| self.is_full(source));
        self.finds_by_source() && (!self.full_handlers.is_empty() || is_any_full())
    }

    /// The time of the next search by source from the start of the lanes, if a job was announced that the last search
    /// did not find. `None` also if the next look may not search: all bound handlers are full, and the end of an attempt
    /// lets the next search start; or orphans are left, which go first.
    pub(in crate::worker) fn announced_search(&self) -> Option<Instant> {
        let at = self.reached_by_source.announced_restart()?;
        let has_room = || self.sources.iter().any(|source| !self.is_full(source));
        let searches = !self.orphans_left && self.finds_by_source() && has_room();
        searches.then(|| at.max(self.by_source_at))
    }

    /// Notes that an attempt of this handler has ended on this host. If the last search skipped its sources, the next
    /// search does not wait.
    pub(in crate::worker) fn free_sources(&mut self, handler: &str) {
        if self.full_handlers.remove(handler) {
            self.by_source_at = Instant::now();
        }
    }

    /// Notes that there may be a job in this lane. True if the lane is served.
    pub(in crate::worker) fn mark_active(&mut self, lane: LaneId) -> bool {
        if self.lanes.is_served_by_source(lane) {
            self.by_source_at = Instant::now();
            self.reached_by_source.announce();
        }
        self.lanes.mark_active(lane)
    }
}

/// The pause after a search by source that found nothing.
fn pause_after(took: Duration) -> Duration {
    (took * BY_SOURCE_SHARE).min(BY_SOURCE_PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::claim::tests::job;

    const SECOND: Duration = Duration::from_secs(1);

    const START: i64 = i64::MIN;

    /// A search of two lanes for two sources, whose handlers have this much room.
    fn covered(rooms: [Option<usize>; 2]) -> Covered {
        let lanes = vec![LaneId(1), LaneId(2)];
        let room = |handler: &str| match handler {
            "mail" => rooms[0],
            _ => rooms[1],
        };
        Covered::new(lanes, [("a", "mail"), ("b", "text")].into_iter(), room)
    }

    fn found(lane: i64, source: &str, turn: i64) -> ClaimedJob {
        ClaimedJob {
            lane: LaneId(lane),
            source: Some(source.into()),
            turn,
            ..job(turn)
        }
    }

    /// How far jobs were claimed after a search that found one of each source in each lane.
    fn reached(now: Instant) -> Reached {
        let mut reached = Reached::new(now);
        let jobs = [(1, "a", 5), (1, "b", 7), (2, "a", 9), (2, "b", 3)];
        let jobs = jobs.map(|(lane, source, turn)| found(lane, source, turn));
        reached.searched(&covered([None; 2]), &jobs, false, now, now);
        reached
    }

    #[test]
    fn a_search_covers_the_handlers_that_have_room_each_within_its_own_limit() {
        let bound = [("a", "mail"), ("b", "text"), ("c", "mail"), ("d", "video")];
        let room = |handler: &str| match handler {
            "mail" => Some(2),
            "video" => Some(0),
            _ => None,
        };
        let covered = Covered::new(vec![LaneId(1)], bound.into_iter(), room);
        assert_eq!(covered.sources, ["a", "b", "c"]);
        assert_eq!(covered.handlers, [0, 1, 0]);
        assert_eq!(covered.limits(100), [2, 100, 0]);
        assert_eq!(covered.limits(1), [1, 1, 0]);
        let full = |sources: &[&str]| {
            let jobs = sources.iter().map(|source| found(1, source, 1));
            let full = covered.full(&jobs.collect::<Vec<_>>());
            let mut full: Vec<String> = full.into_iter().collect();
            full.sort_unstable();
            full
        };
        assert_eq!(full(&[]), ["video"]);
        assert_eq!(full(&["a", "b", "b"]), ["video"]);
        assert_eq!(full(&["a", "b", "c"]), ["mail", "video"]);
    }

    #[test]
    fn a_search_starts_after_the_claimed_turns_and_once_a_second_at_the_beginning() {
        let now = Instant::now();
        let all = covered([None; 2]);
        let mut reached = Reached::new(now);
        let search = |reached: &mut Reached, after: Duration| {
            reached.restart(now + after, |_| true);
            reached.after(&all)
        };
        assert_eq!(search(&mut reached, Duration::ZERO), [START; 4]);
        let jobs = [found(1, "b", 7), found(1, "b", 5)];
        reached.searched(&all, &jobs, false, now, now);
        let after = search(&mut reached, SECOND / 2);
        assert_eq!(after, [START, 7, START, START]);
        assert_eq!(search(&mut reached, SECOND), [START; 4]);
        // A source without new jobs is not read from the start again.
        reached.searched(&all, &[], false, now + SECOND, now + SECOND);
        let after = search(&mut reached, SECOND * 3 / 2);
        assert_eq!(after, [START, 7, START, START]);
        // A lane that is no longer searched is forgotten.
        reached.restart(now + 2 * SECOND, |lane| lane != LaneId(1));
        assert!(reached.pairs.is_empty());
    }

    #[test]
    fn after_an_announcement_a_search_may_start_at_the_beginning_within_the_second() {
        let now = Instant::now();
        let all = covered([None; 2]);
        let mut reached = reached(now);
        reached.restart(now, |_| true);
        reached.searched(&all, &[], false, now, now + SECOND / 100);
        assert_eq!(reached.announced_restart(), None);
        reached.announce();
        let next = now + SECOND * 21 / 100;
        assert_eq!(reached.announced_restart(), Some(next));
        reached.restart(next - Duration::from_millis(1), |_| true);
        assert_eq!(reached.after(&all), [5, 7, 9, 3]);
        reached.searched(&all, &[], false, next, next);
        assert_eq!(reached.announced_restart(), Some(next));
        reached.restart(next, |_| true);
        assert_eq!(reached.after(&all), [START; 4]);
        assert_eq!(reached.announced_restart(), None);
        // The announced job was found.
        reached.announce();
        reached.searched(&all, &[found(1, "a", 6)], false, next, next);
        assert_eq!(reached.announced_restart(), None);
    }

    #[test]
    fn the_next_search_reads_from_the_start_where_a_filled_one_did_not_reach_the_end() {
        let now = Instant::now();
        let all = covered([None; 2]);
        let mut reached = reached(now);
        reached.restart(now, |_| true);
        reached.searched(&all, &[found(1, "b", 4)], true, now, now);
        assert_eq!(reached.after(&all), [5, 4, START, START]);
        reached.searched(&all, &[found(1, "b", 6)], false, now, now);
        assert_eq!(reached.after(&all), [5, 6, 9, 3]);
    }

    #[test]
    fn unread_jobs_of_a_full_handler_are_read_from_the_start_when_it_has_room() {
        let now = Instant::now();
        let all = covered([None; 2]);
        let mut reached = reached(now);
        reached.restart(now, |_| true);
        let one = covered([Some(1), None]);
        reached.searched(&one, &[found(1, "a", 2)], false, now, now);
        assert_eq!(reached.after(&all), [2, 7, START, 3]);
        let full = covered([Some(0), None]);
        assert_eq!(full.sources, ["b"]);
        reached.searched(&full, &[], false, now, now);
        assert_eq!(reached.after(&all), [2, 7, START, 3]);
        reached.searched(&one, &[], false, now, now);
        assert_eq!(reached.after(&all), [2, 7, 9, 3]);
    }

    #[test]
    fn an_expensive_search_from_the_beginning_is_repeated_rarely_but_within_thirty_seconds() {
        let all = covered([None; 2]);
        for (took, pause) in [(0_u32, 1_u32), (1, 20), (60, 30)] {
            let started = Instant::now();
            let now = started + took * SECOND;
            let mut reached = reached(started);
            reached.restart(started, |_| true);
            reached.searched(&all, &[], false, started, now);
            let next = now + pause * SECOND;
            reached.restart(next - Duration::from_millis(1), |_| true);
            assert_eq!(reached.after(&all), [5, 7, 9, 3]);
            reached.restart(next, |_| true);
            assert_eq!(reached.after(&all), [START; 4]);
        }
    }

    #[test]
    fn an_expensive_search_by_source_is_repeated_rarely_but_always_within_thirty_seconds() {
        let pauses = [0, 1, 100, 1_500, 60_000]
            .map(Duration::from_millis)
            .map(pause_after);
        let expected = [0, 20, 2_000, 30_000, 30_000].map(Duration::from_millis);
        assert_eq!(pauses, expected);
    }
}
