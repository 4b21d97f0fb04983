//! SQL statements of handlers, in sessions of the handlers' own logins: checked, run as queries, and committed as
//! effects.
//!
//! A transaction is open only while the host waits for Postgres, never while a guest runs. A transaction with effects
//! starts with the fence: `rouse.settle_with_effects` or `rouse.record_step_with_effects` fails unless this worker holds
//! the job (migrations/functions/effects.sql). The statements are sent at once and answered in one round trip; the
//! COMMIT follows when all answers are right.

mod check;
mod params;

use std::collections::HashMap;
use std::ops::Deref;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use deadpool::managed::{Object, PoolError};
use futures_util::future::{OptionFuture, join_all};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, SimpleQueryMessage};

use self::check::EffectText;
pub use self::check::{CheckedStatement, Unfit};
use self::params::TextParam;
use super::connect::{Connector, NotOpened, Pool, PooledClient};
use super::settle::{NewJobRecord, SettlementRecord, new_jobs};
use super::{ANSWER_WITHIN, Settlement, Store, StoreError, describe_sql};
use crate::job::{Attempt, Fence, JobId, OnError, SqlCall, SqlErrorClass, SqlFailure, SqlLimits};

/// How many times its statement timeout a transaction may take.
const STATEMENTS: u32 = 4;

/// How long a transaction waits for the lock of another one: it holds the lock of the job meanwhile.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// The same for a transaction with the effects of several jobs, which is then tried again in parts.
const LOCK_WAIT_OF_SEVERAL: Duration = Duration::from_millis(50);

/// A statement that a transaction runs this often is prepared first, which costs a round trip.
const PREPARED_FROM: usize = 4;

/// How much longer than its timeouts a transaction may take: for the way, and for a busy server.
const ANSWER_SLACK: Duration = Duration::from_secs(5);

/// How long a statement may take to end after the request to cancel it.
const CANCELLED_WITHIN: Duration = Duration::from_secs(2);

/// A login of a handler, with its connections.
#[derive(Debug, Clone)]
pub struct Login {
    pool: Pool,
    connector: Connector,
    connections: usize,
    /// The address, without secrets.
    target: Arc<str>,
    /// The first failure since a transaction was answered.
    away_since: Arc<Mutex<Option<Instant>>>,
}

/// An error of Postgres, or of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlError {
    /// The SQLSTATE; `None` if there was no answer.
    code: Option<String>,
    /// The function of the server that raised it.
    routine: Option<String>,
    /// For people, in one line.
    message: String,
    /// The statement of the handler, if one has failed.
    statement: Option<String>,
    /// Today's partition of the history does not exist.
    is_partition_missing: bool,
}

impl SqlError {
    fn code(&self) -> &str {
        // 08000: connection exception.
        self.code.as_deref().unwrap_or("08000")
    }

    /// What it says about the transaction.
    pub fn class(&self) -> SqlErrorClass {
        SqlErrorClass::of(self.code(), self.routine.as_deref())
    }

    fn no_answer(message: String) -> Self {
        Self {
            code: None,
            routine: None,
            message,
            statement: None,
            is_partition_missing: false,
        }
    }

    /// A failure after which another attempt may succeed.
    pub fn into_failure(self) -> SqlFailure {
        SqlFailure {
            code: self.code().to_owned(),
            statement: self.statement.unwrap_or_else(|| "(none)".into()),
            message: self.message,
            permanent: false,
        }
    }

    /// A failure with the consequence that the statement declares.
    fn failure(mut self, statement: &CheckedStatement) -> SqlFailure {
        self.statement = Some(statement.name.clone());
        SqlFailure {
            permanent: statement.on_error == OnError::Fail,
            ..self.into_failure()
        }
    }
}

impl std::fmt::Display for SqlError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<&tokio_postgres::Error> for SqlError {
    fn from(error: &tokio_postgres::Error) -> Self {
        Self {
            code: error.code().map(|code| code.code().to_owned()),
            routine: error
                .as_db_error()
                .and_then(|db| db.routine().map(str::to_owned)),
            message: describe_sql(error),
            statement: None,
            is_partition_missing: super::is_partition_missing(error),
        }
    }
}

/// A transaction with effects.
#[derive(Debug, Clone, Copy)]
pub struct Effects<'a> {
    /// What is committed with them.
    pub with: With<'a>,
    /// The statements in order, of each outcome or of the step.
    pub calls: &'a [Vec<CheckedCall<'a>>],
    /// The limits of the handler.
    pub limits: &'a SqlLimits,
}

/// A call of a statement that fits the database.
pub type CheckedCall<'a> = (&'a CheckedStatement, &'a SqlCall);

/// What effects are committed with.
#[derive(Debug, Clone, Copy)]
pub enum With<'a> {
    /// The outcomes of attempts that have succeeded.
    Outcomes(&'a [&'a Settlement]),
    /// The result of a step, JSON.
    Step {
        /// The job.
        id: JobId,
        /// The fence of its claim.
        fence: Fence,
        /// The name of the step.
        name: &'a str,
        /// The result.
        output: &'a str,
    },
}

/// The effects are committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// Some jobs that wait for this one are not released yet: [`Store::continue_releases`] goes on.
    pub has_releases: bool,
}

/// Why effects were not committed.
#[derive(Debug)]
pub enum NotCommitted {
    /// The worker does not hold the job under this fence.
    Lost,
    /// The step is recorded already.
    Recorded,
    /// Postgres refused a statement, or its number of rows is wrong.
    Statement(SqlFailure),
    /// Postgres cannot store the result, or the jobs that the attempt enqueues: a message for people.
    Refused(String),
    /// Today's partition of the history does not exist.
    NoPartition,
    /// The incarnation of the worker is over.
    Over,
    /// Another transaction has locked the job, for instance one that enqueues a job after it or sends it a signal, or a key
    /// of a job that the attempt enqueues. No statement has run.
    Locked(SqlError),
    /// Nothing was committed, because of this. It is not the fault of a statement's data.
    Failed(SqlError),
    /// The COMMIT was sent, and not answered.
    InDoubt(SqlError),
    /// A verb for workers was called too early, or the schema is not migrated.
    Store(StoreError),
}

/// What became of an attempt whose settlement was not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confirmed {
    /// The worker holds the job: nothing was committed.
    Held,
    /// The attempt has ended the job.
    Settled,
    /// The job has another owner, or has ended otherwise.
    Lost,
}

/// Why a query has no rows.
#[derive(Debug)]
pub enum QueryError {
    /// The call is wrong, or there are too many rows: a message for people.
    Refused(String),
    /// Postgres refused it.
    Statement(SqlFailure),
    /// It did not run, because of this.
    Failed(SqlError),
}

/// Removes what an earlier transaction of the session may have left: a role, settings, advisory locks.
const RESET: &str = "SET SESSION AUTHORIZATION DEFAULT; RESET ALL; SELECT pg_advisory_unlock_all()";

/// The timeouts of a transaction.
fn timeouts(statement_timeout: Duration, lock_wait: Duration) -> String {
    format!(
        "SET LOCAL statement_timeout = {}; SET LOCAL lock_timeout = {}",
        statement_timeout.as_millis(),
        statement_timeout.min(lock_wait).as_millis(),
    )
}

/// The settings of a transaction. Its last row has the search path: the schemas of the login's own one, before those of
/// temporary objects.
fn settings(statement_timeout: Duration, lock_wait: Duration) -> String {
    format!(
        "{RESET}; {}; SELECT set_config('search_path', array_to_string(
             ARRAY(SELECT quote_ident(s) FROM unnest(current_schemas(false)) AS s) || 'pg_temp'::text, ', '), true)",
        timeouts(statement_timeout, lock_wait)
    )
}

/// The same settings again, between the effects of two jobs.
fn settings_again(statement_timeout: Duration, lock_wait: Duration, search_path: &str) -> String {
    format!(
        "SET SESSION AUTHORIZATION DEFAULT; RESET ALL; {}; SET LOCAL search_path = {search_path}",
        timeouts(statement_timeout, lock_wait)
    )
}

/// The start of a transaction.
fn start_of(mode: &str, settings: &str) -> String {
    format!("BEGIN ISOLATION LEVEL READ COMMITTED, {mode}; {settings}")
}

/// A connection of a login, for one transaction. It leaves the pool for good if it is dropped without
/// [`end`](Self::end): an attempt that is aborted drops its calls at any point, and the next user of the connection would
/// go on in the transaction that was left open.
struct Session<'a> {
    login: &'a Login,
    /// `None` once it is back in the pool.
    client: Option<PooledClient>,
    /// The COMMIT has been sent. It is not cancelled: a commit that waits for a standby would be visible before the standby
    /// has it.
    is_committing: bool,
}

impl Session<'_> {
    /// Puts the connection back into the pool: the server has answered that the transaction has ended.
    fn end(mut self) {
        self.client = None;
        *self.login.away_since() = None;
    }
}

impl Deref for Session<'_> {
    type Target = Client;

    fn deref(&self) -> &Client {
        self.client
            .as_ref()
            .expect("it is there until the session ends")
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        match self.client.take() {
            Some(client) if self.is_committing => drop(Object::take(client)),
            Some(client) => self.login.connector.abandon(client),
            None => {}
        }
    }
}

impl Login {
    /// A login with at most this many connections. None is opened before it is needed.
    pub fn new(connector: &Connector, connections: usize) -> Self {
        Self {
            pool: connector.pool(connections),
            connector: connector.clone(),
            connections,
            target: connector.target().into(),
            away_since: Arc::default(),
        }
    }

    /// For how long it has had no connection, or no answer. `None` if the last transaction was answered.
    pub fn away_for(&self) -> Option<Duration> {
        let since = *self.away_since();
        since.map(|since| since.elapsed())
    }

    fn away_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.away_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn note_away(&self, since: Instant) {
        self.away_since().get_or_insert(since);
    }

    /// Tries whether it has an answer now.
    pub async fn answers(&self) -> bool {
        let Ok(session) = self.session().await else {
            return false;
        };
        let answered = tokio::time::timeout(ANSWER_WITHIN, session.batch_execute(RESET)).await;
        let answers = matches!(answered, Ok(Ok(())));
        if answers {
            session.end();
        }
        answers
    }

    /// The address, without secrets.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// The name of the role.
    fn user(&self) -> &str {
        self.target.rsplit(" as ").next().unwrap_or_default()
    }

    /// The maximum number of its connections.
    pub fn connections(&self) -> usize {
        self.connections
    }

    async fn session(&self) -> Result<Session<'_>, SqlError> {
        let began = Instant::now();
        let opened = tokio::time::timeout(ANSWER_WITHIN, self.pool.get()).await;
        if !matches!(opened, Ok(Ok(_))) {
            self.note_away(began);
        }
        let Ok(opened) = opened else {
            return Err(SqlError::no_answer(format!(
                "no connection was free or opened within {} s",
                ANSWER_WITHIN.as_secs()
            )));
        };
        let client = opened.map_err(|error| match error {
            PoolError::Backend(NotOpened::Failed(error)) => SqlError::from(&error),
            PoolError::Backend(NotOpened::Away(away)) => SqlError::no_answer(away.why),
            other => SqlError::no_answer(other.to_string()),
        })?;
        Ok(Session {
            login: self,
            client: Some(client),
            is_committing: false,
        })
    }

    fn silent(&self, waited: Duration) -> SqlError {
        SqlError::no_answer(format!(
            "no answer from {} within {} s",
            self.target,
            waited.as_secs()
        ))
    }

    /// Runs a query in a read-only transaction. Each row is a JSON object.
    pub async fn query(
        &self,
        statement: &CheckedStatement,
        params: &str,
        limits: &SqlLimits,
    ) -> Result<Vec<Vec<u8>>, QueryError> {
        let Some(query) = &statement.query else {
            return Err(QueryError::Refused(format!(
                "the statement {} is not a query",
                statement.name
            )));
        };
        let values = statement.bind(params).map_err(QueryError::Refused)?;
        let session = self.session().await.map_err(QueryError::Failed)?;
        let start = start_of("READ ONLY", &settings(limits.statement_timeout, LOCK_WAIT));
        let params = typed(&values, &statement.params);
        let running = async {
            let (started, rows, ended) = tokio::join!(
                session.batch_execute(&start),
                session.query_typed(query, &params),
                session.batch_execute("ROLLBACK"),
            );
            started.map_err(|error| QueryError::Failed((&error).into()))?;
            let rows = rows.map_err(|error| {
                let error = SqlError::from(&error);
                match error.class() {
                    SqlErrorClass::Data => QueryError::Statement(error.failure(statement)),
                    _ => QueryError::Failed(error),
                }
            })?;
            ended.map_err(|error| QueryError::Failed((&error).into()))?;
            Ok(rows)
        };
        let patience = limits.statement_timeout + ANSWER_SLACK;
        let began = Instant::now();
        let (answered, is_usable) = self.answer(&session, patience, running).await;
        let rows = answered.map_err(QueryError::Failed).flatten();
        match &rows {
            Err(QueryError::Failed(error)) if error.class() == SqlErrorClass::Away => {
                self.note_away(began);
            }
            _ if is_usable => session.end(),
            _ => {}
        }
        let rows = rows?;
        if rows.len() > limits.rows_max {
            return Err(QueryError::Refused(format!(
                "the statement {} returns more than {} rows (rows_max of its table in rouse.toml)",
                statement.name, limits.rows_max
            )));
        }
        let rows = rows.iter().map(|row| row.get::<_, Option<String>>(0));
        let rows: Option<Vec<Vec<u8>>> = rows.map(|row| row.map(String::into_bytes)).collect();
        rows.ok_or_else(|| {
            QueryError::Refused(format!(
                "the rows of the statement {} have more than {} bytes as JSON (bytes_max of its table in rouse.toml)",
                statement.name, limits.bytes_max
            ))
        })
    }

    /// Waits for the answer of a session. A statement can lift its own statement timeout, so it is cancelled after
    /// `patience`, and the answer to that counts too. The second value is false then: the session must not be used
    /// again, since the request may arrive late.
    ///
    /// # Errors
    /// If there is no answer at all. The server ends the transaction when it notices the closed connection.
    async fn answer<T>(
        &self,
        client: &Client,
        patience: Duration,
        running: impl Future<Output = T>,
    ) -> (Result<T, SqlError>, bool) {
        let began = Instant::now();
        let mut running = pin!(running);
        if let Ok(answer) = tokio::time::timeout(patience, &mut running).await {
            return (Ok(answer), true);
        }
        let cancelled = async {
            // If the request fails, there will be no answer either.
            let _ = self.connector.cancel(client).await;
            running.await
        };
        let answer = tokio::time::timeout(CANCELLED_WITHIN, cancelled).await;
        if answer.is_err() {
            self.note_away(began);
        }
        (answer.map_err(|_| self.silent(patience)), false)
    }
}

/// Parameters with their types.
fn typed<'a>(values: &'a [TextParam], types: &[Type]) -> Vec<(&'a (dyn ToSql + Sync), Type)> {
    let values = values.iter().map(|value| value as &(dyn ToSql + Sync));
    values.zip(types.iter().cloned()).collect()
}

/// The answers to the statements of one outcome, after that to the settings before them, if any.
type Answers = (Option<Result<(), tokio_postgres::Error>>, Vec<Answer>);

/// The answer to one statement of a transaction.
enum Answer {
    Rows(u64),
    Failed(SqlError),
}

impl Store {
    /// Checks that a login may commit effects, and that it is in this database.
    ///
    /// # Errors
    /// If it cannot be used.
    pub async fn check_login(&self, login: &Login) -> Result<(), Unfit> {
        let (worker, lists) = match (self.identity(), self.lists().await) {
            (Ok(worker), Ok(lists)) => (worker, lists),
            (Err(error), _) | (_, Err(error)) => return Err(Unfit::Unchecked(error.to_string())),
        };
        let session = login.session().await.map_err(|error| login.unfit(&error))?;
        let nothing: [SettlementRecord<'_>; 0] = [];
        let jobs: [NewJobRecord<'_>; 0] = [];
        let (nothing, jobs) = (&nothing.as_slice(), &jobs.as_slice());
        let (incarnation, key) = (worker.incarnation.0, worker.key());
        let params: [(&(dyn ToSql + Sync), Type); 4] = [
            (&incarnation, Type::INT8),
            (&key, Type::BYTEA),
            (nothing, lists.of("settlement")),
            (jobs, lists.of("new_job")),
        ];
        let checking = async {
            session.batch_execute(RESET).await?;
            let rows = session
                .query_typed(include_str!("sql/login.sql"), &[])
                .await?;
            let too_much: Option<String> = rows.first().and_then(|row| row.get(0));
            if let Some(why) = too_much {
                return Ok(Some(why));
            }
            session
                .query_typed(include_str!("sql/settle_with_effects.sql"), &params)
                .await?;
            Ok(None)
        };
        let answered = tokio::time::timeout(ANSWER_WITHIN, checking).await;
        if answered.is_ok() {
            session.end();
        }
        match answered {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(why))) => Err(Unfit::Misfit(format!("{}: {why}", login.target))),
            Ok(Err(error)) => Err(unfit_login(login, &error)),
            Err(_) => Err(Unfit::Unchecked(login.silent(ANSWER_WITHIN).message)),
        }
    }

    /// Commits effects with outcomes or a step: all of them or none.
    ///
    /// # Errors
    /// If nothing was committed, or if that is not known.
    pub async fn commit_effects(
        &self,
        login: &Login,
        effects: Effects<'_>,
    ) -> Result<Committed, NotCommitted> {
        let (worker, lists) = (
            self.identity().map_err(NotCommitted::Store)?,
            self.lists().await.map_err(NotCommitted::Store)?,
        );
        let Effects {
            with,
            calls,
            limits,
        } = effects;
        let (incarnation, key) = (worker.incarnation.0, worker.key());
        // The fence.
        let settlements: Vec<SettlementRecord<'_>>;
        let jobs: Vec<NewJobRecord<'_>>;
        let mut lock_wait = LOCK_WAIT;
        let (id, fence_number);
        let (fence, mut fence_params): (&str, Vec<(&(dyn ToSql + Sync), Type)>);
        fence_params = vec![(&incarnation, Type::INT8), (&key, Type::BYTEA)];
        match &with {
            With::Outcomes(all) => {
                settlements = all.iter().map(|one| (*one).into()).collect();
                jobs = all.iter().flat_map(|one| new_jobs(one)).collect();
                if settlements.len() > 1 {
                    lock_wait = LOCK_WAIT_OF_SEVERAL;
                }
                fence = include_str!("sql/settle_with_effects.sql");
                fence_params.push((&settlements, lists.of("settlement")));
                fence_params.push((&jobs, lists.of("new_job")));
            }
            With::Step {
                id: job,
                fence: number,
                name,
                output,
            } => {
                (id, fence_number) = (job.0, number.0);
                fence = include_str!("sql/record_step_with_effects.sql");
                fence_params.push((&id, Type::INT8));
                fence_params.push((&fence_number, Type::INT8));
                fence_params.push((name, Type::TEXT));
                fence_params.push((output, Type::TEXT));
            }
        }
        let bound = calls.iter().map(|of_one| {
            let of_one = of_one.iter().map(|(statement, call)| {
                let values = statement.bind(&call.params.0);
                let values =
                    values.map_err(|why| NotCommitted::Statement(misbound(statement, why)))?;
                Ok((*statement, values))
            });
            of_one.collect()
        });
        let bound: Vec<Vec<(&CheckedStatement, Vec<TextParam>)>> =
            bound.collect::<Result<_, _>>()?;

        let mut session = login.session().await.map_err(NotCommitted::Failed)?;
        let settings = settings(limits.statement_timeout, lock_wait);
        let start = start_of("READ WRITE", &settings);
        let often = run_often(calls);
        let preparing = often
            .iter()
            .map(|it| session.prepare_typed(it.effect.sql(), &it.params));
        let running = async {
            let opening = async {
                tokio::join!(
                    session.simple_query(&start),
                    session.query_typed(fence, &fence_params),
                    join_all(preparing),
                )
            };
            let run_all = async |settings: &str, prepared: &HashMap<&str, Prepared>| {
                let outcomes = bound.iter().enumerate().map(async |(number, calls)| {
                    // What a statement of one job sets is gone in the next one.
                    let settings = (number > 0).then(|| session.batch_execute(settings));
                    let statements = calls.iter().map(|(statement, values)| {
                        run(&session, statement, prepared.get(&*statement.name), values)
                    });
                    tokio::join!(OptionFuture::from(settings), join_all(statements))
                });
                join_all(outcomes).await
            };
            if often.is_empty() {
                let nothing = HashMap::new();
                let ((started, fenced, _), answers) =
                    tokio::join!(opening, run_all(&settings, &nothing));
                return (started, fenced, answers);
            }
            let (started, fenced, prepared) = opening.await;
            let names = often.iter().map(|statement| &*statement.name);
            let prepared: HashMap<&str, Prepared> = names.zip(prepared).collect();
            let again = match started.as_deref().map(last_value) {
                Ok(Some(path)) => settings_again(limits.statement_timeout, lock_wait, path),
                Ok(None) | Err(_) => settings,
            };
            (started, fenced, run_all(&again, &prepared).await)
        };
        let patience = limits.statement_timeout * STATEMENTS + ANSWER_SLACK;
        let began = Instant::now();
        let (answered, is_usable) = login.answer(&session, patience, running).await;
        let refused = match answered {
            Ok((started, fenced, answers)) => match refusal(started, &fenced, answers, calls) {
                None => Ok(fenced),
                Some(why) => Err(why),
            },
            Err(silent) => Err(NotCommitted::Failed(silent)),
        };
        let fenced = match refused {
            Ok(fenced) => fenced,
            Err(why) => {
                if matches!(&why, NotCommitted::Failed(error) if error.class() == SqlErrorClass::Away)
                {
                    login.note_away(began);
                } else if is_usable {
                    let rollback = session.batch_execute("ROLLBACK");
                    let rolled_back = tokio::time::timeout(ANSWER_WITHIN, rollback).await;
                    if matches!(rolled_back, Ok(Ok(()))) {
                        session.end();
                    }
                }
                return Err(why);
            }
        };
        let has_releases = match fenced {
            Ok(rows) => rows.first().and_then(|row| row.try_get(0).ok()),
            Err(_) => None,
        };
        session.is_committing = true;
        let committed = tokio::time::timeout(ANSWER_WITHIN, session.batch_execute("COMMIT")).await;
        let committed = match committed {
            Ok(committed) => committed.map_err(|error| SqlError::from(&error)),
            Err(_) => {
                login.note_away(began);
                return Err(NotCommitted::InDoubt(login.silent(ANSWER_WITHIN)));
            }
        };
        match &committed {
            Err(error) if error.class() == SqlErrorClass::Away => login.note_away(began),
            _ if is_usable => session.end(),
            _ => {}
        }
        match committed {
            Ok(()) => Ok(Committed {
                has_releases: has_releases.unwrap_or(false),
            }),
            Err(error) => Err(after_commit(error, calls)),
        }
    }

    /// What became of an attempt whose settlement was not answered. Waits for its transaction, for at most 250 ms
    /// (`lock_not_available`).
    pub async fn confirm(
        &self,
        id: JobId,
        fence: Fence,
        attempt: Attempt,
    ) -> Result<Confirmed, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                include_str!("sql/confirm.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&id.0, Type::INT8),
                    (&fence.0, Type::INT8),
                    (&attempt.0, Type::INT4),
                ],
            )
            .await?;
        Ok(match rows.first().map(|row| row.get::<_, &str>(0)) {
            Some("held") => Confirmed::Held,
            Some("settled") => Confirmed::Settled,
            Some(_) | None => Confirmed::Lost,
        })
    }
}

/// The statements that are worth preparing.
fn run_often<'a>(calls: &[Vec<CheckedCall<'a>>]) -> Vec<&'a CheckedStatement> {
    let mut uses: HashMap<&str, (&CheckedStatement, usize)> = HashMap::new();
    for (statement, _) in calls.iter().flatten() {
        uses.entry(&statement.name).or_insert((statement, 0)).1 += 1;
    }
    let often = uses
        .into_values()
        .filter(|(_, count)| *count >= PREPARED_FROM);
    often.map(|(statement, _)| statement).collect()
}

/// The first value of the last row.
fn last_value(messages: &[SimpleQueryMessage]) -> Option<&str> {
    messages.iter().rev().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    })
}

/// A statement that is prepared for one transaction.
type Prepared = Result<tokio_postgres::Statement, tokio_postgres::Error>;

/// Runs one statement of a transaction.
async fn run(
    client: &Client,
    statement: &CheckedStatement,
    prepared: Option<&Prepared>,
    values: &[TextParam],
) -> Answer {
    let prepared = match prepared.map(Result::as_ref).transpose() {
        Ok(prepared) => prepared,
        Err(error) => return Answer::Failed(error.into()),
    };
    let rows = match (&statement.effect, prepared) {
        (EffectText::Plain(_), Some(prepared)) => client.execute_raw(prepared, values).await,
        (EffectText::Plain(sql), None) => {
            let params = typed(values, &statement.params);
            client.execute_typed(sql, &params).await
        }
        (EffectText::Counted(sql), prepared) => {
            let params = typed(values, &statement.params);
            let rows = match prepared {
                Some(prepared) => {
                    let values: Vec<_> = params.iter().map(|(value, _)| *value).collect();
                    client.query(prepared, &values).await
                }
                None => client.query_typed(sql, &params).await,
            };
            rows.map(|rows| {
                let count = rows.first().map_or(0, |row| row.get::<_, i64>(0));
                u64::try_from(count).unwrap_or(0)
            })
        }
    };
    match rows {
        Ok(rows) => Answer::Rows(rows),
        Err(error) => Answer::Failed((&error).into()),
    }
}

/// The first answer that is an error, or a wrong number of rows. All after it only say that the transaction has failed.
fn refusal(
    started: Result<Vec<SimpleQueryMessage>, tokio_postgres::Error>,
    fenced: &Result<Vec<tokio_postgres::Row>, tokio_postgres::Error>,
    answers: Vec<Answers>,
    calls: &[Vec<CheckedCall<'_>>],
) -> Option<NotCommitted> {
    if let Err(error) = started {
        return Some(NotCommitted::Failed((&error).into()));
    }
    if let Err(error) = fenced {
        let error = SqlError::from(error);
        return Some(match error.code() {
            "RW007" => NotCommitted::Lost,
            "RW008" => NotCommitted::Recorded,
            "RW001" | "RW002" | "RW004" => NotCommitted::Over,
            // lock_not_available
            "55P03" => NotCommitted::Locked(error),
            _ if error.is_partition_missing => NotCommitted::NoPartition,
            _ if error.class() == SqlErrorClass::Data => NotCommitted::Refused(error.message),
            _ => NotCommitted::Failed(error),
        });
    }
    for ((settings, answers), calls) in answers.into_iter().zip(calls) {
        if let Some(Err(error)) = settings {
            return Some(NotCommitted::Failed((&error).into()));
        }
        for (answer, (statement, _)) in answers.into_iter().zip(calls) {
            let rows = match answer {
                Answer::Failed(error) => return Some(of_statement(error, statement)),
                Answer::Rows(rows) => rows,
            };
            if let Some(expected) = statement.rows.filter(|expected| *expected != rows) {
                return Some(NotCommitted::Statement(SqlFailure {
                    statement: statement.name.clone(),
                    code: SqlFailure::ROWS.into(),
                    message: format!("expected {expected} rows, got {rows}"),
                    permanent: statement.on_error == OnError::Fail,
                }));
            }
        }
    }
    None
}

fn of_statement(mut error: SqlError, statement: &CheckedStatement) -> NotCommitted {
    error.statement = Some(statement.name.clone());
    match error.class() {
        SqlErrorClass::Data => NotCommitted::Statement(error.failure(statement)),
        SqlErrorClass::Conflict
        | SqlErrorClass::Away
        | SqlErrorClass::Misfit
        | SqlErrorClass::Temporary => NotCommitted::Failed(error),
    }
}

/// An error as the answer to COMMIT: a deferred constraint is the fault of some statement, and nothing is committed. A
/// lost connection leaves it open.
fn after_commit(error: SqlError, calls: &[Vec<CheckedCall<'_>>]) -> NotCommitted {
    let calls: Vec<CheckedCall<'_>> = calls.iter().flatten().copied().collect();
    match (error.class(), calls.last()) {
        (SqlErrorClass::Away, _) => NotCommitted::InDoubt(error),
        (SqlErrorClass::Data, Some((last, _))) => {
            let names: Vec<&str> = calls.iter().map(|(it, _)| it.name.as_str()).collect();
            let mut failure = error.failure(last);
            failure.statement = match names.as_slice() {
                [only] => (*only).to_owned(),
                _ => format!("one of {}", names.join(", ")),
            };
            failure.permanent = calls.iter().all(|(it, _)| it.on_error == OnError::Fail);
            NotCommitted::Statement(failure)
        }
        (_, _) => NotCommitted::Failed(error),
    }
}

fn misbound(statement: &CheckedStatement, message: String) -> SqlFailure {
    SqlFailure {
        statement: statement.name.clone(),
        // Invalid parameter value.
        code: "22023".into(),
        message,
        permanent: true,
    }
}

fn unfit_login(login: &Login, error: &tokio_postgres::Error) -> Unfit {
    let user = login.user();
    let error = SqlError::from(error);
    match error.code() {
        "42501" => Unfit::Misfit(format!(
            "{}: the login may not commit effects; GRANT rouse_handler TO {user}",
            login.target
        )),
        "3F000" | "42883" | "42704" => Unfit::Misfit(format!(
            "{}: this is not Rouse's database, or it is not migrated; effects are committed in the database of the jobs",
            login.target
        )),
        // The worker is unknown here.
        "RW004" => Unfit::Misfit(format!(
            "{}: this is another database than Rouse's; effects are committed in the database of the jobs",
            login.target
        )),
        _ => login.unfit(&error),
    }
}
