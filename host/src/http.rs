//! Health, metrics, invocations and the states of jobs over HTTP.
//!
//! `GET /healthz` shows that the process is alive, `GET /readyz` whether it can run jobs, and `GET /metrics` all
//! metrics as Prometheus text. These three need no token and change nothing. The address is therefore on loopback
//! unless the operator sets another; on loopback, `/readyz` and `/metrics` check the `host` header. `POST
//! /invoke/{handler}` runs a handler for callers with a token; `rouse dev` also runs it for programs on this machine
//! without a token. `GET /jobs/{id}` shows the same callers the state of a job, and how it has ended. The dashboard
//! (`ui`) is added to these routes as a whole; it decides itself who may read.

mod access;
mod connections;
mod invoke;
mod jobs;
mod metrics;
mod problem;
mod readiness;

use std::{future::Future, io, net::SocketAddr, time::Duration};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, State},
    http::{HeaderMap, StatusCode, header},
    middleware,
    response::IntoResponse,
    routing::{get, post},
};
use tokio::{net::TcpListener, time};
use tokio_util::sync::CancellationToken;

use crate::ends::WAITERS_MAX;

pub use access::{Access, Token};
pub(crate) use access::{is_from_a_proxy, is_loopback, is_this_machine, only_value, port_of};
pub(crate) use connections::Peer;
pub use invoke::Invocations;
pub use jobs::Jobs;
pub use metrics::{Metrics, install_metrics};
pub use readiness::{Readiness, Report};

/// The time for which requests may continue once the host is stopping.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// The reason why health and metrics cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// Another process listens at this address.
    #[error(
        "the address {address} is in use, perhaps by another rouse: choose another with --http, or stop that process"
    )]
    Taken {
        /// The address.
        address: SocketAddr,
    },
    /// The system refused the address.
    #[error("cannot listen on {address} ({source}): choose another with --http")]
    Refused {
        /// The address.
        address: SocketAddr,
        /// The system error.
        source: io::Error,
    },
}

/// The sources of the pages.
#[derive(Debug, Clone)]
pub struct Pages {
    /// The source of `/readyz`.
    pub readiness: Readiness,
    /// The source of `/metrics`.
    pub metrics: Metrics,
    /// The source of `/invoke`; `None` if invocations are off.
    pub invocations: Option<Invocations>,
    /// The source of `/jobs`; `None` if there is no queue, or no caller may read.
    pub jobs: Option<Jobs>,
    /// The dashboard, which decides itself who may read; `None` if it is off.
    pub dashboard: Option<Dashboard>,
}

/// The pages of the dashboard.
#[derive(Debug, Clone)]
pub struct Dashboard {
    /// All its routes.
    pub router: Router,
    /// The maximum number of additional connections for its users.
    pub connections_max: usize,
}

/// Binds the address before anything else starts, so that a conflict is reported at once.
///
/// # Errors
/// If the address is taken or refused.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, HttpError> {
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(listener),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(HttpError::Taken { address }),
        Err(source) => Err(HttpError::Refused { address, source }),
    }
}

/// Serves until `shutdown` completes, then gives requests in progress up to 5 s.
pub async fn serve(listener: TcpListener, pages: Pages, shutdown: impl Future<Output = ()>) {
    let on_loopback = listener.local_addr().is_ok_and(access::is_loopback);
    let invocations = pages.invocations.as_ref();
    let max = connections::OTHER_CONNECTIONS_MAX
        + invocations.map_or(0, |it| it.invoker.max())
        + pages.jobs.as_ref().map_or(0, |_| WAITERS_MAX)
        + pages.dashboard.as_ref().map_or(0, |it| it.connections_max);
    serve_router(listener, router(pages, on_loopback), max, shutdown).await;
}

/// Like [`serve`], for these routes, on at most `max` connections.
pub async fn serve_router(
    listener: TcpListener,
    router: Router,
    max: usize,
    shutdown: impl Future<Output = ()>,
) {
    let stop = CancellationToken::new();
    let timeout = async {
        shutdown.await;
        stop.cancel();
        time::sleep(STOP_TIMEOUT).await;
    };
    tokio::select! {
        () = connections::serve(listener, router, max, stop.clone()) => {}
        () = timeout => {}
    }
}

/// With `on_loopback`, only programs on this machine may read the status pages.
fn router(mut pages: Pages, on_loopback: bool) -> Router {
    let dashboard = pages.dashboard.take();
    let payload_bytes_max = match &pages.invocations {
        Some(invocations) => invocations.payload_bytes_max,
        None => 0,
    };
    let invoke = post(invoke::invoke).layer(DefaultBodyLimit::max(payload_bytes_max));
    let mut status = Router::new()
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics_page));
    if on_loopback {
        status = status.layer(middleware::from_fn(access::only_from_this_machine));
    }
    let all = status
        .route("/invoke/{handler}", invoke)
        .route("/jobs/{id}", get(jobs::job))
        .route("/healthz", get(async || "ok\n"))
        .with_state(pages);
    match dashboard {
        Some(dashboard) => all.merge(dashboard.router),
        None => all,
    }
}

async fn readyz(State(pages): State<Pages>) -> impl IntoResponse {
    let report = pages.readiness.report();
    let status = if report.is_ready() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, Json(report))
}

async fn metrics_page(State(pages): State<Pages>, headers: HeaderMap) -> impl IntoResponse {
    let accept = headers.get(header::ACCEPT);
    let accept = accept.and_then(|accept| accept.to_str().ok());
    let (kind, page) = pages.metrics.render(accept);
    ([(header::CONTENT_TYPE, kind)], page)
}
