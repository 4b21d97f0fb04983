//! Checks that a handler's statement fits the database, in a session of the handler's login.

use std::time::Instant;

use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::params::{self, TextParam};
use super::session::{settings, transaction_start};
use super::{LOCK_WAIT, Login, SqlError};
use crate::job::{OnError, SqlErrorClass, SqlFailure, SqlLimits, Statement};
use crate::store::RESPONSE_TIMEOUT;

/// A statement that fits the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedStatement {
    pub(super) name: String,
    /// The text that runs it as an effect.
    pub(super) effect: EffectText,
    /// The text that runs it as a query; `None` if it is not a query.
    pub(super) query: Option<String>,
    pub(super) params: Vec<Type>,
    pub(super) rows: Option<u64>,
    pub(super) on_error: OnError,
}

/// The text that runs an effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum EffectText {
    /// As it is: it returns no rows.
    Plain(String),
    /// Wrapped in a statement that counts its rows, so that the server does not send them.
    Counted(String),
}

impl EffectText {
    pub(super) fn sql(&self) -> &str {
        match self {
            Self::Plain(sql) | Self::Counted(sql) => sql,
        }
    }
}

impl CheckedStatement {
    /// The parameters of a call, from a JSON array.
    ///
    /// # Errors
    /// A human-readable message.
    pub(super) fn bind(&self, params: &str) -> Result<Vec<TextParam>, String> {
        params::from_json(params, &self.params)
    }

    /// Checks the parameters of a call.
    ///
    /// # Errors
    /// A human-readable message.
    pub fn check_params(&self, params: &str) -> Result<(), String> {
        self.bind(params).map(drop)
    }

    /// The failure of a call that affects or returns this number of rows; `None` unless the statement declares another
    /// number.
    pub(super) fn wrong_count(&self, rows: u64) -> Option<SqlFailure> {
        let expected = self.rows.filter(|expected| *expected != rows)?;
        Some(SqlFailure {
            statement: self.name.clone(),
            code: SqlFailure::ROWS.into(),
            message: format!("wrong number of rows: expected {expected}, got {rows}"),
            permanent: self.on_error == OnError::Fail,
        })
    }

    /// The failure of a call that Postgres has refused, with the consequence that the statement declares.
    pub(super) fn failure(&self, mut error: SqlError) -> SqlFailure {
        error.statement = Some(self.name.clone());
        SqlFailure {
            permanent: self.on_error == OnError::Fail,
            ..error.into_failure()
        }
    }
}

/// Why a statement cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unfit {
    /// It does not fit the database, or the login may not run it: a human-readable message.
    Mismatch(String),
    /// It could not be checked now: a human-readable message.
    Unchecked(String),
}

impl Login {
    /// Checks a statement: its kind, its types, and the privileges of the login. Changes nothing.
    ///
    /// # Errors
    /// If it cannot be used.
    pub async fn check(
        &self,
        statement: &Statement,
        limits: &SqlLimits,
    ) -> Result<CheckedStatement, Unfit> {
        let session = self.session().await.map_err(|error| self.unfit(&error))?;
        let checking = check(&session, statement, limits);
        let timeout = limits.statement_timeout + RESPONSE_TIMEOUT;
        let started_at = Instant::now();
        let Ok(checked) = tokio::time::timeout(timeout, checking).await else {
            self.note_unavailable(started_at);
            return Err(Unfit::Unchecked(self.no_response(timeout).to_string()));
        };
        // A prepared statement outlives the transaction.
        let end = session.batch_execute("ROLLBACK; DEALLOCATE rouse_check");
        let has_ended = match tokio::time::timeout(RESPONSE_TIMEOUT, end).await {
            Ok(Ok(())) => true,
            Ok(Err(error)) => error.code() == Some(&SqlState::INVALID_SQL_STATEMENT_NAME),
            Err(_) => false,
        };
        if has_ended {
            session.end_reading();
        }
        checked.map_err(|error| match error {
            Unfit::Mismatch(why) => {
                let grant = missing_grant(&why, &statement.sql, self.user());
                let grant = grant.map_or_else(String::new, |grant| format!("; {grant}"));
                Unfit::Mismatch(format!("the statement {}: {why}{grant}", statement.name))
            }
            unchecked @ Unfit::Unchecked(_) => unchecked,
        })
    }

    /// Why the login cannot be used.
    pub(super) fn unfit(&self, error: &SqlError) -> Unfit {
        let why = format!("{}: {}", self.target, error.message);
        match SqlErrorClass::from_code(error.code(), error.routine.as_deref()) {
            SqlErrorClass::Mismatch => Unfit::Mismatch(why),
            SqlErrorClass::Unavailable
            | SqlErrorClass::Conflict
            | SqlErrorClass::Temporary
            | SqlErrorClass::Data => Unfit::Unchecked(why),
        }
    }
}

async fn check(
    client: &tokio_postgres::Client,
    statement: &Statement,
    limits: &SqlLimits,
) -> Result<CheckedStatement, Unfit> {
    let unfit = |error: tokio_postgres::Error| {
        let error = SqlError::from(&error);
        match error.code.as_deref() {
            // Lost connections and timeouts do not show anything about the statement.
            None => Unfit::Unchecked(error.message),
            Some(code) => match SqlErrorClass::from_code(code, None) {
                SqlErrorClass::Unavailable | SqlErrorClass::Conflict | SqlErrorClass::Temporary => {
                    Unfit::Unchecked(error.message)
                }
                // A literal of the text may be wrong for its type.
                SqlErrorClass::Mismatch | SqlErrorClass::Data => Unfit::Mismatch(error.message),
            },
        }
    };
    let start = transaction_start("READ ONLY", &settings(limits.statement_timeout, LOCK_WAIT));
    client.batch_execute(&start).await.map_err(unfit)?;
    // PREPARE accepts only SELECT, INSERT, UPDATE, DELETE, MERGE and VALUES, and the extended protocol accepts only one
    // statement.
    let sql = &statement.sql;
    let prepare = format!("PREPARE rouse_check AS {sql}");
    client.execute_typed(&prepare, &[]).await.map_err(unfit)?;
    let prepared = client.prepare(sql).await.map_err(unfit)?;
    let params = prepared.params().to_vec();
    // EXPLAIN checks the privileges that PREPARE does not, and runs nothing.
    let nulls = vec!["NULL"; params.len()].join(", ");
    let explain = match params.len() {
        0 => "EXPLAIN EXECUTE rouse_check".to_owned(),
        _ => format!("EXPLAIN EXECUTE rouse_check({nulls})"),
    };
    let plan = client.query_typed(&explain, &[]).await.map_err(unfit)?;
    let top: &str = plan.first().map_or("", |row| row.get(0));
    let effect = match prepared.columns() {
        [] if is_change(top) => EffectText::Plain(sql.clone()),
        _ => {
            let counted = counted(sql);
            if !parses(client, &counted).await.map_err(unfit)? {
                return Err(Unfit::Mismatch(
                    "it cannot be wrapped in a query that counts its rows; leave out INTO, or RETURNING if a WITH changes data"
                        .into(),
                ));
            }
            EffectText::Counted(counted)
        }
    };
    let query = limited(sql, limits);
    let is_query = !prepared.columns().is_empty() && parses(client, &query).await.map_err(unfit)?;
    Ok(CheckedStatement {
        name: statement.name.clone(),
        effect,
        query: is_query.then_some(query),
        params,
        rows: statement.rows,
        on_error: statement.on_error,
    })
}

/// The GRANT that an operator may want to run after this Postgres message. It is a suggestion, derived from the words
/// of the message and of the statement.
fn missing_grant(message: &str, sql: &str, user: &str) -> Option<String> {
    let denied = message.strip_prefix("permission denied for ")?;
    let (kind, name) = denied.split_once(' ')?;
    let (privileges, on) = match kind {
        "table" | "view" => (table_privileges(name, sql), ""),
        "schema" => ("USAGE".to_owned(), "SCHEMA "),
        "sequence" => ("USAGE".to_owned(), "SEQUENCE "),
        "function" => ("EXECUTE".to_owned(), "FUNCTION "),
        _ => return None,
    };
    let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
    Some(format!(
        "GRANT {privileges} ON {on}{} TO {}",
        quoted(name),
        quoted(user)
    ))
}

/// The privileges on a table that a statement needs, judging by its words.
fn table_privileges(table: &str, sql: &str) -> String {
    let words = sql.split(|it: char| !it.is_alphanumeric() && it != '_');
    let words: Vec<String> = words
        .filter(|word| !word.is_empty() && !word.eq_ignore_ascii_case("only"))
        .map(str::to_lowercase)
        .collect();
    let text = format!(" {} ", words.join(" "));
    let has = |part: &str| text.contains(&format!(" {part} "));
    let table = table.to_lowercase();
    // The schema of the table may stand between the keyword and its name.
    let is_behind = |keyword: &str| {
        let positions = words.iter().enumerate().filter(|(_, it)| **it == table);
        positions.into_iter().any(|(position, _)| {
            let before = |end: usize| format!(" {}", words[..end].join(" "));
            let keyword = format!(" {keyword}");
            before(position).ends_with(&keyword)
                || position > 0 && before(position - 1).ends_with(&keyword)
        })
    };
    let merges = is_behind("merge into");
    let inserts = is_behind("insert into");
    let changes = inserts && has("do update") || has("for update") || has("for share");
    let updates = changes || is_behind("update") || merges && has("then update");
    let deletes = is_behind("delete from") || merges && has("then delete");
    let privileges = [
        ("SELECT", !inserts || updates || has("returning")),
        ("INSERT", inserts || merges && has("then insert")),
        ("UPDATE", updates),
        ("DELETE", deletes),
    ];
    let privileges: Vec<&str> = privileges
        .into_iter()
        .filter(|(_, is_needed)| *is_needed)
        .map(|(right, _)| right)
        .collect();
    privileges.join(", ")
}

/// True for the first line of a plan that changes rows, for instance `Update on orders (cost=…`. A `SELECT INTO` has no
/// columns either, and would create a table.
fn is_change(top: &str) -> bool {
    ["Insert on ", "Update on ", "Delete on ", "Merge on "]
        .iter()
        .any(|change| top.starts_with(change))
}

/// The number of rows of a statement. The line break ends a comment at its end.
fn counted(sql: &str) -> String {
    format!("WITH rouse_effect AS (\n{sql}\n) SELECT count(*) FROM rouse_effect")
}

/// The rows of a query as JSON, up to one more than allowed. A row is null if it and the rows before it exceed the size
/// limit.
fn limited(sql: &str, limits: &SqlLimits) -> String {
    format!(
        "SELECT CASE WHEN sized.bytes <= {bytes_max} THEN sized.json END FROM (\
             SELECT row.json, sum(octet_length(row.json)) OVER (ROWS UNBOUNDED PRECEDING) AS bytes FROM (\
                 SELECT row_to_json(rouse_query)::text AS json FROM (\n{sql}\n) AS rouse_query LIMIT {rows}) AS row) AS sized",
        bytes_max = limits.bytes_max,
        rows = limits.rows_max.saturating_add(1),
    )
}

/// Checks whether Postgres accepts this text.
async fn parses(client: &tokio_postgres::Client, sql: &str) -> Result<bool, tokio_postgres::Error> {
    client.batch_execute("SAVEPOINT rouse_parse").await?;
    match client.prepare(sql).await {
        Ok(_) => Ok(true),
        Err(error) if error.code().is_some_and(is_about_the_text) => {
            client
                .batch_execute("ROLLBACK TO SAVEPOINT rouse_parse")
                .await?;
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// True for syntax errors, and for constructs that Postgres does not support in this position.
fn is_about_the_text(code: &SqlState) -> bool {
    matches!(&code.code()[..2], "42" | "0A")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_grant_is_suggested() {
        for (object, sql, grant) in [
            (
                "table orders",
                "SELECT cents FROM orders",
                "SELECT ON \"orders\"",
            ),
            (
                "table orders",
                "INSERT INTO shop.orders VALUES ($1)",
                "INSERT ON \"orders\"",
            ),
            (
                "table orders",
                "insert into orders values ($1) ON CONFLICT (id) DO UPDATE SET n = 1",
                "SELECT, INSERT, UPDATE ON \"orders\"",
            ),
            (
                "table old",
                "INSERT INTO orders SELECT * FROM old",
                "SELECT ON \"old\"",
            ),
            (
                "table orders",
                "WITH x AS (SELECT 1) UPDATE ONLY \"shop\".\"orders\" SET n = 1",
                "SELECT, UPDATE ON \"orders\"",
            ),
            (
                "table orders",
                "DELETE FROM orders",
                "SELECT, DELETE ON \"orders\"",
            ),
            (
                "view a \"b",
                "SELECT 1 FROM orders FOR UPDATE",
                "SELECT, UPDATE ON \"a \"\"b\"",
            ),
            (
                "table a",
                "MERGE INTO a USING b ON a.i = b.i WHEN NOT MATCHED THEN INSERT VALUES (b.i)",
                "SELECT, INSERT ON \"a\"",
            ),
            (
                "schema shop",
                "SELECT FROM shop.orders",
                "USAGE ON SCHEMA \"shop\"",
            ),
            (
                "function pay",
                "SELECT pay()",
                "EXECUTE ON FUNCTION \"pay\"",
            ),
            (
                "sequence ids",
                "SELECT nextval('ids')",
                "USAGE ON SEQUENCE \"ids\"",
            ),
        ] {
            let message = format!("permission denied for {object}");
            assert_eq!(
                missing_grant(&message, sql, "shop handler"),
                Some(format!("GRANT {grant} TO \"shop handler\"")),
                "{sql}"
            );
        }
        for other in [
            "relation \"orders\" does not exist",
            "permission denied for language c",
        ] {
            assert_eq!(missing_grant(other, "SELECT 1", "a"), None);
        }
    }
}
