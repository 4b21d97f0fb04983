//! Queries of handlers.

use std::time::Instant;

use super::check::CheckedStatement;
use super::session::{settings, transaction_start};
use super::{LOCK_WAIT, Login, RESPONSE_SLACK, SqlError, typed};
use crate::job::{SqlErrorClass, SqlFailure, SqlLimits};

/// Why a query has no rows.
#[derive(Debug)]
pub enum QueryError {
    /// The call is wrong, or there are too many rows: a human-readable message.
    Refused(String),
    /// Postgres refused it, or its number of rows is wrong.
    Statement(SqlFailure),
    /// It did not run, because of this error.
    Failed(SqlError),
}

impl Login {
    /// Runs a query in a read-only transaction. Each row is a JSON object.
    pub async fn query(
        &self,
        statement: &CheckedStatement,
        params: &str,
        limits: &SqlLimits,
    ) -> Result<Vec<Vec<u8>>, QueryError> {
        let Some(query) = &statement.query else {
            return Err(QueryError::Refused(format!(
                "the statement {} is not a query",
                statement.name
            )));
        };
        let values = statement.bind(params).map_err(QueryError::Refused)?;
        let session = self.session().await.map_err(QueryError::Failed)?;
        let start = transaction_start("READ ONLY", &settings(limits.statement_timeout, LOCK_WAIT));
        let params = typed(&values, &statement.params);
        let running = async {
            let (started, rows, ended) = tokio::join!(
                session.batch_execute(&start),
                session.query_typed(query, &params),
                session.batch_execute("ROLLBACK"),
            );
            started.map_err(|error| QueryError::Failed((&error).into()))?;
            let rows = rows.map_err(|error| {
                let error = SqlError::from(&error);
                match error.class() {
                    SqlErrorClass::Data => QueryError::Statement(statement.failure(error)),
                    _ => QueryError::Failed(error),
                }
            })?;
            ended.map_err(|error| QueryError::Failed((&error).into()))?;
            Ok(rows)
        };
        let timeout = limits.statement_timeout + RESPONSE_SLACK;
        let started_at = Instant::now();
        let (answered, is_usable) = self.wait_for_response(&session, timeout, running).await;
        let rows = answered.map_err(QueryError::Failed).flatten();
        match &rows {
            Err(QueryError::Failed(error)) if error.class() == SqlErrorClass::Unavailable => {
                self.note_unavailable(started_at);
            }
            _ if is_usable => session.end_reading(),
            _ => {}
        }
        let rows = rows?;
        if rows.len() > limits.rows_max {
            return Err(QueryError::Refused(format!(
                "the statement {} returns more than {} rows (rows_max of its table in rouse.toml)",
                statement.name, limits.rows_max
            )));
        }
        if let Some(failure) = statement.wrong_count(rows.len() as u64) {
            return Err(QueryError::Statement(failure));
        }
        let rows = rows.iter().map(|row| row.get::<_, Option<String>>(0));
        let rows: Option<Vec<Vec<u8>>> = rows.map(|row| row.map(String::into_bytes)).collect();
        rows.ok_or_else(|| {
            QueryError::Refused(format!(
                "the rows of the statement {} are larger than {} bytes as JSON (bytes_max of its table in rouse.toml)",
                statement.name, limits.bytes_max
            ))
        })
    }
}
