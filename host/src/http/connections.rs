//! Takes connections: how many there may be at once, and how long each may be silent.
//!
//! `axum::serve` has no bound for either, so that whoever reaches the port could take all files that the process may
//! open, without sending a single request. Where all places are taken, the connection that has been silent for longest gives
//! way: whoever asks something is answered, however many there are who only connect.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

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
    let open = TaskTracker::new();
    let silent = Silent::default();
    for number in 0_u64.. {
        let next = async {
            // Where the system refuses one (too many open files), it waits a second and goes on.
            let (stream, _) = Listener::accept(&mut listener).await;
            (stream, place(&places, &silent).await)
        };
        let Some((stream, place)) = stop.run_until_cancelled(next).await else {
            break;
        };
        let (pages, stop) = (pages.clone(), stop.clone());
        let connected = Connected::new(number, silent.clone());
        open.spawn(async move {
            connection(stream, pages, connected, stop).await;
            drop(place);
        });
    }
    drop(listener);
    open.close();
    open.wait().await;
}

/// A free one, or that of a connection which is silent.
async fn place(places: &Arc<Semaphore>, silent: &Silent) -> OwnedSemaphorePermit {
    loop {
        if places.available_permits() == 0 {
            silent.longest_gives_way();
        }
        let place = timeout(FULL_PAUSE, places.clone().acquire_owned());
        if let Ok(place) = place.await {
            return place.expect("nobody closes the semaphore");
        }
    }
}

/// The connections from which the next request is awaited: since when, and what makes each give way.
#[derive(Clone, Default)]
struct Silent(Arc<Mutex<HashMap<u64, (Instant, CancellationToken)>>>);

impl Silent {
    fn longest_gives_way(&self) {
        let mut silent = self.lock();
        let longest = silent.iter().min_by_key(|(_, (since, _))| *since);
        if let Some(number) = longest.map(|(number, _)| *number)
            && let Some((_, give_way)) = silent.remove(&number)
        {
            give_way.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, (Instant, CancellationToken)>> {
        // Nothing panics while it holds the lock but the allocator.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One connection among them, silent from its begin.
struct Connected {
    number: u64,
    silent: Silent,
    give_way: CancellationToken,
}

impl Connected {
    fn new(number: u64, silent: Silent) -> Self {
        let give_way = CancellationToken::new();
        let connected = Self {
            number,
            silent,
            give_way,
        };
        connected.waits();
        connected
    }

    fn asks(&self) {
        self.silent.lock().remove(&self.number);
    }

    fn waits(&self) {
        let since = (Instant::now(), self.give_way.clone());
        self.silent.lock().insert(self.number, since);
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.silent.lock().remove(&self.number);
    }
}

async fn connection(
    stream: TcpStream,
    pages: Router,
    connected: Connected,
    stop: CancellationToken,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD_PATIENCE);
    let pages = TowerToHyperService::new(pages);
    let pages = service_fn(|request| {
        connected.asks();
        let answer = pages.call(request);
        async {
            let answer = answer.await;
            connected.waits();
            answer
        }
    });
    let mut served = pin!(http.serve_connection(TokioIo::new(stream), pages));
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = connected.give_way.cancelled() => return,
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        debug!(%error, "a connection has ended early");
    }
}
