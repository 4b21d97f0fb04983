//! Payloads and results as they are, never as HTML.

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse as _, Response};

use super::Ui;
use super::access::User;
use super::problem::Problem;
use super::views::job;

/// `GET /ui/jobs/ID/payload`.
pub(super) async fn payload(ui: State<Ui>, user: Extension<User>, id: Path<String>) -> Response {
    content(ui, user, id, true).await
}

/// `GET /ui/jobs/ID/result`.
pub(super) async fn result(ui: State<Ui>, user: Extension<User>, id: Path<String>) -> Response {
    content(ui, user, id, false).await
}

async fn content(
    State(ui): State<Ui>,
    Extension(user): Extension<User>,
    Path(id): Path<String>,
    is_payload: bool,
) -> Response {
    let chrome = ui.chrome(&user);
    if !chrome.may_read_contents() {
        return ui.problem_page(&user, &Problem::needs_sign_in("read payloads and results"));
    }
    let job = match id.parse() {
        Ok(id) => job(&ui, &chrome, id).await,
        Err(_) => Err(Problem::unknown(format!("{id} is not a job id."))),
    };
    match job {
        Ok(job) => {
            let text = if is_payload { job.payload } else { job.result };
            // Never as HTML, regardless of its contents.
            let headers = [
                (header::CONTENT_TYPE, "text/plain; charset=utf-8"),
                (header::CACHE_CONTROL, "no-store"),
            ];
            (headers, text.unwrap_or_default()).into_response()
        }
        Err(problem) => ui.problem_page(&user, &problem),
    }
}
