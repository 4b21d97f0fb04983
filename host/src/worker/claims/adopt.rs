//! Adopts jobs whose worker is dead or has stopped.

use std::time::SystemTime;

use metrics::counter;
use tracing::error;

use super::dispatch::InLine;
use super::{Claims, Found};
use crate::job::{AfterLoss, Fence, LaneId, after_loss};
use crate::sandbox::BootTime;
use crate::store::{Adoption, AdoptionResult, ClaimedJob, Orphan, StoreError, fills_a_response};
use crate::worker::events::{self, EventContext, Since};
use crate::worker::lanes::Served;

impl Claims<'_> {
    /// Notes that there were no orphans at this time, by the database's clock.
    pub(in crate::worker) fn had_no_orphans(&mut self, at: SystemTime) {
        self.checked_at = at;
        self.orphans_left = false;
    }

    /// Adopts jobs whose lease has ended at `since` or later, by the database's clock. The leases were checked up to
    /// `until`; the next claims check those that end later.
    ///
    /// It adopts no more jobs than can run at once: if one of them kills this host too, all jobs in line behind it are
    /// lost once more, and a job fails after a few such losses.
    pub(in crate::worker) async fn adopt(
        &mut self,
        wanted: usize,
        since: Option<SystemTime>,
        until: SystemTime,
    ) -> Result<Found, StoreError> {
        let wanted = wanted.min(self.shared.settings.slots);
        let found = match self.adopt_from_all(wanted, since).await {
            Ok(found) => found,
            Err(error) if error.is_transient() => return Err(error),
            // An orphan that cannot be adopted must not block other claims.
            Err(error) => {
                self.shared.note_missing_partition(&error);
                error!(%error, "cannot adopt the jobs of dead workers; retrying within seconds");
                Found::default()
            }
        };
        self.orphans_left = found.is_cut;
        self.checked_at = match found.is_cut {
            true => self.checked_at.min(since.unwrap_or(SystemTime::UNIX_EPOCH)),
            false => until,
        };
        Ok(found)
    }

    async fn adopt_from_all(
        &mut self,
        wanted: usize,
        since: Option<SystemTime>,
    ) -> Result<Found, StoreError> {
        let lanes = self.lanes.adoptable(false);
        let mut found = self.adopt_from(&lanes, None, wanted, since).await?;
        let lanes = self.lanes.adoptable(true);
        if !found.is_cut && !self.sources.is_empty() && !lanes.is_empty() {
            let sources = self.sources.clone();
            let rest = wanted.saturating_sub(found.jobs);
            found += self.adopt_from(&lanes, Some(&sources), rest, since).await?;
        }
        Ok(found)
    }

    async fn adopt_from(
        &mut self,
        lanes: &[LaneId],
        sources: Option<&[String]>,
        wanted: usize,
        since: Option<SystemTime>,
    ) -> Result<Found, StoreError> {
        let shared = self.shared;
        let crashes_max = shared.settings.lost_max;
        let orphans = shared
            .store
            .orphans(lanes, sources, wanted, since, crashes_max)
            .await?;
        let is_filled = orphans.len() >= wanted;
        let adoptions: Vec<Adoption> = orphans
            .into_iter()
            .map(|orphan| Adoption {
                next: after_loss(orphan.crashes, crashes_max),
                lease: self.lane_of(&orphan).lease,
                orphan,
            })
            .collect();
        let fence = Fence(rand::random());
        let sent = BootTime::now();
        let in_flight = shared.leases.claiming();
        let AdoptionResult { claimed, lost } = shared.store.adopt(fence, &adoptions).await?;
        counter!("rouse_jobs_adopted_total").increment(claimed.len() as u64);
        for adoption in &lost {
            self.report_lost(adoption);
        }
        let bytes = claimed.iter().map(ClaimedJob::bytes).sum();
        let is_cut = is_filled || fills_a_response(claimed.len(), bytes);
        let jobs = self
            .dispatch(in_flight, claimed, sent, InLine::Adopted, None)
            .await;
        Ok(Found {
            jobs,
            is_cut,
            ..Found::default()
        })
    }

    fn lane_of(&self, orphan: &Orphan) -> Served {
        let lane = self.lanes.get(orphan.lane);
        lane.expect("jobs are adopted from lanes that are served")
    }

    /// Reports a lost job that is not claimed now: it waits, or has failed. It is counted for the handler that would
    /// have run it: producers choose the names of other handlers freely.
    fn report_lost(&self, adoption: &Adoption) {
        let Adoption { orphan, next, .. } = adoption;
        let lane = self.lane_of(orphan).lane;
        let has_failed = *next == AfterLoss::Fail;
        let next = match has_failed {
            true => "failed",
            false => "queued",
        };
        let source = orphan.source.as_deref();
        let handler = self.shared.settings.handler_for(source, &lane.handler);
        let handler = handler.to_owned();
        counter!("rouse_jobs_lost_total", "handler" => handler, "next" => next).increment(1);
        let context = EventContext {
            worker_id: &self.shared.settings.worker_id,
            id: orphan.id,
            handler: &lane.handler,
            attempt: orphan.attempt,
            since: Since::ClaimedElsewhere(orphan.after),
        };
        events::lost(context, orphan.uncounted, has_failed);
    }
}
