//! From a name to its addresses. The system looks names up on a thread that nobody can call back: it goes on when nobody
//! waits for it any more. So a look-up counts until it has ended, and no guest can have the host start more and more.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Look-ups of the whole host at a time. Each takes a thread, for half a minute where no name server answers; the
/// runtime has 512 such threads, which files of guests need too.
const LOOKUPS_MAX: usize = 32;

/// Those of one handler: who asks for names whose servers never answer waits for himself.
pub(super) const LOOKUPS_OF_ONE_MAX: usize = 8;

/// Finds the addresses of a name.
pub trait Resolver: fmt::Debug + Send + Sync {
    /// All of them, in the order in which they should be tried.
    fn resolve<'a>(&'a self, name: &'a str) -> Addresses<'a>;

    /// The addresses of this machine's own interfaces. They count as private, whatever they are. Default: the system's, some tens
    /// of microseconds.
    ///
    /// # Errors
    /// What the system says.
    fn own(&self) -> io::Result<Vec<IpAddr>> {
        let interfaces = if_addrs::get_if_addrs()?;
        Ok(interfaces.iter().map(if_addrs::Interface::ip).collect())
    }
}

/// What a resolver is asked for.
pub type Addresses<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>>;

/// The system's: files, DNS, and whatever else it is set up for.
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

/// The look-ups of a host.
pub(super) struct Lookups {
    resolver: Arc<dyn Resolver>,
    under_way: Arc<Semaphore>,
    /// Those of each handler, whichever version of its module asks.
    of_handlers: Mutex<HashMap<Arc<str>, Arc<Semaphore>>>,
}

impl Lookups {
    pub(super) fn new(resolver: Arc<dyn Resolver>) -> Self {
        Self {
            resolver,
            under_way: Arc::new(Semaphore::new(LOOKUPS_MAX)),
            of_handlers: Mutex::default(),
        }
    }

    /// All addresses of this name, in the order in which they should be tried. Who stops waiting before it is started has
    /// asked for nothing.
    ///
    /// # Errors
    /// What the resolver says.
    pub(super) async fn look_up(&self, handler: &Arc<str>, name: &str) -> io::Result<Vec<IpAddr>> {
        // For one of the handler's own places first: what waits there is in nobody else's way.
        let own = enter(self.of(handler)).await;
        let places = (own, enter(self.under_way.clone()).await);
        let (resolver, name) = (self.resolver.clone(), name.to_owned());
        let looking = tokio::spawn(async move {
            let found = resolver.resolve(&name).await;
            drop(places);
            found
        });
        match looking.await {
            Ok(found) => found,
            Err(error) => Err(io::Error::other(error)),
        }
    }

    /// True for an address of one of this machine's own interfaces.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn is_own(&self, address: IpAddr) -> io::Result<bool> {
        Ok(self.resolver.own()?.contains(&address))
    }

    /// The places of one handler.
    fn of(&self, handler: &Arc<str>) -> Arc<Semaphore> {
        let of_handlers = self.of_handlers.lock();
        // Nothing panics while it holds the lock.
        let mut of_handlers = of_handlers.unwrap_or_else(PoisonError::into_inner);
        let own = of_handlers.entry(handler.clone());
        own.or_insert_with(|| Arc::new(Semaphore::new(LOOKUPS_OF_ONE_MAX)))
            .clone()
    }
}

async fn enter(places: Arc<Semaphore>) -> OwnedSemaphorePermit {
    let place = places.acquire_owned().await;
    place.expect("nobody closes it")
}

#[cfg(test)]
mod tests;
