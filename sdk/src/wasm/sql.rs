//! The imports for SQL statements.

use serde_json::json;

use super::bindings::rouse::handler::sql::{self, Call, SqlError, SqlFailure};
use super::{Imports, aborted};
use crate::host::{Sql, SqlCall};
use crate::{Error, Result};

impl Sql for Imports {
    fn execute(&self, effect: SqlCall) -> Result<()> {
        sql::execute(&call(effect)).map_err(sql_error)
    }

    fn query(&self, query: SqlCall) -> Result<Vec<Vec<u8>>> {
        sql::query(&call(query)).map_err(sql_error)
    }

    fn complete_step_with(&self, name: &str, output: Vec<u8>, effects: Vec<SqlCall>) -> Result<()> {
        let effects: Vec<Call> = effects.into_iter().map(call).collect();
        sql::complete_step(name, &output, &effects).map_err(sql_error)
    }
}

fn call(call: SqlCall) -> Call {
    Call {
        statement: call.statement,
        params: call.params,
    }
}

fn sql_error(error: SqlError) -> Error {
    match error {
        SqlError::Aborted => aborted(),
        SqlError::NotGranted(why) => Error::permanent(why).kind("denied"),
        SqlError::Refused(why) => Error::permanent(why).kind("sql_refused"),
        SqlError::Failed(failure) => {
            let SqlFailure {
                statement,
                code,
                message,
                permanent,
            } = failure;
            let message = format!("the statement {statement} failed: {message}");
            let error = match permanent {
                true => Error::permanent(message),
                false => Error::retryable(message),
            };
            let details = json!({"statement": statement, "code": code});
            error.kind("sql_failed").details(details)
        }
    }
}
