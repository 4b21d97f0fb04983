//! SQL statements of handlers, in sessions of the handlers' own logins. This file commits effects.
//!
//! A transaction is open only while the host waits for Postgres, never while a guest runs. A transaction with effects
//! starts with the fence: `rouse.settle_with_effects` or `rouse.record_step_with_effects` fails unless this worker
//! holds the job (migrations/functions/effects.sql). The statements are pipelined, which takes one round trip; the
//! COMMIT follows if all results are as expected. After each statement, the timeouts of the transaction are set again,
//! in the same round trip.

mod check;
mod error;
mod params;
mod query;
mod session;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, SimpleQueryMessage, Statement as PreparedStatement};

use self::check::EffectText;
pub use self::check::{CheckedStatement, Unfit};
pub use self::error::SqlError;
use self::params::TextParam;
pub use self::query::QueryError;
pub use self::session::Login;
use self::session::{RESET, settings, settings_again, timeouts, transaction_start};
use super::error::is_about_data;
use super::lock_wait::lock_wait_ms;
use super::settle::{NewJobRecord, SettlementRecord, new_jobs};
use super::{RESPONSE_TIMEOUT, Settlement, Store, StoreError};
use crate::job::{Attempt, Fence, JobId, OnError, SqlCall, SqlErrorClass, SqlFailure, SqlLimits};

/// The timeout of a transaction, as a multiple of its statement timeout.
const TRANSACTION_TIMEOUT_FACTOR: u32 = 4;

/// The maximum time for which a transaction waits for the lock of another one. It holds the lock of the job while it
/// waits.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// The same for a transaction with the effects of several jobs, which is then tried again in parts.
const LOCK_WAIT_OF_SEVERAL: Duration = Duration::from_millis(50);

/// A statement that a transaction runs at least this often is prepared first, which costs a round trip.
const PREPARED_FROM: usize = 4;

/// The additional time that a transaction may take beyond its timeouts: for the network, and for a busy server.
const RESPONSE_SLACK: Duration = Duration::from_secs(5);

/// A transaction with effects.
#[derive(Debug, Clone, Copy)]
pub struct Effects<'a> {
    /// The write with which they are committed.
    pub write: FencedWrite<'a>,
    /// The statements in order, of each outcome or of the step.
    pub calls: &'a [Vec<CheckedCall<'a>>],
    /// The limits of the handler.
    pub limits: &'a SqlLimits,
}

/// A call to a statement that fits the database.
pub type CheckedCall<'a> = (&'a CheckedStatement, &'a SqlCall);

/// The write, behind the fence, with which effects are committed.
#[derive(Debug, Clone, Copy)]
pub enum FencedWrite<'a> {
    /// The outcomes of attempts that have succeeded.
    Outcomes {
        /// The outcomes.
        settlements: &'a [&'a Settlement],
        /// The time that they wait for another transaction that has locked one of the jobs, at most 250 ms.
        job_lock_wait: Duration,
    },
    /// The result of a step, as JSON.
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

/// The result of a commit of effects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommitResult {
    /// Some jobs that wait for this one are not released yet: [`Store::continue_releases`] releases them.
    pub has_releases: bool,
}

/// Why effects were not committed.
#[derive(Debug)]
pub enum CommitError {
    /// The worker does not hold the job under this fence.
    Lost,
    /// The step has already been recorded.
    Recorded,
    /// Postgres refused a statement, or its number of rows is wrong.
    Statement(SqlFailure),
    /// Postgres cannot store the result, or the jobs that the attempt enqueues, and would refuse them again: a
    /// human-readable message.
    Refused(String),
    /// Today's partition of the history does not exist.
    NoPartition,
    /// The incarnation of the worker has ended.
    IncarnationEnded,
    /// Another transaction has locked the job, for instance to enqueue a job that waits for it or to send it a signal;
    /// or it has locked a key of a job that the attempt enqueues. No statement has run.
    Locked(SqlError),
    /// Nothing was committed, because of this error, which neither a statement's data nor the result has caused.
    Failed(SqlError),
    /// The COMMIT was sent, and no response arrived.
    InDoubt(SqlError),
    /// An operation for workers was called too early, or the schema is not migrated.
    Store(StoreError),
}

/// The state of an attempt whose settlement got no response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommitStatus {
    /// The worker holds the job: nothing was committed.
    Held,
    /// The attempt has ended the job.
    Settled,
    /// The job has another owner, or has ended otherwise.
    Lost,
}

/// Parameters with their types.
fn typed<'a>(values: &'a [TextParam], types: &[Type]) -> Vec<(&'a (dyn ToSql + Sync), Type)> {
    let values = values.iter().map(|value| value as &(dyn ToSql + Sync));
    values.zip(types.iter().cloned()).collect()
}

/// A statement of a transaction, with its parameters.
type Bound<'a> = (&'a CheckedStatement, Vec<TextParam>);

/// What a transaction sends after its fence.
enum Message<'a> {
    /// All settings, before the statements of the next outcome.
    Settings,
    /// The timeouts, after a statement.
    Timeouts,
    Statement(&'a Bound<'a>),
}

/// The response to one of these messages.
enum Response {
    Rows(u64),
    Failed(SqlError),
}

/// The messages for these statements of each outcome.
fn messages<'a>(bound: &'a [Vec<Bound<'a>>]) -> Vec<Message<'a>> {
    let mut messages = Vec::new();
    for (outcome, statements) in bound.iter().enumerate() {
        for (number, statement) in statements.iter().enumerate() {
            match (outcome, number) {
                // Its settings start the transaction.
                (0, 0) => {}
                // Settings that a statement of one job has changed are reset for the next job.
                (_, 0) => messages.push(Message::Settings),
                (_, _) => messages.push(Message::Timeouts),
            }
            messages.push(Message::Statement(statement));
        }
    }
    messages.push(Message::Timeouts);
    messages
}

impl Store {
    /// Checks that a login may commit effects, and that it leads to this database.
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
        let params: [(&(dyn ToSql + Sync), Type); 5] = [
            (&incarnation, Type::INT8),
            (&key, Type::BYTEA),
            (nothing, lists.array_type("settlement")),
            (jobs, lists.array_type("new_job")),
            // It may have to wait for a partition that is being dropped.
            (&250_i32, Type::INT4),
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
        let started_at = Instant::now();
        let answered = tokio::time::timeout(RESPONSE_TIMEOUT, checking).await;
        match &answered {
            Ok(Err(error)) if SqlError::from(error).class() == SqlErrorClass::Unavailable => {}
            // A new session may reach a server that accepts writes.
            Ok(Err(error)) if error.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION) => {}
            Ok(_) => session.end(),
            Err(_) => login.note_unavailable(started_at),
        }
        match answered {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(why))) => Err(Unfit::Mismatch(format!("{}: {why}", login.target))),
            Ok(Err(error)) => Err(unfit_login(login, &error)),
            Err(_) => Err(Unfit::Unchecked(
                login.no_response(RESPONSE_TIMEOUT).message,
            )),
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
    ) -> Result<CommitResult, CommitError> {
        let (worker, lists) = (
            self.identity().map_err(CommitError::Store)?,
            self.lists().await.map_err(CommitError::Store)?,
        );
        let Effects {
            write,
            calls,
            limits,
        } = effects;
        let (incarnation, key) = (worker.incarnation.0, worker.key());
        // The fence.
        let settlements: Vec<SettlementRecord<'_>>;
        let jobs: Vec<NewJobRecord<'_>>;
        let mut lock_wait = LOCK_WAIT;
        let (id, fence_number);
        let job_lock_wait_ms: i32;
        let (fence, mut fence_params): (&str, Vec<(&(dyn ToSql + Sync), Type)>);
        fence_params = vec![(&incarnation, Type::INT8), (&key, Type::BYTEA)];
        match &write {
            FencedWrite::Outcomes {
                settlements: all,
                job_lock_wait,
            } => {
                settlements = all.iter().map(|one| (*one).into()).collect();
                jobs = all.iter().flat_map(|one| new_jobs(one)).collect();
                if settlements.len() > 1 {
                    lock_wait = LOCK_WAIT_OF_SEVERAL;
                }
                fence = include_str!("sql/settle_with_effects.sql");
                fence_params.push((&settlements, lists.array_type("settlement")));
                fence_params.push((&jobs, lists.array_type("new_job")));
                job_lock_wait_ms = lock_wait_ms(*job_lock_wait);
                fence_params.push((&job_lock_wait_ms, Type::INT4));
            }
            FencedWrite::Step {
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
                let values = values
                    .map_err(|why| CommitError::Statement(invalid_parameters(statement, why)))?;
                Ok((*statement, values))
            });
            of_one.collect()
        });
        let bound: Vec<Vec<Bound<'_>>> = bound.collect::<Result<_, _>>()?;
        let messages = messages(&bound);

        let mut session = login.session().await.map_err(CommitError::Failed)?;
        let settings = settings(limits.statement_timeout, lock_wait);
        let start = transaction_start("READ WRITE", &settings);
        let timeouts = timeouts(limits.statement_timeout, lock_wait);
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
            let run_all = async |settings: &str, prepared: &HashMap<&str, PreparedStatement>| {
                // In one list, so that they are sent in this order.
                let responses = messages.iter().map(async |message| match message {
                    Message::Settings => set(&session, settings).await,
                    Message::Timeouts => set(&session, &timeouts).await,
                    Message::Statement((statement, values)) => {
                        run(&session, statement, prepared.get(&*statement.name), values).await
                    }
                });
                join_all(responses).await
            };
            if often.is_empty() {
                let nothing = HashMap::new();
                let ((started, fenced, _), responses) =
                    tokio::join!(opening, run_all(&settings, &nothing));
                return (started, fenced, Ok(responses));
            }
            let (started, fenced, prepared) = opening.await;
            let responses = match by_name(&often, prepared) {
                Ok(prepared) => {
                    let again = match started.as_deref().map(last_value) {
                        Ok(Some(path)) => settings_again(limits.statement_timeout, lock_wait, path),
                        Ok(None) | Err(_) => settings,
                    };
                    Ok(run_all(&again, &prepared).await)
                }
                Err(why) => Err(why),
            };
            (started, fenced, responses)
        };
        let timeout = limits.statement_timeout * TRANSACTION_TIMEOUT_FACTOR + RESPONSE_SLACK;
        let started_at = Instant::now();
        let (answered, is_usable) = login.wait_for_response(&session, timeout, running).await;
        let refused = match answered {
            Ok((started, fenced, responses)) => {
                match refusal(started, &fenced, &messages, responses) {
                    None => Ok(fenced),
                    Some(why) => Err(why),
                }
            }
            Err(silent) => Err(CommitError::Failed(silent)),
        };
        let fenced = match refused {
            Ok(fenced) => fenced,
            Err(why) => {
                if matches!(&why, CommitError::Failed(error) if error.class() == SqlErrorClass::Unavailable)
                {
                    login.note_unavailable(started_at);
                } else if is_usable {
                    let rollback = session.batch_execute("ROLLBACK");
                    let rolled_back = tokio::time::timeout(RESPONSE_TIMEOUT, rollback).await;
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
        let committed =
            tokio::time::timeout(RESPONSE_TIMEOUT, session.batch_execute("COMMIT")).await;
        let committed = match committed {
            Ok(committed) => committed.map_err(|error| SqlError::from(&error)),
            Err(_) => {
                login.note_unavailable(started_at);
                return Err(CommitError::InDoubt(login.no_response(RESPONSE_TIMEOUT)));
            }
        };
        match &committed {
            Err(error) if error.class() == SqlErrorClass::Unavailable => {
                login.note_unavailable(started_at)
            }
            _ if is_usable => session.end(),
            _ => {}
        }
        match committed {
            Ok(()) => Ok(CommitResult {
                has_releases: has_releases.unwrap_or(false),
            }),
            Err(error) => Err(after_commit(error, calls)),
        }
    }

    /// Looks up the state of an attempt whose settlement got no response. Waits for its transaction, for at most 250 ms
    /// (`lock_not_available`).
    pub async fn confirm(
        &self,
        id: JobId,
        fence: Fence,
        attempt: Attempt,
    ) -> Result<CommitStatus, StoreError> {
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
            Some("held") => CommitStatus::Held,
            Some("settled") => CommitStatus::Settled,
            Some(_) | None => CommitStatus::Lost,
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

/// These statements by their names, once they are prepared.
fn by_name<'a>(
    statements: &[&'a CheckedStatement],
    prepared: Vec<Result<PreparedStatement, tokio_postgres::Error>>,
) -> Result<HashMap<&'a str, PreparedStatement>, CommitError> {
    let by_name = statements.iter().zip(prepared);
    let by_name = by_name.map(|(statement, prepared)| match prepared {
        Ok(prepared) => Ok((&*statement.name, prepared)),
        Err(error) => Err(statement_failure((&error).into(), statement)),
    });
    by_name.collect()
}

/// The first value of the last row.
fn last_value(messages: &[SimpleQueryMessage]) -> Option<&str> {
    messages.iter().rev().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0),
        _ => None,
    })
}

/// Sends settings within a transaction.
async fn set(client: &Client, settings: &str) -> Response {
    match client.batch_execute(settings).await {
        Ok(()) => Response::Rows(0),
        Err(error) => Response::Failed((&error).into()),
    }
}

/// Runs one statement of a transaction. `prepared`: the statement, if it is prepared for this transaction.
async fn run(
    client: &Client,
    statement: &CheckedStatement,
    prepared: Option<&PreparedStatement>,
    values: &[TextParam],
) -> Response {
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
        Ok(rows) => Response::Rows(rows),
        Err(error) => Response::Failed((&error).into()),
    }
}

/// The first response that is an error, or has a wrong number of rows. All responses after it only report that the
/// transaction has failed. `responses`: to these messages, none of which was sent if a statement cannot be prepared.
fn refusal(
    started: Result<Vec<SimpleQueryMessage>, tokio_postgres::Error>,
    fenced: &Result<Vec<tokio_postgres::Row>, tokio_postgres::Error>,
    messages: &[Message<'_>],
    responses: Result<Vec<Response>, CommitError>,
) -> Option<CommitError> {
    if let Err(error) = started {
        return Some(CommitError::Failed((&error).into()));
    }
    if let Err(error) = fenced {
        let error = SqlError::from(error);
        return Some(match error.code() {
            "RW007" => CommitError::Lost,
            "RW008" => CommitError::Recorded,
            "RW001" | "RW002" | "RW004" => CommitError::IncarnationEnded,
            // lock_not_available
            "55P03" => CommitError::Locked(error),
            _ if error.is_partition_missing => CommitError::NoPartition,
            code if is_about_data(code) => CommitError::Refused(error.message),
            _ => CommitError::Failed(error),
        });
    }
    let responses = match responses {
        Ok(responses) => responses,
        Err(why) => return Some(why),
    };
    for (message, response) in messages.iter().zip(responses) {
        match (message, response) {
            (Message::Settings | Message::Timeouts, Response::Rows(_)) => {}
            (Message::Settings | Message::Timeouts, Response::Failed(error)) => {
                return Some(CommitError::Failed(error));
            }
            (Message::Statement((statement, _)), Response::Failed(error)) => {
                return Some(statement_failure(error, statement));
            }
            (Message::Statement((statement, _)), Response::Rows(rows)) => {
                if let Some(failure) = statement.wrong_count(rows) {
                    return Some(CommitError::Statement(failure));
                }
            }
        }
    }
    None
}

fn statement_failure(mut error: SqlError, statement: &CheckedStatement) -> CommitError {
    error.statement = Some(statement.name.clone());
    match error.class() {
        SqlErrorClass::Data => CommitError::Statement(statement.failure(error)),
        SqlErrorClass::Conflict
        | SqlErrorClass::Unavailable
        | SqlErrorClass::Mismatch
        | SqlErrorClass::Temporary => CommitError::Failed(error),
    }
}

/// An error in response to COMMIT: a deferred constraint is violated by some statement, and nothing is committed. After
/// a lost connection, the result is unknown.
fn after_commit(error: SqlError, calls: &[Vec<CheckedCall<'_>>]) -> CommitError {
    let calls: Vec<CheckedCall<'_>> = calls.iter().flatten().copied().collect();
    match (error.class(), calls.last()) {
        (SqlErrorClass::Unavailable, _) => CommitError::InDoubt(error),
        (SqlErrorClass::Data, Some((last, _))) => {
            let names: Vec<&str> = calls.iter().map(|(it, _)| it.name.as_str()).collect();
            let mut failure = last.failure(error);
            failure.statement = match names.as_slice() {
                [only] => (*only).to_owned(),
                _ => format!("one of {}", names.join(", ")),
            };
            failure.permanent = calls.iter().all(|(it, _)| it.on_error == OnError::Fail);
            CommitError::Statement(failure)
        }
        (_, _) => CommitError::Failed(error),
    }
}

fn invalid_parameters(statement: &CheckedStatement, message: String) -> SqlFailure {
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
        "42501" => Unfit::Mismatch(format!(
            "{}: the login may not commit effects; GRANT rouse_handler TO {user}",
            login.target
        )),
        "3F000" | "42883" | "42704" => Unfit::Mismatch(format!(
            "{}: this is not Rouse's database, or it is not migrated; effects must be committed in the database that contains the jobs",
            login.target
        )),
        // The worker is unknown here.
        "RW004" => Unfit::Mismatch(format!(
            "{}: this is a database other than Rouse's; effects must be committed in the database that contains the jobs",
            login.target
        )),
        _ => login.unfit(&error),
    }
}
