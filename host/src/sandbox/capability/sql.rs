//! `rouse:handler/sql`: SQL statements that the module has declared. Effects are collected here, and committed with the
//! outcome.

use std::fmt;
use std::sync::Arc;

use serde::de::IgnoredAny;

use super::batch::NO_EFFECTS;
use super::steps::end_step;
use crate::job::{SqlCall, SqlFailure, json_from, most_specific_first};
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::rouse::handler::sql::{
    Call, Host, SqlError, SqlFailure as GuestFailure,
};
use crate::sandbox::bindings::rouse::handler::steps::StepError;
use crate::sandbox::grants::{GrantedSql, lines};
use crate::sandbox::{
    Attenuation, HandlerManifest, Journal, Limits, Origin, Settings, SqlRefusal, SqlStore,
};
use crate::sanitize::printable;

/// The SQL that a handler may use, the same for all its attempts.
#[derive(Debug, Default)]
pub(in crate::sandbox) struct SqlAccess {
    pub(in crate::sandbox) handler: Arc<str>,
    /// The names of the statements that the module declares.
    pub(in crate::sandbox) declared: Vec<String>,
    /// `None` if none is granted.
    pub(in crate::sandbox) granted: Option<Arc<GrantedSql>>,
    /// The operator grants statements that the job's attenuation removes.
    pub(in crate::sandbox) is_removed_by_job: bool,
    /// The lines of `rouse.toml` that would bind the table that grants statements.
    pub(in crate::sandbox) unbound: Option<String>,
    /// The text of the operator's file, for suggested lines.
    pub(in crate::sandbox) config: Arc<str>,
}

/// The effects of an attempt, and how much of its limits it has used.
#[derive(Default)]
pub(in crate::sandbox) struct Sql {
    access: Arc<SqlAccess>,
    journal: Option<Arc<dyn Journal>>,
    effects: Vec<SqlCall>,
    limits: SqlCounts,
    used: SqlCounts,
    /// The handler takes batches.
    takes_batches: bool,
    /// A statement does not match the database: the host has stopped the guest.
    pub(in crate::sandbox) is_parked: bool,
}

/// Numbers of calls, and bytes.
#[derive(Default, Clone, Copy)]
struct SqlCounts {
    effects: usize,
    effects_bytes: usize,
    queries: usize,
}

/// Why a call fails.
enum Refusal {
    NotGranted(String),
    Refused(String),
    Failed(SqlFailure),
    Parked,
}

impl From<SqlRefusal> for Refusal {
    fn from(refusal: SqlRefusal) -> Self {
        match refusal {
            SqlRefusal::Refused(why) => Self::Refused(why),
            SqlRefusal::Failed(failure) => Self::Failed(failure),
            SqlRefusal::Parked => Self::Parked,
        }
    }
}

/// The end of an attempt whose handler is parked. The guest cannot catch it.
#[derive(Debug)]
struct Parked;

impl fmt::Display for Parked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the handler is parked")
    }
}

impl std::error::Error for Parked {}

impl Sql {
    pub(in crate::sandbox) fn new(
        access: Arc<SqlAccess>,
        journal: Option<Arc<dyn Journal>>,
        limits: &Limits,
    ) -> Self {
        Self {
            access,
            journal,
            limits: SqlCounts {
                effects: limits.effects,
                effects_bytes: limits.effects_bytes,
                queries: limits.queries,
            },
            ..Self::default()
        }
    }

    /// Refuses all effects if the handler takes batches.
    pub(in crate::sandbox) fn unless_batches(self, takes_batches: bool) -> Self {
        Self {
            takes_batches,
            ..self
        }
    }

    /// Takes all effects. The caller drops them unless the attempt has succeeded.
    pub(in crate::sandbox) fn take(&mut self) -> Vec<SqlCall> {
        std::mem::take(&mut self.effects)
    }

    fn store(&self) -> Result<&dyn SqlStore, Refusal> {
        let store = self.journal.as_ref().and_then(|journal| journal.sql());
        store.ok_or_else(|| {
            Refusal::Refused(
                "a handler that is invoked without the queue cannot run SQL; enqueue a job for it instead"
                    .into(),
            )
        })
    }

    /// Refuses a statement that the handler may not run.
    fn require_granted(&self, statement: &str) -> Result<(), Refusal> {
        if !self.access.declared.iter().any(|it| it == statement) {
            let name: String = statement
                .chars()
                .filter(|it| !it.is_control())
                .take(64)
                .collect();
            return Err(Refusal::Refused(format!(
                "the manifest of the handler {} declares no statement {name}",
                self.access.handler
            )));
        }
        if self
            .access
            .granted
            .as_ref()
            .and_then(|it| it.statement(statement))
            .is_none()
        {
            return Err(Refusal::NotGranted(self.access.denial(statement)));
        }
        Ok(())
    }

    /// Checks the parameters of a call, except for what Postgres checks. This takes up to half a second, during which
    /// the guest's thread does nothing else, so the call must have been counted.
    fn read(&self, call: Call) -> Result<SqlCall, Refusal> {
        let Call { statement, params } = call;
        let what = |why: String| Refusal::Refused(format!("the statement {statement}: {why}"));
        let params = json_from("list of parameters", params).map_err(what)?;
        // A list of `IgnoredAny`, which has no size, takes no memory.
        if serde_json::from_str::<Vec<IgnoredAny>>(&params.0).is_err() {
            return Err(what("its parameters are not a JSON array".into()));
        }
        let call = SqlCall { statement, params };
        let checked = self.store()?.check(&call);
        checked
            .map_err(|why| Refusal::Refused(format!("the statement {}: {why}", call.statement)))?;
        Ok(call)
    }

    /// Counts effects, up to the limits. Effects that are refused later count too.
    fn count(&mut self, effects: &[Call]) -> Result<(), Refusal> {
        if self.takes_batches {
            return Err(Refusal::Refused(NO_EFFECTS.into()));
        }
        let bytes = effects
            .iter()
            .map(|it| it.statement.len() + it.params.len());
        let bytes: usize = bytes.sum();
        let (count, bytes) = (
            self.used.effects.saturating_add(effects.len()),
            self.used.effects_bytes.saturating_add(bytes),
        );
        if count > self.limits.effects {
            return Err(Refusal::Refused(format!(
                "an attempt may have at most {} effects (limits.effects in rouse.toml)",
                self.limits.effects
            )));
        }
        if bytes > self.limits.effects_bytes {
            return Err(Refusal::Refused(format!(
                "the effects of an attempt may take at most {} bytes together (limits.effects_bytes in rouse.toml)",
                self.limits.effects_bytes
            )));
        }
        (self.used.effects, self.used.effects_bytes) = (count, bytes);
        Ok(())
    }

    fn execute(&mut self, call: Call) -> Result<(), Refusal> {
        self.require_granted(&call.statement)?;
        self.count(std::slice::from_ref(&call))?;
        let call = self.read(call)?;
        self.effects.push(call);
        Ok(())
    }

    async fn query(&mut self, call: Call) -> Result<Vec<Vec<u8>>, Refusal> {
        self.require_granted(&call.statement)?;
        if self.used.queries >= self.limits.queries {
            return Err(Refusal::Refused(format!(
                "an attempt may run at most {} queries (limits.queries in rouse.toml)",
                self.limits.queries
            )));
        }
        self.used.queries += 1;
        let call = self.read(call)?;
        Ok(self.store()?.query(&call).await?)
    }
}

impl SqlAccess {
    /// What the operator grants to a handler of this module.
    pub(in crate::sandbox) fn for_handler(
        manifest: &HandlerManifest,
        origin: Origin<'_>,
        settings: &Settings,
    ) -> Self {
        let name = manifest.name.as_str();
        let table = most_specific_first(&settings.sql, name).into_iter().next();
        let granted = table.filter(|(table, _)| settings.grants_secrets_to(table, origin));
        let mut withheld = settings.withheld(name, origin).into_iter();
        Self {
            handler: name.into(),
            declared: manifest
                .statements
                .iter()
                .map(|it| it.name.clone())
                .collect(),
            granted: granted
                .map(|(table, grant)| Arc::new(grant.granted(table, &manifest.statements))),
            is_removed_by_job: false,
            unbound: withheld.find(|it| it.what == "sql").map(|it| it.lines),
            config: settings.config.clone(),
        }
    }

    /// Applies a job's attenuation.
    pub(in crate::sandbox) fn attenuated(self: &Arc<Self>, job: &Attenuation) -> Arc<Self> {
        let Some(granted) = &self.granted else {
            return self.clone();
        };
        let left = GrantedSql::clone(granted).retain(|name| job.leaves_sql(name));
        Arc::new(Self {
            handler: self.handler.clone(),
            declared: self.declared.clone(),
            is_removed_by_job: left != **granted,
            granted: Some(Arc::new(left)),
            unbound: self.unbound.clone(),
            config: self.config.clone(),
        })
    }

    /// The denial: what the handler tried, and the lines of rouse.toml that would allow it.
    fn denial(&self, statement: &str) -> String {
        let (handler, statement) = (&self.handler, &*printable(statement, 128));
        if self.is_removed_by_job {
            return format!(
                "the handler {handler} tried to run the statement {statement}, which the grants of this job leave out (\"sql\")"
            );
        }
        let lines = match &self.unbound {
            Some(lines) => format!("{lines}{}", lines::how_to_bind(handler)),
            None => lines::to_paste(handler, &lines::sql(handler, Some(statement)), &self.config),
        };
        format!(
            "the handler {handler} tried to run the statement {statement}, which is not granted to it; to grant it, add these lines to rouse.toml:\n{lines}"
        )
    }
}

impl AttemptState {
    /// Runs a call, unless the attempt has to stop before it is done.
    async fn sql_call<T>(
        &mut self,
        call: impl AsyncFnOnce(&mut Self) -> Result<T, Refusal>,
    ) -> wasmtime::Result<Result<T, SqlError>> {
        self.meter.count_host_call();
        let abort = self.abort.clone();
        let done = tokio::select! {
            biased;
            () = abort.aborted() => return Ok(Err(SqlError::Aborted)),
            done = call(self) => done,
        };
        let refusal = match done {
            Ok(done) => return Ok(Ok(done)),
            Err(refusal) => refusal,
        };
        Ok(Err(match refusal {
            Refusal::Refused(why) => SqlError::Refused(why),
            Refusal::NotGranted(denial) => {
                let why = denial.lines().next().unwrap_or_default().to_owned();
                self.denial = Some(denial);
                SqlError::NotGranted(why)
            }
            Refusal::Failed(failure) => SqlError::Failed(GuestFailure {
                statement: failure.statement,
                code: failure.code,
                message: failure.message,
                permanent: failure.permanent,
            }),
            Refusal::Parked => {
                self.sql.is_parked = true;
                return Err(wasmtime::Error::new(Parked));
            }
        }))
    }
}

impl Host for AttemptState {
    async fn execute(&mut self, effect: Call) -> wasmtime::Result<Result<(), SqlError>> {
        self.sql_call(async |state: &mut Self| state.sql.execute(effect))
            .await
    }

    async fn query(&mut self, query: Call) -> wasmtime::Result<Result<Vec<Vec<u8>>, SqlError>> {
        self.sql_call(async |state: &mut Self| state.sql.query(query).await)
            .await
    }

    async fn complete_step(
        &mut self,
        step: String,
        output: Vec<u8>,
        effects: Vec<Call>,
    ) -> wasmtime::Result<Result<(), SqlError>> {
        let span = self.step_spans.take(&step);
        let completed = self.sql_call(async |state: &mut Self| {
            let Self { sql, steps, .. } = state;
            for effect in &effects {
                sql.require_granted(&effect.statement)?;
            }
            sql.count(&effects)?;
            let effects = effects.into_iter().map(|call| sql.read(call));
            let effects = effects.collect::<Result<Vec<_>, _>>()?;
            let check = steps.check_complete(&step, &output).await;
            check.map_err(|error| match error {
                StepError::Aborted => unreachable!("a check does not look at the abort signal"),
                StepError::Refused(why) => Refusal::Refused(why),
            })?;
            steps.count_calls(1).map_err(Refusal::Refused)?;
            sql.store()?.complete_step(&step, &output, &effects).await?;
            steps.note(step, output.len());
            Ok(())
        });
        let completed = completed.await?;
        end_step(span, completed.as_ref().err());
        Ok(completed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{OnError, SqlLimits, Statement};
    use crate::sandbox::JournalFuture;

    /// Accepts all calls.
    struct Accepting;

    impl SqlStore for Accepting {
        fn check(&self, _: &SqlCall) -> Result<(), String> {
            Ok(())
        }

        fn query<'a>(
            &'a self,
            _: &'a SqlCall,
        ) -> JournalFuture<'a, Result<Vec<Vec<u8>>, SqlRefusal>> {
            Box::pin(async { Ok(Vec::new()) })
        }

        fn complete_step<'a>(
            &'a self,
            _: &'a str,
            _: &'a [u8],
            _: &'a [SqlCall],
        ) -> JournalFuture<'a, Result<(), SqlRefusal>> {
            Box::pin(async { Ok(()) })
        }
    }

    impl Journal for Accepting {
        fn recorded(
            &self,
        ) -> JournalFuture<'_, Arc<std::collections::HashMap<String, crate::job::RecordedStep>>>
        {
            Box::pin(async { Arc::default() })
        }

        fn result<'a>(&'a self, _: &'a str) -> JournalFuture<'a, Result<Vec<u8>, String>> {
            Box::pin(async { Err("none".into()) })
        }

        fn record<'a>(&'a self, _: &'a str, _: &'a [u8]) -> JournalFuture<'a, Result<(), String>> {
            Box::pin(async { Ok(()) })
        }

        fn progress(&self, _: u8, _: &str) {}

        fn sql(&self) -> Option<&dyn SqlStore> {
            Some(self)
        }
    }

    fn sql(limits: &Limits) -> Sql {
        let statement = |name: &str| Statement {
            name: name.into(),
            sql: "SELECT 1".into(),
            rows: None,
            on_error: OnError::Fail,
        };
        let access = SqlAccess {
            handler: "a.b".into(),
            declared: vec!["granted".into(), "other".into()],
            granted: Some(Arc::new(GrantedSql {
                table: "a.b".into(),
                statements: vec![statement("granted")],
                limits: SqlLimits::default(),
            })),
            ..SqlAccess::default()
        };
        Sql::new(Arc::new(access), Some(Arc::new(Accepting)), limits)
    }

    fn call(statement: &str, params: &str) -> Call {
        Call {
            statement: statement.into(),
            params: params.into(),
        }
    }

    fn why(refused: Result<(), Refusal>) -> String {
        match refused {
            Err(Refusal::Refused(why)) => why,
            Err(Refusal::NotGranted(why)) => format!("not granted: {why}"),
            Err(Refusal::Failed(_) | Refusal::Parked) | Ok(()) => "not refused".into(),
        }
    }

    #[test]
    fn refuse_statements_that_are_not_declared_or_not_granted_and_invalid_parameters() {
        let mut sql = sql(&Limits::default());
        assert_eq!(why(sql.execute(call("granted", "[1]"))), "not refused");
        for (statement, params, expected) in [
            ("unknown", "[]", "declares no statement unknown"),
            ("other", "[]", "not granted: the handler a.b tried"),
            ("granted", "{}", "not a JSON array"),
            ("granted", "[", "not JSON"),
            ("granted", "[\"\\u0000\"]", "NUL"),
        ] {
            let refused = why(sql.execute(call(statement, params)));
            assert!(refused.contains(expected), "{refused}");
        }
        assert_eq!(sql.take().len(), 1);
    }

    #[test]
    fn the_lines_of_a_denial_would_grant_the_statement() {
        let refused = why(sql(&Limits::default()).execute(call("other", "[]")));
        assert!(refused.contains("[handlers.\"a.b\".sql]"), "{refused}");
        assert!(refused.contains("statements = [\"other\"]"), "{refused}");
    }

    /// Limits that a few calls reach.
    fn few() -> Limits {
        Limits {
            effects: 2,
            effects_bytes: 30,
            queries: 1,
            ..Limits::default()
        }
    }

    #[tokio::test]
    async fn limit_the_number_and_the_size_of_effects_and_the_number_of_queries() {
        let mut sql = sql(&few());
        let large = format!("[\"{}\"]", "x".repeat(30));
        let refused = why(sql.execute(call("granted", &large)));
        assert!(refused.contains("limits.effects_bytes"), "{refused}");
        assert_eq!(why(sql.execute(call("granted", "[]"))), "not refused");
        assert_eq!(why(sql.execute(call("granted", "[]"))), "not refused");
        let refused = why(sql.execute(call("granted", "[]")));
        assert!(refused.contains("limits.effects "), "{refused}");
        assert!(sql.query(call("granted", "[]")).await.is_ok());
        let refused = why(sql.query(call("granted", "[]")).await.map(drop));
        assert!(refused.contains("limits.queries"), "{refused}");
    }

    #[tokio::test]
    async fn large_calls_are_refused_unread_and_refused_calls_count() {
        let mut sql = sql(&few());
        let large = "[".repeat(40);
        let refused = why(sql.execute(call("granted", &large)));
        assert!(refused.contains("limits.effects_bytes"), "{refused}");
        for _ in 0..2 {
            let refused = why(sql.execute(call("granted", "[")));
            assert!(refused.contains("not JSON"), "{refused}");
        }
        let refused = why(sql.execute(call("granted", "[]")));
        assert!(refused.contains("limits.effects "), "{refused}");
        let refused = why(sql.query(call("granted", "[")).await.map(drop));
        assert!(refused.contains("not JSON"), "{refused}");
        let refused = why(sql.query(call("granted", "[]")).await.map(drop));
        assert!(refused.contains("limits.queries"), "{refused}");
        assert!(sql.take().is_empty());
    }
}
