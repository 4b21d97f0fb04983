//! `GET /jobs/{id}`: the state of a job, at once or, with `?wait=30s`, once it has ended.

use std::time::Duration;

use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use tokio_util::sync::CancellationToken;

use super::problem::Problem;
use super::{Access, Pages};
use crate::duration;
use crate::ends::{Ends, Seen};
use crate::job::JobId;

/// The maximum `wait`. Longer waits would exceed the timeouts of proxies.
const WAIT_MAX: Duration = Duration::from_secs(300);

/// The parts that reading jobs over HTTP needs.
#[derive(Debug, Clone)]
pub struct Jobs {
    /// The callers that may read.
    pub access: Access,
    /// Waits for the ends of jobs.
    pub ends: Ends,
    /// Cancelled when the host stops: waiting callers then get their responses.
    pub stopping: CancellationToken,
}

/// Responds with the job. If the caller disconnects, this future is dropped, and with it the wait.
pub(super) async fn job(
    State(pages): State<Pages>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    let Some(jobs) = pages.jobs else {
        return Problem::unrelated(
            StatusCode::FORBIDDEN,
            "off",
            "this host does not serve /jobs: it needs a queue and a token; set ROUSE_INVOKE_TOKEN, or invoke_token_file in rouse.toml, and restart the host. Callers send `authorization: Bearer TOKEN`",
        )
        .into_response();
    };
    match respond(&jobs, &id, query.as_deref().unwrap_or_default(), &headers).await {
        Ok(response) => response,
        Err(problem) => problem.into_response(),
    }
}

async fn respond(
    jobs: &Jobs,
    id: &str,
    query: &str,
    headers: &HeaderMap,
) -> Result<Response, Problem> {
    jobs.access
        .admit_caller(headers)
        .map_err(Problem::uncounted)?;
    let id = id.parse().ok().filter(|id: &i64| *id > 0).ok_or_else(|| {
        let why = format!("{id:?} is not a job id, such as 17");
        Problem::unrelated(StatusCode::BAD_REQUEST, "invalid_id", why)
    })?;
    let wait = wait(query)
        .map_err(|why| Problem::unrelated(StatusCode::BAD_REQUEST, "invalid_wait", why))?;
    let seen = tokio::select! {
        seen = jobs.ends.wait(JobId(id), wait) => seen,
        () = jobs.stopping.cancelled() => {
            return Err(unavailable("stopping", "this host is stopping"));
        }
    };
    let Ok(seen) = seen else {
        return Err(unavailable(
            "full",
            "too many callers wait for jobs on this host; retry later",
        ));
    };
    match seen {
        Seen::Live(row) | Seen::Ended(row) => {
            let kind = [
                (header::CONTENT_TYPE, "application/json"),
                (header::CACHE_CONTROL, "no-store"),
            ];
            Ok((kind, row).into_response())
        }
        Seen::Unknown => Err(Problem::unrelated(
            StatusCode::NOT_FOUND,
            "unknown_job",
            format!(
                "no job {id}: it was never enqueued, its transaction is not committed, or it is no longer kept"
            ),
        )),
        Seen::Refused(why) => Err(Problem::unrelated(
            StatusCode::FORBIDDEN,
            "refused",
            format!("the database refuses to show the job to this host: {why}"),
        )),
        Seen::Unreadable(why) => Err(Problem::unrelated(
            StatusCode::INTERNAL_SERVER_ERROR,
            "unreadable",
            format!("the database cannot read the job: {why}"),
        )),
        Seen::Nothing => Err(unavailable("database", "the database does not respond")),
    }
}

fn unavailable(kind: &'static str, why: &str) -> Problem {
    Problem::unrelated(StatusCode::SERVICE_UNAVAILABLE, kind, why)
}

/// Parses the query: nothing, or `wait=TIME`.
fn wait(query: &str) -> Result<Duration, String> {
    let mut wait = Duration::ZERO;
    for (key, value) in query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
    {
        if key != "wait" {
            return Err(format!("{key:?} is not a parameter; the only one is wait"));
        }
        wait = duration::argument(value).map_err(|why| format!("wait={value}: {why}"))?;
    }
    match wait <= WAIT_MAX {
        true => Ok(wait),
        false => Err("wait is longer than 5m; wait again after that".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_is_a_duration_of_at_most_five_minutes() {
        assert_eq!(wait(""), Ok(Duration::ZERO));
        assert_eq!(wait("wait=30s"), Ok(Duration::from_secs(30)));
        assert_eq!(wait("wait=5m"), Ok(WAIT_MAX));
        for (query, why) in [
            ("wait=6m", "longer than 5m"),
            ("wait", "is not a duration"),
            ("wait=30", "is not a duration"),
            ("timeout=3s", "\"timeout\" is not a parameter"),
        ] {
            let error = wait(query).unwrap_err();
            assert!(error.contains(why), "{query}: {error}");
        }
    }
}
