//! The connection pool.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use deadpool::managed::{self, Metrics, RecycleError, RecycleResult};
use deadpool_postgres::{ClientWrapper, Connect, Manager};
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Config, Error};

use super::backoff::{Backoff, OpenError, Try};
use super::{Passwords, Tls, next_step, open};
use crate::store::error::describe;

/// A pool of connections to one database.
pub type Pool = managed::Pool<Opener>;

/// A pooled connection. Dropping it returns it to the pool.
pub type PooledClient = managed::Object<Opener>;

/// Opens connections for a pool, subject to the backoff.
///
/// A try continues if its caller gives up; the next caller gets it, and the resulting connection. So even callers with
/// a short timeout get connections from a server that is slow to accept them, and do not each start a new try.
#[derive(Debug)]
pub struct Opener {
    manager: Arc<Manager>,
    backoff: Arc<Backoff>,
    /// The time limit for a try.
    timeout: Duration,
    /// Tries whose caller has given up.
    abandoned: Mutex<Vec<Opening>>,
}

/// An abandoned try that is older than this, and has not ended, is no longer reused.
const REUSE_AGE_MAX: Duration = Duration::from_secs(3);

/// A try to open a connection of the pool.
type Opening = Try<ClientWrapper, Error>;

/// The try that a caller waits for. If the caller gives up, the try is abandoned.
struct Waiting<'a> {
    opener: &'a Opener,
    opening: Option<Opening>,
}

impl Waiting<'_> {
    async fn end(mut self) -> Result<ClientWrapper, OpenError<Error>> {
        let opening = self.opening.as_mut().expect("it is taken below only");
        let opened = opening.end().await;
        self.opening = None;
        opened
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The try has panicked, and with it this caller: the try must not be polled again.
            return;
        }
        self.opener.abandoned().extend(self.opening.take());
    }
}

impl Opener {
    pub(super) fn new(manager: Manager, backoff: Arc<Backoff>, timeout: Duration) -> Self {
        Self {
            manager: Arc::new(manager),
            backoff,
            timeout,
            abandoned: Mutex::default(),
        }
    }

    fn abandoned(&self) -> MutexGuard<'_, Vec<Opening>> {
        self.abandoned
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// An abandoned try, or a new one.
    fn opening(&self) -> Result<Opening, OpenError<Error>> {
        let mut abandoned = self.abandoned();
        // A try may hang until its time limit, although the server is already back.
        abandoned.retain(|opening| opening.has_ended() || opening.age() < REUSE_AGE_MAX);
        // While the server is away, callers fail at once.
        let is_away = self.backoff.is_away();
        let usable = |opening: &Opening| opening.has_ended() || !is_away;
        if let Some(index) = abandoned.iter().position(usable) {
            return Ok(abandoned.swap_remove(index));
        }
        drop(abandoned);
        let manager = self.manager.clone();
        let opening = async move { managed::Manager::create(&*manager).await };
        self.backoff.start(self.timeout, opening, why)
    }
}

impl managed::Manager for Opener {
    type Type = ClientWrapper;
    type Error = OpenError<Error>;

    async fn create(&self) -> Result<ClientWrapper, Self::Error> {
        loop {
            let opening = self.opening()?;
            let is_old = opening.has_ended();
            let waiting = Waiting {
                opener: self,
                opening: Some(opening),
            };
            let opened = waiting.end().await;
            // The result of an abandoned try is outdated, unless its connection is still open.
            if is_old && !opened.as_ref().is_ok_and(|client| !client.is_closed()) {
                continue;
            }
            return opened;
        }
    }

    async fn recycle(&self, client: &mut ClientWrapper, _: &Metrics) -> RecycleResult<Self::Error> {
        match client.is_closed() {
            true => Err(RecycleError::message("it has ended")),
            false => Ok(()),
        }
    }

    fn detach(&self, client: &mut ClientWrapper) {
        self.manager.detach(client);
    }
}

/// Connects like deadpool's default, but logs the end of a connection at debug level: the worker reports an outage
/// once.
pub(super) struct QuietConnect {
    pub(super) passwords: Passwords,
    pub(super) tls: Tls,
}

type Connected = (Client, JoinHandle<()>);

impl Connect for QuietConnect {
    fn connect(
        &self,
        config: &Config,
    ) -> Pin<Box<dyn Future<Output = Result<Connected, Error>> + Send + '_>> {
        let config = config.clone();
        Box::pin(async move {
            let (client, connection) = open(&config, &self.passwords, &self.tls).await?;
            let driver = tokio::spawn(async move {
                if let Err(error) = connection.await {
                    tracing::debug!(%error, "a connection of the pool ended");
                }
            });
            Ok((client, driver))
        })
    }
}

/// The cause of a failure to connect, with a hint if one is known.
pub(in crate::store) fn why(error: &Error) -> String {
    format!("{}{}", describe(error), next_step(error))
}
