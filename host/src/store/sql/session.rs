//! Sessions of a handler's own login.

use std::ops::Deref;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use deadpool::managed::{Object, PoolError};
use tokio_postgres::Client;

use super::SqlError;
use crate::store::RESPONSE_TIMEOUT;
use crate::store::connect::{Connector, OpenError, Pool, PooledClient};

/// The maximum time that a statement may take to end after the request to cancel it.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(2);

/// A login of a handler, with its connections.
#[derive(Debug, Clone)]
pub struct Login {
    pool: Pool,
    connector: Connector,
    connections: usize,
    /// The address, without secrets.
    pub(super) target: Arc<str>,
    /// The time of the first failure since the last transaction that got a response.
    unavailable_since: Arc<Mutex<Option<Instant>>>,
}

/// The time that the server waits for the next message of a transaction. From the fence on, the transaction locks the
/// row of the job: while its host is frozen, or disconnected, no other worker could adopt the job. A host sends the
/// next message within milliseconds.
const NEXT_MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Removes what an earlier transaction of the session may have left: a role, settings, advisory locks.
pub(super) const RESET: &str =
    "SET SESSION AUTHORIZATION DEFAULT; RESET ALL; SELECT pg_advisory_unlock_all()";

/// Fails on a standby.
const WRITABLE: &str = "BEGIN READ WRITE; ROLLBACK";

/// Sets the timeouts of a transaction. They are set again after each statement, which may have changed them with
/// `set_config`, or called a function that has: without timeouts, the row of the job would stay locked for as long as
/// its host is frozen. All other settings remain for the next statement of the job.
///
/// Switches off `transaction_timeout`, which Postgres has from 17 on. The other timeouts have no effect while its value
/// is shorter than theirs, although its timer may have been started with an earlier, long value. And a transaction that
/// always takes longer than a timeout of the login would be tried again until the lease ends.
pub(super) fn timeouts(statement_timeout: Duration, lock_wait: Duration) -> String {
    format!(
        "SELECT pg_catalog.set_config('statement_timeout', '{}', true),
                pg_catalog.set_config('lock_timeout', '{}', true),
                pg_catalog.set_config('idle_in_transaction_session_timeout', '{}', true),
                CASE WHEN pg_catalog.current_setting('transaction_timeout', true) IS NOT NULL
                     THEN pg_catalog.set_config('transaction_timeout', '0', true) END",
        statement_timeout.as_millis(),
        statement_timeout.min(lock_wait).as_millis(),
        NEXT_MESSAGE_TIMEOUT.as_millis(),
    )
}

/// The settings of a transaction. Its last row has the search path: the schemas of the login's own search path, before
/// those of temporary objects.
pub(super) fn settings(statement_timeout: Duration, lock_wait: Duration) -> String {
    format!(
        "{RESET}; {}; SELECT set_config('search_path', array_to_string(
             ARRAY(SELECT quote_ident(s) FROM unnest(current_schemas(false)) AS s) || 'pg_temp'::text, ', '), true)",
        timeouts(statement_timeout, lock_wait)
    )
}

/// The same settings again, between the effects of two jobs.
pub(super) fn settings_again(
    statement_timeout: Duration,
    lock_wait: Duration,
    search_path: &str,
) -> String {
    format!(
        "SET SESSION AUTHORIZATION DEFAULT; RESET ALL; {}; SET LOCAL search_path = {search_path}",
        timeouts(statement_timeout, lock_wait)
    )
}

/// The start of a transaction.
pub(super) fn transaction_start(mode: &str, settings: &str) -> String {
    format!("BEGIN ISOLATION LEVEL READ COMMITTED, {mode}; {settings}")
}

/// A connection of a login, for one transaction. It leaves the pool permanently if it is dropped without
/// [`end`](Self::end): an attempt that is aborted drops its calls at any point, and the next user of the connection
/// would continue in the transaction that was left open.
pub(super) struct Session<'a> {
    login: &'a Login,
    /// `None` once it is back in the pool.
    client: Option<PooledClient>,
    /// The COMMIT has been sent. It is not cancelled, because a commit that waits for a standby would then be visible
    /// before the standby has it.
    pub(super) is_committing: bool,
}

impl Session<'_> {
    /// Puts the connection back into the pool: the server has confirmed that the transaction has ended.
    pub(super) fn end(self) {
        *self.login.unavailable_since() = None;
        self.end_reading();
    }

    /// Like [`end`](Self::end), after a transaction that only read. It does not show that the login is available: a
    /// standby would have responded too.
    pub(super) fn end_reading(mut self) {
        self.client = None;
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
            unavailable_since: Arc::default(),
        }
    }

    /// The time for which the login has had no connection, or no response. `None` if the last transaction got a
    /// response.
    pub fn unavailable_for(&self) -> Option<Duration> {
        let since = *self.unavailable_since();
        since.map(|since| since.elapsed())
    }

    fn unavailable_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.unavailable_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note_unavailable(&self, since: Instant) {
        self.unavailable_since().get_or_insert(since);
    }

    /// Checks whether the login gets a response now, from a server that accepts writes.
    pub async fn responds(&self) -> bool {
        let Ok(session) = self.session().await else {
            return false;
        };
        let answered =
            tokio::time::timeout(RESPONSE_TIMEOUT, session.batch_execute(WRITABLE)).await;
        let responses = matches!(answered, Ok(Ok(())));
        if responses {
            session.end();
        }
        responses
    }

    /// The address, without secrets.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// The name of the role.
    pub(super) fn user(&self) -> &str {
        self.connector.user()
    }

    /// The maximum number of its connections.
    pub fn connections(&self) -> usize {
        self.connections
    }

    pub(super) async fn session(&self) -> Result<Session<'_>, SqlError> {
        let started_at = Instant::now();
        let opened = tokio::time::timeout(RESPONSE_TIMEOUT, self.pool.get()).await;
        if !matches!(opened, Ok(Ok(_))) {
            self.note_unavailable(started_at);
        }
        let Ok(opened) = opened else {
            return Err(SqlError::no_response(format!(
                "no connection was free or opened within {} s",
                RESPONSE_TIMEOUT.as_secs()
            )));
        };
        let client = opened.map_err(|error| match error {
            PoolError::Backend(OpenError::Failed(error)) => SqlError::from(&error),
            PoolError::Backend(OpenError::Away(away)) => SqlError::no_response(away.why),
            other => SqlError::no_response(other.to_string()),
        })?;
        Ok(Session {
            login: self,
            client: Some(client),
            is_committing: false,
        })
    }

    pub(super) fn no_response(&self, waited: Duration) -> SqlError {
        SqlError::no_response(format!(
            "no response from {} within {} s",
            self.target,
            waited.as_secs()
        ))
    }

    /// Waits for the response of a session. A statement can override its own statement timeout, so it is cancelled
    /// after `timeout`, and its response after that counts too. In that case the second value is false: the session
    /// must not be used again, since the request may arrive late.
    ///
    /// # Errors
    /// If there is no response at all. The server ends the transaction when it notices the closed connection.
    pub(super) async fn wait_for_response<T>(
        &self,
        client: &Client,
        timeout: Duration,
        running: impl Future<Output = T>,
    ) -> (Result<T, SqlError>, bool) {
        let started_at = Instant::now();
        let mut running = pin!(running);
        if let Ok(response) = tokio::time::timeout(timeout, &mut running).await {
            return (Ok(response), true);
        }
        let cancelled = async {
            // If the request fails, there will be no response either.
            let _ = self.connector.cancel(client).await;
            running.await
        };
        let response = tokio::time::timeout(CANCEL_TIMEOUT, cancelled).await;
        if response.is_err() {
            self.note_unavailable(started_at);
        }
        (response.map_err(|_| self.no_response(timeout)), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_role_is_taken_from_the_connection_string() {
        let url = "postgres://run%20as%20x@db.example/jobs";
        let connector = Connector::from_url(url, &|_| None).unwrap();
        assert_eq!(Login::new(&connector, 1).user(), "run as x");
    }
}
