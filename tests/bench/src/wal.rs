//! Bytes written to the write-ahead log during a measurement.

use anyhow::{Context as _, Result};
use tokio_postgres::Client;

/// A position in the log, in bytes from its start.
#[derive(Clone, Copy)]
pub(super) struct Position(i64);

impl Position {
    /// The current end of the log.
    pub(super) async fn now(client: &Client) -> Result<Self> {
        let row = client
            .query_one("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint", &[])
            .await
            .context("read the end of the WAL")?;
        Ok(Self(row.get(0)))
    }

    pub(super) fn bytes_since(self, before: Self) -> i64 {
        self.0 - before.0
    }
}

/// Bytes of the records between two positions, and of the full-page images among them. An image is written at the first
/// change to a page after a checkpoint, so images depend on the time of the checkpoint.
pub(super) struct Records {
    pub(super) bytes: i64,
    pub(super) image_bytes: i64,
}

impl Records {
    /// `None` if the server has no pg_walinspect (available since PostgreSQL 15), or has recycled
    /// that part of the log.
    pub(super) async fn between(client: &Client, from: Position, to: Position) -> Option<Self> {
        client
            .batch_execute("CREATE EXTENSION IF NOT EXISTS pg_walinspect")
            .await
            .ok()?;
        let row = client
            .query_one(
                "SELECT sum(record_size)::bigint, sum(fpi_size)::bigint
                 FROM pg_get_wal_stats('0/0'::pg_lsn + $1::bigint::numeric, '0/0'::pg_lsn + $2::bigint::numeric)",
                &[&from.0, &to.0],
            )
            .await
            .ok()?;
        Some(Self {
            bytes: row.get(0),
            image_bytes: row.get(1),
        })
    }
}
