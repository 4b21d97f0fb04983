//! State that handlers keep between their jobs: read and written behind the fence of a job.

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::{LostJob, Store, StoreError};
use crate::job::{Fence, JobId};

/// The job on whose behalf a handler's state is accessed. The database knows its tenant.
#[derive(Debug, Clone, Copy)]
pub struct StateScope<'a> {
    /// The job.
    pub id: JobId,
    /// Its fence.
    pub fence: Fence,
    /// The handler that runs it.
    pub handler: &'a str,
}

/// A value to store.
#[derive(Debug, Clone, Copy)]
pub struct NewStateValue<'a> {
    /// The key under which it is stored.
    pub key: &'a str,
    /// The bytes.
    pub value: &'a [u8],
    /// The version that the value gets: random, and the same if the same write is retried.
    pub version: i64,
    /// The version that is expected; 0 means no value, `None` means any.
    pub expected: Option<i64>,
    /// The maximum number of keys of the handler for this tenant.
    pub keys_max: u32,
    /// The maximum size of those keys and their values, in bytes.
    pub bytes_max: u64,
}

/// The result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateWrite {
    /// The value is committed.
    Set,
    /// The current version is not the expected one.
    Conflict,
    /// A concurrent write changed the value: try again.
    Again,
    /// The handler already has the maximum number of keys for this tenant.
    TooManyKeys,
    /// The other keys already use this many bytes, and the value does not fit.
    TooManyBytes(u64),
}

impl StateWrite {
    fn read(row: &Row) -> Self {
        match row.get::<_, &str>(1) {
            "set" => Self::Set,
            "conflict" => Self::Conflict,
            "again" => Self::Again,
            "keys" => Self::TooManyKeys,
            // `bytes`, the only other result of rouse.write_state.
            _ => Self::TooManyBytes(u64::try_from(row.get::<_, i64>(2)).unwrap_or(0)),
        }
    }
}

/// The row, unless it shows that the job no longer belongs to this worker.
fn check_held(row: &Row) -> Result<&Row, LostJob> {
    row.get::<_, Option<&str>>(0)
        .map_or(Ok(row), |reason| Err(LostJob::read(reason)))
}

/// The only row of a function that returns one.
fn only(rows: &[Row]) -> &Row {
    rows.first()
        .expect("a function with OUT parameters returns one row")
}

impl Store {
    /// Runs a statement whose first parameters are the worker, the job and its handler; `more` are the others.
    async fn query_state(
        &self,
        scope: StateScope<'_>,
        sql: &str,
        more: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, StoreError> {
        let worker = self.identity()?;
        let key = worker.key();
        let mut params: Vec<(&(dyn ToSql + Sync), Type)> = vec![
            (&worker.incarnation.0, Type::INT8),
            (&key, Type::BYTEA),
            (&scope.id.0, Type::INT8),
            (&scope.fence.0, Type::INT8),
            (&scope.handler, Type::TEXT),
        ];
        params.extend_from_slice(more);
        self.query(sql, &params).await
    }

    /// The value under a key, with its version.
    pub async fn read_state(
        &self,
        scope: StateScope<'_>,
        key: &str,
    ) -> Result<Result<Option<(Vec<u8>, i64)>, LostJob>, StoreError> {
        let rows = self
            .query_state(scope, include_str!("read_state.sql"), &[(&key, Type::TEXT)])
            .await?;
        let row = rows.first().map(check_held).transpose();
        Ok(row.map(|row| row.map(|row| (row.get(1), row.get(2)))))
    }

    /// Up to `max` keys with this prefix, in byte order, after `after`.
    pub async fn state_keys(
        &self,
        scope: StateScope<'_>,
        prefix: &str,
        after: Option<&str>,
        max: u32,
    ) -> Result<Result<Vec<String>, LostJob>, StoreError> {
        let max = i32::try_from(max).unwrap_or(i32::MAX);
        let rows = self
            .query_state(
                scope,
                include_str!("state_keys.sql"),
                &[
                    (&prefix, Type::TEXT),
                    (&after, Type::TEXT),
                    (&max, Type::INT4),
                ],
            )
            .await?;
        let keys = rows.iter().map(|row| Ok(check_held(row)?.get(1)));
        Ok(keys.collect())
    }

    /// Stores a value. If this returns [`StateWrite::Set`], it is committed.
    pub async fn write_state(
        &self,
        scope: StateScope<'_>,
        set: NewStateValue<'_>,
    ) -> Result<Result<StateWrite, LostJob>, StoreError> {
        let bytes_max = i64::try_from(set.bytes_max).unwrap_or(i64::MAX);
        let rows = self
            .query_state(
                scope,
                include_str!("write_state.sql"),
                &[
                    (&set.key, Type::TEXT),
                    (&set.value, Type::BYTEA),
                    (&set.version, Type::INT8),
                    (&set.expected, Type::INT8),
                    (&i64::from(set.keys_max), Type::INT8),
                    (&bytes_max, Type::INT8),
                ],
            )
            .await?;
        Ok(check_held(only(&rows)).map(StateWrite::read))
    }

    /// Removes a key; false if it did not exist.
    pub async fn erase_state(
        &self,
        scope: StateScope<'_>,
        key: &str,
    ) -> Result<Result<bool, LostJob>, StoreError> {
        let rows = self
            .query_state(
                scope,
                include_str!("erase_state.sql"),
                &[(&key, Type::TEXT)],
            )
            .await?;
        Ok(check_held(only(&rows)).map(|row| row.get(1)))
    }
}
