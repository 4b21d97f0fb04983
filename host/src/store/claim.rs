//! Claims jobs in batches. The jobs of a large claim are read in a second round trip.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime};

use postgres_types::ToSql;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::{JsonText, Store, StoreError, millis};
use crate::job::{Attempt, Fence, JobId, LaneId};

/// A claim or an adoption ends with the job whose row makes the total reach this size; as in `rouse.claim`
/// (migrations/functions/claim.sql).
pub const CLAIM_BYTES_MAX: usize = 8 << 20;
/// The size of each row apart from `rouse.job.bytes`.
pub const COLUMNS_BYTES: usize = 120;

/// True if a claim or an adoption of this many jobs, with this many bytes in all ([`ClaimedJob::bytes`]), ended because
/// of its size.
pub fn fills_a_response(jobs: usize, bytes: usize) -> bool {
    jobs * COLUMNS_BYTES + bytes >= CLAIM_BYTES_MAX
}

/// One lane to claim from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimOrder {
    /// The lane.
    pub lane: LaneId,
    /// Only turns after this one are read. It is a hint: a wrong value delays a job until the next sweep, and never
    /// loses it.
    pub after: i64,
    /// The lease, in milliseconds.
    pub lease_ms: i64,
    /// The maximum number of its jobs; `None` means as many as are wanted.
    pub max: Option<usize>,
    /// Restricts the claim to some of the lane's jobs; `None` means any.
    pub overdue: Option<OverdueFilter>,
}

/// The overdue jobs of a lane: of its next `max` jobs, those that have waited for `waited`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverdueFilter {
    /// The maximum number of the lane's next jobs that are read.
    pub max: usize,
    /// The minimum wait, by the database's clock.
    pub waited: Duration,
}

/// A search for jobs by their source.
#[derive(Debug, Clone, Copy, Default)]
pub struct BoundSearch<'a> {
    /// The lanes, in their order.
    pub lanes: &'a [LaneId],
    /// The sources, in their order.
    pub sources: &'a [String],
    /// For each lane, and in it for each source, the turn after which to search. If it is empty, all jobs are searched.
    pub after: &'a [i64],
    /// For each source, the position of its handler in `rooms`. If it is empty, no handler is limited.
    pub handlers: &'a [usize],
    /// For each handler, the maximum number of its jobs.
    pub rooms: &'a [usize],
}

/// The result of a search for jobs by their source.
#[derive(Debug, Clone)]
pub struct BoundClaim {
    /// The claimed jobs.
    pub jobs: Vec<ClaimedJob>,
    /// For each lane of the search, and in it for each source, true if there was no ready job after the turn in
    /// [`BoundSearch::after`]. False if there was one, or if the lane was not read. The pairs after the last one that
    /// was read are missing.
    pub is_empty: Vec<bool>,
}

/// The record that `rouse.claim` takes.
#[derive(Debug, ToSql)]
#[postgres(name = "claim_order")]
struct OrderRecord {
    lane: i64,
    after: i64,
    lease_ms: i64,
    max: Option<i32>,
    waited_ms: Option<i64>,
}

impl From<&ClaimOrder> for OrderRecord {
    fn from(order: &ClaimOrder) -> Self {
        let next = order.overdue.map(|filter| filter.max);
        let max = order.max.into_iter().chain(next).min();
        Self {
            lane: order.lane.0,
            after: order.after,
            lease_ms: order.lease_ms,
            max: max.map(|max| i32::try_from(max).unwrap_or(i32::MAX)),
            waited_ms: order.overdue.map(|filter| millis(filter.waited)),
        }
    }
}

/// The result of a claim.
#[derive(Debug, Clone)]
pub enum ClaimResult {
    /// The claimed jobs; fewer than wanted if the lanes have no more, if the response reached its maximum size, or
    /// because of gates.
    Jobs(Vec<ClaimedJob>, Vec<ClosedLane>),
    /// No jobs, because a lease has ended, and orphans are adopted first. Leases were checked up to this time, by the
    /// database's clock.
    Orphans(SystemTime),
}

impl ClaimResult {
    /// The jobs; empty if there are orphans.
    pub fn jobs(self) -> Vec<ClaimedJob> {
        match self {
            Self::Jobs(jobs, _) => jobs,
            Self::Orphans(_) => Vec::new(),
        }
    }
}

/// A lane of which no further job may start now, because of gates, or because the worker's login may not claim from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClosedLane {
    /// The lane.
    pub lane: LaneId,
    /// The gates that have no free capacity for it.
    pub by: Vec<ClosedGate>,
}

/// A gate that has no free capacity for a lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClosedGate {
    /// Its name, `queue NAME` for the limit on running jobs of a key of a queue, or `the login` for the limits of the
    /// worker's login.
    pub name: String,
    /// The time after which a job may start; `None` means after a job of its key has ended.
    pub wait: Option<Duration>,
}

impl ClosedLane {
    /// True if this gate has no free capacity for the lane.
    pub fn is_closed_by(&self, gate: &str) -> bool {
        self.by.iter().any(|closed| closed.name == gate)
    }
}

/// A job that this host has claimed.
#[derive(Debug, Clone)]
pub struct ClaimedJob {
    /// The job.
    pub id: JobId,
    /// The number that its settlement has to show.
    pub fence: Fence,
    /// Its lane: handler, queue, priority, tags.
    pub lane: LaneId,
    /// Its turn in the lane.
    pub turn: i64,
    /// The number of this attempt; 1 for the first.
    pub attempt: Attempt,
    /// The number of its attempts that do not count: they were lost with their worker, suspended, or given back after
    /// their start.
    pub uncounted: i32,
    /// The maximum number of attempts; `None` means the handler's own.
    pub max_attempts: Option<u32>,
    /// The tenant that it belongs to.
    pub tenant: Option<String>,
    /// What triggered it.
    pub source: Option<String>,
    /// When it was enqueued, by the database's clock.
    pub requested_at: SystemTime,
    /// When it became ready, by the database's clock: enqueued, due, or retried. `None` if it was adopted.
    pub ready_at: Option<SystemTime>,
    /// When it was claimed, by the database's clock.
    pub claimed_at: SystemTime,
    /// JSON; empty if the row in `rouse.payload` was removed, or if it could not be read.
    pub payload: JsonText,
    /// Why the payload could not be read, for the log: its page is damaged, or the connection is too slow for it. It
    /// may contain the address of the database.
    pub unread: Option<String>,
    /// The memory limit of this attempt, in bytes, if it differs from the handler's own because an earlier attempt ran
    /// out of memory.
    pub memory_bytes: Option<u64>,
    /// The job's attenuated grants, as JSON; `None` means all grants of its handler.
    pub grants: Option<JsonText>,
    /// The lease of its claims; `None` means that of its lane.
    pub lease: Option<Duration>,
    /// The run timeout of its attempts; `None` means the handler's own.
    pub timeout: Option<Duration>,
    /// The trace context of its producer, a `traceparent`.
    pub trace: Option<String>,
}

impl ClaimedJob {
    /// Its `rouse.job.bytes`: payload, tenant, source, grants and trace as text.
    pub fn bytes(&self) -> usize {
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let grants = self.grants.as_ref().map_or(0, |grants| grants.0.len());
        self.payload.0.len() + text(&self.tenant) + text(&self.source) + grants + text(&self.trace)
    }

    fn from_row(row: &Row, fence: Fence) -> Result<Self, tokio_postgres::Error> {
        Ok(Self {
            id: JobId(row.try_get(0)?),
            fence,
            lane: LaneId(row.try_get(1)?),
            turn: row.try_get(2)?,
            attempt: Attempt(row.try_get(3)?),
            uncounted: row.try_get(4)?,
            max_attempts: row
                .try_get::<_, Option<i32>>(5)?
                .and_then(|max| u32::try_from(max).ok()),
            tenant: row.try_get(6)?,
            source: row.try_get(7)?,
            requested_at: row.try_get(8)?,
            ready_at: row.try_get(9)?,
            claimed_at: row.try_get(10)?,
            payload: row.try_get(11)?,
            unread: None,
            memory_bytes: row
                .try_get::<_, Option<i64>>(12)?
                .and_then(|bytes| u64::try_from(bytes).ok()),
            grants: row.try_get(13)?,
            lease: time(row, 14)?,
            timeout: time(row, 15)?,
            trace: row.try_get(16)?,
        })
    }
}

impl Store {
    /// Claims up to `wanted` jobs, from the lanes in the order given, unless a lease has ended at `checked_at` or later
    /// (`None`: leases are not checked). One round trip, or two if the jobs are large.
    pub async fn claim(
        &self,
        fence: Fence,
        orders: &[ClaimOrder],
        wanted: usize,
        checked_at: Option<SystemTime>,
    ) -> Result<ClaimResult, StoreError> {
        self.claim_orders(fence, orders, wanted, checked_at, false)
            .await
    }

    /// Like [`claim`](Self::claim), but for up to `wanted` batches of jobs, from lanes that all have a gate of kind
    /// `batch`. Each order has a maximum number of jobs.
    pub async fn claim_batches(
        &self,
        fence: Fence,
        orders: &[ClaimOrder],
        wanted: usize,
        checked_at: Option<SystemTime>,
    ) -> Result<ClaimResult, StoreError> {
        self.claim_orders(fence, orders, wanted, checked_at, true)
            .await
    }

    async fn claim_orders(
        &self,
        fence: Fence,
        orders: &[ClaimOrder],
        wanted: usize,
        checked_at: Option<SystemTime>,
        in_batches: bool,
    ) -> Result<ClaimResult, StoreError> {
        let (worker, lists) = (self.identity()?, self.lists().await?);
        let positions = orders.iter().map(|order| order.lane).zip(0_usize..);
        let positions: HashMap<LaneId, usize> = positions.collect();
        let orders: Vec<OrderRecord> = orders.iter().map(OrderRecord::from).collect();
        let wanted = i32::try_from(wanted).unwrap_or(i32::MAX);
        let rows = self
            .query_with_records(
                include_str!("claim.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&fence.0, Type::INT8),
                    (&orders, lists.array_type("claim_order")),
                    (&wanted, Type::INT4),
                    (&checked_at, Type::TIMESTAMPTZ),
                    (&in_batches, Type::BOOL),
                ],
            )
            .await?;
        let mut claimed = Vec::new();
        let mut closed: Vec<ClosedLane> = Vec::new();
        let mut closed_at: HashMap<LaneId, usize> = HashMap::new();
        for row in &rows {
            if let Some(ids) = row.try_get::<_, Option<Vec<i64>>>(17)? {
                claimed = self.claimed(fence, &ids).await?;
            } else if row.try_get::<_, Option<i64>>(0)?.is_some() {
                claimed.push(ClaimedJob::from_row(row, fence)?);
            } else if let Some(lane) = row.try_get(1)? {
                // The gates of a lane have several rows if they have different waits.
                let lane = LaneId(lane);
                let index = *closed_at.entry(lane).or_insert_with(|| {
                    let by = Vec::new();
                    closed.push(ClosedLane { lane, by });
                    closed.len() - 1
                });
                let wait = time(row, 14)?;
                let names: Option<Vec<String>> = row.try_get(18)?;
                let gates = names.into_iter().flatten();
                let gates = gates.map(|name| ClosedGate { name, wait });
                closed[index].by.extend(gates);
            } else {
                return Ok(ClaimResult::Orphans(row.try_get(10)?));
            }
        }
        // The response is in the order of the ids.
        claimed.sort_by_key(|job| (positions.get(&job.lane).copied(), job.turn));
        Ok(ClaimResult::Jobs(claimed, closed))
    }

    /// Claims up to `wanted` jobs that this search finds. Two round trips.
    pub async fn claim_bound(
        &self,
        fence: Fence,
        search: BoundSearch<'_>,
        lease: Duration,
        wanted: usize,
    ) -> Result<BoundClaim, StoreError> {
        let worker = self.identity()?;
        let integer = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
        let lanes: Vec<i64> = search.lanes.iter().map(|lane| lane.0).collect();
        // Arrays start at 1 in SQL.
        let handlers = search.handlers.iter().map(|position| integer(position + 1));
        let handlers: Vec<i32> = handlers.collect();
        let rooms: Vec<i32> = search.rooms.iter().map(|room| integer(*room)).collect();
        let rows = self
            .query(
                include_str!("claim_bound.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&fence.0, Type::INT8),
                    (&lanes, Type::INT8_ARRAY),
                    (&search.sources, Type::TEXT_ARRAY),
                    (&millis(lease), Type::INT8),
                    (&integer(wanted), Type::INT4),
                    (&search.after, Type::INT8_ARRAY),
                    (&handlers, Type::INT4_ARRAY),
                    (&rooms, Type::INT4_ARRAY),
                ],
            )
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        let ids: Option<Vec<i64>> = row.try_get(0)?;
        let is_empty = row.try_get(1)?;
        let jobs = self.claimed(fence, &ids.unwrap_or_default()).await?;
        Ok(BoundClaim { jobs, is_empty })
    }

    /// Reads the jobs of this claim, except those that the worker has lost since. If the connection breaks, the read is
    /// retried once: the jobs stay claimed, and would otherwise be stuck until their leases end. If one of the payloads
    /// cannot be read, or not in time, each of them is read separately, so that only the job of that payload is
    /// affected ([`ClaimedJob::unread`]).
    pub(super) async fn claimed(
        &self,
        fence: Fence,
        ids: &[i64],
    ) -> Result<Vec<ClaimedJob>, StoreError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let read = match self.read_claimed(fence, ids, true).await {
            Err(error) if error.is_transient() && !error.is_silence() => {
                self.read_claimed(fence, ids, true).await
            }
            response => response,
        };
        match read {
            Err(error) if !error.is_unreachable() => self.read_separately(fence, ids).await,
            response => response,
        }
    }

    /// Reads the jobs without their payloads, and then each payload. Stops after the second payload that gets no
    /// response, because the connection is to blame, and after 15 s, because the worker claims nothing else in the
    /// meantime. The jobs that were not read then wait until their leases end.
    async fn read_separately(
        &self,
        fence: Fence,
        ids: &[i64],
    ) -> Result<Vec<ClaimedJob>, StoreError> {
        let mut jobs = Vec::with_capacity(ids.len());
        let mut unanswered = 0;
        let started_at = Instant::now();
        for job in self.read_claimed(fence, ids, false).await? {
            match self.read_claimed(fence, &[job.id.0], true).await {
                Ok(read) => jobs.extend(read),
                Err(error) if error.is_unreachable() => break,
                Err(error) => {
                    unanswered += u32::from(error.is_unanswered());
                    let unread = Some(error.to_string());
                    jobs.push(ClaimedJob { unread, ..job });
                    if unanswered > 1 {
                        break;
                    }
                }
            }
            if started_at.elapsed() >= self.read_payloads_for {
                break;
            }
        }
        Ok(jobs)
    }

    async fn read_claimed(
        &self,
        fence: Fence,
        ids: &[i64],
        payloads: bool,
    ) -> Result<Vec<ClaimedJob>, StoreError> {
        let worker = self.identity()?;
        self.query_as_rows_arrive(
            include_str!("claimed.sql"),
            &[
                (&worker.incarnation.0, Type::INT8),
                (&worker.key(), Type::BYTEA),
                (&fence.0, Type::INT8),
                (&ids, Type::INT8_ARRAY),
                (&payloads, Type::BOOL),
            ],
            |row| ClaimedJob::from_row(row, fence),
        )
        .await
    }
}

/// A column of milliseconds.
fn time(row: &Row, column: usize) -> Result<Option<Duration>, tokio_postgres::Error> {
    let ms: Option<i64> = row.try_get(column)?;
    Ok(ms
        .and_then(|ms| u64::try_from(ms).ok())
        .map(Duration::from_millis))
}
