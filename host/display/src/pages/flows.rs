//! The list of flows, and one flow as a graph.

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::flow_graph::graph;
use super::layout::Chrome;

/// The maximum number of jobs that are listed on a page.
const LISTED_MAX: usize = 200;
/// The maximum number of jobs that are drawn: those of a larger flow, and their errors, would take megabytes.
const DRAWN_MAX: usize = 1_000;

/// The number of jobs that a page of a flow needs, after the chain with which the previous page ended (`None`: the
/// first page, which also has the graph).
pub fn jobs_of_flow(after: Option<i64>) -> i32 {
    let jobs = match after {
        None => DRAWN_MAX,
        Some(_) => LISTED_MAX,
    };
    // One more shows whether there is another page.
    i32::try_from(jobs + 1).unwrap_or(i32::MAX)
}

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

/// One flow: a row of `rouse.flows`, with as many of its jobs as [`jobs_of_flow`] requests, as `listed`. `after`: the
/// chain with which the previous page ended.
pub fn flow(chrome: &Chrome, flow: &Value, after: Option<i64>, now: f64) -> Markup {
    let jobs = flow["listed"].as_array().map_or(&[][..], Vec::as_slice);
    let number = |key: &str| flow[key].as_i64().unwrap_or_default();
    let queued = number("waiting") + number("scheduled") + number("ready");
    let live = queued + number("running");
    let failed = number("failed") + number("cancelled");
    let path = |action: &str| format!("/flows/{}/{action}", flow["id"]);
    let counts = [
        ("queued", queued),
        ("running", number("running")),
        ("succeeded", number("succeeded")),
        ("failed", number("failed")),
        ("cancelled", number("cancelled")),
    ];
    let listed = &jobs[..jobs.len().min(LISTED_MAX)];
    let next = listed.last().filter(|_| jobs.len() > LISTED_MAX);
    let drawn = &jobs[..jobs.len().min(DRAWN_MAX)];
    let not_drawn = usize::try_from(number("jobs"))
        .unwrap_or(0)
        .saturating_sub(drawn.len());
    html! {
        div class="title" {
            h1 { "Flow " span class="mono" { (flow["id"]) } " " (cells::plain(&flow["name"])) }
            (cells::state(cells::text(flow, "state")))
            div class="actions" {
                @if failed > 0 { (chrome.button(&path("retry"), "Retry failed jobs", "", "main")) }
                @if live > 0 { (chrome.button(&path("cancel"), "Cancel", "Cancel all jobs of this flow that have not ended?", "risky")) }
            }
        }
        div class="stats" {
            @for (state, jobs) in counts {
                @if jobs > 0 {
                    div class={ "stat " (cells::tone(state)) } { b { (cells::number(jobs)) } span { (state) } }
                }
            }
            div class="stat" { b { (cells::time(&flow["requested_at"], now)) } span { "enqueued" } }
        }
        @if after.is_none() { section class="card" { h2 { "Graph" } (graph(chrome, drawn, not_drawn)) } }
        section class="card scroll" tabindex="0" aria-label="Jobs of the flow" {
            table class="stack" {
                thead { tr { th { "Name" } th { "Job" } th { "State" } th { "Handler" } th { "Ended" } th { "Error" } } }
                tbody {
                    @for job in listed {
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
        }
        @if let Some(last) = next {
            div class="more" { a class="button" href={ (chrome.base) "/flows/" (flow["id"]) "?after=" (last["chain"]) } { "More jobs" } }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A flow of 5,000 jobs, of which these chains are listed.
    fn page(chains: std::ops::Range<usize>, after: Option<i64>) -> String {
        let job = |chain: usize| json!({"job": chain, "chain": chain, "name": "x", "handler": "h", "state": "queued"});
        let listed: Vec<Value> = chains.map(job).collect();
        let flow_of = json!({
            "id": 9, "name": null, "state": "live", "requested_at": null, "jobs": 5_000,
            "waiting": 4_000, "scheduled": 100, "ready": 400, "running": 0, "succeeded": 500, "failed": 0, "cancelled": 0,
            "listed": listed,
        });
        flow(&Chrome::default(), &flow_of, after, 0.0).into_string()
    }

    #[test]
    fn a_large_flow_is_drawn_and_listed_in_part_and_counted_as_a_whole() {
        assert_eq!((jobs_of_flow(None), jobs_of_flow(Some(1))), (1_001, 201));
        let first = page(1..1_002, None);
        assert!(first.contains("4000 jobs are not drawn."), "{first}");
        assert!(first.contains(r#"href="/flows/9?after=200""#), "{first}");
        assert!(first.contains("<b>4,500</b>"), "{first}");
        assert_eq!(first.matches("id=\"job-").count(), 200);
        let last = page(201..301, Some(200));
        assert!(
            !last.contains("Graph") && !last.contains("?after="),
            "{last}"
        );
        assert_eq!(last.matches("id=\"job-").count(), 100);
    }
}
