//! Workers: what they run, when they were last seen, which versions they have.

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::layout::Chrome;
use crate::plural::{choose, counted};

/// The maximum number of listed workers.
const LISTED_MAX: usize = 500;

/// The list, as `rouse workers --json` prints it.
pub fn workers(chrome: &Chrome, workers: &[Value]) -> Markup {
    html! {
        div class="title" { h1 { "Workers" } }
        section class="card scroll" tabindex="0" aria-label="Workers" {
            @if workers.is_empty() { p { "No worker has registered yet: " code { "rouse serve" } " starts one." } }
            @else {
                table class="stack" {
                    thead { tr {
                        th { "Worker" } th { "State" } th { "Slots in use" } th { "Host" } th { "Version" } th { "Seen" }
                        th class="number" { "Succeeded" } th class="number" { "Failed" } th { "Memory" }
                    } }
                    tbody { @for worker in workers.iter().take(LISTED_MAX) { (row(chrome, worker)) } }
                }
            }
        }
    }
}

fn row(chrome: &Chrome, worker: &Value) -> Markup {
    let stats = &worker["stats"];
    html! {
        tr id={ "worker-" (cells::plain(&worker["worker_id"])) } {
            td data-label="Worker" { a class="row" href={ (chrome.base) "/workers/" (chrome.encoded(cells::text(worker, "worker_id"))) } { (cells::plain(&worker["worker_id"])) } }
            td data-label="State" { (cells::state(cells::text(worker, "state"))) (flags(worker)) }
            td class="keep" data-label="Slots in use" { (slots(worker)) }
            td data-label="Host" { (cells::plain(&worker["hostname"])) }
            td class="keep" data-label="Version" { (cells::plain(&worker["version"])) }
            td class="keep" data-label="Seen" { (seen(worker)) }
            td class="number" data-label="Succeeded" { (cells::count(stats, "completed")) }
            td class="number" data-label="Failed" { (cells::count(stats, "failed")) }
            td class="keep" data-label="Memory" { @if let Some(memory) = stats["memory_bytes"].as_u64() { (cells::bytes(memory)) } }
        }
    }
}

fn seen(worker: &Value) -> String {
    match worker["seen_s"].as_f64() {
        Some(ago) => format!("{} ago", crate::when::short(ago)),
        None => String::new(),
    }
}

fn slots(worker: &Value) -> Markup {
    let slots = worker["slots"].as_i64().unwrap_or_default();
    html! {
        @match worker["stats"]["active"].as_i64() {
            Some(active) => {
                meter min="0" max=(slots.max(1)) value=(active) aria-label={ "Slots in use: " (active) " of " (slots) } {}
                " " (active) " of " (slots)
            },
            None => { "– of " (slots) },
        }
    }
}

/// Marks for unusual conditions.
fn flags(worker: &Value) -> Markup {
    html! {
        @if worker["limited"] == true { " " (cells::state("limited")) }
        @if worker["stats"]["loading"] == true { " " (cells::state("loading")) }
        @if worker["timeouts"].as_i64() > Some(0) { " " span class="state bad" { (worker["timeouts"]) " timed out" } }
        @if worker["refused"].as_i64() > Some(0) { " " span class="state bad" { (worker["refused"]) " refused" } }
    }
}

/// The attempts that a worker runs.
#[derive(Debug, Clone, Default)]
pub struct RunningAttempts {
    /// Those that have run longest: `id`, `handler`, `queue`, `tenant`, `attempt`, `running_s`.
    pub longest: Vec<Value>,
    /// True if it runs more than these.
    pub has_more: bool,
    /// The number of running jobs, of all workers, that were examined; `None`: all of them.
    pub examined_only: Option<i64>,
}

/// One worker: its newest incarnation, the number of earlier ones, and the attempts that it runs.
pub fn worker(
    chrome: &Chrome,
    worker: &Value,
    earlier: i64,
    running: &RunningAttempts,
    now: f64,
) -> Markup {
    let stats = &worker["stats"];
    let timeouts = worker["timeouts"].as_i64().unwrap_or_default();
    let list = |key: &str, none: &str| match cells::joined(&worker[key]) {
        text if text.is_empty() => none.to_owned(),
        text => text,
    };
    html! {
        div class="title" {
            h1 { "Worker " (cells::plain(&worker["worker_id"])) }
            (cells::state(cells::text(worker, "state"))) (flags(worker))
        }
        div class="stats" {
            div class="stat" { b { (describe_slots(worker)) } span { "slots in use" } }
            div class="stat" { b { (cells::count(stats, "completed")) } span { "jobs succeeded" } }
            div class="stat" { b { (cells::count(stats, "failed")) } span { "jobs failed" } }
            div class="stat" { b { @if let Some(ms) = stats["average_ms"].as_f64() { (crate::when::took(ms / 1e3)) } @else { "–" } } span { "average attempt" } }
            div class="stat" { b { @if let Some(cores) = stats["cpu_cores"].as_f64() { (format!("{cores:.2}")) } @else { "–" } } span { "cores" } }
            div class="stat" { b { @if let Some(bytes) = stats["memory_bytes"].as_u64() { (cells::bytes(bytes)) } @else { "–" } } span { "memory" } }
        }
        @if timeouts > 0 {
            p class="notice bad" {
                (counted(timeouts, "attempt")) " " (choose(timeouts, "has", "have")) " timed out since " (cells::exact_time(&worker["timed_out_since"], now))
                "; the last for job " (cells::job(chrome, &worker["timed_out_job"])) " "
                (cells::handler(chrome, cells::text(worker, "timed_out_handler"))) ". "
                (chrome.button(&format!("/workers/{}/clear-timeouts", chrome.encoded(cells::text(worker, "worker_id"))), "Clear", "", ""))
            }
        }
        (attempts(chrome, running))
        div class="pair" {
            section class="card" {
                h2 { "Facts" }
                dl class="facts" {
                    dt { "Host" } dd { (cells::plain(&worker["hostname"])) ", " (cells::plain(&worker["platform"])) }
                    dt { "Version" } dd { (cells::plain(&worker["version"])) }
                    dt { "Queues" } dd { (list("queues", "all")) }
                    dt { "Tags" } dd { (list("tags", "none")) }
                    dt { "Login" } dd { (cells::plain(&worker["login"])) }
                    dt { "Registered" } dd { (cells::exact_time(&worker["registered_at"], now)) }
                    dt { "Seen" } dd { (cells::exact_time(&worker["seen_at"], now)) }
                    @if worker["draining_at"].is_string() { dt { "Draining" } dd { (cells::exact_time(&worker["draining_at"], now)) } }
                    @if worker["ended_at"].is_string() { dt { "Ended" } dd { (cells::exact_time(&worker["ended_at"], now)) } }
                    @if let Some(free) = stats["disk_free_bytes"].as_u64() { dt { "Free disk" } dd { (cells::bytes(free)) } }
                    @if earlier > 0 { dt { "Earlier incarnations" } dd { (earlier) } }
                }
            }
            section class="card scroll" tabindex="0" aria-label="Handlers of the worker" {
                h2 { "Handlers" }
                table {
                    thead { tr { th { "Handler" } th { "Version" } th { "Module" } th { "Grants" } } }
                    tbody {
                        @for name in worker["handlers"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                            // Null if the incarnation has ended.
                            @let it = &worker["capabilities"][name];
                            tr {
                                td { (cells::handler(chrome, name)) @if it["parked"].is_string() { " " (cells::state("parked")) } }
                                td class="keep" { (cells::plain(&it["version"])) }
                                td class="keep mono" { (digest(&it["sha256"])) }
                                td { (cells::joined(&it["grants"])) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn attempts(chrome: &Chrome, running: &RunningAttempts) -> Markup {
    if running.longest.is_empty() && running.examined_only.is_none() {
        return html! {};
    }
    html! {
        section class="card scroll" tabindex="0" aria-label="Running jobs of the worker" {
            h2 { "Running" }
            @if running.has_more {
                p class="soft" {
                    "Only the " (running.longest.len()) " that have run longest are listed. "
                    code { "rouse top --limit 1000" }
                    " lists those of all workers."
                }
            }
            @if let Some(examined) = running.examined_only {
                p class="soft" {
                    "There may be more: only " (cells::number(examined)) " running jobs of all workers were examined."
                }
            }
            @if !running.longest.is_empty() {
                table class="stack" {
                    thead { tr { th { "Job" } th { "Handler" } th { "Queue" } th { "Tenant" } th class="number" { "Attempt" } th { "Runs for" } } }
                    tbody {
                        @for attempt in &running.longest {
                            tr id={ "job-" (attempt["id"]) } {
                                td class="keep" data-label="Job" { (cells::job(chrome, &attempt["id"])) }
                                td data-label="Handler" { (cells::handler(chrome, cells::text(attempt, "handler"))) }
                                td data-label="Queue" { (cells::queue(chrome, cells::text(attempt, "queue"))) }
                                td data-label="Tenant" { (cells::plain(&attempt["tenant"])) }
                                td class="number" data-label="Attempt" { (attempt["attempt"]) }
                                td class="keep" data-label="Runs for" { (cells::seconds(&attempt["running_s"])) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn describe_slots(worker: &Value) -> String {
    let active = worker["stats"]["active"].as_i64();
    format!(
        "{} of {}",
        active.map_or("–".to_owned(), |it| it.to_string()),
        worker["slots"]
    )
}

/// The first digits of a SHA-256, enough to tell files apart.
pub(super) fn digest(sha256: &Value) -> String {
    let digits = sha256.as_str().unwrap_or_default();
    cells::line(&digits.chars().take(12).collect::<String>())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn one_timeout_is_singular() {
        let page = |timeouts: i64| {
            let incarnation = json!({"worker_id": "w-1", "timeouts": timeouts});
            let none = RunningAttempts::default();
            worker(&Chrome::default(), &incarnation, 0, &none, 1.0).into_string()
        };
        assert!(page(1).contains("1 attempt has timed out since"));
        assert!(page(2).contains("2 attempts have timed out since"));
        assert!(!page(0).contains("timed out since"));
    }

    #[test]
    fn the_page_of_a_worker_has_the_number_of_earlier_incarnations() {
        let page = |earlier| {
            let incarnation = json!({"worker_id": "w-1"});
            let none = RunningAttempts::default();
            worker(&Chrome::default(), &incarnation, earlier, &none, 1.0).into_string()
        };
        assert!(page(7).contains("<dt>Earlier incarnations</dt><dd>7</dd>"));
        assert!(!page(0).contains("Earlier incarnations"));
    }

    #[test]
    fn the_page_of_a_worker_says_which_of_its_attempts_are_not_listed() {
        let page = |running: &RunningAttempts| {
            let incarnation = json!({"worker_id": "w-1", "state": "active", "slots": 8});
            worker(&Chrome::default(), &incarnation, 0, running, 1.0).into_string()
        };
        let attempt =
            json!({"id": 7, "handler": "a.b", "queue": "q", "attempt": 1, "running_s": 1.5});
        let of = |has_more, examined_only| RunningAttempts {
            longest: vec![attempt.clone()],
            has_more,
            examined_only,
        };
        let all = page(&of(false, None));
        assert!(all.contains("/jobs/7"), "{all}");
        assert!(!all.contains("Only the") && !all.contains("There may be more"));
        let longest = page(&of(true, None));
        assert!(
            longest.contains("Only the 1 that have run longest"),
            "{longest}"
        );
        let examined = "only 10,000 running jobs of all workers were examined";
        assert!(page(&of(false, Some(10_000))).contains(examined));
        let none = RunningAttempts::default();
        assert!(!page(&none).contains("Running jobs of the worker"));
        let unknown = RunningAttempts {
            examined_only: Some(10_000),
            ..none
        };
        assert!(page(&unknown).contains(examined));
    }
}
