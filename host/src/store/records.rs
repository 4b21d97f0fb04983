//! The records that the functions for workers take: composite types of schema `rouse` (migrations/functions/types.sql).
//!
//! Each has a struct next to its operation, with `#[derive(ToSql)]`; the fields are matched by name. To add a field,
//! extend the struct and the type; nothing in between has to change.

use std::collections::HashMap;
use std::sync::Arc;

use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{Field, Kind, ToSql, Type};

use super::{Store, StoreError};

/// The records that a host sends.
const NAMES: [&str; 9] = [
    "adoption",
    "claim_order",
    "settlement",
    "new_job",
    "progress_report",
    "attempt_usage",
    "log_line",
    "schedule_change",
    "schedule_firing",
];

/// Array types of records, by the name of the record. Their oids differ from database to database.
#[derive(Debug)]
pub(super) struct Lists(HashMap<&'static str, Type>);

impl Lists {
    /// The array type of these records.
    pub(super) fn array_type(&self, name: &str) -> Type {
        self.0
            .get(name)
            .expect("the types of all operations are read")
            .clone()
    }
}

impl Store {
    /// The types of records.
    ///
    /// # Errors
    /// Fails like any read, and if the database lacks a type because it is not migrated.
    pub(super) async fn lists(&self) -> Result<Arc<Lists>, StoreError> {
        if let Some(lists) = self.lists.load_full() {
            return Ok(lists);
        }
        let lists = Arc::new(self.read_records().await?);
        self.lists.store(Some(lists.clone()));
        Ok(lists)
    }

    /// Like [`query`](Store::query), but with arrays of records. If the server does not know their types, because the
    /// schema was recreated, they are read again for the next call.
    pub(super) async fn query_with_records(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, StoreError> {
        let response = self.query(sql, params).await;
        let unknown = [
            // "cache lookup failed for type"
            SqlState::INTERNAL_ERROR,
            SqlState::UNDEFINED_OBJECT,
            SqlState::UNDEFINED_FUNCTION,
            SqlState::DATATYPE_MISMATCH,
        ];
        if let Err(error) = &response
            && error.code().is_some_and(|code| unknown.contains(code))
        {
            self.lists.store(None);
        }
        response
    }

    /// Reads the types of records.
    ///
    /// # Errors
    /// If the database lacks a type because it is not migrated.
    async fn read_records(&self) -> Result<Lists, StoreError> {
        let names: &[&str] = &NAMES;
        let rows = self
            .query(include_str!("records.sql"), &[(&names, Type::TEXT_ARRAY)])
            .await?;
        let mut lists = HashMap::new();
        for row in &rows {
            let (name, record, list): (&str, u32, u32) = (row.get(0), row.get(1), row.get(2));
            let (fields, kinds): (Vec<String>, Vec<u32>) = (row.get(3), row.get(4));
            let fields = fields
                .into_iter()
                .zip(kinds)
                .filter_map(|(name, kind)| Some(Field::new(name, Type::from_oid(kind)?)));
            let of = |oid, kind| Type::new(name.to_owned(), oid, kind, "rouse".to_owned());
            let record = of(record, Kind::Composite(fields.collect()));
            if let Some(name) = NAMES.into_iter().find(|known| *known == name) {
                lists.insert(name, of(list, Kind::Array(record)));
            }
        }
        match NAMES.into_iter().find(|name| !lists.contains_key(name)) {
            None => Ok(Lists(lists)),
            Some(missing) => Err(StoreError::NotMigrated(missing)),
        }
    }
}
