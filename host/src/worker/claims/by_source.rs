//! Claims jobs by their source from lanes whose own handler this host does not have.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::dispatch::InLine;
use super::{Claims, Found};
use crate::job::{Fence, LaneId};
use crate::sandbox::BootTime;
use crate::store::StoreError;

/// A search by source that finds nothing is retried after this multiple of its duration.
const BY_SOURCE_SHARE: u32 = 20;
/// The longest wait before it is retried.
const BY_SOURCE_PAUSE_MAX: Duration = Duration::from_secs(30);
/// The shortest wait between two searches from the start of the lanes.
const RESTART_PAUSE_MIN: Duration = Duration::from_secs(1);

/// How far jobs have been claimed by their source. The next search starts there: a transaction that is open all day
/// keeps the index entries of all jobs that have ended since. Now and then, a search starts at the beginning of the
/// lanes. It finds jobs that were committed late, or were locked.
pub(super) struct Reached {
    /// The last claimed turn, by lane and source.
    turns: HashMap<LaneId, HashMap<String, i64>>,
    /// The time of the next search from the start of the lanes.
    restart_at: Instant,
}

impl Reached {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            turns: HashMap::new(),
            restart_at: now,
        }
    }

    /// True if the search that starts now is one from the start of the lanes.
    fn restarts(&self, now: Instant) -> bool {
        now >= self.restart_at
    }

    /// Schedules the next search from the start of the lanes, after such a search. `is_filled`: there may be more jobs
    /// before the claimed turns than it has found.
    fn restarted(&mut self, started: Instant, now: Instant, is_filled: bool) {
        let took = now.saturating_duration_since(started);
        self.restart_at = now + pause_after(took).max(RESTART_PAUSE_MIN);
        if is_filled {
            self.turns.clear();
        }
    }

    /// For each lane, and in it for each source, the turn after which to search.
    fn after(&self, restarts: bool, lanes: &[LaneId], sources: &[String]) -> Vec<i64> {
        let mut after = Vec::with_capacity(lanes.len() * sources.len());
        for lane in lanes {
            let turns = self.turns.get(lane).filter(|_| !restarts);
            for source in sources {
                let turn = turns.and_then(|turns| turns.get(source));
                after.push(turn.copied().unwrap_or(i64::MIN));
            }
        }
        after
    }

    /// Notes that a job of this source was claimed.
    fn claimed(&mut self, lane: LaneId, source: &str, turn: i64) {
        let turns = self.turns.entry(lane).or_default();
        let reached = turns.entry(source.to_owned()).or_insert(turn);
        *reached = turn.max(*reached);
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
        let (sources, wanted) = self.sources_with_room(wanted);
        if sources.is_empty() {
            return Ok(Found::default());
        }
        // Any of these lanes will do: all of them have the same lease.
        let Some(served) = lanes.first().and_then(|lane| self.lanes.get(*lane)) else {
            return Ok(Found::default());
        };
        let lease = served.lease;
        let fence = Fence(rand::random());
        let sent = BootTime::now();
        let shared = self.shared;
        let store = &shared.store;
        let under_way = shared.leases.claiming();
        let restarts = self.reached_by_source.restarts(started);
        let after = self.reached_by_source.after(restarts, &lanes, &sources);
        let jobs = store
            .claim_bound(fence, &lanes, &sources, &after, lease, wanted)
            .await?;
        let is_cut = self.record_size(&jobs);
        if restarts {
            let is_filled = is_cut || jobs.len() >= wanted;
            self.reached_by_source
                .restarted(started, Instant::now(), is_filled);
        }
        for job in &jobs {
            if let Some(source) = &job.source {
                self.reached_by_source.claimed(job.lane, source, job.turn);
            }
        }
        // The search is expensive if it covers many lanes or reads past dead rows.
        self.by_source_at = match jobs.is_empty() {
            true => started + pause_after(started.elapsed()),
            false => started,
        };
        let left_out = self.sources.iter().filter(|it| !sources.contains(it));
        let left_out = left_out.filter_map(|source| shared.settings.sources.get(source));
        self.full_handlers = left_out.cloned().collect();
        // The sources take turns going first.
        self.sources.rotate_left(1);
        let jobs = self
            .dispatch(under_way, jobs, sent, InLine::Queued(&[]), None)
            .await;
        Ok(Found {
            jobs,
            is_cut,
            ..Found::default()
        })
    }

    /// The sources whose handlers may start another attempt on this host, and the number of their jobs that may be
    /// claimed.
    fn sources_with_room(&self, wanted: usize) -> (Vec<String>, usize) {
        let bound = &self.shared.settings.sources;
        let room = |source: &String| {
            let limit = bound
                .get(source)
                .and_then(|handler| self.host_limits.get(handler));
            limit.map_or(wanted, |limit| {
                let in_hand = self.shared.slots.in_hand_of(&limit.handler);
                limit.max.saturating_sub(in_hand).min(wanted)
            })
        };
        let rooms = self.sources.iter().map(|source| (source, room(source)));
        let open: Vec<(&String, usize)> = rooms.filter(|(_, room)| *room > 0).collect();
        let least = open.iter().map(|(_, room)| *room).min();
        let sources = open.into_iter().map(|(source, _)| source.clone());
        (sources.collect(), least.unwrap_or(0))
    }

    /// True if jobs of a bound source may wait for the end of an attempt of its handler on this host. The last search
    /// may have left the source out although the attempt has ended since.
    pub(in crate::worker) fn sources_wait(&self) -> bool {
        let is_any_full = || self.sources_with_room(1).0.len() < self.sources.len();
        self.finds_by_source() && (!self.full_handlers.is_empty() || is_any_full())
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

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_search_starts_after_the_claimed_turns_and_once_a_second_at_the_beginning() {
        const START: i64 = i64::MIN;
        let now = Instant::now();
        let (lanes, sources) = ([LaneId(1), LaneId(2)], ["a", "b"].map(String::from));
        let mut reached = Reached::new(now);
        assert!(reached.restarts(now));
        reached.restarted(now, now, false);
        reached.claimed(LaneId(1), "b", 7);
        reached.claimed(LaneId(1), "b", 5);
        assert!(!reached.restarts(now + SECOND / 2));
        let after = |reached: &Reached, restarts| reached.after(restarts, &lanes, &sources);
        assert_eq!(after(&reached, false), [START, 7, START, START]);
        assert!(reached.restarts(now + SECOND));
        assert_eq!(after(&reached, true), [START; 4]);
        // A source without new jobs is not read from the start again.
        reached.restarted(now + SECOND, now + SECOND, false);
        assert_eq!(after(&reached, false), [START, 7, START, START]);
        // Not all jobs before these turns have been claimed.
        reached.restarted(now + SECOND, now + SECOND, true);
        assert_eq!(after(&reached, false), [START; 4]);
    }

    #[test]
    fn an_expensive_search_from_the_beginning_is_repeated_rarely_but_within_thirty_seconds() {
        for (took, pause) in [(0_u32, 1_u32), (1, 20), (60, 30)] {
            let started = Instant::now();
            let now = started + took * SECOND;
            let mut reached = Reached::new(started);
            reached.restarted(started, now, false);
            assert!(!reached.restarts(now + pause * SECOND - Duration::from_millis(1)));
            assert!(reached.restarts(now + pause * SECOND));
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
