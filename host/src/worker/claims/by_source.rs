//! Claims jobs by their source from lanes whose own handler this host does not have.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::dispatch::InLine;
use super::{Claims, Found};
use crate::job::{Fence, LaneId};
use crate::sandbox::BootTime;
use crate::store::{BoundClaim, BoundSearch, ClaimedJob, StoreError};

/// A search by source that finds nothing is retried after this multiple of its duration.
const BY_SOURCE_SHARE: u32 = 20;
/// The longest wait before it is retried.
const BY_SOURCE_PAUSE_MAX: Duration = Duration::from_secs(30);
/// The shortest wait between two restarts ([`Reached`]), unless a job is announced.
const RESTART_PAUSE_MIN: Duration = Duration::from_secs(1);

/// The maximum number of pairs of a lane and a source in a search. Each costs a lookup, and five bytes of a response
/// that the server sends while it locks the jobs: it has to fit into the buffers of the connection
/// (`docs/decisions/claims-commit-before-rows-are-sent.md`).
const PAIRS_MAX: usize = 16 << 10;

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

    /// The pairs of a lane and a source, in the order in which a search reads them.
    fn pairs(&self) -> impl Iterator<Item = (LaneId, &str)> {
        let sources = &self.sources;
        let lanes = self.lanes.iter().copied();
        lanes.flat_map(move |lane| sources.iter().map(move |source| (lane, source.as_str())))
    }

    /// The handlers that have no room left after a search that has found these jobs.
    fn full(&self, jobs: &[ClaimedJob]) -> HashSet<String> {
        let sources = self.sources.iter().map(String::as_str);
        let handlers: HashMap<&str, usize> = sources.zip(self.handlers.iter().copied()).collect();
        let mut found = vec![0; self.rooms.len()];
        for source in jobs.iter().filter_map(|job| job.source.as_deref()) {
            if let Some(handler) = handlers.get(source) {
                found[*handler] += 1;
            }
        }
        let rooms = self.rooms.iter().zip(found);
        let full = rooms.filter(|((_, room), found)| *room == Some(*found));
        full.map(|((handler, _), _)| handler.clone()).collect()
    }
}

/// The positions from which the next search by source continues. Without them, each search would read the index entries
/// of jobs that have ended, and a transaction that is open all day keeps all of these. A restart forgets the positions:
/// then each pair of a lane and a source is read from its start again. This finds jobs that were committed late, or
/// were locked.
pub(super) struct Reached {
    /// By lane and source: the turn after which to search. It is the last one that was claimed; or, if a search has
    /// found no job after it, the turn that `empty_to` was then. Without an entry, a pair is read from its start.
    turns: HashMap<LaneId, HashMap<String, i64>>,
    /// A turn that was assigned a while ago. Jobs with later turns may not be committed yet.
    empty_to: i64,
    /// The time of the last restart.
    restarted_at: Instant,
    /// The duration of the slowest search since then that has read pairs from their start.
    slowest: Duration,
    /// True if a job was announced, and since then, no search has found a job, and there was no restart: its producer
    /// may have committed it late, before these positions.
    is_announced: bool,
}

impl Reached {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            turns: HashMap::new(),
            empty_to: i64::MIN,
            restarted_at: now,
            slowest: Duration::ZERO,
            is_announced: false,
        }
    }

    /// Notes that a notification has announced a job in a lane that is searched.
    fn announce(&mut self) {
        self.is_announced = true;
    }

    /// The time of the next restart, which waits at least this long.
    fn restart_after(&self, pause_min: Duration) -> Instant {
        self.restarted_at + self.slowest + pause_after(self.slowest).max(pause_min)
    }

    /// The time of the restart that an announced job requires.
    fn announced_restart(&self) -> Option<Instant> {
        self.is_announced
            .then(|| self.restart_after(Duration::ZERO))
    }

    /// Forgets the positions, if it is time.
    fn restart(&mut self, now: Instant) {
        let at = self.announced_restart();
        if now < at.unwrap_or_else(|| self.restart_after(RESTART_PAUSE_MIN)) {
            return;
        }
        *self = Self {
            empty_to: self.empty_to,
            ..Self::new(now)
        };
    }

    /// The turn after which to search a pair.
    fn turn(&self, lane: LaneId, source: &str) -> i64 {
        let turns = self.turns.get(&lane);
        let turn = turns.and_then(|turns| turns.get(source));
        turn.copied().unwrap_or(i64::MIN)
    }

    /// For each pair, the turn after which to search.
    fn after(&self, covered: &Covered) -> Vec<i64> {
        let pairs = covered.pairs();
        pairs
            .map(|(lane, source)| self.turn(lane, source))
            .collect()
    }

    /// Notes the result of a search that took this long.
    fn searched(&mut self, covered: &Covered, claim: &BoundClaim, took: Duration) {
        if self.after(covered).contains(&i64::MIN) {
            self.slowest = self.slowest.max(took);
        }
        self.is_announced &= claim.jobs.is_empty();
        for ((lane, source), is_empty) in covered.pairs().zip(&claim.is_empty) {
            if *is_empty {
                self.advance(lane, source, self.empty_to);
            }
        }
        for job in &claim.jobs {
            if let Some(source) = &job.source {
                self.advance(job.lane, source, job.turn);
            }
        }
    }

    /// Lets the next searches of a pair start after this turn, or where they start already.
    fn advance(&mut self, lane: LaneId, source: &str, turn: i64) {
        let turns = self.turns.entry(lane).or_default();
        if let Some(reached) = turns.get_mut(source) {
            *reached = turn.max(*reached);
        } else {
            turns.insert(source.to_owned(), turn);
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
            true => self.lanes.by_source(lanes_max(self.sources.len())),
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
        self.reached_by_source.restart(started);
        let search = BoundSearch {
            lanes: &covered.lanes,
            sources: &covered.sources,
            after: &self.reached_by_source.after(&covered),
            handlers: &covered.handlers,
            rooms: &covered.limits(wanted),
        };
        let claim = shared
            .store
            .claim_bound(fence, search, served.lease, wanted)
            .await?;
        let took = started.elapsed();
        self.reached_by_source.searched(&covered, &claim, took);
        let jobs = claim.jobs;
        let is_cut = self.record_size(&jobs);
        // The search is expensive if it covers many lanes or reads past dead rows.
        self.by_source_at = match jobs.is_empty() {
            true => started + pause_after(took),
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

    /// The time of the next search by source that is a restart, if a job was announced that the last search did not
    /// find. `None` also if the next look may not search: all bound handlers are full, and the end of an attempt lets
    /// the next search start; or orphans are left, which go first.
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

    /// Sets the turn after which the next searches by source start where one has found no job. It was assigned a while
    /// ago: jobs with later turns may not be committed yet.
    pub(in crate::worker) fn set_empty_to(&mut self, turn: i64) {
        self.reached_by_source.empty_to = turn;
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

/// The maximum number of lanes in a search for this many sources.
fn lanes_max(sources: usize) -> usize {
    (PAIRS_MAX / sources.max(1)).max(1)
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

    /// The result of a search: the jobs that it has claimed, and for each pair that it has read, `e` if it was empty.
    fn claim(jobs: &[(i64, &str, i64)], pairs: &str) -> BoundClaim {
        let jobs = jobs
            .iter()
            .map(|(lane, source, turn)| found(*lane, source, *turn));
        BoundClaim {
            jobs: jobs.collect(),
            is_empty: pairs.chars().map(|pair| pair == 'e').collect(),
        }
    }

    /// The positions after a search that found a job of each source in each lane.
    fn reached(now: Instant) -> Reached {
        let mut reached = Reached::new(now);
        let jobs = [(1, "a", 5), (1, "b", 7), (2, "a", 9), (2, "b", 3)];
        reached.searched(&covered([None; 2]), &claim(&jobs, "----"), Duration::ZERO);
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
        assert_eq!(reached.after(&all), [START; 4]);
        let jobs = [(1, "b", 7), (1, "b", 5)];
        reached.searched(&all, &claim(&jobs, "e-ee"), Duration::ZERO);
        reached.restart(now + SECOND / 2);
        assert_eq!(reached.after(&all), [START, 7, START, START]);
        reached.searched(&all, &claim(&[(1, "b", 9)], "e-ee"), Duration::ZERO);
        assert_eq!(reached.after(&all), [START, 9, START, START]);
        reached.restart(now + SECOND);
        assert_eq!(reached.after(&all), [START; 4]);
    }

    #[test]
    fn a_pair_without_jobs_is_searched_after_a_turn_that_was_assigned_a_while_ago() {
        let now = Instant::now();
        let all = covered([None; 2]);
        let mut reached = reached(now);
        reached.restart(now + SECOND);
        reached.empty_to = 6;
        reached.searched(&all, &claim(&[(2, "a", 4)], "ee-e"), Duration::ZERO);
        assert_eq!(reached.after(&all), [6, 6, 4, 6]);
        // No position is moved back.
        reached.empty_to = 8;
        reached.searched(&all, &claim(&[(1, "a", 10)], "-ee-"), Duration::ZERO);
        assert_eq!(reached.after(&all), [10, 8, 8, 6]);
        reached.searched(&all, &claim(&[], "eeee"), Duration::ZERO);
        assert_eq!(reached.after(&all), [10, 8, 8, 8]);
        reached.restart(now + 2 * SECOND);
        assert_eq!(reached.after(&all), [START; 4]);
    }

    /// A gate was closed, for example, or the search has found enough jobs.
    #[test]
    fn after_a_restart_a_pair_is_read_from_the_start_until_a_search_has_read_it() {
        let now = Instant::now();
        let all = covered([None; 2]);
        let mut reached = reached(now);
        reached.restart(now + SECOND);
        reached.empty_to = 8;
        reached.searched(&all, &claim(&[(1, "b", 4)], "e-"), Duration::ZERO);
        assert_eq!(reached.after(&all), [8, 4, START, START]);
        reached.searched(&all, &claim(&[], "-ee-"), Duration::ZERO);
        assert_eq!(reached.after(&all), [8, 8, 8, START]);
        // The handler of the source `a` is full.
        let one = covered([Some(0), None]);
        assert_eq!(one.sources, ["b"]);
        reached.restart(now + 2 * SECOND);
        reached.searched(&one, &claim(&[(1, "b", 9)], "-e"), Duration::ZERO);
        assert_eq!(reached.after(&all), [START, 9, START, 8]);
    }

    #[test]
    fn after_an_announcement_a_search_may_start_at_the_beginning_within_the_second() {
        let now = Instant::now();
        let all = covered([None; 2]);
        let mut reached = Reached::new(now);
        let jobs = [(1, "a", 5), (1, "b", 7), (2, "a", 9), (2, "b", 3)];
        reached.searched(&all, &claim(&jobs, "----"), SECOND / 100);
        assert_eq!(reached.announced_restart(), None);
        reached.announce();
        let next = now + SECOND * 21 / 100;
        assert_eq!(reached.announced_restart(), Some(next));
        reached.restart(next - Duration::from_millis(1));
        assert_eq!(reached.after(&all), [5, 7, 9, 3]);
        // This search reads no pair from its start.
        reached.searched(&all, &claim(&[], "eeee"), SECOND);
        assert_eq!(reached.announced_restart(), Some(next));
        reached.restart(next);
        assert_eq!(reached.after(&all), [START; 4]);
        assert_eq!(reached.announced_restart(), None);
        // The announced job was found.
        reached.announce();
        reached.searched(&all, &claim(&[(1, "a", 6)], "-eee"), Duration::ZERO);
        assert_eq!(reached.announced_restart(), None);
    }

    #[test]
    fn an_expensive_search_from_the_beginning_is_repeated_rarely_but_within_thirty_seconds() {
        let all = covered([None; 2]);
        for (took, pause) in [(0_u32, 1_u32), (1, 20), (60, 30)] {
            let now = Instant::now();
            let mut reached = Reached::new(now);
            reached.empty_to = 4;
            reached.searched(&all, &claim(&[], "ee"), took * SECOND);
            // The rest was read faster.
            reached.searched(&all, &claim(&[], "eeee"), Duration::ZERO);
            let next = now + (took + pause) * SECOND;
            reached.restart(next - Duration::from_millis(1));
            assert_eq!(reached.after(&all), [4; 4]);
            reached.restart(next);
            assert_eq!(reached.after(&all), [START; 4]);
        }
    }

    #[test]
    fn a_search_for_many_sources_covers_fewer_lanes() {
        let lanes = [0, 1, 64, 1_000, 1_000_000].map(lanes_max);
        assert_eq!(lanes, [PAIRS_MAX, PAIRS_MAX, 256, 16, 1]);
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
