//! SQL statements in native tests.

use std::cell::RefCell;
use std::rc::Rc;

use serde_json::Value;

use super::declared::NO_EFFECTS;
use super::{Recorder, TestCtx, json};
use crate::host::{Host as _, Sql, SqlCall};
use crate::{Error, OnError, Result, Statement};

/// A call to a statement.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StatementCall {
    /// The name of the statement.
    pub statement: String,
    /// The parameters: a JSON array.
    pub params: Value,
}

impl StatementCall {
    fn from_call(call: &SqlCall) -> Result<Self> {
        let statement = &call.statement;
        let params = serde_json::from_slice(&call.params)
            .expect("the parameters were written by serde_json");
        json::check("list of parameters", &params).map_err(|why| {
            Error::permanent(format_args!("the statement {statement}: {why}")).kind("sql_refused")
        })?;
        Ok(Self {
            statement: statement.clone(),
            params,
        })
    }
}

/// Answers queries with rows.
type Database = Rc<RefCell<dyn FnMut(&StatementCall) -> Result<Vec<Value>>>>;

/// The statements of one attempt.
#[derive(Default)]
pub(super) struct SqlState {
    /// Calls that are committed with the outcome.
    pub(super) effects: RefCell<Vec<StatementCall>>,
    /// Calls that were committed with a step.
    committed: RefCell<Vec<StatementCall>>,
    database: RefCell<Option<Database>>,
}

impl SqlState {
    /// For the next attempt, or the next job.
    pub(super) fn next(&self) -> Self {
        Self {
            database: RefCell::new(self.database.borrow().clone()),
            ..Self::default()
        }
    }
}

impl TestCtx {
    /// The effects of this attempt so far, in order: those of finished steps ([`Ctx::step_with`](crate::Ctx::step_with)),
    /// and then those that are committed with the outcome ([`Ctx::sql`](crate::Ctx::sql)).
    /// [`run`](TestCtx::run) and [`attempt`](TestCtx::attempt) drop the latter unless the handler succeeds.
    pub fn effects(&self) -> Vec<StatementCall> {
        let sql = &self.recorder.sql;
        let mut effects = sql.committed.borrow().clone();
        effects.extend(sql.effects.borrow().iter().cloned());
        effects
    }

    /// Sets the function that answers further queries, in place of a database, in this attempt and in later attempts
    /// and jobs that are derived from it: each row is an object with a key for each column. Without this, each query is
    /// an error.
    pub fn on_query(&self, respond: impl FnMut(&StatementCall) -> Result<Vec<Value>> + 'static) {
        *self.recorder.sql.database.borrow_mut() = Some(Rc::new(RefCell::new(respond)));
    }
}

impl Sql for Recorder {
    fn execute(&self, effect: SqlCall) -> Result<()> {
        self.unless_aborted()?;
        self.statement(&effect.statement)?;
        self.require_one_job(NO_EFFECTS, "sql_refused")?;
        let effect = StatementCall::from_call(&effect)?;
        self.sql.effects.borrow_mut().push(effect);
        Ok(())
    }

    fn query(&self, query: SqlCall) -> Result<Vec<Vec<u8>>> {
        self.unless_aborted()?;
        let declared = self.statement(&query.statement)?;
        let query = StatementCall::from_call(&query)?;
        let database = self.sql.database.borrow().clone();
        let Some(respond) = database else {
            let why = format_args!(
                "{}: this test does not answer queries; set rows with TestCtx::on_query",
                query.statement
            );
            return Err(Error::permanent(why).kind("denied"));
        };
        let rows = (respond.borrow_mut())(&query)?;
        if let Some(statement) = declared {
            check_count(&statement, rows.len())?;
        }
        Ok(rows
            .iter()
            .map(|row| row.to_string().into_bytes())
            .collect())
    }

    fn complete_step_with(&self, name: &str, output: Vec<u8>, effects: Vec<SqlCall>) -> Result<()> {
        self.unless_aborted()?;
        for effect in &effects {
            self.statement(&effect.statement)?;
        }
        let effects = effects.iter().map(StatementCall::from_call);
        let effects = effects.collect::<Result<Vec<_>>>()?;
        self.complete_step(name, output)?;
        self.sql.committed.borrow_mut().extend(effects);
        Ok(())
    }
}

/// The error of the host for a query that returns another number of rows than its statement declares.
fn check_count(statement: &Statement, rows: usize) -> Result<()> {
    let Some(expected) = statement.rows.filter(|expected| *expected != rows as u64) else {
        return Ok(());
    };
    let name = statement.name;
    let message = format!(
        "the statement {name} failed: wrong number of rows: expected {expected}, got {rows}"
    );
    let error = match statement.on_error {
        OnError::Fail => Error::permanent(message),
        OnError::Retry => Error::retryable(message),
    };
    let details = serde_json::json!({"statement": name, "code": "rows"});
    Err(error.kind("sql_failed").details(details))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn effects_of_an_attempt_that_fails_are_dropped_except_those_of_its_steps() {
        let ctx = TestCtx::new();
        ctx.step_with("first", |tx| tx.sql("one", ())).unwrap();
        ctx.sql("two", (2, "b")).unwrap();
        assert_eq!(ctx.effects()[0].params, json!([]));
        assert_eq!(ctx.effects()[1].params, json!([2, "b"]));
        let next = ctx.next_attempt();
        next.step_with("first", |tx| tx.sql("one", ())).unwrap();
        assert_eq!(next.effects(), []);
    }

    #[test]
    fn parameters_are_a_tuple_or_a_list_and_effects_are_outside_of_steps() {
        let ctx = TestCtx::new();
        let refused = ctx.sql("one", 7).unwrap_err();
        assert_eq!(refused.kind, "sql_refused");
        ctx.sql("one", [1, 2]).unwrap();
        let within = ctx.step("s", || ctx.sql("one", ())).unwrap_err();
        assert_eq!(within.kind, "in_step");
        let none: Result<Vec<Value>> = ctx.query("q", ());
        assert!(none.unwrap_err().message.contains("on_query"));
    }
}
