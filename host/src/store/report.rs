//! Says how far attempts are, many in one statement.

use std::collections::HashSet;

use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::{Fence, JobId};

/// How far one attempt is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The job.
    pub id: JobId,
    /// The number that its claim drew.
    pub fence: Fence,
    /// 0 to 100.
    pub percent: u8,
    /// The step that it is in, at most 200 characters.
    pub step: String,
}

impl Store {
    /// Writes the reports down, and forgets those of attempts that have ended. Returns the jobs that are
    /// this worker's; nothing was written about the others.
    pub async fn report(
        &self,
        reports: &[Report],
        ended: &[(JobId, Fence)],
    ) -> Result<HashSet<JobId>, StoreError> {
        let me = self.me()?;
        let ids: Vec<i64> = reports.iter().map(|one| one.id.0).collect();
        let fences: Vec<i64> = reports.iter().map(|one| one.fence.0).collect();
        let percents: Vec<i32> = reports.iter().map(|one| one.percent.into()).collect();
        let steps: Vec<&str> = reports.iter().map(|one| one.step.as_str()).collect();
        let ended_ids: Vec<i64> = ended.iter().map(|(id, _)| id.0).collect();
        let ended_fences: Vec<i64> = ended.iter().map(|(_, fence)| fence.0).collect();
        let rows = self
            .query(
                include_str!("report.sql"),
                &[
                    (&me.incarnation.0, Type::INT8),
                    (&me.key(), Type::BYTEA),
                    (&ids, Type::INT8_ARRAY),
                    (&fences, Type::INT8_ARRAY),
                    (&percents, Type::INT4_ARRAY),
                    (&steps, Type::TEXT_ARRAY),
                    (&ended_ids, Type::INT8_ARRAY),
                    (&ended_fences, Type::INT8_ARRAY),
                ],
            )
            .await?;
        Ok(rows.iter().map(|row| JobId(row.get(0))).collect())
    }
}
