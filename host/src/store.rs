//! The module that contains the SQL: one file per operation, one `.sql` file per longer query. Outside it, only
//! `cli/postgres.rs` contains SQL: a statement that creates a database.
//!
//! Writes go through the functions of schema `rouse`, so that the layout of the tables can change under a running host.
//! The statements of workers and commands are sent unnamed, nearly all of them in one round trip, and leave nothing in
//! a session, so they work behind a transaction pooler. The listening connection does not.

pub mod connect;
pub mod migrate;

mod admin;
mod admin_state;
mod adopt;
mod audit;
mod audit_outbox;
mod challenge;
mod claim;
mod conflicts;
mod contract;
mod database_metrics;
mod deadlines;
mod declared;
mod enqueue;
mod error;
mod find;
mod fire;
mod fleet;
mod flows;
mod gates;
mod handler_state;
mod jobs;
mod json;
mod lanes;
mod leftovers;
mod listen;
mod lock_wait;
mod log;
mod outcomes;
mod overdue;
mod partitions;
mod peek;
mod promote;
mod queues;
mod read;
mod recent;
mod records;
mod registration;
mod releases;
mod remaining;
mod renew;
mod report;
mod retry_all;
mod running;
mod schedules;
mod settle;
mod shards;
mod sleep;
mod sql;
mod steps;
mod waits;

use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use deadpool::managed::{Object, PoolError};
use futures_util::TryStreamExt as _;
use tokio::sync::watch;
use tokio_postgres::Row;
use tokio_postgres::error::Severity;
use tokio_postgres::types::{ToSql, Type};

use self::connect::{Connector, OpenError, Pool, PooledClient, Reach};
use self::error::describe_chain;
use crate::job::Incarnation;

pub use crate::job::JsonText;
pub use admin::When;
pub use adopt::{Adoption, AdoptionResult, Orphan};
pub use audit::{AdminRecords, Audit};
pub use audit_outbox::AdminAction;
pub use challenge::Challenge;
pub use claim::{
    BoundClaim, BoundSearch, CLAIM_BYTES_MAX, COLUMNS_BYTES, ClaimOrder, ClaimResult, ClaimedJob,
    ClosedGate, ClosedLane, OverdueFilter, fills_a_response,
};
pub use conflicts::retry_conflicts;
pub use contract::{Change, ContractChange, ContractError, delete_contracts, publish_contracts};
pub use database_metrics::{COUNT_TIMEOUT, DatabaseMetrics, Depth, FairAge};
pub use deadlines::{Enforcement, MissedDeadline};
pub use declared::ModuleSchedule;
pub use enqueue::{EnqueueRequest, EnqueueResult};
pub use error::StoreError;
pub use find::{FoundJobs, RetriedJobs};
pub use fire::{Backfill, Due, DueSchedule, ScheduleDecision};
pub use fleet::Incarnations;
pub use flows::FlowPage;
pub use gates::{GateKeys, NewGate};
pub use handler_state::{NewStateValue, StateScope, StateWrite};
pub use jobs::{EXAMINED_MAX, JobList, Listing};
pub use lanes::{CATALOG_WINDOW, Catalog, FairQueues, FairVersion, InboxRecovery, Lane};
pub use leftovers::{Deletion, Leftover};
pub use listen::{ECHO_TIMEOUT, Listener, Notification, WAKE_CHANNEL, Wakeup};
pub use lock_wait::LockWait;
pub use log::{LogLine, LoggedLine, NEWEST_LINES};
pub use outcomes::JobStatus;
pub use overdue::OverdueLane;
pub use peek::{Peek, PeekParams};
pub use promote::Promotion;
pub use queues::{NewFairShare, add_counts, add_keys};
pub use read::JobView;
pub use recent::EndedCounts;
pub use registration::{FairKeyStats, FairQueueStats, Heartbeat, Registration, Stats, WorkerKey};
pub use remaining::Remaining;
pub use renew::{RENEWALS_MAX, Refusal, Renewal, renew_timeout};
pub use report::Report;
pub use retry_all::{NEW_JOBS_MAX, RetryAll};
pub use running::{RunningOn, RunningUsage};
pub use schedules::NewSchedule;
pub use settle::{GuestRun, Locked, SettleResult, Settlement};
pub use shards::LeasedShards;
pub use sql::{
    CheckedCall, CheckedStatement, CommitError, CommitResult, CommitStatus, Effects, FencedWrite,
    Login, QueryError, SqlError, Unfit,
};
pub use steps::{LostJob, RecordedSteps};
pub use waits::ParentEnds;

/// The time that Postgres may take to respond. None of the host's statements takes a long time; a connection that is
/// silent for this long is dead.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);

/// The database, as the worker and the commands see it. Cheap to clone; every operation borrows a connection for one
/// round trip.
#[derive(Clone)]
pub struct Store {
    pool: Pool,
    connector: Connector,
    /// The address, without secrets.
    target: Arc<str>,
    /// The worker that has registered through this store; shown with each of its writes.
    identity: Arc<ArcSwapOption<registration::Identity>>,
    /// The types of records, once they have been read.
    lists: Arc<ArcSwapOption<records::Lists>>,
    /// The user of the dashboard on whose behalf the store acts; `None`: its login acts for itself.
    reader: Option<Arc<str>>,
    /// See [`Store::cancelling`].
    cancels: bool,
    /// See [`Store::reading_payloads_for`].
    read_payloads_for: Duration,
}

/// The parameters of a statement, with their types.
type Params<'a> = &'a [(&'a (dyn ToSql + Sync), Type)];

impl Store {
    /// A store on at most `connections` connections. None is opened before it is needed.
    pub fn new(connector: &Connector, connections: usize) -> Self {
        Self {
            pool: connector.pool(connections),
            connector: connector.clone(),
            target: connector.target().into(),
            identity: Arc::default(),
            lists: Arc::default(),
            reader: None,
            cancels: false,
            read_payloads_for: RESPONSE_TIMEOUT,
        }
    }

    /// The same store, with another maximum time for reading the payloads of a claim separately. Tests set it.
    pub fn reading_payloads_for(self, max: Duration) -> Self {
        Self {
            read_payloads_for: max,
            ..self
        }
    }

    /// The same store, for reads only: the server receives a request to cancel those that take too long. Otherwise they
    /// would continue to run, and a page that is read again every few seconds would add another one each time. A write
    /// is not cancelled: it may be about to commit, and a write that waits for a standby would be visible before the
    /// standby has it. Writes that a worker retries wait only a few seconds for locks (`lock_timeout` of their
    /// functions).
    pub fn cancelling(self) -> Self {
        Self {
            cancels: true,
            ..self
        }
    }

    /// The same store on behalf of this user of the dashboard, whom the records of admin actions name in addition to
    /// the login. If the name is empty, they name only the login.
    pub fn on_behalf_of(&self, reader: &str) -> Self {
        Self {
            reader: (!reader.is_empty()).then(|| reader.into()),
            cancels: false,
            ..self.clone()
        }
    }

    /// The incarnation of the worker that registered last; `None` if none has.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.identity
            .load()
            .as_ref()
            .map(|identity| identity.incarnation)
    }

    fn identity(&self) -> Result<Arc<registration::Identity>, StoreError> {
        self.identity.load_full().ok_or(StoreError::NotRegistered)
    }

    /// Watches whether connections open.
    pub fn reach(&self) -> watch::Receiver<Reach> {
        self.connector.reach()
    }

    /// Ends the backoff, for a call that cannot wait.
    pub fn try_now(&self) {
        self.connector.try_now();
    }

    /// Waits until the server is reached or the backoff has passed.
    pub async fn ready(&self) {
        self.connector.ready().await;
    }

    async fn client(&self) -> Result<PooledClient, StoreError> {
        self.pool
            .get()
            .await
            .map_err(|error| StoreError::Unreachable {
                target: self.target.clone(),
                why: match &error {
                    PoolError::Backend(OpenError::Failed(error)) => connect::why(error),
                    PoolError::Backend(OpenError::Away(away)) => away.why.clone(),
                    PoolError::Backend(not @ OpenError::Silent(_)) => not.to_string(),
                    other => describe_chain(other),
                },
            })
    }

    /// A connection of the pool. The wait is bounded, because every connection may be waiting for a server that does
    /// not respond.
    async fn client_with_timeout(&self, timeout: Duration) -> Result<Borrowed<'_>, StoreError> {
        let client = tokio::time::timeout(timeout, self.client())
            .await
            .map_err(|_| StoreError::Unreachable {
                target: self.target.clone(),
                why: format!(
                    "no connection of the pool was free or opened within {} s",
                    timeout.as_secs()
                ),
            })??;
        Ok(Borrowed {
            store: self,
            client: Some(client),
        })
    }

    /// Runs one statement, unnamed, in one round trip.
    async fn query(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, StoreError> {
        self.query_with_timeout(RESPONSE_TIMEOUT, sql, params).await
    }

    /// Like [`query`](Self::query), for a function that takes the incarnation and the key of this worker and nothing
    /// else.
    async fn query_as_worker(&self, sql: &str) -> Result<Vec<Row>, StoreError> {
        let worker = self.identity()?;
        self.query(
            sql,
            &[
                (&worker.incarnation.0, Type::INT8),
                (&worker.key(), Type::BYTEA),
            ],
        )
        .await
    }

    /// Like [`query`](Self::query), for a statement that shows rows to people, with the settings of [`BEGIN_READ`].
    async fn read(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, StoreError> {
        self.query_within(RESPONSE_TIMEOUT, true, sql, params).await
    }

    /// Like [`query`](Self::query), but with its own timeout.
    async fn query_with_timeout(
        &self,
        timeout: Duration,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, StoreError> {
        self.query_within(timeout, false, sql, params).await
    }

    /// Runs one statement, with the settings of [`BEGIN_READ`] if `is_page` is true.
    async fn query_within(
        &self,
        timeout: Duration,
        is_page: bool,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<Row>, StoreError> {
        let until = tokio::time::Instant::now() + timeout;
        let mut client = self.client_with_timeout(timeout).await?;
        let response = async {
            match (&self.reader, is_page) {
                (Some(reader), _) => query_for(&mut client, reader, sql, params).await,
                (None, true) => query_page(&client, sql, params).await,
                (None, false) => client.query_typed(sql, params).await,
            }
        };
        match tokio::time::timeout_at(until, response).await {
            Ok(response) => {
                client.end(&response);
                Ok(response?)
            }
            Err(_) => Err(self.no_response(timeout)),
        }
    }

    /// Like [`query`](Self::query), for a large response to a statement of a worker: each row is converted as soon as
    /// it arrives. So the response is never in memory as a whole, and its buffers are soon used again.
    async fn query_as_rows_arrive<T>(
        &self,
        sql: &str,
        params: Params<'_>,
        convert: impl Fn(&Row) -> Result<T, tokio_postgres::Error>,
    ) -> Result<Vec<T>, StoreError> {
        let until = tokio::time::Instant::now() + RESPONSE_TIMEOUT;
        let client = self.client_with_timeout(RESPONSE_TIMEOUT).await?;
        let response = async {
            let rows = client.query_typed_raw(sql, params.iter().cloned()).await?;
            let mut rows = pin!(rows);
            let mut converted = Vec::new();
            while let Some(row) = rows.try_next().await? {
                converted.push(convert(&row)?);
            }
            Ok::<_, tokio_postgres::Error>(converted)
        };
        match tokio::time::timeout_at(until, response).await {
            Ok(response) => {
                client.end(&response);
                Ok(response?)
            }
            Err(_) => Err(self.no_response(RESPONSE_TIMEOUT)),
        }
    }

    /// Runs reads in one round trip, even if the store acts on behalf of a user. Each read sees what was committed
    /// before it, and so at least what the reads before it see.
    async fn query_in_order<const N: usize>(
        &self,
        statements: [(&str, Params<'_>); N],
    ) -> Result<[Vec<Row>; N], StoreError> {
        let until = tokio::time::Instant::now() + RESPONSE_TIMEOUT;
        let client = self.client_with_timeout(RESPONSE_TIMEOUT).await?;
        // The statements are sent in this order, without waiting for responses.
        let responses = statements.map(|(sql, params)| client.query_typed(sql, params));
        let responses = futures_util::future::try_join_all(responses);
        match tokio::time::timeout_at(until, responses).await {
            Ok(responses) => {
                client.end(&responses);
                let responses: Vec<Vec<Row>> = responses?;
                Ok(responses.try_into().expect("a response for each statement"))
            }
            Err(_) => Err(self.no_response(RESPONSE_TIMEOUT)),
        }
    }

    /// A read that Postgres cancels after `limit` (`query_canceled`). It runs in a transaction, so that the limit ends
    /// with it, even behind a transaction pooler.
    async fn query_limited(&self, limit: Duration, sql: &str) -> Result<Vec<Row>, StoreError> {
        let mut client = self.client_with_timeout(RESPONSE_TIMEOUT).await?;
        let reading = async {
            let transaction = client.build_transaction().read_only(true).start().await?;
            let set = format!("SET LOCAL statement_timeout = {}", limit.as_millis());
            transaction.batch_execute(&set).await?;
            let rows = transaction.query_typed(sql, &[]).await?;
            transaction.commit().await?;
            Ok(rows)
        };
        let timeout = limit + RESPONSE_TIMEOUT;
        match tokio::time::timeout(timeout, reading).await {
            Ok(response) => {
                client.end(&response);
                response.map_err(StoreError::Refused)
            }
            Err(_) => Err(self.no_response(timeout)),
        }
    }

    fn no_response(&self, waited: Duration) -> StoreError {
        StoreError::Silent {
            target: self.target.clone(),
            waited,
        }
    }

    /// Rejects a database that is not migrated, or whose schema is too new for this host.
    pub async fn check_schema(&self) -> Result<(), migrate::MigrateError> {
        let unreachable = |error: StoreError| migrate::MigrateError::Unreachable(error.to_string());
        let client = self
            .client_with_timeout(RESPONSE_TIMEOUT)
            .await
            .map_err(unreachable)?;
        match tokio::time::timeout(RESPONSE_TIMEOUT, migrate::check(&***client)).await {
            Ok(checked) => {
                client.put_back();
                checked
            }
            Err(_) => Err(unreachable(self.no_response(RESPONSE_TIMEOUT))),
        }
    }
}

/// A connection of the pool, for one call. If the call gets no response in time, or is dropped before it has one (by an
/// abort, or because the user of a page has left), the connection is closed: the next call would get it, and wait for
/// that response too.
struct Borrowed<'a> {
    store: &'a Store,
    /// `None` once it is back in the pool.
    client: Option<PooledClient>,
}

impl Borrowed<'_> {
    /// Puts the connection back into the pool after this response, unless its session [`is_unfit`].
    fn end<T>(mut self, response: &Result<T, tokio_postgres::Error>) {
        let client = self.client.take();
        if response.as_ref().is_err_and(is_unfit) {
            drop(client.map(Object::take));
        }
    }

    /// Puts the connection back into the pool.
    fn put_back(mut self) {
        self.client = None;
    }
}

impl Deref for Borrowed<'_> {
    type Target = PooledClient;

    fn deref(&self) -> &PooledClient {
        self.client.as_ref().expect(IS_BORROWED)
    }
}

impl DerefMut for Borrowed<'_> {
    fn deref_mut(&mut self) -> &mut PooledClient {
        self.client.as_mut().expect(IS_BORROWED)
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        match self.client.take() {
            Some(client) if self.store.cancels => self.store.connector.abandon(client),
            Some(client) => drop(Object::take(client)),
            None => {}
        }
    }
}

const IS_BORROWED: &str = "it is there until the call ends";

/// True if a session cannot do this work: it is read-only, as on a standby, or has a different isolation level, or the
/// server has just ended it. A new connection may reach another server.
fn is_unfit(error: &tokio_postgres::Error) -> bool {
    // 25 invalid transaction state.
    let is_invalid = error
        .code()
        .is_some_and(|code| code.code().starts_with("25"));
    // The end of the connection arrives after the error: a retry at once would get the same connection.
    let has_ended = error.as_db_error().is_some_and(|error| {
        matches!(
            error.parsed_severity(),
            Some(Severity::Fatal | Severity::Panic)
        )
    });
    is_invalid || has_ended
}

/// Starts the transaction of a read for people. Functions for workers have these settings of their own, but views have
/// none. A listing looks up each of its jobs in all daily partitions, which has a high estimated cost: with 90 of them,
/// Postgres spent 1 to 12 s on compiling the listing of 100 jobs, and 20 ms on running it
/// (docs/decisions/plans-without-statistics.md). The settings belong together: without `enable_seqscan`, the estimated
/// cost of a table that can only be read as a whole is so high that JIT would compile the statement.
const BEGIN_READ: &str = "BEGIN; SET LOCAL enable_seqscan = off; SET LOCAL jit = off";

/// A statement in a transaction that [`BEGIN_READ`] starts. One round trip.
async fn query_page(
    client: &tokio_postgres::Client,
    sql: &str,
    params: &[(&(dyn ToSql + Sync), Type)],
) -> Result<Vec<Row>, tokio_postgres::Error> {
    // The three are sent in this order, without waiting for responses. If the statement fails, the COMMIT rolls back. A
    // caller that is dropped leaves no transaction open, because the COMMIT has been sent too.
    let (started, rows, ended) = futures_util::future::join3(
        client.batch_execute(BEGIN_READ),
        client.query_typed(sql, params),
        client.batch_execute("COMMIT"),
    )
    .await;
    started?;
    let rows = rows?;
    ended?;
    Ok(rows)
}

/// A statement in its own transaction, whose records name this user of the dashboard. It has the settings of
/// [`BEGIN_READ`] too: admin actions, and the searches for their jobs, read few rows through indexes. Functions with
/// settings of their own keep them.
async fn query_for(
    client: &mut PooledClient,
    reader: &str,
    sql: &str,
    params: &[(&(dyn ToSql + Sync), Type)],
) -> Result<Vec<Row>, tokio_postgres::Error> {
    let transaction = client.transaction().await?;
    let set = "SELECT set_config('rouse.reader', $1, true),
                      set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)";
    transaction
        .query_typed(set, &[(&reader, Type::TEXT)])
        .await?;
    let rows = transaction.query_typed(sql, params).await?;
    transaction.commit().await?;
    Ok(rows)
}

/// A count as the database stores it, capped at its maximum.
fn count(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Whole microseconds, capped at the maximum.
fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Whole milliseconds, as the functions of schema `rouse` take them, capped at the maximum.
fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
