//! Takes connections: how many there may be at once, and how long each may be silent.
//!
//! `axum::serve` has no bound for either, so that whoever reaches the port could take all files that the process may
//! open, without sending a single request. Where all places are taken, one gives way that asks nothing, or does not take its
//! answer ([`open`]): whoever asks something is answered, however many there are who only connect.

mod open;
mod watched;

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
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
use self::watched::{Body, Stream};

/// Connections beside those of invocations that run: probes, scrapers, and callers that are refused. All of them are
/// answered in milliseconds. More wait in the system's line, where none of these is silent.
pub(super) const BESIDE_INVOCATIONS_MAX: usize = 128;

/// A connection that has not sent the whole head of a request for so long is closed, also one that is kept open after an
/// answer. Callers send theirs at once; who comes back later connects again.
const HEAD_PATIENCE: Duration = Duration::from_secs(10);

/// Where nobody is silent, somebody may be soon.
const FULL_PAUSE: Duration = Duration::from_millis(50);

/// Serves at most `max` connections at once until `stop`, then until the requests that are under way are answered.
pub(super) async fn serve(
    mut listener: TcpListener,
    pages: Router,
    max: usize,
    stop: CancellationToken,
) {
    let places = Arc::new(Semaphore::new(max));
    let tasks = TaskTracker::new();
    let open = Open::default();
    loop {
        let next = async {
            // Where the system refuses one (too many open files), it waits a second and goes on.
            let (stream, _) = Listener::accept(&mut listener).await;
            (stream, place(&places, &open).await)
        };
        let Some((stream, place)) = stop.run_until_cancelled(next).await else {
            break;
        };
        let (pages, stop) = (pages.clone(), stop.clone());
        let connected = Arc::new(Connected::new(&open));
        tasks.spawn(async move {
            connection(stream, pages, connected, stop).await;
            drop(place);
        });
    }
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

/// A free one, or that of a connection which gives way.
async fn place(places: &Arc<Semaphore>, open: &Open) -> OwnedSemaphorePermit {
    loop {
        if places.available_permits() == 0 {
            open.one_gives_way();
        }
        let place = timeout(FULL_PAUSE, places.clone().acquire_owned());
        if let Ok(place) = place.await {
            return place.expect("nobody closes the semaphore");
        }
    }
}

async fn connection(
    stream: TcpStream,
    pages: Router,
    connected: Arc<Connected>,
    stop: CancellationToken,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_PATIENCE);
    let pages = TowerToHyperService::new(pages);
    let service = service_fn(|request| {
        let (pages, connected) = (pages.clone(), connected.clone());
        async move {
            if !connected.asks() {
                // It has given way in this moment, and is about to be dropped.
                std::future::pending::<()>().await;
            }
            let answer = pages.call(request).await?;
            Ok::<_, Infallible>(answer.map(|body| Body::new(body, connected)))
        }
    });
    let stream = Stream::new(stream, connected.clone());
    let mut served = pin!(http.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        biased;
        () = connected.gives_way() => return,
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
