//! Connections that are lent out, one for each round trip.

use std::pin::Pin;
use std::sync::Arc;

use deadpool::managed::{self, Metrics, RecycleError, RecycleResult};
use deadpool_postgres::{ClientWrapper, Connect, Manager};
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Config, Error};

use super::ladder::{Ladder, NotOpened};
use super::{Tls, next_step};
use crate::store::describe;

/// Connections to one database.
pub type Pool = managed::Pool<Opener>;

/// A connection that is lent; dropped, it goes back.
pub type Lent = managed::Object<Opener>;

/// Opens connections for a pool, when it is time to.
#[derive(Debug)]
pub struct Opener {
    pub(super) manager: Manager,
    pub(super) ladder: Arc<Ladder>,
}

impl managed::Manager for Opener {
    type Type = ClientWrapper;
    type Error = NotOpened<Error>;

    async fn create(&self) -> Result<ClientWrapper, Self::Error> {
        self.ladder.open(self.manager.create(), why).await
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

/// Connects as the pool would by itself, but does not warn of each connection that ends: that the server is away is said once.
pub(super) struct Quietly(pub(super) Tls);

type Connected = (Client, JoinHandle<()>);

impl Connect for Quietly {
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

/// Why it could not be opened, and what to do where that is known.
pub(in crate::store) fn why(error: &Error) -> String {
    format!("{}{}", describe(error), next_step(error))
}
