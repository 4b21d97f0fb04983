//! Challenges: a worker has to prove that it has a handler's module, and answers with its key.

use serde_json::Value;
use tokio_postgres::types::{Json, Type};

use super::json::ShownJson;
use super::{Store, StoreError};

/// A challenge that a worker has to answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    /// The unguessable number that the answer has to quote.
    pub nonce: String,
    /// The handler.
    pub handler: String,
}

impl Store {
    /// Challenges the worker with this id; returns the nonce of the challenge.
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

    /// The worker's answer; `None` if there is none yet.
    pub async fn challenge_answer(&self, nonce: &str) -> Result<Option<Value>, StoreError> {
        let rows = self
            .query(
                "SELECT rouse.challenge_answer($1::text::uuid)",
                &[(&nonce, Type::TEXT)],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        let answer: Option<ShownJson> = row.get(0);
        Ok(answer.map(|ShownJson(answer)| answer))
    }

    /// The open challenges of this worker.
    pub async fn challenges(&self) -> Result<Vec<Challenge>, StoreError> {
        let rows = self
            .query_as_worker("SELECT nonce::text, handler FROM rouse.challenges($1, $2)")
            .await?;
        let challenge = |row: &tokio_postgres::Row| Challenge {
            nonce: row.get(0),
            handler: row.get(1),
        };
        Ok(rows.iter().map(challenge).collect())
    }

    /// Answers a challenge. Returns false if it was answered already, or is not for this worker.
    pub async fn answer_challenge(&self, nonce: &str, answer: &Value) -> Result<bool, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                "SELECT rouse.answer_challenge($1, $2, $3::text::uuid, $4)",
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&nonce, Type::TEXT),
                    (&Json(answer), Type::JSONB),
                ],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }
}
