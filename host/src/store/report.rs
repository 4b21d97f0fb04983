//! Says how far attempts are, many in one statement.

use std::collections::HashSet;

use postgres_types::ToSql;
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

/// As `rouse.report` takes it.
#[derive(Debug, ToSql)]
#[postgres(name = "progress_report")]
struct ReportRecord<'a> {
    id: i64,
    fence: i64,
    percent: i32,
    step: &'a str,
}

impl<'a> From<&'a Report> for ReportRecord<'a> {
    fn from(one: &'a Report) -> Self {
        Self {
            id: one.id.0,
            fence: one.fence.0,
            percent: one.percent.into(),
            step: &one.step,
        }
    }
}

impl Store {
    /// Writes the reports down, and forgets those of attempts that have ended. Returns the jobs that are
    /// this worker's; nothing was written about the others.
    pub async fn report(
        &self,
        reports: &[Report],
        ended: &[(JobId, Fence)],
    ) -> Result<HashSet<JobId>, StoreError> {
        let (me, lists) = (self.me()?, self.lists().await?);
        let reports: Vec<ReportRecord<'_>> = reports.iter().map(ReportRecord::from).collect();
        let ended_ids: Vec<i64> = ended.iter().map(|(id, _)| id.0).collect();
        let ended_fences: Vec<i64> = ended.iter().map(|(_, fence)| fence.0).collect();
        let rows = self
            .query_with_records(
                include_str!("report.sql"),
                &[
                    (&me.incarnation.0, Type::INT8),
                    (&me.key(), Type::BYTEA),
                    (&reports, lists.of("progress_report")),
                    (&ended_ids, Type::INT8_ARRAY),
                    (&ended_fences, Type::INT8_ARRAY),
                ],
            )
            .await?;
        Ok(rows.iter().map(|row| JobId(row.get(0))).collect())
    }
}
