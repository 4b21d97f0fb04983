//! Schedules, with their expressions in English, their next due times and their last outcomes.

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::layout::Chrome;

/// The maximum number of listed schedules.
const LISTED_MAX: usize = 500;

/// The list. Each row has `words`: its cron expression in English.
pub fn schedules(chrome: &Chrome, schedules: &[Value], now: f64) -> Markup {
    html! {
        div class="title" { h1 { "Schedules" } }
        section class="card scroll" tabindex="0" aria-label="Schedules" {
            @if schedules.is_empty() { p { "There are no schedules. " code { "rouse schedule set" } ", rouse.schedule or a module creates one." } }
            @else {
                table class="stack" {
                    thead { tr { th { "Name" } th { "State" } th { "When" } th { "Handler" } th { "Next" } th { "Last" } th { "" } } }
                    tbody { @for schedule in schedules.iter().take(LISTED_MAX) { (row(chrome, schedule, now)) } }
                }
            }
        }
    }
}

fn row(chrome: &Chrome, schedule: &Value, now: f64) -> Markup {
    let name = cells::text(schedule, "name");
    html! {
        tr id={ "schedule-" (chrome.encoded(name)) } {
            td data-label="Name" { a class="row" href={ (chrome.base) "/schedules/" (chrome.encoded(name)) } { (cells::line(name)) } }
            td data-label="State" { (cells::state(cells::text(schedule, "state"))) }
            td data-label="When" { (words(schedule)) }
            td data-label="Handler" { (cells::handler(chrome, cells::text(schedule, "handler"))) }
            td class="keep" data-label="Next" { (cells::time(&schedule["next_at"], now)) }
            td class="keep" data-label="Last" { (outcome(chrome, &schedule["last_runs"][0])) }
            td { (actions(chrome, schedule)) }
        }
    }
}

fn words(schedule: &Value) -> Markup {
    html! {
        @let words = cells::plain(&schedule["words"]);
        @if words.is_empty() { code { (cells::plain(&schedule["cron"])) } }
        @else { span title=(cells::plain(&schedule["cron"])) { (words) } }
        " " span class="soft" { (cells::plain(&schedule["time_zone"])) }
    }
}

/// The outcome of a due time: its job and the job's state, or why there is none.
fn outcome(chrome: &Chrome, run: &Value) -> Markup {
    html! {
        @if run["job"].is_number() { (cells::job(chrome, &run["job"])) " " }
        @match run["state"].as_str().or(run["outcome"].as_str()) {
            Some(word) => (cells::state(word)),
            None => {},
        }
    }
}

fn actions(chrome: &Chrome, schedule: &Value) -> Markup {
    let name = chrome.encoded(cells::text(schedule, "name"));
    html! {
        (chrome.button(&format!("/schedules/{name}/run"), "Run now", "", ""))
        @match cells::text(schedule, "state") {
            "paused" => (chrome.button(&format!("/schedules/{name}/resume"), "Resume", "", "")),
            _ => (chrome.button(&format!("/schedules/{name}/pause"), "Pause", "", "")),
        }
    }
}

/// One schedule.
pub fn schedule(chrome: &Chrome, schedule: &Value, now: f64) -> Markup {
    let list = |key: &str| schedule[key].as_array().map_or(&[][..], Vec::as_slice);
    html! {
        div class="title" {
            h1 { "Schedule " (cells::plain(&schedule["name"])) }
            (cells::state(cells::text(schedule, "state")))
            div class="actions" { (actions(chrome, schedule)) }
        }
        @if let Some(error) = schedule["error"].as_str().filter(|_| chrome.may_read_contents()) { p class="notice bad" role="alert" { (cells::line(error)) } }
        div class="pair" {
            section class="card" {
                h2 { "Facts" }
                dl class="facts" {
                    dt { "When" } dd { (words(schedule)) }
                    dt { "Cron" } dd { code { (cells::plain(&schedule["cron"])) } }
                    dt { "Handler" } dd { (cells::handler(chrome, cells::text(schedule, "handler"))) }
                    @for (key, name) in [
                        ("overlap", "Overlap"), ("catch_up", "Catch up"), ("catch_up_window", "Catch up within"), ("jitter", "Jitter"),
                        ("due_key", "Key of the due time"), ("tenant", "Tenant"), ("source", "Source"), ("priority", "Priority"), ("login", "Created by")
                    ] {
                        @let value = cells::plain(&schedule[key]);
                        @if !value.is_empty() { dt { (name) } dd { (value) } }
                    }
                    dt { "Queue" } dd { (cells::queue(chrome, cells::text(schedule, "queue"))) }
                    @if chrome.may_read_contents() { dt { "Payload" } dd { code { (cells::plain(&schedule["payload"])) } } }
                    @if schedule["paused_at"].is_string() { dt { "Paused" } dd { (cells::exact_time(&schedule["paused_at"], now)) } }
                }
            }
            section class="card" {
                h2 { "Next" }
                @if list("upcoming").is_empty() { p class="soft" { "Nothing is planned." } }
                ul { @for at in list("upcoming").iter().take(10) { li { (cells::exact_time(at, now)) } } }
                h2 { "Last" }
                @if list("last_runs").is_empty() { p class="soft" { "It has not run yet." } }
                ul {
                    @for run in list("last_runs") {
                        li { (cells::exact_time(&run["due_at"], now)) " " (outcome(chrome, run)) " " @if chrome.may_read_contents() { (cells::plain(&run["error"])) } }
                    }
                }
            }
        }
        p { a href={ (chrome.base) "/jobs?source=" (chrome.encoded(cells::text(schedule, "source"))) } { "All its jobs" } }
    }
}
