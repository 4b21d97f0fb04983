//! Extends the leases of long attempts, several hundred in one statement.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::{AbortReason, Fence, JobId};

/// The maximum number of renewals in one statement. With this limit, even a slow server renews at least the first ones
/// in time.
pub const RENEWALS_MAX: usize = 500;

/// A statement that takes longer than this, plus the time for each renewal, is usually retried on another connection.
const RENEW_TIMEOUT: Duration = Duration::from_secs(1);
/// The additional time for each renewal. The server continues with a statement after the host has given up on it, and
/// until it is done, each retry finds the jobs locked.
const RENEW_TIMEOUT_EACH: Duration = Duration::from_millis(5);

/// One lease to extend.
#[derive(Debug, Clone, Copy)]
pub struct Renewal {
    /// The job.
    pub id: JobId,
    /// The fence of its claim.
    pub fence: Fence,
    /// The new duration of the lease, counted from now, in milliseconds.
    pub lease_ms: i64,
}

/// The timeout of a statement with this number of renewals, unless the server is known to need longer.
pub fn renew_timeout(renewals: usize) -> Duration {
    let number = u32::try_from(renewals).unwrap_or(u32::MAX);
    RENEW_TIMEOUT + RENEW_TIMEOUT_EACH.saturating_mul(number)
}

/// Why a lease was not extended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Another transaction is changing the job; try again.
    Busy,
    /// The job no longer belongs to this worker.
    Lost(AbortReason),
}

impl Store {
    /// Extends leases, at most [`RENEWALS_MAX`]. Returns one entry per job, in any order: `None` if its lease was
    /// extended.
    pub async fn renew(
        &self,
        renewals: &[Renewal],
    ) -> Result<Vec<(JobId, Option<Refusal>)>, StoreError> {
        self.renew_within(renew_timeout(renewals.len()), renewals)
            .await
    }

    /// [`renew`](Self::renew) with another timeout.
    pub async fn renew_within(
        &self,
        timeout: Duration,
        renewals: &[Renewal],
    ) -> Result<Vec<(JobId, Option<Refusal>)>, StoreError> {
        let worker = self.identity()?;
        let ids: Vec<i64> = renewals.iter().map(|renewal| renewal.id.0).collect();
        let fences: Vec<i64> = renewals.iter().map(|renewal| renewal.fence.0).collect();
        let leases: Vec<i64> = renewals.iter().map(|renewal| renewal.lease_ms).collect();
        let rows = self
            .query_with_timeout(
                timeout,
                include_str!("renew.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&ids, Type::INT8_ARRAY),
                    (&fences, Type::INT8_ARRAY),
                    (&leases, Type::INT8_ARRAY),
                ],
            )
            .await?;
        let refusal = |word: &str| match word {
            "busy" => Refusal::Busy,
            reason => Refusal::Lost(AbortReason::parse(reason).unwrap_or(AbortReason::Error)),
        };
        Ok(rows
            .iter()
            .map(|row| {
                (
                    JobId(row.get(0)),
                    row.get::<_, Option<&str>>(1).map(refusal),
                )
            })
            .collect())
    }
}
