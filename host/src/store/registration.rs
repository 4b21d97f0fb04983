//! One life of a worker, as the database knows it.

use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::Incarnation;

/// What a worker says of itself.
#[derive(Debug, Clone)]
pub struct Registration {
    /// Its id: 1 to 64 letters, digits, `-` and `_`.
    pub worker_id: String,
    /// The machine that it runs on.
    pub hostname: String,
    /// The host's version.
    pub version: String,
    /// The handlers that it has.
    pub handlers: Vec<String>,
}

impl Store {
    /// Registers one life of a worker.
    pub async fn register(&self, worker: &Registration) -> Result<Incarnation, StoreError> {
        let rows = self
            .query(
                "SELECT rouse.register($1, $2, $3, $4)",
                &[
                    (&worker.worker_id, Type::TEXT),
                    (&worker.hostname, Type::TEXT),
                    (&worker.version, Type::TEXT),
                    (&worker.handlers, Type::TEXT_ARRAY),
                ],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(Incarnation(row.get(0)))
    }

    /// Says that the worker lives, and which handlers it has now.
    pub async fn heartbeat(
        &self,
        worker: Incarnation,
        handlers: &[String],
    ) -> Result<(), StoreError> {
        self.query(
            "SELECT rouse.heartbeat($1, $2)",
            &[(&worker.0, Type::INT8), (&handlers, Type::TEXT_ARRAY)],
        )
        .await?;
        Ok(())
    }

    /// False when no worker that lives has this handler. A worker is taken to live for 90 s after
    /// its last heartbeat (SPEC row A2). None: this login may not look.
    pub async fn handler_is_served(&self, handler: &str) -> Result<Option<bool>, StoreError> {
        let asked = self
            .query(include_str!("served.sql"), &[(&handler, Type::TEXT)])
            .await;
        match asked {
            Ok(rows) => Ok(rows.first().map(|row| row.get(0))),
            Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Says that the worker has stopped.
    pub async fn unregister(&self, worker: Incarnation) -> Result<(), StoreError> {
        self.query("SELECT rouse.unregister($1)", &[(&worker.0, Type::INT8)])
            .await?;
        Ok(())
    }
}
