//! What attempts print and log: kept, and read again.

use std::time::Duration;

use postgres_types::ToSql;
use tokio_postgres::types::Type;

use super::{Store, StoreError, millis};
use crate::job::{Attempt, JobId};

/// One line of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// The job.
    pub id: JobId,
    /// Which attempt at it.
    pub attempt: Attempt,
    /// From 1, within the attempt.
    pub line: u32,
    /// How long ago it was said.
    pub age: Duration,
    /// `trace`, `debug`, `info`, `warn` or `error`.
    pub level: &'static str,
    /// One line of text, without control characters.
    pub text: String,
}

/// A line that was kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedLine {
    /// Which attempt said it.
    pub attempt: i32,
    /// From 1, within the attempt.
    pub line: i32,
    /// When (UTC, RFC 3339).
    pub at: String,
    /// `trace`, `debug`, `info`, `warn` or `error`.
    pub level: String,
    /// The line.
    pub text: String,
}

/// As `rouse.append_log` takes it.
#[derive(Debug, ToSql)]
#[postgres(name = "log_line")]
struct LineRecord<'a> {
    id: i64,
    attempt: i32,
    line: i32,
    age_ms: i64,
    level: &'static str,
    text: &'a str,
}

impl<'a> From<&'a LogLine> for LineRecord<'a> {
    fn from(one: &'a LogLine) -> Self {
        Self {
            id: one.id.0,
            attempt: one.attempt.0,
            line: i32::try_from(one.line).unwrap_or(i32::MAX),
            age_ms: millis(one.age),
            level: one.level,
            text: &one.text,
        }
    }
}

impl Store {
    /// Keeps these lines; returns how many it took: those of jobs that are this worker's, or of which it has ended an
    /// attempt.
    pub async fn append_log(&self, lines: &[LogLine]) -> Result<usize, StoreError> {
        let (me, lists) = (self.me()?, self.lists().await?);
        let lines: Vec<LineRecord<'_>> = lines.iter().map(LineRecord::from).collect();
        let rows = self
            .query_with_records(
                include_str!("append_log.sql"),
                &[
                    (&me.incarnation.0, Type::INT8),
                    (&me.key(), Type::BYTEA),
                    (&lines, lists.of("log_line")),
                ],
            )
            .await?;
        let kept: i32 = rows.first().map_or(0, |row| row.get(0));
        Ok(usize::try_from(kept).unwrap_or(0))
    }

    /// What the attempts at a job have said, in order, after this line of this attempt (0, 0: from the start), at most
    /// 1,000 lines.
    pub async fn job_log(
        &self,
        id: JobId,
        after: (i32, i32),
    ) -> Result<Vec<LoggedLine>, StoreError> {
        let rows = self
            .query(
                include_str!("job_log.sql"),
                &[
                    (&id.0, Type::INT8),
                    (&after.0, Type::INT4),
                    (&after.1, Type::INT4),
                ],
            )
            .await?;
        Ok(rows
            .iter()
            .map(|row| LoggedLine {
                attempt: row.get(0),
                line: row.get(1),
                at: row.get(2),
                level: row.get(3),
                text: row.get(4),
            })
            .collect())
    }
}
