//! Takes over jobs whose worker is dead or has stopped. The caller decides what happens to each
//! ([`after_loss`](crate::job::after_loss)).

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use postgres_types::ToSql;
use tokio_postgres::types::Type;

use super::{ClaimedJob, Store, StoreError, millis};
use crate::job::{AfterLoss, Attempt, Fence, JobId, LaneId, SILENT_FOR, State};

/// A job whose lease has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    /// The job.
    pub id: JobId,
    /// The fence of the attempt that was lost.
    pub fence: Fence,
    /// Its lane.
    pub lane: LaneId,
    /// What triggered it.
    pub source: Option<String>,
    /// The attempt that was lost.
    pub attempt: Attempt,
    /// The number of its attempts that do not count, including this one: they were lost, suspended, or given back after
    /// their start.
    pub uncounted: i32,
    /// The number of these in which the worker crashed.
    pub crashes: u32,
    /// The time from the claim of the attempt to now, by the database's clock.
    pub after: Duration,
}

/// The decision about an orphan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adoption {
    /// The orphan.
    pub orphan: Orphan,
    /// What happens to it.
    pub next: AfterLoss,
    /// The lease, if the orphan is claimed and has no lease of its own.
    pub lease: Duration,
}

/// The result of a list of adoptions. A job in neither list has been adopted, renewed or locked by others since.
#[derive(Debug, Default)]
pub struct AdoptionResult {
    /// The jobs that were claimed again.
    pub claimed: Vec<ClaimedJob>,
    /// The jobs that were not claimed: they wait, or have failed.
    pub lost: Vec<Adoption>,
}

impl Store {
    /// Lists up to `wanted` jobs of these lanes whose lease has ended, by priority, then by id.
    ///
    /// `sources`: only jobs of these sources; `None` for all. `since`: only leases that ended at this time or later, by
    /// the database's clock; `None` for all. A job that would fail because it has `crashes_max` crashes is not listed
    /// as long as its last worker may still report that it has not crashed ([`SILENT_FOR`]).
    pub async fn orphans(
        &self,
        lanes: &[LaneId],
        sources: Option<&[String]>,
        wanted: usize,
        since: Option<SystemTime>,
        crashes_max: u32,
    ) -> Result<Vec<Orphan>, StoreError> {
        let worker = self.identity()?;
        let lanes: Vec<i64> = lanes.iter().map(|lane| lane.0).collect();
        let wanted = i32::try_from(wanted).unwrap_or(i32::MAX);
        let rows = self
            .query(
                include_str!("orphans.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&lanes, Type::INT8_ARRAY),
                    (&sources, Type::TEXT_ARRAY),
                    (&wanted, Type::INT4),
                    (&since, Type::TIMESTAMPTZ),
                    (&i64::from(crashes_max), Type::INT8),
                    (&millis(SILENT_FOR), Type::INT8),
                ],
            )
            .await?;
        let orphan = |row: &tokio_postgres::Row| Orphan {
            id: JobId(row.get(0)),
            fence: Fence(row.get(1)),
            lane: LaneId(row.get(2)),
            attempt: Attempt(row.get(3)),
            uncounted: row.get::<_, i32>(4) + 1,
            crashes: u32::try_from(row.get::<_, i64>(5)).unwrap_or(u32::MAX),
            after: Duration::from_millis(row.get::<_, i64>(6).try_into().unwrap_or(0)),
            source: row.get(7),
        };
        Ok(rows.iter().map(orphan).collect())
    }

    /// Takes over orphans. The jobs that are claimed get this fence.
    pub async fn adopt(
        &self,
        fence: Fence,
        adoptions: &[Adoption],
    ) -> Result<AdoptionResult, StoreError> {
        if adoptions.is_empty() {
            return Ok(AdoptionResult::default());
        }
        let (worker, lists) = (self.identity()?, self.lists().await?);
        let records: Vec<AdoptionRecord> = adoptions.iter().map(AdoptionRecord::from).collect();
        let rows = self
            .query_with_records(
                include_str!("adopt.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&fence.0, Type::INT8),
                    (&records, lists.array_type("adoption")),
                ],
            )
            .await?;
        let adopted: HashSet<i64> = rows.iter().map(|row| row.get(0)).collect();
        let (claimed, lost): (Vec<Adoption>, Vec<Adoption>) = adoptions
            .iter()
            .filter(|adoption| adopted.contains(&adoption.orphan.id.0))
            .cloned()
            .partition(|adoption| adoption.next == AfterLoss::Claim);
        let ids = claimed.iter().map(|adoption| adoption.orphan.id.0);
        let ids: Vec<i64> = ids.collect();
        let mut claimed = self.claimed(fence, &ids).await?;
        for job in &mut claimed {
            job.ready_at = None;
        }
        Ok(AdoptionResult { claimed, lost })
    }
}

/// The record that `rouse.adopt` takes.
#[derive(Debug, ToSql)]
#[postgres(name = "adoption")]
struct AdoptionRecord {
    id: i64,
    fence: i64,
    next: &'static str,
    crashes: i64,
    delay_ms: i64,
    lease_ms: i64,
}

impl From<&Adoption> for AdoptionRecord {
    fn from(adoption: &Adoption) -> Self {
        let (next, delay) = match adoption.next {
            AfterLoss::Claim => (State::Running, Duration::ZERO),
            AfterLoss::Wait(delay) => (State::Queued, delay),
            AfterLoss::Fail => (State::Failed, Duration::ZERO),
        };
        Self {
            id: adoption.orphan.id.0,
            fence: adoption.orphan.fence.0,
            next: next.as_str(),
            crashes: adoption.orphan.crashes.into(),
            delay_ms: millis(delay),
            lease_ms: millis(adoption.lease),
        }
    }
}
