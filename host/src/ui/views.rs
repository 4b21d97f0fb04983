//! Reads the rows of each page and draws it.

use std::time::Duration;

use rouse_display::pages::{
    self, AuditNext, AuditQuery, Chrome, Found, Job, JobFilter, Live, Loaded, LogRow, Markup,
    Overview, Pairs, Role, RunningAttempts,
};
use rouse_display::when;
use serde_json::{Value, json};

use super::Ui;
use super::problem::Problem;
use super::view::View;
use crate::job::JobId;
use crate::job::cron;
use crate::store::{Listing, add_keys};

/// The number of rows on a page of a list.
const ROWS: i32 = 50;
/// The maximum number of failures of a handler that are grouped by error.
const FAILURES: i32 = 30;
/// The maximum number of failures that are listed for users who may not see errors.
const FAILURES_ANONYMOUS: i32 = 10;
/// The maximum number of jobs that a search examines. A link continues the search.
const EXAMINED: i32 = 10_000;
/// The maximum number of running jobs, of all workers, among which the page of a worker looks for those of this worker.
const RUNNING_EXAMINED: i64 = 10_000;
/// The period that a page of the audit covers. A link leads to the next page.
const AUDITED: Duration = Duration::from_secs(31 * 24 * 3600);

/// A page that was read.
pub(super) struct Shown {
    pub(super) title: String,
    pub(super) body: Markup,
    /// True if it is updated while it is open.
    pub(super) is_live: bool,
}

/// Reads the data of a page, and draws it. Few pages are read for anonymous users at once; a page whose user has
/// disconnected counts until the database has responded.
pub(super) async fn render(
    ui: &Ui,
    chrome: &Chrome,
    view: &View,
    query: &Pairs,
) -> Result<Shown, Problem> {
    let permit = match chrome.role {
        Role::Nobody | Role::Anonymous => ui.anonymous_reads.clone().acquire_owned().await.ok(),
        Role::Viewer | Role::Operator => return draw(ui, chrome, view, query).await,
    };
    let (ui, chrome, view, query) = (ui.clone(), chrome.clone(), view.clone(), query.clone());
    let drawn = tokio::spawn(async move {
        let _permit = permit;
        draw(&ui, &chrome, &view, &query).await
    });
    match drawn.await {
        Ok(shown) => shown,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

/// The same for one request. Few requests of anonymous users may wait: each keeps a connection of the host open. (The
/// number of open pages that are updated for them has its own limit.)
pub(super) async fn render_once(
    ui: &Ui,
    chrome: &Chrome,
    view: &View,
    query: &Pairs,
) -> Result<Shown, Problem> {
    let waiting = match chrome.role {
        Role::Nobody | Role::Anonymous => Some(ui.anonymous_requests.try_acquire()),
        Role::Viewer | Role::Operator => None,
    };
    let Ok(_waiting) = waiting.transpose() else {
        return Err(Problem::crowded());
    };
    render(ui, chrome, view, query).await
}

async fn draw(ui: &Ui, chrome: &Chrome, view: &View, query: &Pairs) -> Result<Shown, Problem> {
    let store = &ui.reads.store;
    let now = store.now().await?;
    let before = || query.get("before").and_then(|id| id.parse::<i64>().ok());
    let (title, body) = match view {
        View::Overview => (
            "Overview".to_owned(),
            pages::overview(chrome, &overview(ui).await?, now),
        ),
        View::Jobs => {
            let filter = JobFilter::read(query).map_err(Problem::invalid)?;
            if filter.looks_at_contents() && !chrome.may_read_contents() {
                return Err(Problem::needs_sign_in("search in payloads and errors"));
            }
            let found = jobs(ui, &filter, before(), now).await?;
            let live = ui.reads.known_backlog().map(|it| Live::from_backlog(&it));
            let body = pages::jobs(chrome, &filter, &found, live, now);
            ("Jobs".to_owned(), body)
        }
        View::Job(id) => (
            format!("Job {id}"),
            pages::job(chrome, &job(ui, chrome, *id).await?, now),
        ),
        View::Flows => {
            let page = store.flows(before().unwrap_or(i64::MAX), ROWS).await?;
            (
                "Flows".to_owned(),
                pages::flows(chrome, &page.flows, page.next_before, now),
            )
        }
        View::Flow(id) => {
            let after = query.get("after").and_then(|id| id.parse::<i64>().ok());
            let flow = store
                .flow_page(*id, after, pages::jobs_of_flow(after))
                .await?;
            let flow = flow.ok_or_else(|| {
                Problem::unknown(format!("There is no flow {id}, or it is no longer kept."))
            })?;
            (format!("Flow {id}"), pages::flow(chrome, &flow, after, now))
        }
        View::Schedules => {
            let mut schedules = store.schedules(None).await?;
            schedules.iter_mut().for_each(describe_schedule);
            (
                "Schedules".to_owned(),
                pages::schedules(chrome, &schedules, now),
            )
        }
        View::Schedule(name) => {
            let mut schedules = store.schedules(Some(name)).await?;
            let schedule = schedules.first_mut();
            let schedule = schedule
                .ok_or_else(|| Problem::unknown(format!("There is no schedule {name}.")))?;
            describe_schedule(schedule);
            (
                format!("Schedule {name}"),
                pages::schedule(chrome, schedule, now),
            )
        }
        View::Queues => {
            let queues = ui.reads.queues().await?;
            let gates = ui.reads.gates().await?;
            (
                "Queues".to_owned(),
                pages::queues(chrome, &queues, &gates, now),
            )
        }
        View::Queue(name) => {
            let mut queues = ui.reads.queues().await?;
            let queue = queues
                .iter_mut()
                .find(|queue| queue["name"] == name.as_str());
            let queue = queue.ok_or_else(|| {
                Problem::unknown(format!(
                    "There is no queue {name}: it has no settings, and was never used."
                ))
            })?;
            if queue["scheduler"]["policy"] == "drr" {
                add_keys(queue, &*ui.reads.fair_keys().await?);
            }
            let backlog = rows_with(&ui.reads.backlog().await?, "queue", name);
            (
                format!("Queue {name}"),
                pages::queue(chrome, queue, &backlog, now),
            )
        }
        View::Workers => {
            let workers = store.workers().await?;
            let workers = workers.ok_or_else(|| Problem::forbidden("the workers"))?;
            ("Workers".to_owned(), pages::workers(chrome, &workers))
        }
        View::Worker(id) => {
            let incarnations = store.incarnations(id, 1).await?;
            let incarnations = incarnations.ok_or_else(|| Problem::forbidden("the workers"))?;
            let newest = incarnations.newest.first();
            let newest =
                newest.ok_or_else(|| Problem::unknown(format!("There is no worker {id}.")))?;
            let earlier = incarnations.count - 1;
            let running = running(ui, id).await?;
            (
                format!("Worker {id}"),
                pages::worker(chrome, newest, earlier, &running, now),
            )
        }
        View::Handlers => {
            let waiting = ui.reads.backlog().await?;
            let waiting: Vec<Value> = waiting
                .iter()
                .filter(|row| row["workers"] == 0)
                .cloned()
                .collect();
            let body = pages::handlers(chrome, &ui.reads.handlers().await?, &waiting, &loaded(ui));
            ("Handlers".to_owned(), body)
        }
        View::Handler(name) => (
            format!("Handler {name}"),
            handler(ui, chrome, name, now).await?,
        ),
        View::Audit => ("Audit".to_owned(), audit(ui, chrome, query, now).await?),
        View::Bulk(number) => {
            if !chrome.may_read_contents() {
                return Err(Problem::needs_sign_in("see changes of jobs"));
            }
            let bulk = ui.bulks.get(*number);
            let bulk = bulk.ok_or_else(|| Problem::unknown("This host does not know that change: the host has restarted since, or another host is making the change.".into()))?;
            ("Change".to_owned(), pages::bulk(chrome, &bulk))
        }
    };
    // Later pages of a list do not change.
    let is_live = query.get("before").is_none();
    Ok(Shown {
        title,
        body,
        is_live,
    })
}

async fn overview(ui: &Ui) -> Result<Overview, Problem> {
    let reads = &ui.reads;
    let (queues, backlog, workers, failing, recent, metrics) = tokio::join!(
        reads.queues(),
        reads.backlog(),
        reads.workers(),
        reads.failing(),
        reads.recent(),
        reads.database_metrics(),
    );
    Ok(Overview {
        queues: queues?,
        backlog: backlog?,
        workers: workers?.to_vec(),
        failing: failing?.to_vec(),
        recent: Value::clone(&*recent?),
        samples: reads.samples.rates(),
        oldest_transaction_s: metrics
            .ok()
            .and_then(|metrics| metrics.oldest_transaction_s),
    })
}

/// The jobs that match, or the error in the filter.
async fn jobs(
    ui: &Ui,
    filter: &JobFilter,
    before: Option<i64>,
    now: f64,
) -> Result<Result<Found, String>, Problem> {
    let listing = Listing {
        filter: filter.json(now),
        before,
        limit: ROWS,
        max_examined: EXAMINED,
    };
    let listed = match ui.reads.store.jobs(&listing).await {
        Ok(listed) => listed,
        Err(error) if error.is_about_data() => return Ok(Err(error.to_string())),
        Err(error) => return Err(error.into()),
    };
    let is_full = listed.jobs.len() == ROWS as usize;
    let last = listed.jobs.last().and_then(|job| job["id"].as_i64());
    Ok(Ok(Found {
        next_before: listed.examined_back_to.or(last.filter(|_| is_full)),
        examined_back_to: listed.examined_back_to,
        is_later_page: before.is_some(),
        jobs: listed.jobs,
    }))
}

/// One job, without its contents for a user who may not see them.
pub(super) async fn job(ui: &Ui, chrome: &Chrome, id: i64) -> Result<Job, Problem> {
    let store = &ui.reads.store;
    let view = store.job_page(JobId(id)).await?;
    let view = view.ok_or_else(|| Problem::unknown(format!("There is no job {id}: it was never enqueued, its transaction is not committed, or it is no longer kept.")))?;
    let contents = chrome.may_read_contents();
    // The sentences of `why` quote errors.
    let why = match view.state == "queued" && contents {
        true => store.why(JobId(id)).await?.unwrap_or_default(),
        false => Vec::new(),
    };
    let log = match contents {
        true => store.newest_log(JobId(id)).await?,
        false => Vec::new(),
    };
    let log: Vec<LogRow> = log
        .into_iter()
        .map(|line| LogRow {
            attempt: line.attempt,
            at: line.at,
            level: line.level,
            text: line.text,
        })
        .collect();
    Ok(Job {
        payload: view.payload.filter(|_| contents),
        result: view.result.filter(|_| contents),
        record: view.record,
        why,
        has_older_lines: log.len() >= crate::store::NEWEST_LINES as usize,
        log,
    })
}

/// The attempts that a worker runs.
async fn running(ui: &Ui, worker_id: &str) -> Result<RunningAttempts, Problem> {
    let rows = ROWS as usize;
    let found = ui
        .reads
        .store
        .running_on(worker_id, i64::from(ROWS) + 1, RUNNING_EXAMINED)
        .await?;
    let mut found = found.ok_or_else(|| Problem::forbidden("the running jobs"))?;
    let has_more = found.attempts.len() > rows;
    found.attempts.truncate(rows);
    Ok(RunningAttempts {
        longest: found.attempts,
        has_more,
        examined_only: Some(found.examined_count).filter(|it| *it >= RUNNING_EXAMINED),
    })
}

async fn handler(ui: &Ui, chrome: &Chrome, name: &str, now: f64) -> Result<Markup, Problem> {
    let store = &ui.reads.store;
    let failed = Listing {
        filter: json!({"handler": name, "state": ["failed", "timed_out"]}),
        before: None,
        limit: match chrome.may_read_contents() {
            true => FAILURES,
            false => FAILURES_ANONYMOUS,
        },
        max_examined: EXAMINED,
    };
    let (fleet, backlog, recent, errors) = tokio::join!(
        ui.reads.handlers(),
        ui.reads.backlog(),
        store.recent(Some(name)),
        store.jobs(&failed)
    );
    let loaded = loaded(ui);
    let fleet = rows_with(&fleet?, "handler", name);
    let backlog = rows_with(&backlog?, "handler", name);
    let recent = recent?.ok_or_else(|| Problem::forbidden("jobs"))?;
    let errors = errors?.jobs;
    let loaded = loaded.iter().find(|it| it.name == name);
    if fleet.is_empty() && backlog.is_empty() && recent["jobs"] == 0 && loaded.is_none() {
        return Err(Problem::unknown(format!(
            "No worker has a handler {name}, and it has no jobs."
        )));
    }
    let handler = pages::HandlerPage {
        name,
        fleet: &fleet,
        backlog: &backlog,
        recent: &recent,
        errors: &errors,
        loaded,
    };
    Ok(pages::handler(chrome, &handler, now))
}

async fn audit(ui: &Ui, chrome: &Chrome, query: &Pairs, now: f64) -> Result<Markup, Problem> {
    let get = |name: &str| query.get(name).map(str::to_owned);
    let filter = AuditQuery {
        who: get("who").unwrap_or_default(),
        queue: get("queue").unwrap_or_default(),
    };
    let before = get("before");
    let after = query.get("after").and_then(|id| id.parse().ok());
    let some = |text| Some(text).filter(|text: &&str| !text.is_empty());
    let of = (some(filter.who.as_str()), some(filter.queue.as_str()));
    let read = ui
        .reads
        .store
        .admin_records(AUDITED, (before.as_deref(), after), of, ROWS);
    let read = match read.await {
        Err(error) if error.is_about_data() => return Err(Problem::invalid(error.to_string())),
        read => read?.ok_or_else(|| Problem::forbidden("the audit"))?,
    };
    // The next page starts after the last action that this one shows or has examined, or with the next period.
    let upto = before.as_deref().and_then(when::epoch).unwrap_or(now);
    let next = match read.next {
        Some((at, id)) => AuditNext {
            at,
            after: Some(id),
        },
        None => AuditNext {
            at: when::rfc3339(upto - AUDITED.as_secs_f64()),
            after: None,
        },
    };
    Ok(pages::audit(chrome, &filter, &read.actions, &next, now))
}

/// The rows that have this value.
fn rows_with(rows: &[Value], key: &str, value: &str) -> Vec<Value> {
    rows.iter()
        .filter(|row| row[key] == value)
        .cloned()
        .collect()
}

/// Adds a description of the schedule's cron expression in English.
fn describe_schedule(schedule: &mut Value) {
    let words = cron::describe(schedule["cron"].as_str().unwrap_or_default());
    schedule["words"] = words.into();
}

/// The requested and missing capabilities of the modules of this host.
fn loaded(ui: &Ui) -> Vec<Loaded> {
    let Some(catalog) = &ui.reads.catalog else {
        return Vec::new();
    };
    let current = catalog.current();
    let handlers = current.handlers.values().map(|handler| {
        let missing = handler.missing();
        let lines = missing.iter().filter_map(|it| it.lines.as_deref());
        Loaded {
            name: handler.manifest.name.clone(),
            requested: handler
                .manifest
                .capabilities
                .iter()
                .map(ToString::to_string)
                .collect(),
            missing: lines.collect::<Vec<_>>().join("\n"),
        }
    });
    handlers.collect()
}
