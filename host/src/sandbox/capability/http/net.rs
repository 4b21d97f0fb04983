//! What all handlers of a host share: settings, and the connections that are kept for their next requests. Each handler's are
//! its own: what one handler may reach, another does not find open.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use super::connect::{Connector, Dialer, OpenCount, Reach};
use super::outgoing::Outgoing;
use super::settings::HttpSettings;

/// A connection that nobody uses for so long is closed; servers close theirs after 5 to 120 s.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// Idle connections to one server.
const IDLE_COUNT_MAX: usize = 8;

/// Connections of all handlers that are kept. Whoever may reach any server can make a thousand of them, each to another one;
/// a process has 1,024 files where nobody says otherwise, and needs some for the database and for requests.
const KEPT_MAX: usize = 256;

/// The head of a response, bytes; servers send 1 to 16 KiB. It is also what a connection of HTTP/1.1 buffers.
const HEAD_BYTES_MAX: u32 = 64 << 10;

/// What a server may send over HTTP/2 before the guest has read it: of one response, and over one connection.
const WINDOW_BYTES: u32 = 256 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;

pub(super) type HttpClient = Client<Connector, Outgoing>;

/// What all handlers of a host share.
pub(in crate::sandbox) struct Net {
    pub(super) settings: HttpSettings,
    dialer: Arc<Dialer>,
    kept: Mutex<Kept>,
}

/// Connections that are kept.
#[derive(Default)]
struct Kept {
    /// One for each handler and reach: a connection to a private address is not there for a request that may not go to
    /// one.
    clients: HashMap<(Arc<str>, Reach), HttpClient>,
    /// Those that these clients have made, in use or not.
    open: OpenCount,
}

impl Net {
    /// # Errors
    /// When the file with the operator's authorities cannot be read.
    pub(in crate::sandbox) fn new(settings: HttpSettings) -> anyhow::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            dialer: Dialer::new(&settings)?,
            settings,
            kept: Mutex::default(),
        }))
    }

    /// The client for this handler's requests of this reach. Where too many connections are open, all handlers start
    /// with none: those that nobody uses are closed at once, and the others with the ends of their requests.
    pub(super) fn client(&self, handler: &Arc<str>, reach: Reach) -> HttpClient {
        // Nothing panics while it holds the lock.
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.open.count() >= KEPT_MAX {
            *kept = Kept::default();
        }
        let Kept { clients, open } = &mut *kept;
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
    Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_MAX)
        .pool_max_idle_per_host(IDLE_COUNT_MAX)
        .http1_max_buf_size(HEAD_BYTES_MAX as usize)
        .http2_max_header_list_size(HEAD_BYTES_MAX)
        .http2_initial_stream_window_size(WINDOW_BYTES)
        .http2_initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .build(connector)
}

#[cfg(test)]
mod tests;
