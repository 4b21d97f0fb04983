//! Publishes the contracts of handlers: what producers may enqueue, checked by the database.

use serde::{Deserialize, Serialize};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::error::describe_sql;

/// The change that a publication makes to the contract of one handler.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContractChange {
    /// The handler.
    pub handler: String,
    /// The kind of change.
    pub change: Change,
    /// Its typed function, quoted as SQL needs it.
    pub function: String,
    /// The version of the module; `None` if no module is published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// The parameters that change: `+` is new, `-` is removed, `~` has a different type or default, or has become
    /// required or optional.
    pub fields: Vec<String>,
    /// The number of input schemas in use, including this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub versions: Option<u32>,
}

/// The kind of change to a contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// It is created.
    New,
    /// Its function, its comment or the set of accepted payloads changes.
    Changed,
    /// Nothing changes.
    Unchanged,
    /// Its handler is not published, and no worker has it: after this, the function raises an error.
    Removed,
    /// Its handler is not published, but a worker has it.
    Kept,
}

/// The reason why contracts were not published or deleted, as a human-readable message.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ContractError(String);

impl From<&tokio_postgres::Error> for ContractError {
    fn from(error: &tokio_postgres::Error) -> Self {
        let hint = match error.code() {
            Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                "; only a member of rouse_owner can publish and delete contracts; to create a schema, the member also needs CREATE on the database; in a schema of another owner, rouse_owner needs CREATE"
            }
            _ => "",
        };
        Self(format!("{}{hint}", describe_sql(error)))
    }
}

/// Publishes contracts in one transaction, or returns what that would change (`dry_run`). `contracts`: a JSON array, as
/// `rouse.publish_contracts` takes it. The schema is created if it does not exist. With `complete`, the contracts of
/// all other handlers that no worker has are removed.
///
/// # Errors
/// If the connection's user is not the owner, the schema may not be used, or a function of another owner has the name.
/// Nothing is published then.
pub async fn publish_contracts(
    client: &mut Client,
    contracts: &str,
    schema: &str,
    complete: bool,
    dry_run: bool,
) -> Result<Vec<ContractChange>, ContractError> {
    let publishing = async {
        let transaction = client.transaction().await?;
        let create = include_str!("contract_schema.sql");
        let create = transaction
            .query_typed(create, &[(&schema, Type::TEXT)])
            .await?;
        if let Some(create) = create.first().and_then(|row| row.get::<_, Option<&str>>(0)) {
            transaction.batch_execute(create).await?;
        }
        let changes = transaction
            .query_typed(
                include_str!("publish_contracts.sql"),
                &[
                    (&contracts, Type::TEXT),
                    (&schema, Type::TEXT),
                    (&complete, Type::BOOL),
                ],
            )
            .await?;
        match dry_run {
            true => transaction.rollback().await?,
            false => transaction.commit().await?,
        }
        Ok(changes)
    };
    let changes = publishing
        .await
        .map_err(|error: tokio_postgres::Error| ContractError::from(&error))?;
    let changes = changes.first().map_or("[]", |row| row.get(0));
    serde_json::from_str(changes).map_err(|error| ContractError(error.to_string()))
}

/// Deletes the contracts of these handlers (`None`: of all), and returns the handlers that had one.
///
/// # Errors
/// If the connection's user is not the owner.
pub async fn delete_contracts(
    client: &Client,
    handlers: Option<&[String]>,
) -> Result<Vec<String>, ContractError> {
    let rows = client
        .query_typed(
            include_str!("delete_contracts.sql"),
            &[(&handlers, Type::TEXT_ARRAY)],
        )
        .await
        .map_err(|error| ContractError::from(&error))?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}
