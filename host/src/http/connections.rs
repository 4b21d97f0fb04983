//! Takes connections: how many there may be at once, and how long each may be silent.
//!
//! `axum::serve` has no bound for either, so that whoever reaches the port could take all files that the process may
//! open, without sending a single request.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

/// Connections beside those of invocations that run: probes, scrapers, and callers that are refused. All of them are
/// answered in milliseconds. More wait in the system's line.
pub(super) const BESIDE_INVOCATIONS_MAX: usize = 128;

/// A connection that has not sent the whole head of a request for so long is closed, also one that is kept open after an
/// answer. Callers send theirs at once; who comes back later connects again.
const HEAD_PATIENCE: Duration = Duration::from_secs(10);

/// Serves at most `max` connections at once until `stop`, then until the requests that are under way are answered.
pub(super) async fn serve(
    mut listener: TcpListener,
    pages: Router,
    max: usize,
    stop: CancellationToken,
) {
    let places = Arc::new(Semaphore::new(max));
    let open = TaskTracker::new();
    loop {
        let next = async {
            let place = places.clone().acquire_owned().await;
            let place = place.expect("nobody closes the semaphore");
            // Where the system refuses one (too many open files), it waits a second and goes on.
            let (stream, _) = Listener::accept(&mut listener).await;
            (stream, place)
        };
        let Some((stream, place)) = stop.run_until_cancelled(next).await else {
            break;
        };
        let (pages, stop) = (pages.clone(), stop.clone());
        open.spawn(async move {
            connection(stream, pages, stop).await;
            drop(place);
        });
    }
    drop(listener);
    open.close();
    open.wait().await;
}

async fn connection(stream: TcpStream, pages: Router, stop: CancellationToken) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_PATIENCE);
    let pages = TowerToHyperService::new(pages);
    let mut served = pin!(http.serve_connection(TokioIo::new(stream), pages));
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        debug!(%error, "a connection has ended early");
    }
}
