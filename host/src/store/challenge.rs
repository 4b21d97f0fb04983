//! Challenges: a worker is asked to prove that it has the module of a handler, and answers behind its key.

use serde_json::Value;
use tokio_postgres::types::{Json, Type};

use super::{Store, StoreError};

/// What a worker is asked to prove.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    /// The number that the answer has to have, which nobody can guess.
    pub nonce: String,
    /// The handler.
    pub handler: String,
}

impl Store {
    /// Asks the worker of this id; returns the number of the challenge.
    pub async fn challenge(&self, worker_id: &str, handler: &str) -> Result<String, StoreError> {
        let rows = self
            .query(
                "SELECT rouse.challenge($1, $2)::text",
                &[(&worker_id, Type::TEXT), (&handler, Type::TEXT)],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// What it has answered; none: nothing yet.
    pub async fn challenge_answer(&self, nonce: &str) -> Result<Option<Value>, StoreError> {
        let rows = self
            .query(
                "SELECT rouse.challenge_answer($1::text::uuid)",
                &[(&nonce, Type::TEXT)],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// What this worker is to prove.
    pub async fn challenges(&self) -> Result<Vec<Challenge>, StoreError> {
        let me = self.me()?;
        let rows = self
            .query(
                "SELECT nonce::text, handler FROM rouse.challenges($1, $2)",
                &[(&me.incarnation.0, Type::INT8), (&me.key(), Type::BYTEA)],
            )
            .await?;
        let challenge = |row: &tokio_postgres::Row| Challenge {
            nonce: row.get(0),
            handler: row.get(1),
        };
        Ok(rows.iter().map(challenge).collect())
    }

    /// Answers one of them; false: somebody has, or it is not this worker's.
    pub async fn answer_challenge(&self, nonce: &str, answer: &Value) -> Result<bool, StoreError> {
        let me = self.me()?;
        let rows = self
            .query(
                "SELECT rouse.answer_challenge($1, $2, $3::text::uuid, $4)",
                &[
                    (&me.incarnation.0, Type::INT8),
                    (&me.key(), Type::BYTEA),
                    (&nonce, Type::TEXT),
                    (&Json(answer), Type::JSONB),
                ],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }
}
