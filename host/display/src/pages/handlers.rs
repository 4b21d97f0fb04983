//! Handlers: which versions the fleet has, what they request and lack, how they perform.

use std::collections::BTreeMap;

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::layout::Chrome;
use super::queues::backlog_table;
use super::workers::digest;
use crate::plural::choose;
use crate::when;

/// The maximum number of failures, and of different errors, that the page of a handler lists.
const ERRORS_MAX: usize = 10;

/// A handler as this host has loaded it.
#[derive(Debug, Clone, Default)]
pub struct Loaded {
    /// Its name.
    pub name: String,
    /// The requested capabilities.
    pub requested: Vec<String>,
    /// The lines for `rouse.toml` that grant what it lacks; empty: it lacks nothing.
    pub missing: String,
}

/// The list. `fleet`: rows of `rouse.handlers`; `waiting`: rows of `rouse.backlog` that no worker can run.
pub fn handlers(chrome: &Chrome, fleet: &[Value], waiting: &[Value], loaded: &[Loaded]) -> Markup {
    let mut versions: BTreeMap<&str, Vec<&Value>> = BTreeMap::new();
    for row in fleet {
        versions
            .entry(cells::text(row, "handler"))
            .or_default()
            .push(row);
    }
    html! {
        div class="title" { h1 { "Handlers" } }
        @if !waiting.is_empty() {
            section class="card scroll" tabindex="0" aria-label="Jobs that no worker can run" {
                h2 { "No worker can run these" }
                (backlog_table(chrome, waiting))
            }
        }
        section class="card scroll" tabindex="0" aria-label="Handlers" {
            @if versions.is_empty() { p { "No running worker has a handler: put *.wasm files into the handlers folder of a worker." } }
            @else {
                table class="stack" {
                    thead { tr { th { "Handler" } th { "Versions" } th { "Modules" } th class="number" { "Workers" } th class="number" { "Slots" } th { "Grants" } th { "Lacks" } } }
                    tbody { @for (name, rows) in &versions { (row(chrome, name, rows, loaded)) } }
                }
            }
        }
    }
}

fn row(chrome: &Chrome, name: &str, rows: &[&Value], loaded: &[Loaded]) -> Markup {
    let distinct = |key: &str| {
        let mut all: Vec<String> = rows.iter().map(|row| cells::plain(&row[key])).collect();
        all.sort();
        all.dedup();
        all
    };
    let slots: i64 = rows.iter().filter_map(|row| row["slots"].as_i64()).sum();
    let parked = rows.iter().filter(|row| row["parked"].is_string()).count();
    let digests = distinct("sha256");
    let lacks = loaded
        .iter()
        .any(|it| it.name == name && !it.missing.is_empty());
    html! {
        tr id={ "handler-" (cells::line(name)) } {
            td data-label="Handler" {
                a class="row" href={ (chrome.base) "/handlers/" (chrome.encoded(name)) } { (cells::line(name)) }
                @if parked > 0 { " " (cells::state("parked")) }
            }
            td class="keep" data-label="Versions" { (distinct("version").join(", ")) }
            td class="keep" data-label="Modules" {
                @for digest in &digests { span class="mono" { (digest.chars().take(12).collect::<String>()) } " " }
                @if digests.len() > 1 { (cells::state("differ")) }
            }
            td class="number" data-label="Workers" { (rows.len()) }
            td class="number" data-label="Slots" { (slots) }
            td data-label="Grants" { (cells::joined(&rows[0]["grants"])) }
            td data-label="Lacks" { @if lacks { (cells::state("grants")) } }
        }
    }
}

/// The data of the page of a handler.
#[derive(Debug)]
pub struct HandlerPage<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its rows of `rouse.handlers`.
    pub fleet: &'a [Value],
    /// Its rows of `rouse.backlog`.
    pub backlog: &'a [Value],
    /// Statistics of its newest ended jobs: `jobs`, `failed`, and in seconds `wait_p50` and so on.
    pub recent: &'a Value,
    /// Its newest unsuccessful jobs, the newest first.
    pub errors: &'a [Value],
    /// As this host has loaded it.
    pub loaded: Option<&'a Loaded>,
}

/// One handler.
pub fn handler(chrome: &Chrome, it: &HandlerPage<'_>, now: f64) -> Markup {
    let HandlerPage {
        name,
        fleet,
        backlog,
        recent,
        errors,
        loaded,
    } = *it;
    let jobs = recent["jobs"].as_i64().unwrap_or_default();
    let failed = recent["failed"].as_i64().unwrap_or_default();
    let rate = match jobs {
        0 => "–".to_owned(),
        _ => format!("{:.1} %", failed as f64 * 100.0 / jobs as f64),
    };
    let took = |key: &str| recent[key].as_f64().map_or("–".to_owned(), when::took);
    let encoded = chrome.encoded(name);
    html! {
        div class="title" { h1 { "Handler " (cells::line(name)) }
            div class="actions" {
                a class="button" href={ (chrome.base) "/jobs?handler=" (encoded) } { "Jobs" }
                a class="button" href={ (chrome.base) "/jobs?state=failed&state=timed_out&handler=" (encoded) } { "Failed jobs" }
            }
        }
        div class="stats" {
            a class={ "stat" @if failed > 0 { " bad" } } href={ (chrome.base) "/jobs?state=failed&state=timed_out&handler=" (encoded) } {
                b { (rate) } span { "failed, of its newest " (cells::number(jobs)) " " (choose(jobs, "job", "jobs")) }
            }
            div class="stat" { b { (took("wait_p50")) " · " (took("wait_p95")) } span { "wait p50 · p95" } }
            div class="stat" { b { (took("run_p50")) " · " (took("run_p95")) } span { "run p50 · p95" } }
            div class="stat" { b { (took("cpu_p50")) " · " (took("cpu_p95")) } span { "CPU time p50 · p95" } }
        }
        @if !errors.is_empty() {
            section class="card scroll" tabindex="0" aria-label="Newest failures" {
                h2 { "Newest failures" }
                (by_error(chrome, errors, now))
                table class="stack" {
                    thead { tr { th { "Job" } th { "State" } th { "Ended" } th { "Error" } } }
                    tbody {
                        @for job in errors.iter().take(ERRORS_MAX) {
                            tr {
                                td class="keep" data-label="Job" { (cells::job(chrome, &job["id"])) }
                                td data-label="State" { (cells::state(cells::text(job, "state"))) }
                                td class="keep" data-label="Ended" { (cells::time(&job["finished_at"], now)) }
                                td class="message" data-label="Error" {
                                    @if chrome.may_read_contents() { (cells::excerpt(job["error"]["message"].as_str().unwrap_or_default())) }
                                }
                            }
                        }
                    }
                }
            }
        }
        @if let Some(loaded) = loaded && chrome.may_read_contents() { (requested(loaded)) }
        section class="card scroll" tabindex="0" aria-label="Backlog" { h2 { "Backlog" } (backlog_table(chrome, backlog)) }
        section class="card scroll" tabindex="0" aria-label="Workers with the handler" {
            h2 { "In the fleet" }
            @if fleet.is_empty() { p { "No running worker has this handler." } }
            @else {
                table class="stack" {
                    thead { tr { th { "Worker" } th { "State" } th { "Version" } th { "Module" } th { "Grants" } } }
                    tbody {
                        @for row in fleet {
                            tr {
                                td data-label="Worker" { (cells::worker(chrome, cells::text(row, "worker_id"))) }
                                td data-label="State" {
                                    (cells::state(cells::text(row, "state")))
                                    @if let Some(why) = row["parked"].as_str() { " " (cells::state("parked")) @if chrome.may_read_contents() { " " (cells::line(why)) } }
                                }
                                td class="keep" data-label="Version" { (cells::plain(&row["version"])) }
                                td class="keep mono" data-label="Module" { (digest(&row["sha256"])) }
                                td data-label="Grants" { (cells::joined(&row["grants"])) }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The number of times that each error occurs among the newest failures; nothing for a single failure.
fn by_error(chrome: &Chrome, errors: &[Value], now: f64) -> Markup {
    let mut groups: Vec<(String, Vec<&Value>)> = Vec::new();
    for job in errors {
        let shape = shape(&job["error"]);
        match groups.iter_mut().find(|(known, _)| *known == shape) {
            Some((_, jobs)) => jobs.push(job),
            None => groups.push((shape, vec![job])),
        }
    }
    groups.sort_by_key(|(_, jobs)| std::cmp::Reverse(jobs.len()));
    html! {
        @if errors.len() > 1 && chrome.may_read_contents() {
            table class="stack" id="by-error" {
                caption { "The newest " (errors.len()) " by error" }
                thead { tr { th { "Error" } th class="number" { "Jobs" } th { "First" } th { "Last" } th { "Newest job" } } }
                tbody {
                    @for (shape, jobs) in groups.iter().take(ERRORS_MAX) {
                        tr {
                            td class="message" data-label="Error" { (cells::excerpt(shape)) }
                            td class="number" data-label="Jobs" { (jobs.len()) }
                            td class="keep" data-label="First" { (cells::time(&jobs[jobs.len() - 1]["finished_at"], now)) }
                            td class="keep" data-label="Last" { (cells::time(&jobs[0]["finished_at"], now)) }
                            td class="keep" data-label="Newest job" { (cells::job(chrome, &jobs[0]["id"])) }
                        }
                    }
                }
            }
            @if groups.len() > ERRORS_MAX { p class="soft" { "and " (groups.len() - ERRORS_MAX) " more" } }
        }
    }
}

/// The first line of an error without what differs from job to job: numbers are `#`.
fn shape(error: &Value) -> String {
    let kind = cells::text(error, "kind");
    let line = cells::text(error, "message")
        .lines()
        .next()
        .unwrap_or_default();
    let mut shape = match line.is_empty() {
        true => kind.to_owned(),
        false => String::with_capacity(line.len()),
    };
    let mut in_number = false;
    for c in line.chars() {
        let is_digit = c.is_ascii_digit();
        if !is_digit {
            shape.push(c);
        } else if !in_number {
            shape.push('#');
        }
        in_number = is_digit;
    }
    shape
}

fn requested(loaded: &Loaded) -> Markup {
    html! {
        section class="card" {
            h2 { "Requested capabilities" }
            @if loaded.requested.is_empty() { p { "None." } }
            ul { @for line in &loaded.requested { li { (cells::line(line)) } } }
            @if !loaded.missing.is_empty() {
                h3 { "Missing grants: add these lines to rouse.toml" }
                pre { (crate::sanitize::lines(&loaded.missing)) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::layout::Role;
    use super::*;

    #[test]
    fn failures_that_differ_in_numbers_alone_are_one_error() {
        let failed = |id: i64, message: &str| json!({"id": id, "error": {"kind": "error", "message": message}});
        let errors = [
            failed(9, "order 9 of 12 is lost\nat mill.rs"),
            failed(8, "<b>"),
            failed(7, "order 7 of 3 is lost"),
        ];
        let mut chrome = Chrome::default();
        assert!(by_error(&chrome, &errors, 1.0).into_string().is_empty());
        chrome.role = Role::Viewer;
        let table = by_error(&chrome, &errors, 1.0).into_string();
        let (first, second) = table.split_once("order # of # is lost").unwrap();
        assert!(!first.contains("/jobs/"), "{table}");
        assert!(
            second.contains(">2</td>") && second.contains("/jobs/9\""),
            "{table}"
        );
        assert!(
            second.contains("&lt;b&gt;") && !second.contains("mill.rs"),
            "{table}"
        );
        assert_eq!(shape(&json!({"kind": "lost"})), "lost");
    }
}
