//! A proxy between a worker and its database that can hold a message.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rouse::sandbox::{Catalog, Sandbox};
use rouse::store::Store;
use rouse::store::connect::Connector;
use rouse::worker::Parts;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{Semaphore, watch};

use super::TestDb;
use super::worker::TIMEOUT;

/// The statement by which a worker checks that its notifications arrive, once it listens.
pub(crate) const ECHO: &str = "SELECT pg_notify($1, $2)";

/// A COMMIT on its own. The start of a transaction contains the word too: READ COMMITTED.
pub(crate) const COMMIT: &str = "COMMIT\0";

/// Forwards connections to a port of this machine until the test ends.
pub(crate) struct Proxy {
    url: String,
    next: Arc<Mutex<Option<Arc<Hold>>>>,
    outage: Arc<watch::Sender<Outage>>,
    /// The times of refused connections.
    tries: Arc<watch::Sender<Vec<Instant>>>,
    /// The number of messages, or groups of messages, that clients have sent.
    sent: Arc<AtomicUsize>,
}

/// The outages of a proxy.
#[derive(Debug, Clone, Copy, Default)]
struct Outage {
    is_down: bool,
    /// The number of outages that have started. A connection does not survive one, however short it is.
    started: usize,
}

/// The part of an exchange that is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// The statement: the database does not see it yet.
    Statement,
    /// The response and everything after it on that connection: the database has executed the statement.
    Response,
    /// The connection: it is cut each time the statement arrives, until the release.
    Cut,
}

#[derive(Debug)]
struct Hold {
    words: &'static str,
    side: Side,
    caught: watch::Sender<usize>,
    is_released: watch::Sender<bool>,
}

/// A message that is held once it arrives. Released when dropped.
#[derive(Debug)]
pub(crate) struct Held(Arc<Hold>);

impl Held {
    /// Waits until the statement has arrived.
    pub(crate) async fn caught(&self) {
        self.caught_times(1).await;
    }

    /// Waits until the statement has arrived this many times; with [`Side::Cut`], its connection is cut each time.
    pub(crate) async fn caught_times(&self, times: usize) {
        let mut caught = self.0.caught.subscribe();
        tokio::time::timeout(TIMEOUT, caught.wait_for(|caught| *caught >= times))
            .await
            .unwrap_or_else(|_| panic!("not sent: {:?}", self.0.words))
            .expect("the sender is in this struct");
    }

    /// Lets the message pass.
    pub(crate) fn release(self) {}
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.is_released.send_replace(true);
    }
}

impl Proxy {
    /// A proxy to this database.
    pub(crate) async fn start(db: &TestDb) -> Self {
        Self::start_with_limit(db, Semaphore::MAX_PERMITS).await
    }

    /// A proxy that refuses further connections while this many are open, as a server does at `max_connections`.
    pub(crate) async fn start_with_limit(db: &TestDb, connections_max: usize) -> Self {
        let at = db.address();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("its number").port();
        let next = Arc::new(Mutex::new(None));
        let (socket, holds) = (at.directory.join(".s.PGSQL.5432"), next.clone());
        let sent = Arc::new(AtomicUsize::new(0));
        let sending = sent.clone();
        let outage = Arc::new(watch::Sender::<Outage>::default());
        let tries = Arc::new(watch::Sender::<Vec<Instant>>::default());
        let (outages, refused) = (outage.clone(), tries.clone());
        let permits = Arc::new(Semaphore::new(connections_max));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let mut outages = outages.subscribe();
                let Outage { is_down, started } = *outages.borrow();
                let permit = permits.clone().try_acquire_owned().ok();
                let Some(permit) = permit.filter(|_| !is_down) else {
                    refused.send_modify(|tries| tries.push(Instant::now()));
                    continue;
                };
                let (socket, holds) = (socket.clone(), Holds(holds.clone()));
                let sending = sending.clone();
                tokio::spawn(async move {
                    tokio::select! {
                        // First: what is released after an outage has started does not arrive.
                        biased;
                        _ = outages.wait_for(|outage| outage.started > started) => {}
                        () = forward(client, socket, holds, &sending) => {}
                    }
                    drop(permit);
                });
            }
        });
        let url = format!(
            "postgres://{}@127.0.0.1:{port}/{}?sslmode=disable",
            at.user, at.database
        );
        Self {
            url,
            next,
            outage,
            tries,
            sent,
        }
    }

    /// The number of messages that clients have sent: one per statement, since each is sent as a whole and its response
    /// awaited.
    pub(crate) fn sent(&self) -> usize {
        self.sent.load(Ordering::Relaxed)
    }

    /// Cuts all connections, and each new one.
    pub(crate) fn go_down(&self) {
        self.outage.send_modify(|outage| {
            outage.is_down = true;
            outage.started += 1;
        });
    }

    /// Forwards connections again.
    pub(crate) fn come_up(&self) {
        self.outage.send_modify(|outage| outage.is_down = false);
    }

    /// Waits for a refused connection this long after the first one; returns the times of all.
    pub(crate) async fn refused_after(&self, later: Duration) -> Vec<Instant> {
        self.refused_until(|tries| match tries {
            [first, .., last] => *last - *first >= later,
            _ => false,
        })
        .await
    }

    /// Waits until the times of the refused connections satisfy this condition; returns them.
    pub(crate) async fn refused_until(
        &self,
        are_enough: impl Fn(&[Instant]) -> bool,
    ) -> Vec<Instant> {
        let mut tries = self.tries.subscribe();
        let refused = tries.wait_for(|tries| are_enough(tries));
        let refused = tokio::time::timeout(TIMEOUT, refused).await;
        refused
            .expect("enough tries")
            .expect("the sender is in this struct")
            .clone()
    }

    /// The connection string that leads through the proxy.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Like [`Proxy::url`], for a worker in this process.
    pub(crate) fn connector(&self) -> Connector {
        Connector::from_url(&self.url, &|_| None).expect("a good connection string")
    }

    /// A store with connections of its own through the proxy.
    pub(crate) fn store(&self) -> Store {
        Store::new(&self.connector(), 4)
    }

    /// The parts of a worker whose statements go through the proxy. It listens without the proxy.
    pub(crate) fn parts(&self, db: &TestDb, sandbox: Arc<Sandbox>, catalog: Arc<Catalog>) -> Parts {
        Parts {
            store: self.store(),
            listen_connector: db.connector(),
            sandbox,
            catalog,
            sql_logins: BTreeMap::new(),
            middleware: Vec::new(),
        }
    }

    /// Holds the next statement that contains these words, or its response.
    pub(crate) fn hold(&self, words: &'static str, side: Side) -> Held {
        let hold = Arc::new(Hold {
            words,
            side,
            caught: watch::Sender::new(0),
            is_released: watch::Sender::new(false),
        });
        *lock(&self.next) = Some(hold.clone());
        Held(hold)
    }
}

fn lock(next: &Mutex<Option<Arc<Hold>>>) -> MutexGuard<'_, Option<Arc<Hold>>> {
    next.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone)]
struct Holds(Arc<Mutex<Option<Arc<Hold>>>>);

impl Holds {
    /// Takes the pending hold if these bytes contain its words.
    fn catch(&self, bytes: &[u8]) -> Option<Arc<Hold>> {
        let mut next = lock(&self.0);
        let words = next.as_ref()?.words.as_bytes();
        let fits = bytes.windows(words.len()).any(|window| window == words);
        let hold = match next.as_ref()?.side {
            Side::Cut => next
                .clone()
                .filter(|hold| fits && !*hold.is_released.borrow()),
            Side::Statement | Side::Response => next.take_if(|_| fits),
        }?;
        hold.caught.send_modify(|times| *times += 1);
        Some(hold)
    }
}

async fn wait_for(hold: &Hold) {
    let mut released = hold.is_released.subscribe();
    // The sender is in the same struct.
    let _ = released.wait_for(|released| *released).await;
}

/// Forwards one connection, until either side closes it.
async fn forward(client: TcpStream, socket: PathBuf, holds: Holds, sent: &AtomicUsize) {
    // A delay in the kernel would look like a delay of the worker.
    let _ = client.set_nodelay(true);
    let Ok(server) = UnixStream::connect(socket).await else {
        return;
    };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let responses = watch::Sender::new(None);
    let held = responses.subscribe();
    tokio::select! {
        () = forward_statements(from_client, to_server, holds, responses, sent) => {}
        () = forward_answers(from_server, to_client, held) => {}
    }
}

async fn forward_statements(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    holds: Holds,
    responses: watch::Sender<Option<Arc<Hold>>>,
    sent: &AtomicUsize,
) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        sent.fetch_add(1, Ordering::Relaxed);
        if let Some(hold) = holds.catch(&bytes[..count]) {
            match hold.side {
                Side::Statement => wait_for(&hold).await,
                Side::Response => _ = responses.send_replace(Some(hold)),
                Side::Cut => return,
            }
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

async fn forward_answers(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    held: watch::Receiver<Option<Arc<Hold>>>,
) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        let hold = held.borrow().clone();
        if let Some(hold) = hold {
            wait_for(&hold).await;
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}
