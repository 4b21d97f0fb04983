//! The list of jobs, and what can be done with many of them.

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::filter::JobFilter;
use super::layout::Chrome;

/// The result of a search.
#[derive(Debug, Clone, Default)]
pub struct Found {
    /// The newest first.
    pub jobs: Vec<Value>,
    /// The id after which the next page starts, if there may be more.
    pub next_before: Option<i64>,
    /// The search stopped here: the oldest job that was examined.
    pub examined_back_to: Option<i64>,
    /// True if the page does not start with the newest job.
    pub is_later_page: bool,
}

/// The number of jobs that have not ended.
#[derive(Debug, Clone, Copy)]
pub struct Live {
    /// Ready or scheduled.
    pub queued: i64,
    /// With a worker.
    pub running: i64,
    /// True if they were only counted up to a bound.
    pub at_least: bool,
}

impl Live {
    /// The sum over rows of `rouse.backlog`.
    pub fn from_backlog(rows: &[Value]) -> Self {
        let sum = |key: &str| rows.iter().filter_map(|row| row[key].as_i64()).sum::<i64>();
        Self {
            queued: sum("ready") + sum("scheduled"),
            running: sum("running"),
            at_least: rows.iter().any(|row| row["at_least"] == true),
        }
    }

    /// The number of jobs in exactly this state, as text; `None` for other selections.
    fn describe(self, states: &[&str]) -> Option<String> {
        let jobs = match states {
            ["queued"] => self.queued,
            ["running"] => self.running,
            _ => return None,
        };
        Some(cells::at_least(jobs, self.at_least))
    }
}

/// The page. `live`: the number of jobs that have not ended, if known.
pub fn jobs(
    chrome: &Chrome,
    filter: &JobFilter,
    found: &Result<Found, String>,
    live: Option<Live>,
    now: f64,
) -> Markup {
    html! {
        div class="title" {
            h1 { "Jobs" }
            (states(chrome, filter, live))
            form class="inline" method="get" action={ (chrome.base) "/job" } {
                label { "Job " input name="job" inputmode="numeric" size="12" placeholder="its id" autocomplete="off"; }
                button type="submit" { "Open" }
            }
        }
        section class="card" {
            details id="filter" open[*filter != JobFilter::default()] {
                summary { "Filter" }
                (filter.form(chrome))
            }
        }
        @match found {
            Err(why) => p class="notice bad" role="alert" { (cells::line(why)) },
            Ok(found) => (list(chrome, filter, found, now)),
        }
    }
}

/// Links to the usual searches.
fn states(chrome: &Chrome, filter: &JobFilter, live: Option<Live>) -> Markup {
    let usual: [(&str, &[&str]); 5] = [
        ("All", &[]),
        ("Queued", &["queued"]),
        ("Running", &["running"]),
        ("Failed", &["failed", "timed_out"]),
        ("Succeeded", &["succeeded"]),
    ];
    html! {
        div class="actions" {
            @for (label, states) in usual {
                @let this = JobFilter::for_states(states);
                a class="button" href={ (chrome.base) "/jobs?" (this.query()) }
                    aria-current=[(this == *filter).then_some("true")] {
                        (label)
                        @if let Some(jobs) = live.and_then(|live| live.describe(states)) { span class="soft" { (jobs) } }
                    }
            }
        }
    }
}

fn list(chrome: &Chrome, filter: &JobFilter, found: &Found, now: f64) -> Markup {
    if found.jobs.is_empty() {
        return html! {
            section class="card" {
                p {
                    @match found.examined_back_to {
                        Some(id) => { "None of the jobs down to " (id) " matches. " (older(chrome, filter, id, "Search further back")) },
                        None => "No job matches.",
                    }
                }
            }
        };
    }
    // Columns in which all jobs have the usual value are left out.
    let has_priorities = found.jobs.iter().any(|job| job["priority"] != "normal");
    html! {
        form id="selection" method="post" action={ (chrome.base) "/jobs/change" } {
            @if chrome.may_act() { (chrome.token()) (filter.hidden()) (changes(filter)) }
            section class="card scroll" tabindex="0" aria-label="Jobs" {
                table class="stack" {
                    thead { tr {
                        @if chrome.may_act() {
                            th { input type="checkbox" data-all aria-label="Select all jobs of this page"; }
                        }
                        th { "Job" } th { "State" } th { "Handler" } th { "Queue" }
                        @if has_priorities { th { "Priority" } }
                        th { "Tenant" }
                        th { "Attempt" } th { "When" } th { "Error" }
                    } }
                    tbody {
                        @for job in &found.jobs { (row(chrome, job, has_priorities, now)) }
                    }
                }
            }
        }
        div class="more" {
            @if found.is_later_page { a class="button" href={ (chrome.base) "/jobs?" (filter.query()) } { "Newest" } }
            @if let Some(before) = found.next_before { (older(chrome, filter, before, "Older")) }
            @if let Some(id) = found.examined_back_to {
                span class="soft" { "Only jobs down to " (id) " were examined." }
            }
        }
    }
}

fn older(chrome: &Chrome, filter: &JobFilter, before: i64, label: &str) -> Markup {
    html! { a class="button" href={ (chrome.base) "/jobs?" (filter.query()) "&before=" (before) } { (label) } }
}

fn changes(filter: &JobFilter) -> Markup {
    html! {
        div class="more" {
            button type="submit" name="do" value="retry" data-needs-chosen { "Retry" span data-chosen { "0" } }
            button type="submit" name="do" value="cancel" class="risky" data-needs-chosen
                data-ask="Cancel the selected jobs?" { "Cancel" span data-chosen { "0" } }
            @if !filter.is_of_ended() {
                button type="submit" name="do" value="run-now" data-needs-chosen { "Run now" span data-chosen { "0" } }
                button type="submit" name="do" value="delete" class="risky" data-needs-chosen
                    data-ask="Delete the selected queued jobs?" { "Delete" span data-chosen { "0" } }
            }
            span class="soft" { "or all that match, after a count:" }
            @if filter.is_of_ended() {
                button type="submit" name="do" value="retry-all" { "Retry all …" }
            } @else {
                button type="submit" name="do" value="cancel-all" class="risky" { "Cancel all …" }
                button type="submit" name="do" value="run-now-all" { "Run all now …" }
                button type="submit" name="do" value="delete-all" class="risky" { "Delete all …" }
            }
        }
    }
}

fn row(chrome: &Chrome, job: &Value, has_priority: bool, now: f64) -> Markup {
    let state = cells::text(job, "state");
    let when = ["finished_at", "claimed_at", "available_at", "requested_at"]
        .into_iter()
        .find(|key| job[*key].is_string());
    let when = match state {
        "queued" => "available_at",
        _ => when.unwrap_or("requested_at"),
    };
    let error = job["error"]["message"].as_str().unwrap_or_default();
    html! {
        tr id={ "job-" (job["id"]) } {
            @if chrome.may_act() {
                td { input type="checkbox" name="id" value=(job["id"]) aria-label={ "Select job " (job["id"]) }; }
            }
            td class="keep" data-label="Job" { (cells::job(chrome, &job["id"])) }
            td data-label="State" {
                (cells::state(shown_state(job)))
                @if job["retried_as"].is_number() { " retried as " (cells::job(chrome, &job["retried_as"])) }
            }
            td data-label="Handler" { (cells::handler(chrome, cells::text(job, "handler"))) }
            td data-label="Queue" { (cells::queue(chrome, cells::text(job, "queue"))) }
            @if has_priority { td data-label="Priority" { (cells::plain(&job["priority"])) } }
            td data-label="Tenant" { (cells::plain(&job["tenant"])) }
            td class="keep" data-label="Attempt" { (attempts(job, attempts_max(job))) }
            td class="keep" data-label="When" { (cells::time(&job[when], now)) }
            td class="message" data-label="Error" {
                @if chrome.may_read_contents() && !error.is_empty() {
                    span class="cut" title=(cells::excerpt(error)) { (cells::excerpt(error)) }
                }
            }
        }
    }
}

/// The state, with what a queued job waits for.
pub(super) fn shown_state(job: &Value) -> &str {
    match cells::text(job, "state") {
        "queued" if !job["wait"].is_null() => "suspended",
        "queued" if job["attempt"].as_i64().unwrap_or_default() > 0 => "retry",
        state => state,
    }
}

/// The attempts of a job, for instance `2 of 3`, or nothing before the first one. `max` is their maximum number, from
/// its producer or its last error. Attempts that were lost, suspended or given back are not counted against it, so they
/// are added to it, as in `rouse job ls`.
pub(super) fn attempts(job: &Value, max: Option<i64>) -> String {
    let number = |key: &str| job[key].as_i64().unwrap_or_default();
    match (number("attempt"), max) {
        (0, _) => String::new(),
        // The maximum may be that of an error, which a worker has reported.
        (attempt, Some(max)) => format!("{attempt} of {}", max.saturating_add(number("uncounted"))),
        (attempt, None) => attempt.to_string(),
    }
}

/// The maximum number of attempts of a listed job, if it is known.
fn attempts_max(job: &Value) -> Option<i64> {
    let own = job["max_attempts"].as_i64();
    own.or(job["attempts_max"].as_i64())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::layout::Role;
    use super::*;

    fn found() -> Result<Found, String> {
        Ok(Found {
            jobs: vec![json!({
                "id": 9_007_199_254_740_993_i64, "state": "failed", "handler": "a.b", "queue": "q", "tenant": "<img src=x onerror=alert(1)>",
                "attempt": 2, "max_attempts": 3, "finished_at": "2026-11-28T15:00:00+00:00", "error": {"message": "</td><script>x"}
            })],
            next_before: Some(9_007_199_254_740_993),
            ..Found::default()
        })
    }

    #[test]
    fn the_list_escapes_untrusted_text_and_hides_errors_from_anonymous_users() {
        let mut chrome = Chrome::default();
        let filter = JobFilter::for_states(&["failed"]);
        let page = |chrome: &Chrome| jobs(chrome, &filter, &found(), None, 1.0).into_string();
        let anonymous = page(&chrome);
        assert!(
            !anonymous.contains("script") && !anonymous.contains("<img"),
            "{anonymous}"
        );
        assert!(!anonymous.contains("checkbox\" name=\"id\""));
        chrome.role = Role::Operator;
        let operator = page(&chrome);
        assert!(operator.contains("&lt;script&gt;x") && operator.contains("Retry all"));
        assert!(operator.contains("before=9007199254740993\""), "{operator}");
    }

    #[test]
    fn priorities_retries_and_counts_are_shown_where_there_are_any() {
        let page = |job: Value, live| {
            let found = Ok(Found {
                jobs: vec![job],
                ..Found::default()
            });
            jobs(&Chrome::default(), &JobFilter::default(), &found, live, 1.0).into_string()
        };
        let usual = page(
            json!({"id": 1, "priority": "normal", "retried_as": null}),
            None,
        );
        assert!(
            !usual.contains("Priority") && !usual.contains("retried as"),
            "{usual}"
        );
        let live = Live::from_backlog(&[
            json!({"ready": 12_000, "scheduled": 34, "running": 8, "at_least": true}),
        ]);
        let other = page(
            json!({"id": 1, "priority": "high", "retried_as": 77}),
            Some(live),
        );
        for part in ["Priority", "retried as", "/jobs/77\"", ">12,034+<", ">8<"] {
            assert!(other.contains(part), "{part}: {other}");
        }
    }

    #[test]
    fn attempts_that_are_not_counted_raise_the_maximum() {
        for (job, text) in [
            (json!({"attempt": 0, "max_attempts": 3, "uncounted": 0}), ""),
            (json!({"attempt": 2, "uncounted": 0}), "2"),
            (
                json!({"attempt": 2, "max_attempts": 3, "uncounted": 0}),
                "2 of 3",
            ),
            // An attempt was lost.
            (
                json!({"attempt": 4, "max_attempts": 3, "uncounted": 1}),
                "4 of 4",
            ),
            // The producer has set no limit: the last error has the handler's.
            (
                json!({"attempt": 4, "attempts_max": 5, "uncounted": 2}),
                "4 of 7",
            ),
            (
                json!({"attempt": 4, "attempts_max": i64::MAX, "uncounted": 2}),
                "4 of 9223372036854775807",
            ),
        ] {
            assert_eq!(attempts(&job, attempts_max(&job)), text, "{job}");
        }
    }

    #[test]
    fn without_jobs_the_page_says_how_far_the_search_went() {
        let found = Ok(Found {
            examined_back_to: Some(17),
            ..Found::default()
        });
        let page = jobs(&Chrome::default(), &JobFilter::default(), &found, None, 1.0).into_string();
        assert!(
            page.contains("Search further back") && page.contains("before=17"),
            "{page}"
        );
    }
}
