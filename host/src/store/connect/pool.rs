//! The connection pool.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use deadpool::managed::{self, Metrics, RecycleError, RecycleResult};
use deadpool_postgres::{ClientWrapper, Connect, Manager};
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Config, Error};

use super::backoff::{Backoff, NotOpened};
use super::{Tls, next_step};
use crate::store::describe;

/// A pool of connections to one database.
pub type Pool = managed::Pool<Opener>;

/// A pooled connection; dropping it returns it.
pub type PooledClient = managed::Object<Opener>;

/// Opens connections for a pool, subject to the backoff.
#[derive(Debug)]
pub struct Opener {
    pub(super) manager: Arc<Manager>,
    pub(super) backoff: Arc<Backoff>,
    /// How long a try may take.
    pub(super) patience: Duration,
}

impl managed::Manager for Opener {
    type Type = ClientWrapper;
    type Error = NotOpened<Error>;

    async fn create(&self) -> Result<ClientWrapper, Self::Error> {
        let manager = self.manager.clone();
        let opening = async move { manager.create().await };
        self.backoff.open(self.patience, opening, why).await
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

/// Connects like deadpool's default, but logs the end of a connection at debug: the worker reports an outage once.
pub(super) struct QuietConnect(pub(super) Tls);

type Connected = (Client, JoinHandle<()>);

impl Connect for QuietConnect {
    fn connect(
        &self,
        config: &Config,
    ) -> Pin<Box<dyn Future<Output = Result<Connected, Error>> + Send + '_>> {
        let (config, tls) = (config.clone(), self.0.clone());
        Box::pin(async move {
            let (client, connection) = config.connect(tls).await?;
            let going = tokio::spawn(async move {
                if let Err(error) = connection.await {
                    tracing::debug!(%error, "a connection of the pool ended");
                }
            });
            Ok((client, going))
        })
    }
}

/// The cause of a failure to connect, with a hint if one is known.
pub(in crate::store) fn why(error: &Error) -> String {
    format!("{}{}", describe(error), next_step(error))
}
