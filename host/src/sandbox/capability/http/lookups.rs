//! Name lookups. The system resolves names on a thread that cannot be cancelled: it continues even if its caller has
//! stopped waiting. So a lookup counts until it has ended, and no guest can make the host start an unlimited number of
//! lookups.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The maximum number of concurrent lookups of the whole host. Each takes a thread, for half a minute if no name server
/// responds; the runtime has 512 such threads, which are also needed for guests' files.
const LOOKUPS_MAX: usize = 32;

/// The maximum number of concurrent lookups of one handler: a handler whose name servers never respond delays only
/// itself.
pub(super) const LOOKUPS_PER_HANDLER_MAX: usize = 8;

/// Resolves names.
pub trait Resolver: fmt::Debug + Send + Sync {
    /// All addresses of a name, in the order in which they should be tried.
    fn resolve<'a>(&'a self, name: &'a str) -> Addresses<'a>;

    /// The addresses of this machine's own interfaces, which always count as private. Default: the system's, which
    /// takes tens of microseconds.
    ///
    /// # Errors
    /// The system's error.
    fn own(&self) -> io::Result<Vec<IpAddr>> {
        let interfaces = if_addrs::get_if_addrs()?;
        Ok(interfaces.iter().map(if_addrs::Interface::ip).collect())
    }
}

/// The result of a lookup.
pub type Addresses<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>>;

/// The system's resolver: files, DNS, and other configured sources.
#[derive(Debug, Clone, Copy)]
pub struct SystemResolver;

impl Resolver for SystemResolver {
    fn resolve<'a>(&'a self, name: &'a str) -> Addresses<'a> {
        Box::pin(async move {
            let addresses = tokio::net::lookup_host((name, 0)).await?;
            Ok(addresses.map(|address| address.ip()).collect())
        })
    }
}

/// The lookups of a host.
pub(super) struct Lookups {
    resolver: Arc<dyn Resolver>,
    under_way: Arc<Semaphore>,
    /// By handler, across versions of its module.
    by_handler: Mutex<HashMap<Arc<str>, Arc<Semaphore>>>,
}

impl Lookups {
    pub(super) fn new(resolver: Arc<dyn Resolver>) -> Self {
        Self {
            resolver,
            under_way: Arc::new(Semaphore::new(LOOKUPS_MAX)),
            by_handler: Mutex::default(),
        }
    }

    /// All addresses of this name, in the order in which they should be tried. Dropping the future before the lookup
    /// starts prevents it.
    ///
    /// # Errors
    /// The resolver's error.
    pub(super) async fn look_up(&self, handler: &Arc<str>, name: &str) -> io::Result<Vec<IpAddr>> {
        // The handler's own limit first: waiting there does not block other handlers.
        let own = acquire(self.permits_of(handler)).await;
        let permits = (own, acquire(self.under_way.clone()).await);
        let (resolver, name) = (self.resolver.clone(), name.to_owned());
        let lookup = tokio::spawn(async move {
            let found = resolver.resolve(&name).await;
            drop(permits);
            found
        });
        match lookup.await {
            Ok(found) => found,
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// The addresses of this machine's own interfaces.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn own(&self) -> io::Result<Vec<IpAddr>> {
        self.resolver.own()
    }

    /// The permits of one handler.
    fn permits_of(&self, handler: &Arc<str>) -> Arc<Semaphore> {
        let by_handler = self.by_handler.lock();
        // Nothing panics while the lock is held.
        let mut by_handler = by_handler.unwrap_or_else(PoisonError::into_inner);
        let own = by_handler.entry(handler.clone());
        own.or_insert_with(|| Arc::new(Semaphore::new(LOOKUPS_PER_HANDLER_MAX)))
            .clone()
    }
}

async fn acquire(permits: Arc<Semaphore>) -> OwnedSemaphorePermit {
    let permit = permits.acquire_owned().await;
    permit.expect("the semaphore is never closed")
}

#[cfg(test)]
mod tests;
