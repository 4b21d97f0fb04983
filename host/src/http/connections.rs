//! Accepts connections. Limits how many are open at once and how long each may be silent.
//!
//! `axum::serve` limits neither, so any client that reaches the port could exhaust the file descriptors of the process
//! without sending a single request. If all slots are taken, a connection that has not sent a request or its whole
//! body, or does not read its response, is closed ([`open`]). Requests are therefore served even if many clients
//! connect and send nothing.

mod open;
mod watched;

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

use self::open::{Connected, Open};
use self::watched::{Body, RequestBody, Stream};

/// Connections in addition to those of running invocations: probes, scrapers and refused callers, all of which are
/// served in milliseconds. Further connections wait in the listen backlog, unless one of these is silent.
pub(super) const OTHER_CONNECTIONS_MAX: usize = 128;

/// The time in which a connection has to send the head of a request, including the next request of a kept-alive
/// connection. Callers send theirs at once, and a caller that returns later can reconnect.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// The wait before the next search for a silent connection.
const FULL_PAUSE: Duration = Duration::from_millis(50);

/// An extension of each request: the address at the other end of its connection, which may be that of a proxy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) IpAddr);

/// Serves at most `max` connections at once until `stop`, then finishes the requests in progress.
pub(super) async fn serve(
    mut listener: TcpListener,
    pages: Router,
    max: usize,
    stop: CancellationToken,
) {
    let slots = Arc::new(Semaphore::new(max));
    let tasks = TaskTracker::new();
    let open = Open::default();
    loop {
        let next = async {
            // If too many files are open, `accept` waits a second and retries.
            let (stream, peer) = Listener::accept(&mut listener).await;
            (stream, Peer(peer.ip()), acquire_slot(&slots, &open).await)
        };
        let Some((stream, peer, slot)) = stop.run_until_cancelled(next).await else {
            break;
        };
        let (pages, stop) = (pages.clone(), stop.clone());
        let connected = Arc::new(Connected::new(&open));
        tasks.spawn(async move {
            connection(stream, peer, pages, connected, stop).await;
            drop(slot);
        });
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

/// Waits for a free slot; if there is none, closes a connection to free one.
async fn acquire_slot(slots: &Arc<Semaphore>, open: &Open) -> OwnedSemaphorePermit {
    loop {
        if slots.available_permits() == 0 {
            open.close_one();
        }
        let slot = timeout(FULL_PAUSE, slots.clone().acquire_owned());
        if let Ok(slot) = slot.await {
            return slot.expect("the semaphore is never closed");
        }
    }
}

async fn connection(
    stream: TcpStream,
    peer: Peer,
    pages: Router,
    connected: Arc<Connected>,
    stop: CancellationToken,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT);
    let pages = TowerToHyperService::new(pages);
    let service = service_fn(|request: Request<Incoming>| {
        let (pages, connected) = (pages.clone(), connected.clone());
        async move {
            if !connected.start_request() {
                // This connection has just been chosen to be closed, and is about to be dropped.
                std::future::pending::<()>().await;
            }
            let mut request = request.map(|body| RequestBody::new(body, connected.clone()));
            request.extensions_mut().insert(peer);
            let response = pages.call(request).await?;
            Ok::<_, Infallible>(response.map(|body| Body::new(body, connected)))
        }
    });
    let stream = Stream::new(stream, connected.clone());
    let mut served = pin!(http.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        biased;
        () = connected.must_close() => return,
        ended = served.as_mut() => ended,
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        debug!(%error, "connection ended early");
    }
}
