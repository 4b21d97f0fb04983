//! Output and log lines of attempts: stored, and read again.

use std::time::Duration;

use postgres_types::ToSql;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::fleet::allowed;
use super::{Store, StoreError, millis};
use crate::job::{Attempt, JobId};

/// The number of lines that a page shows.
pub const NEWEST_LINES: i32 = 500;

/// A log line of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// The job.
    pub id: JobId,
    /// The attempt.
    pub attempt: Attempt,
    /// Counted from 1 within the attempt.
    pub line: u32,
    /// The time since it was logged.
    pub age: Duration,
    /// `trace`, `debug`, `info`, `warn` or `error`.
    pub level: &'static str,
    /// One line of text, without control characters.
    pub text: String,
}

/// A stored log line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedLine {
    /// The attempt that logged it.
    pub attempt: i32,
    /// Counted from 1 within the attempt.
    pub line: i32,
    /// The time at which it was logged (UTC, RFC 3339).
    pub at: String,
    /// `trace`, `debug`, `info`, `warn` or `error`.
    pub level: String,
    /// The line.
    pub text: String,
}

impl LoggedLine {
    fn from_row(row: &Row) -> Self {
        Self {
            attempt: row.get(0),
            line: row.get(1),
            at: row.get(2),
            level: row.get(3),
            text: row.get(4),
        }
    }
}

/// The record that `rouse.append_log` takes.
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
    fn from(log_line: &'a LogLine) -> Self {
        Self {
            id: log_line.id.0,
            attempt: log_line.attempt.0,
            line: i32::try_from(log_line.line).unwrap_or(i32::MAX),
            age_ms: millis(log_line.age),
            level: log_line.level,
            text: &log_line.text,
        }
    }
}

impl Store {
    /// Stores these lines; returns the number that are stored: those of jobs that this worker has claimed, or whose
    /// attempt it has ended. `repeats`: an earlier call may have stored some of them.
    pub async fn append_log(&self, lines: &[LogLine], repeats: bool) -> Result<usize, StoreError> {
        let (worker, lists) = (self.identity()?, self.lists().await?);
        let lines: Vec<LineRecord<'_>> = lines.iter().map(LineRecord::from).collect();
        let rows = self
            .query_with_records(
                include_str!("append_log.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&lines, lists.array_type("log_line")),
                    (&repeats, Type::BOOL),
                ],
            )
            .await?;
        let kept: i32 = rows.first().map_or(0, |row| row.get(0));
        Ok(usize::try_from(kept).unwrap_or(0))
    }

    /// The [`NEWEST_LINES`] newest lines of all attempts at a job, in order; none if the login may not read them.
    pub async fn newest_log(&self, id: JobId) -> Result<Vec<LoggedLine>, StoreError> {
        let rows = self
            .read(
                include_str!("newest_log.sql"),
                &[(&id.0, Type::INT8), (&NEWEST_LINES, Type::INT4)],
            )
            .await;
        let rows = allowed(rows)?.unwrap_or_default();
        Ok(rows.iter().map(LoggedLine::from_row).collect())
    }

    /// The lines of all attempts at a job, in order, after this line of this attempt (0, 0: from the start), at most
    /// 1,000 lines.
    pub async fn job_log(
        &self,
        id: JobId,
        after: (i32, i32),
    ) -> Result<Vec<LoggedLine>, StoreError> {
        let rows = self
            .read(
                include_str!("job_log.sql"),
                &[
                    (&id.0, Type::INT8),
                    (&after.0, Type::INT4),
                    (&after.1, Type::INT4),
                ],
            )
            .await?;
        Ok(rows.iter().map(LoggedLine::from_row).collect())
    }
}
