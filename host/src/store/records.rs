//! The records that the functions of workers take: composite types of schema `rouse` (migrations/functions/types.sql).
//!
//! Each has a struct beside its verb, with `#[derive(ToSql)]`; the fields are matched by their names. A field is added there and in the
//! type, and nowhere between.

use std::collections::HashMap;
use std::sync::Arc;

use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{Field, Kind, ToSql, Type};

use super::{Store, StoreError};

/// Those that a host sends.
const NAMES: [&str; 6] = [
    "adoption",
    "claim_order",
    "settlement",
    "progress_report",
    "attempt_usage",
    "log_line",
];

/// Lists of records, by the name of the record. Their numbers in the catalog differ from database to database.
#[derive(Debug)]
pub(super) struct Lists(HashMap<&'static str, Type>);

impl Lists {
    /// The type of a list of these records.
    pub(super) fn of(&self, name: &str) -> Type {
        self.0
            .get(name)
            .expect("all that the verbs name are read")
            .clone()
    }
}

impl Store {
    /// The types of records.
    ///
    /// # Errors
    /// As of a read, and where the database lacks one: it is not migrated.
    pub(super) async fn lists(&self) -> Result<Arc<Lists>, StoreError> {
        if let Some(lists) = self.lists.load_full() {
            return Ok(lists);
        }
        let lists = Arc::new(self.read_records().await?);
        self.lists.store(Some(lists.clone()));
        Ok(lists)
    }

    /// [`query`](Store::query) with lists of records. Where the server does not know their types (any more), because the schema was made
    /// anew, they are read again for the next call.
    pub(super) async fn query_with_records(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, StoreError> {
        let answer = self.query(sql, params).await;
        let unknown = [
            // "cache lookup failed for type"
            SqlState::INTERNAL_ERROR,
            SqlState::UNDEFINED_OBJECT,
            SqlState::UNDEFINED_FUNCTION,
            SqlState::DATATYPE_MISMATCH,
        ];
        if let Err(error) = &answer
            && error.code().is_some_and(|code| unknown.contains(code))
        {
            self.lists.store(None);
        }
        answer
    }

    /// Reads the types of records.
    ///
    /// # Errors
    /// Where the database lacks one: it is not migrated.
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
