//! Reports the progress of attempts, many in one statement.

use std::collections::HashSet;

use postgres_types::ToSql;
use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::{Fence, JobId};

/// The progress of one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The job.
    pub id: JobId,
    /// The fence of its claim.
    pub fence: Fence,
    /// 0 to 100.
    pub percent: u8,
    /// Its current step, at most 200 characters.
    pub step: String,
}

/// The record that `rouse.report` takes.
#[derive(Debug, ToSql)]
#[postgres(name = "progress_report")]
struct ReportRecord<'a> {
    id: i64,
    fence: i64,
    percent: i32,
    step: &'a str,
}

impl<'a> From<&'a Report> for ReportRecord<'a> {
    fn from(report: &'a Report) -> Self {
        Self {
            id: report.id.0,
            fence: report.fence.0,
            percent: report.percent.into(),
            step: &report.step,
        }
    }
}

impl Store {
    /// Stores the reports, and deletes those of attempts that have ended. Returns the jobs that this worker has
    /// claimed; reports about others are dropped.
    pub async fn report(
        &self,
        reports: &[Report],
        ended: &[(JobId, Fence)],
    ) -> Result<HashSet<JobId>, StoreError> {
        let (worker, lists) = (self.identity()?, self.lists().await?);
        let reports: Vec<ReportRecord<'_>> = reports.iter().map(ReportRecord::from).collect();
        let ended_ids: Vec<i64> = ended.iter().map(|(id, _)| id.0).collect();
        let ended_fences: Vec<i64> = ended.iter().map(|(_, fence)| fence.0).collect();
        let rows = self
            .query_with_records(
                include_str!("report.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&reports, lists.array_type("progress_report")),
                    (&ended_ids, Type::INT8_ARRAY),
                    (&ended_fences, Type::INT8_ARRAY),
                ],
            )
            .await?;
        Ok(rows.iter().map(|row| JobId(row.get(0))).collect())
    }
}
