//! The settings and pooled connections of all handlers of a host. Each handler has a pool of its own: it never gets a
//! connection that another handler opened.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper_util::client::legacy::{Builder, Client};
use hyper_util::rt::{TokioExecutor, TokioTimer};

use super::connect::{Connector, Dialer, OpenCount, Reach};
use super::outgoing::{CHUNK_BYTES_MAX, Outgoing};
use super::settings::HttpSettings;
use super::tally::{IN_FLIGHT_MAX, REQUEST_BUFFER_BYTES};

/// An unused connection is closed after this time; servers close theirs after 5 to 120 s.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// The maximum number of idle connections to one server.
const IDLE_COUNT_MAX: usize = 8;

/// If there are at least this many open connections, idle ones are closed. A handler that may reach any server can open
/// a thousand, each to a different server.
const OPEN_MAX: usize = 256;

/// The maximum size of the head of a response, in bytes; servers send 1 to 16 KiB. It is also the buffer of an HTTP/1.1
/// connection.
const HEAD_BYTES_MAX: u32 = 64 << 10;

/// The number of bytes that a server may send over HTTP/2 before the guest has read them, for one response and for one
/// connection.
const WINDOW_BYTES: u32 = 256 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;

/// While this many bytes of a request or more wait to be sent over HTTP/2, hyper does not take any further chunks of
/// its body. hyper's default is 1 MiB.
const SEND_BYTES: usize = 64 << 10;

// The amount that a server can make the host keep for one request: one more chunk exceeds SEND_BYTES, and another waits
// behind it.
const _: () = assert!(
    WINDOW_BYTES as usize + HEAD_BYTES_MAX as usize + SEND_BYTES + 2 * CHUNK_BYTES_MAX
        <= REQUEST_BUFFER_BYTES
);

pub(super) type HttpClient = Client<Connector, Outgoing>;

/// The HTTP settings and pools of a host, for all handlers.
pub(in crate::sandbox) struct Net {
    pub(super) settings: HttpSettings,
    dialer: Arc<Dialer>,
    pools: Mutex<Pools>,
}

/// Pooled connections.
#[derive(Default)]
struct Pools {
    /// One client for each handler and reach: a connection to a private address must not serve a request that may not
    /// go to one.
    clients: HashMap<(Arc<str>, Reach), HttpClient>,
    /// Counts the connections of these clients, in use or idle.
    open: OpenCount,
}

impl Net {
    /// Creates the pools of a host that runs at most `attempts_max` attempts. The maximum number of open connections
    /// covers all requests of these attempts, and idle connections. Only connections that outlive their attempts,
    /// because a server takes no data, could need more.
    ///
    /// # Errors
    /// When the file with the operator's authorities cannot be read.
    pub(in crate::sandbox) fn new(
        settings: HttpSettings,
        attempts_max: usize,
    ) -> anyhow::Result<Arc<Self>> {
        let connections_max = attempts_max * IN_FLIGHT_MAX + OPEN_MAX;
        Ok(Arc::new(Self {
            dialer: Dialer::new(&settings, connections_max)?,
            settings,
            pools: Mutex::default(),
        }))
    }

    /// The client for this handler's requests with this reach. If too many connections are open, all handlers start
    /// with empty pools: idle connections are closed at once, others when their requests end.
    pub(super) fn client(&self, handler: &Arc<str>, reach: Reach) -> HttpClient {
        // Nothing panics while the lock is held.
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if pools.open.count() >= OPEN_MAX {
            *pools = Pools::default();
        }
        let Pools { clients, open } = &mut *pools;
        let client = clients.entry((handler.clone(), reach)).or_insert_with(|| {
            client(Connector {
                dialer: self.dialer.clone(),
                handler: handler.clone(),
                reach,
                open: open.clone(),
            })
        });
        client.clone()
    }
}

fn client(connector: Connector) -> HttpClient {
    builder().build(connector)
}

fn builder() -> Builder {
    let mut builder = Client::builder(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_MAX)
        .pool_max_idle_per_host(IDLE_COUNT_MAX)
        .http1_max_buf_size(HEAD_BYTES_MAX as usize)
        .http2_max_header_list_size(HEAD_BYTES_MAX)
        .http2_initial_stream_window_size(WINDOW_BYTES)
        .http2_initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_max_send_buf_size(SEND_BYTES);
    builder
}

#[cfg(test)]
mod tests;
