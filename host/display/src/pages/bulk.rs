//! Changes to many jobs: the confirmation, and the progress.

use maud::{Markup, html};

use super::cells;
use super::filter::JobFilter;
use super::layout::Chrome;
use crate::plural::choose;

/// A change to many jobs.
#[derive(Debug, Clone, Default)]
pub struct Bulk {
    /// The action, for instance `Retry`.
    pub action: &'static str,
    /// Its past participle, for instance `retried`.
    pub done_word: &'static str,
    /// The user who started it; empty: the user on this machine.
    pub who: String,
    /// The number of jobs to which it applies, if they were counted.
    pub total: Option<i64>,
    /// True if more jobs match than were counted.
    pub at_least: bool,
    /// Jobs that were changed.
    pub done: i64,
    /// Jobs that could not be changed: their state does not allow it, they were retried before, a live job has their
    /// unique key, or a job that they wait for has failed.
    pub refused: i64,
    /// Jobs that were not changed because another transaction has locked them.
    pub locked: i64,
    /// The first jobs that retries have created.
    pub new_jobs: Vec<i64>,
    /// True while it is running.
    pub is_running: bool,
    /// Why it ended early.
    pub error: Option<String>,
}

/// The question before a change. `now`: jobs that end, or are enqueued, after this time will not be changed.
pub fn bulk_question(
    chrome: &Chrome,
    filter: &JobFilter,
    bulk: &Bulk,
    action: &str,
    now: f64,
) -> Markup {
    let total = match (bulk.total.unwrap_or_default(), bulk.at_least) {
        (1, false) => "1 job".to_owned(),
        (total, more) => format!(
            "{}{} jobs",
            cells::number(total),
            if more { "+" } else { "" }
        ),
    };
    html! {
        div class="title" { h1 { (bulk.action) " " (total) "?" } }
        section class="card" {
            p { "These are all jobs that match now: " code { (filter.words()) } }
            form method="post" action={ (chrome.base) "/jobs/change" } class="inline" {
                (chrome.token()) (filter.hidden())
                input type="hidden" name="do" value=(action);
                input type="hidden" name="sure" value="yes";
                input type="hidden" name="until-now" value=(now);
                button type="submit" class="main" disabled[bulk.total == Some(0) && !bulk.at_least] { (bulk.action) " " (total) }
                a class="button" href={ (chrome.base) "/jobs?" (filter.query()) } { "Back" }
            }
        }
    }
}

/// The progress.
pub fn bulk(chrome: &Chrome, bulk: &Bulk) -> Markup {
    let examined = bulk.done + bulk.refused + bulk.locked;
    html! {
        div class="title" {
            h1 { (bulk.action) " jobs" }
            (cells::state(match (&bulk.error, bulk.is_running) { (Some(_), _) => "failed", (None, true) => "running", (None, false) => "done" }))
        }
        @if let Some(error) = &bulk.error { p class="notice bad" role="alert" { (cells::line(error)) } }
        section class="card" {
            @if bulk.is_running {
                progress max=[bulk.total.filter(|_| !bulk.at_least).map(|total| total.max(1))] value=[(!bulk.at_least).then_some(examined)] aria-label="Jobs that have been processed" {}
            }
            p {
                (cells::number(bulk.done)) " " (bulk.done_word)
                @if let Some(total) = bulk.total { " of " (cells::number(total)) @if bulk.at_least { "+" } }
                @if bulk.refused > 0 { "; " (cells::number(bulk.refused)) " could not be: their state does not allow it, they were retried before, a live job has their unique key, or a job that they wait for has failed" }
                @if bulk.locked > 0 { "; " (cells::number(bulk.locked)) " " (choose(bulk.locked, "is", "are")) " left, because another transaction has locked " (choose(bulk.locked, "it", "them")) ": start the change again when that transaction has ended" }
                "."
                @if !bulk.who.is_empty() { " By " (cells::line(&bulk.who)) "." }
            }
            @if !bulk.new_jobs.is_empty() {
                p {
                    "Retried as " @for id in &bulk.new_jobs { (cells::job(chrome, &(*id).into())) " " }
                    @if bulk.done > bulk.new_jobs.len() as i64 { "…" }
                }
            }
            @if !bulk.is_running { p { a href={ (chrome.base) "/jobs" } { "All jobs" } } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Role;
    use super::*;

    #[test]
    fn the_question_has_the_count_and_the_whole_filter() {
        let chrome = Chrome {
            role: Role::Operator,
            csrf: "t".into(),
            ..Chrome::default()
        };
        let filter = JobFilter::for_states(&["failed"]).with("handler", "a.b");
        let it = Bulk {
            action: "Retry",
            total: Some(10_000),
            at_least: true,
            ..Bulk::default()
        };
        let page = bulk_question(&chrome, &filter, &it, "retry-all", 1.5).into_string();
        for part in [
            "Retry 10,000+ jobs?",
            r#"name="state" value="failed""#,
            r#"name="handler" value="a.b""#,
            r#"value="1.5""#,
            r#"value="t""#,
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }
}
