//! Forms of operators: each calls one function of schema `rouse` and returns to its page.

use std::time::Duration;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Redirect, Response};
use percent_encoding::percent_decode_str;
use rouse_display::pages::{self, JobFilter, Notice, Pairs, Tone, live_main, page};
use rouse_display::plural::{choose, counted};

use super::access::User;
use super::bulk::{self, BulkAction};
use super::problem::Problem;
use super::{Ui, html, pairs, path_of};
use crate::http::{Peer, only_value};
use crate::job::JobId;
use crate::store::{JsonText, Store, StoreError, When};

/// The maximum number of jobs of a queue that one statement of a purge cancels.
const PURGED_AT_ONCE: i32 = 1000;
/// The maximum number of jobs of a flow that one statement changes.
const OF_FLOW_AT_ONCE: i32 = 1000;
/// The time after which a purge stops. The next purge continues it.
const PURGE_TIMEOUT: Duration = Duration::from_secs(8);

/// The result of an action: a sentence, and the next path (empty: back to the page).
struct Done {
    text: String,
    to: String,
}

impl Done {
    fn here(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            to: String::new(),
        }
    }
}

/// The sign-in page.
pub(super) async fn sign_in_page(
    State(ui): State<Ui>,
    Extension(user): Extension<User>,
    RawQuery(query): RawQuery,
) -> Response {
    let query = pairs(&query.unwrap_or_default());
    sign_in_again(
        &ui,
        &user,
        StatusCode::OK,
        "",
        query.get("next").unwrap_or("/"),
    )
}

fn sign_in_again(ui: &Ui, user: &User, status: StatusCode, why: &str, next: &str) -> Response {
    let chrome = ui.chrome(user);
    let main = live_main("", &pages::sign_in(&chrome, why, next));
    html(status, page(&chrome, None, "Sign in", &main).into_string())
}

/// Checks a token.
pub(super) async fn sign_in(
    State(ui): State<Ui>,
    Extension(user): Extension<User>,
    Extension(Peer(peer)): Extension<Peer>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let form = pairs(&String::from_utf8_lossy(&body));
    let next = form.get("next").unwrap_or("/");
    let forwarded = axum::http::HeaderName::from_static("x-forwarded-proto");
    let is_https = only_value(&headers, forwarded) == Some("https");
    let token = form.get("token").unwrap_or_default();
    match ui.access.sign_in(peer, token, &ui.base(), is_https) {
        Ok(Some(cookie)) => {
            // Only paths of the dashboard are accepted.
            let next = if next.starts_with('/') && !next.starts_with("//") {
                next
            } else {
                "/"
            };
            let to = Redirect::to(&format!("{}{next}", ui.base()));
            ([(header::SET_COOKIE, cookie)], to).into_response()
        }
        Ok(None) => sign_in_again(
            &ui,
            &user,
            StatusCode::FORBIDDEN,
            "That is not a token of this installation.",
            next,
        ),
        Err(wait) => {
            let why = format!("Too many tries: wait for {} s.", wait.as_secs() + 1);
            sign_in_again(&ui, &user, StatusCode::TOO_MANY_REQUESTS, &why, next)
        }
    }
}

/// Ends a sign-in.
pub(super) async fn sign_out(State(ui): State<Ui>) -> Response {
    let gone = ui.access.sign_out(&ui.base());
    (
        [(header::SET_COOKIE, gone)],
        Redirect::to(&format!("{}/", ui.base())),
    )
        .into_response()
}

/// `POST` of a form of a page.
pub(super) async fn act(
    State(ui): State<Ui>,
    Extension(user): Extension<User>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let form = pairs(&String::from_utf8_lossy(&body));
    if !ui
        .access
        .is_form_of(&user, form.get("csrf").unwrap_or_default())
    {
        let why = "This form is no longer valid, for instance because the host has restarted. Go back, reload the page, and send the form again.";
        return ui.problem_for(&user, StatusCode::FORBIDDEN, "Refused", why);
    }
    let parts: Vec<String> = path_of(&uri)
        .trim_start_matches('/')
        .split('/')
        .map(|part| percent_decode_str(part).decode_utf8_lossy().into_owned())
        .collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    if parts == ["jobs", "change"] {
        return change_jobs(&ui, &user, &form, &headers).await;
    }
    let ended = run_action(&ui.reads.store.on_behalf_of(&user.name), &parts, &form).await;
    // An action that has failed may have changed something before.
    ui.reads.forget();
    match ended {
        Ok(Some(done)) => back(
            &ui,
            &headers,
            Notice {
                tone: Tone::Good,
                text: done.text,
            },
            &done.to,
        ),
        Ok(None) => ui.problem_for(
            &user,
            StatusCode::NOT_FOUND,
            "Not found",
            "There is no such action.",
        ),
        Err(problem) => back(
            &ui,
            &headers,
            Notice {
                tone: Tone::Bad,
                text: problem,
            },
            "",
        ),
    }
}

/// Redirects to this path, or back to the page that sent the form; that page shows the notice.
fn back(ui: &Ui, headers: &HeaderMap, notice: Notice, to: &str) -> Response {
    let cookie = ui.access.notice_cookie(&notice, &ui.base());
    let base = ui.base();
    let from = only_value(headers, header::REFERER)
        .and_then(|url| url.split_once("://")?.1.split_once('/'))
        .map(|(_, path)| format!("/{path}"))
        .filter(|path| path.starts_with(&format!("{base}/")));
    let to = match to {
        "" => from.unwrap_or_else(|| format!("{base}/")),
        path => format!("{base}{path}"),
    };
    ([(header::SET_COOKIE, cookie)], Redirect::to(&to)).into_response()
}

/// Runs one action. `None` if there is no action at this path; `Err`: the reason why it was refused.
async fn run_action(store: &Store, parts: &[&str], form: &Pairs) -> Result<Option<Done>, String> {
    let text = |error: StoreError| error.to_string();
    let id = |text: &str| {
        text.parse::<i64>()
            .map_err(|_| format!("{text} is not an id"))
    };
    let done = match *parts {
        ["jobs", job, "retry"] => {
            let made = store.retry(JobId(id(job)?)).await.map_err(text)?;
            Done {
                text: format!("Job {job} is retried as job {made}."),
                to: format!("/jobs/{made}"),
            }
        }
        ["jobs", job, "cancel"] => match store.cancel(JobId(id(job)?)).await.map_err(text)? {
            true => Done::here(format!("Job {job} is cancelled.")),
            false => return Err(format!("Job {job} had already ended.")),
        },
        ["jobs", job, "run-now"] => {
            store
                .reschedule(JobId(id(job)?), &When::Now)
                .await
                .map_err(text)?;
            Done::here(format!("Job {job} is due now."))
        }
        ["jobs", job, "complete"] => {
            let result = form.get("result").unwrap_or("null").to_owned();
            store
                .complete(JobId(id(job)?), JsonText(result))
                .await
                .map_err(text)?;
            Done::here(format!("Job {job} has succeeded with this result."))
        }
        ["jobs", job, "fail"] => {
            let message = form.get("message").ok_or("The message is missing.")?;
            store.fail(JobId(id(job)?), message).await.map_err(text)?;
            Done::here(format!("Job {job} has failed with this message."))
        }
        ["jobs", job, "priority"] => {
            let priority = form.get("priority").ok_or("The priority is missing.")?;
            let done = store.set_priority(JobId(id(job)?), priority);
            done.await.map_err(text)?;
            Done::here(format!("Job {job} has the priority {priority}."))
        }
        ["jobs", job, "replace-payload"] => {
            let payload = form.get("payload").ok_or("The payload is missing.")?;
            let done = store.replace_payload(JobId(id(job)?), JsonText(payload.to_owned()));
            let made = done.await.map_err(text)?;
            Done {
                text: format!("Job {made} has this payload. Job {job} is cancelled."),
                to: format!("/jobs/{made}"),
            }
        }
        ["jobs", job, "signal"] => {
            let name = form
                .get("name")
                .ok_or("The name of the signal is missing.")?;
            let payload = form.get("payload").unwrap_or("null").to_owned();
            match store
                .signal(JobId(id(job)?), name, JsonText(payload))
                .await
                .map_err(text)?
            {
                true => Done::here(format!("Job {job} has received the signal {name}.")),
                false => return Err(format!("Job {job} had already ended.")),
            }
        }
        ["flows", flow, "retry"] => {
            let flow = id(flow)?;
            let before = store.now().await.map_err(text)?;
            let mut all = 0;
            loop {
                match store.retry_flow(flow, OF_FLOW_AT_ONCE, before).await {
                    Ok(0) => break,
                    Ok(retried) => all += retried,
                    Err(error) => return Err(stopped(all, &of_flow(all, flow, "retried"), error)),
                }
            }
            Done::here(of_flow(all, flow, "retried") + ".")
        }
        ["flows", flow, "cancel"] => {
            let flow = id(flow)?;
            let mut all = 0;
            loop {
                match store.cancel_flow(flow, OF_FLOW_AT_ONCE).await {
                    Ok(0) => break,
                    Ok(cancelled) => all += cancelled,
                    Err(error) => {
                        return Err(stopped(all, &of_flow(all, flow, "cancelled"), error));
                    }
                }
            }
            Done::here(of_flow(all, flow, "cancelled") + ".")
        }
        ["schedules", name, "run"] => {
            let job = store.run_schedule(name).await.map_err(text)?;
            Done {
                text: format!("Schedule {name} has enqueued job {job}."),
                to: format!("/jobs/{job}"),
            }
        }
        ["schedules", name, "pause"] => {
            store.pause_schedule(name).await.map_err(text)?;
            Done::here(format!("Schedule {name} is paused."))
        }
        ["schedules", name, "resume"] => {
            store.resume_schedule(name).await.map_err(text)?;
            Done::here(format!("Schedule {name} is resumed."))
        }
        ["queues", name, "pause"] => {
            store.pause_queue(name).await.map_err(text)?;
            Done::here(format!("Queue {name} is paused: none of its jobs starts."))
        }
        ["queues", name, "resume"] => {
            store.resume_queue(name).await.map_err(text)?;
            Done::here(format!("Queue {name} is resumed."))
        }
        ["queues", name, "purge"] => {
            let since = std::time::Instant::now();
            let mut all = 0;
            let rest = loop {
                match store.purge_queue(name, PURGED_AT_ONCE).await {
                    Ok(0) => break "",
                    Ok(purged) => all += purged,
                    Err(error) => return Err(stopped(all, &of_queue(all, name), error)),
                }
                if since.elapsed() > PURGE_TIMEOUT {
                    break " More are left: purge again.";
                }
            };
            Done::here(format!("{}.{rest}", of_queue(all, name)))
        }
        ["workers", worker, "clear-timeouts"] => {
            store.clear_timeouts(worker).await.map_err(text)?;
            Done::here(format!("The timeouts of worker {worker} are cleared."))
        }
        _ => return Ok(None),
    };
    Ok(Some(done))
}

/// Why a change has stopped, after it has changed this many jobs, as `done` says: each statement has been committed.
fn stopped(changed: i32, done: &str, error: StoreError) -> String {
    match changed {
        0 => error.to_string(),
        _ => format!("{done}; others are left: {error}"),
    }
}

fn of_flow(changed: i32, flow: i64, done_word: &str) -> String {
    let are = choose(changed, "is", "are");
    format!(
        "{} of flow {flow} {are} {done_word}",
        counted(changed, "job")
    )
}

fn of_queue(cancelled: i32, queue: &str) -> String {
    let are = choose(cancelled, "is", "are");
    let jobs = counted(cancelled, "ready job");
    format!("{jobs} of queue {queue} {are} cancelled")
}

/// Changes several jobs: the selected ones at once, or all that match a filter, after a confirmation that shows their
/// number.
async fn change_jobs(ui: &Ui, user: &User, form: &Pairs, headers: &HeaderMap) -> Response {
    let problem = |problem: Problem| ui.problem_page(user, &problem);
    let started = |number: Result<u64, Problem>| match number {
        Ok(number) => Redirect::to(&format!("{}/bulk/{number}", ui.base())).into_response(),
        Err(error) => problem(error),
    };
    let filter = match JobFilter::read(form) {
        Ok(filter) => filter,
        Err(why) => return problem(Problem::invalid(why)),
    };
    let ids: Vec<i64> = form.all("id").filter_map(|id| id.parse().ok()).collect();
    let action = form.get("do").unwrap_or_default();
    let (what, is_all) = match action {
        "retry" => (BulkAction::Retry, false),
        "cancel" => (BulkAction::Cancel, false),
        "retry-all" => (BulkAction::Retry, true),
        "cancel-all" => (BulkAction::Cancel, true),
        "run-now" => (BulkAction::RunNow, false),
        "delete" => (BulkAction::Delete, false),
        "run-now-all" => (BulkAction::RunNow, true),
        "delete-all" => (BulkAction::Delete, true),
        other => return problem(Problem::invalid(format!("{other:?} is not an action."))),
    };
    if !is_all {
        if ids.is_empty() {
            let notice = Notice {
                tone: Tone::Bad,
                text: "No job was selected.".into(),
            };
            return back(ui, headers, notice, "");
        }
        return started(bulk::change_ids(ui, what, ids, &user.name));
    }
    let until = form.get("until-now").and_then(|until| until.parse().ok());
    match (form.get("sure"), until) {
        (Some("yes"), Some(until)) => {
            started(bulk::change_all(ui, what, &filter, until, &user.name))
        }
        _ => match bulk::confirm(ui, user, what, &filter).await {
            Ok(page) => page,
            Err(error) => problem(error),
        },
    }
}
