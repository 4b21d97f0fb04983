//! The list of flows, and one flow as a graph.

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::flow_graph::graph;
use super::layout::Chrome;

/// The maximum number of jobs that are listed below the graph.
const LISTED_MAX: usize = 200;

/// The newest flows. `next_before`: the id after which the next page starts.
pub fn flows(chrome: &Chrome, flows: &[Value], next_before: Option<i64>, now: f64) -> Markup {
    html! {
        div class="title" { h1 { "Flows" } }
        section class="card scroll" tabindex="0" aria-label="Flows" {
            @if flows.is_empty() { p { "There are no flows. " code { "rouse.enqueue_flow" } " enqueues jobs that wait for each other." } }
            @else {
                table class="stack" {
                    thead { tr {
                        th { "Flow" } th { "Name" } th { "State" } th class="number" { "Jobs" } th { "Done" }
                        th class="number" { "Failed" } th { "Enqueued" } th { "Took" }
                    } }
                    tbody { @for flow in flows { (row(chrome, flow, now)) } }
                }
            }
        }
        @if let Some(before) = next_before {
            div class="more" { a class="button" href={ (chrome.base) "/flows?before=" (before) } { "Older" } }
        }
    }
}

fn row(chrome: &Chrome, flow: &Value, now: f64) -> Markup {
    let number = |key: &str| flow[key].as_i64().unwrap_or_default();
    let done = number("succeeded") + number("failed") + number("cancelled");
    html! {
        tr id={ "flow-" (flow["id"]) } {
            td class="keep" data-label="Flow" { a class="row mono" href={ (chrome.base) "/flows/" (flow["id"]) } { (flow["id"]) } }
            td data-label="Name" { (cells::plain(&flow["name"])) }
            td data-label="State" { (cells::state(if number("stuck") > 0 { "stuck" } else { cells::text(flow, "state") })) }
            td class="number" data-label="Jobs" { (cells::number(number("jobs"))) }
            td class="keep" data-label="Done" {
                progress max=(number("jobs").max(1)) value=(done) aria-label={ "Flow " (flow["id"]) ": jobs that have ended" } {}
                " " (done)
            }
            td class="number" data-label="Failed" { (number("failed")) }
            td class="keep" data-label="Enqueued" { (cells::time(&flow["requested_at"], now)) }
            td class="keep" data-label="Took" { (cells::seconds(&flow["age_s"])) }
        }
    }
}

/// One flow, as `rouse flow show --json` prints it.
pub fn flow(chrome: &Chrome, flow: &Value, now: f64) -> Markup {
    let jobs = flow["jobs"].as_array().map_or(&[][..], Vec::as_slice);
    let count = |state: &str| jobs.iter().filter(|job| job["state"] == state).count();
    let live = count("queued") + count("running");
    let failed = count("failed") + count("timed_out") + count("cancelled");
    let path = |action: &str| format!("/flows/{}/{action}", flow["id"]);
    html! {
        div class="title" {
            h1 { "Flow " span class="mono" { (flow["id"]) } " " (cells::plain(&flow["name"])) }
            (cells::state(match (live, failed) { (0, 0) => "succeeded", (0, _) => "failed", _ => "live" }))
            div class="actions" {
                @if failed > 0 { (chrome.button(&path("retry"), "Retry failed jobs", "", "main")) }
                @if live > 0 { (chrome.button(&path("cancel"), "Cancel", "Cancel all jobs of this flow that have not ended?", "risky")) }
            }
        }
        div class="stats" {
            @for state in super::filter::STATES {
                @if count(state) > 0 {
                    div class={ "stat " (cells::tone(state)) } { b { (cells::number(count(state) as i64)) } span { (state.replace('_', " ")) } }
                }
            }
            div class="stat" { b { (cells::time(&flow["requested_at"], now)) } span { "enqueued" } }
        }
        section class="card" { h2 { "Graph" } (graph(chrome, jobs)) }
        section class="card scroll" tabindex="0" aria-label="Jobs of the flow" {
            table class="stack" {
                thead { tr { th { "Name" } th { "Job" } th { "State" } th { "Handler" } th { "Ended" } th { "Error" } } }
                tbody {
                    @for job in jobs.iter().take(LISTED_MAX) {
                        tr id={ "job-" (job["job"]) } {
                            td data-label="Name" { (cells::plain(&job["name"])) }
                            td class="keep" data-label="Job" { (cells::job(chrome, &job["job"])) }
                            td data-label="State" { (cells::state(cells::text(job, "state"))) }
                            td data-label="Handler" { (cells::handler(chrome, cells::text(job, "handler"))) }
                            td class="keep" data-label="Ended" { (cells::time(&job["finished_at"], now)) }
                            td class="message" data-label="Error" {
                                @if chrome.may_read_contents() { (cells::excerpt(job["error"]["message"].as_str().unwrap_or_default())) }
                            }
                        }
                    }
                }
            }
            @if jobs.len() > LISTED_MAX { p class="soft" { "The first " (LISTED_MAX) " of " (cells::number(jobs.len() as i64)) " jobs." } }
        }
    }
}
