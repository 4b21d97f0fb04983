//! The audit: admin actions and their logins.

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::layout::Chrome;

/// The filter of the audit, as it was typed.
#[derive(Debug, Clone, Default)]
pub struct AuditQuery {
    /// Only by this login, or for this user of the dashboard; empty: all.
    pub who: String,
    /// Only actions on this queue, not those on its jobs; empty: all.
    pub queue: String,
}

/// Where the next page starts.
#[derive(Debug, Clone)]
pub struct AuditNext {
    /// The time before which its actions were made.
    pub at: String,
    /// The id of an action at that time: the page starts after it. `None`: the time range of this page is exhausted.
    pub after: Option<i64>,
}

/// The page.
pub fn audit(
    chrome: &Chrome,
    filter: &AuditQuery,
    rows: &[Value],
    next: &AuditNext,
    now: f64,
) -> Markup {
    let after = next.after.map(|id| format!("&after={id}"));
    let query = format!(
        "who={}&queue={}&before={}{}",
        chrome.encoded(&filter.who),
        chrome.encoded(&filter.queue),
        chrome.encoded(&next.at),
        after.unwrap_or_default()
    );
    let has_filter = !filter.who.is_empty() || !filter.queue.is_empty();
    let nothing = match next.after {
        Some(_) => "None of the examined actions matches. Older ones may.",
        None if has_filter => "No action in these 31 days matches the filter.",
        None => "Nobody changed anything in these 31 days.",
    };
    html! {
        div class="title" { h1 { "Audit" } }
        section class="card" {
            form class="filters" method="get" action={ (chrome.base) "/audit" } {
                label { "By" input type="search" name="who" value=(filter.who) placeholder="a login, or a user" autocomplete="off" spellcheck="false"; }
                label { "Queue" input type="search" name="queue" value=(filter.queue) autocomplete="off" spellcheck="false"; }
                button type="submit" class="main" { "Search" }
            }
        }
        section class="card scroll" tabindex="0" aria-label="Events" {
            @if rows.is_empty() { p { (nothing) } }
            @else {
                table class="stack" {
                    thead { tr { th { "When" } th { "Event" } th { "By" } th { "Job" } th { "Queue" } th { "Handler" } th { "Detail" } } }
                    tbody {
                        @for row in rows {
                            tr {
                                td class="keep" data-label="When" { (cells::time(&row["at"], now)) }
                                td data-label="Event" { (cells::state(cells::text(row, "event"))) }
                                td data-label="By" { (cells::plain(&row["by"])) }
                                td class="keep" data-label="Job" { (cells::job(chrome, &row["job"])) }
                                td data-label="Queue" { @if row["queue"].is_string() { (cells::queue(chrome, cells::text(row, "queue"))) } }
                                td data-label="Handler" { @if row["handler"].is_string() { (cells::handler(chrome, cells::text(row, "handler"))) } }
                                td class="message" data-label="Detail" { @if chrome.may_read_contents() { (detail(&row["detail"])) } }
                            }
                        }
                    }
                }
            }
        }
        div class="more" { a class="button" href={ (chrome.base) "/audit?" (query) } { "Older" } }
    }
}

fn detail(detail: &Value) -> String {
    match detail {
        Value::Null => String::new(),
        it => match it["message"].as_str() {
            Some(message) => cells::excerpt(message),
            None => cells::excerpt(&it.to_string()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_starts_after_the_last_action_or_with_the_next_period() {
        let page = |after| {
            let next = AuditNext {
                at: "2026-11-28T15:00:00+00:00".into(),
                after,
            };
            let (chrome, filter) = (Chrome::default(), AuditQuery::default());
            audit(&chrome, &filter, &[], &next, 1.0).into_string()
        };
        let (within, next_period) = (page(Some(17)), page(None));
        assert!(
            within.contains("%2B00%3A00&amp;after=17\"") && within.contains("Older ones may"),
            "{within}"
        );
        assert!(
            next_period.contains("%2B00%3A00\"") && next_period.contains("Nobody changed anything"),
            "{next_period}"
        );
    }

    #[test]
    fn an_empty_page_with_a_filter_does_not_claim_that_nobody_changed_anything() {
        let by = AuditQuery {
            who: "ada".into(),
            ..AuditQuery::default()
        };
        let on = AuditQuery {
            queue: "mail".into(),
            ..AuditQuery::default()
        };
        for filter in [by, on] {
            let next = AuditNext {
                at: "2026-11-28T15:00:00+00:00".into(),
                after: None,
            };
            let page = audit(&Chrome::default(), &filter, &[], &next, 1.0).into_string();
            let words = "No action in these 31 days matches the filter.";
            assert!(page.contains(words) && !page.contains("Nobody"), "{page}");
        }
    }
}
