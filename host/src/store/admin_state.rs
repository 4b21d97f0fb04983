//! Handler state, for the command line: lists, reads, writes and deletes entries, independently of running
//! attempts.

use serde_json::Value;
use tokio_postgres::types::Type;

use super::{Store, StoreError};

impl Store {
    /// The state namespaces that have entries: handler, tenant, number of keys, bytes.
    pub async fn state_spaces(&self) -> Result<Vec<Value>, StoreError> {
        let rows = self.read(include_str!("state_spaces.sql"), &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// A handler's entries for a tenant, without their values. `None` selects the entries of jobs without
    /// a tenant.
    pub async fn state_entries(
        &self,
        handler: &str,
        tenant: Option<&str>,
    ) -> Result<Vec<Value>, StoreError> {
        let rows = self
            .read(
                include_str!("state_entries.sql"),
                &[(&handler, Type::TEXT), (&tenant, Type::TEXT)],
            )
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// The value of one key, with the rest of its entry.
    pub async fn state_value(
        &self,
        handler: &str,
        tenant: Option<&str>,
        key: &str,
    ) -> Result<Option<(Vec<u8>, Value)>, StoreError> {
        let rows = self
            .read(
                include_str!("state_value.sql"),
                &[
                    (&handler, Type::TEXT),
                    (&tenant, Type::TEXT),
                    (&key, Type::TEXT),
                ],
            )
            .await?;
        Ok(rows.first().map(|row| (row.get(0), row.get(1))))
    }

    /// Stores a value. Overwrites an existing one.
    pub async fn set_state(
        &self,
        handler: &str,
        tenant: Option<&str>,
        key: &str,
        value: &[u8],
    ) -> Result<(), StoreError> {
        self.act(
            "rouse.set_state($1, $2, $3, $4)",
            &[
                (&handler, Type::TEXT),
                (&tenant, Type::TEXT),
                (&key, Type::TEXT),
                (&value, Type::BYTEA),
            ],
        )
        .await?;
        Ok(())
    }

    /// Deletes one key, or all keys of the handler for this tenant; returns how many there were.
    pub async fn delete_state(
        &self,
        handler: &str,
        tenant: Option<&str>,
        key: Option<&str>,
    ) -> Result<i64, StoreError> {
        let row = self
            .act(
                "rouse.delete_state($1, $2, $3)",
                &[
                    (&handler, Type::TEXT),
                    (&tenant, Type::TEXT),
                    (&key, Type::TEXT),
                ],
            )
            .await?;
        Ok(row.get(0))
    }
}
