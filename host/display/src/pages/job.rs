//! The page of a job.

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::jobs::{attempts, shown_state};
use super::layout::Chrome;
use super::timeline::timeline;
use super::why::why;
use crate::flow::chain;
use crate::plural::choose;
use crate::sanitize;
use crate::when;

/// Longer payloads and results are cut; a link leads to the full text.
const CONTENT_BYTES_MAX: usize = 64 << 10;
/// Longer calls of `rouse.enqueue` are not offered for copying.
const COMMAND_BYTES_MAX: usize = 4 << 10;
/// Deeper nesting is not indented further.
const INDENTED_MAX: usize = 24;

/// The data of the page of a job.
#[derive(Debug, Clone, Default)]
pub struct Job {
    /// A row of `rouse.jobs` without payload and result, with the newest events of its `history`, and with
    /// `has_older_events`.
    pub record: Value,
    /// The payload, as Postgres wrote it; `None` if there is none, or the user may not see it.
    pub payload: Option<String>,
    /// The result, likewise.
    pub result: Option<String>,
    /// Rows of `rouse.why`.
    pub why: Vec<Value>,
    /// The newest lines of its log.
    pub log: Vec<LogRow>,
    /// True if there are older lines.
    pub has_older_lines: bool,
}

/// A line of a job's log.
#[derive(Debug, Clone)]
pub struct LogRow {
    /// The attempt.
    pub attempt: i32,
    /// When it was written.
    pub at: String,
    /// `error`, `warn`, `info`, `debug`, `trace`, `stdout` or `stderr`.
    pub level: String,
    /// The line.
    pub text: String,
}

/// The page.
pub fn job(chrome: &Chrome, job: &Job, now: f64) -> Markup {
    let record = &job.record;
    let history = record["history"].as_array().map_or(&[][..], Vec::as_slice);
    let is_live = matches!(cells::text(record, "state"), "queued" | "running");
    html! {
        div class="title" {
            h1 { "Job " span class="mono" { (record["id"]) } " " (cells::handler(chrome, cells::text(record, "handler"))) }
            (cells::state(shown_state(record)))
            (progress(chrome, record))
            div class="actions" { (actions(chrome, record, history)) }
        }
        (retried_as(chrome, history))
        @if !job.why.is_empty() { (why(chrome, record, &job.why)) }
        (error(chrome, record))
        section class="card" aria-label="Timeline" { (timeline(history, is_live, now)) }
        div class="pair" {
            section class="card" { h2 { "Facts" } (facts(chrome, record, history, now)) }
            section class="card" { h2 { "History" } (events(chrome, record, history, now)) }
        }
        @if chrome.may_read_contents() {
            (content(chrome, record, "Payload", "payload", job.payload.as_deref()))
            (content(chrome, record, "Result", "result", job.result.as_deref()))
            (log(job))
        }
        @if cells::text(record, "state") == "queued" { (edit(chrome, record, job.payload.as_deref())) }
        @if is_live { (more(chrome, record)) }
        (commands(chrome, job, now))
    }
}

fn progress(chrome: &Chrome, record: &Value) -> Markup {
    let progress = &record["progress"];
    html! {
        @if let Some(percent) = progress["percent"].as_i64() {
            span {
                progress max="100" value=(percent) aria-label="Progress" {}
                " " (percent) " % "
                @if chrome.may_read_contents() { span class="soft" { (cells::excerpt(cells::text(progress, "step"))) } }
            }
        }
    }
}

/// The newest job that was enqueued to retry this one.
fn last_retry(history: &[Value]) -> Option<&Value> {
    let retried = |event: &&Value| event["event"] == "retried";
    Some(&history.iter().rev().find(retried)?["detail"]["as"])
}

fn retried_as(chrome: &Chrome, history: &[Value]) -> Markup {
    html! {
        @if let Some(id) = last_retry(history) { p class="notice" { "This job was retried as job " (cells::job(chrome, id)) "." } }
    }
}

fn actions(chrome: &Chrome, record: &Value, history: &[Value]) -> Markup {
    let id = &record["id"];
    let path = |action: &str| format!("/jobs/{id}/{action}");
    html! {
        @match cells::text(record, "state") {
            "queued" => {
                @if record["wait"].is_null() {
                    (chrome.button(&path("run-now"), "Run now", "", ""))
                }
                (chrome.button(&path("cancel"), "Cancel", "Cancel this job?", "risky"))
            }
            "running" => (chrome.button(&path("cancel"), "Cancel", "Cancel this job? Its attempt is stopped.", "risky")),
            _ if last_retry(history).is_some() => (chrome.button(&path("retry"), "Retry again", "", "")),
            _ => (chrome.button(&path("retry"), "Retry", "", "main")),
        }
    }
}

fn error(chrome: &Chrome, record: &Value) -> Markup {
    let error = &record["error"];
    if error.is_null() {
        return html! {};
    }
    if !chrome.may_read_contents() {
        return html! { p class="notice bad" { "The last attempt failed. Sign in to read the error." } };
    }
    let text = |key: &str| error[key].as_str().filter(|text| !text.is_empty());
    let plain = error.as_str().or_else(|| text("message"));
    let (details, stack) = without_stack(&error["details"]);
    html! {
        section class="card" id="error" {
            h2 {
                "Error"
                @for key in ["kind", "guest_kind"] { @if let Some(kind) = text(key) { " " (cells::state(kind)) } }
            }
            pre { (sanitize::lines(start(plain.unwrap_or_default()))) }
            @if let Some(location) = text("location") { p { "At " code { (sanitize::line(location)) } } }
            @if error["kind"] == "lost" && record["state"] == "failed" {
                p { "This job is quarantined, because it probably crashes the hosts that run it. Retry it once the cause is fixed." }
            }
            (more_of_error("details", "Details", &details))
            (more_of_error("stack", "Stack", &stack))
            (more_of_error("stderr", "Last lines of standard error", &listed(&error["stderr"])))
            (more_of_error("backtrace", "Backtrace of the handler", &listed(&error["backtrace"])))
        }
    }
}

/// A part of an error, collapsed at first; nothing if the part is empty.
fn more_of_error(id: &str, title: &str, text: &str) -> Markup {
    html! {
        @if !text.is_empty() {
            details id=(id) { summary { (title) } pre { (start(text)) } }
        }
    }
}

/// The details of an error as JSON, and separately the stack, which JavaScript and Python write as text with line
/// breaks. Each is empty if there is none.
fn without_stack(details: &Value) -> (String, String) {
    let mut rest = details.clone();
    let stack = match rest["stack"].is_string() {
        true => rest.as_object_mut().and_then(|it| it.remove("stack")),
        false => None,
    };
    let is_empty =
        rest.is_null() || stack.is_some() && rest.as_object().is_some_and(|it| it.is_empty());
    let rest = match is_empty {
        true => String::new(),
        false => sanitize::json(&format!("{rest:#}")),
    };
    let stack = stack.as_ref().and_then(Value::as_str).map(sanitize::lines);
    (rest, stack.unwrap_or_default())
}

/// The strings of a list, each on a line of its own.
fn listed(list: &Value) -> String {
    let lines = list.as_array().into_iter().flatten();
    let lines = lines.filter_map(Value::as_str).map(sanitize::line);
    lines.collect::<Vec<_>>().join("\n")
}

/// The start of a text that may be too long for a page.
fn start(text: &str) -> &str {
    &text[..text.floor_char_boundary(CONTENT_BYTES_MAX)]
}

fn facts(chrome: &Chrome, record: &Value, history: &[Value], now: f64) -> Markup {
    let milliseconds = |value: &Value| value.as_f64().map(|ms| when::took(ms / 1e3));
    let row = |name: &str, value: Markup| html! { @if !value.0.is_empty() { dt { (name) } dd { (value) } } };
    let time = |key: &str| match record[key].is_string() {
        true => cells::exact_time(&record[key], now),
        false => html! {},
    };
    let ids = |list: &Value| {
        html! {
            @for id in list.as_array().into_iter().flatten() { (cells::job(chrome, id)) " " }
        }
    };
    html! {
        dl class="facts" {
            (row("Queue", cells::queue(chrome, cells::text(record, "queue"))))
            (row("Priority", html! { (cells::plain(&record["priority"])) }))
            (row("Tags", tags(&record["tags"])))
            (row("Tenant", linked_value(chrome, record, "tenant")))
            (row("Source", linked_value(chrome, record, "source")))
            (row("Unique key", html! { (cells::plain(&record["unique_key"])) }))
            (row("Attempt", attempt(record, history)))
            (row("Retried from", cells::job(chrome, &record["retried_from"])))
            (row("Parent", cells::job(chrome, &record["parent"])))
            @if record["chain"] != record["id"] { (row("Chain", cells::job(chrome, &record["chain"]))) }
            (row("After", after(chrome, &record["after"])))
            (row("Waits for", ids(&record["waits_for"])))
            (row("Suspended", suspension(chrome, &record["wait"])))
            (row("Lease", html! { @if let Some(lease) = milliseconds(&record["lease_ms"]) { (lease) } }))
            (row("Timeout", html! { @if let Some(timeout) = milliseconds(&record["timeout_ms"]) { (timeout) } }))
            (row("Deadline", time("deadline_at")))
            (row("Grants", html! { @if !record["grants"].is_null() { code { (cells::plain(&record["grants"])) } } }))
            @if record["trace"].is_string() { (row("Trace", trace(chrome, cells::text(record, "trace")))) }
            (row("Enqueued", time("requested_at")))
            (row("Due", time("available_at")))
            (row("Claimed", time("claimed_at")))
            (row("Lease ended", time("orphaned_at")))
            (row("Started", time("started_at")))
            (row("Ended", time("finished_at")))
            (row("Used", usage(&record["usage"])))
        }
    }
}

/// The chains that a job waits or waited for, by name, each with its `on_failure` unless that is the default.
fn after(chrome: &Chrome, named: &Value) -> Markup {
    html! {
        @for (name, entry) in named.as_object().into_iter().flatten() {
            (cells::line(name)) " "
            @if let Some((on_failure, chain)) = chain(entry) {
                (cells::job(chrome, &chain.into())) " "
                @if let Some(word) = on_failure { "(" (cells::line(word)) ") " }
            }
        }
    }
}

/// The id of a trace; a link if the trace is sampled and `trace_url` is set.
fn trace(chrome: &Chrome, traceparent: &str) -> Markup {
    let id = traceparent.split('-').nth(1).unwrap_or_default();
    html! {
        @if chrome.trace_url.is_empty() || traceparent.ends_with("-00") {
            code { (sanitize::line(id)) }
        } @else {
            a href=(chrome.trace_url.replace("{trace}", &chrome.encoded(id))) rel="noreferrer" { code { (sanitize::line(id)) } }
        }
    }
}

/// A value with a link to all jobs that have it.
fn linked_value(chrome: &Chrome, record: &Value, key: &str) -> Markup {
    let value = cells::text(record, key);
    html! {
        @if !value.is_empty() {
            a href={ (chrome.base) "/jobs?" (key) "=" (chrome.encoded(value)) } { (cells::line(value)) }
        }
    }
}

pub(super) fn tags(list: &Value) -> Markup {
    html! {
        @for tag in list.as_array().into_iter().flatten() { span class="tag" { (cells::plain(tag)) } }
    }
}

fn attempt(record: &Value, history: &[Value]) -> Markup {
    let uncounted = record["uncounted"].as_i64().unwrap_or_default();
    html! {
        (attempts(record, attempts_max(record, history)))
        @if uncounted > 0 { ", of which " (uncounted) " " (choose(uncounted, "does", "do")) " not count (lost, suspended or given back)" }
    }
}

/// The maximum number of attempts, without the uncounted ones: the producer's limit, or that of the last error that has
/// one.
fn attempts_max(record: &Value, history: &[Value]) -> Option<i64> {
    let own = record["max_attempts"].as_i64();
    let last = record["error"]["max_attempts"].as_i64();
    let mut known = history.iter().rev();
    own.or(last)
        .or_else(|| known.find_map(|event| event["detail"]["max_attempts"].as_i64()))
}

fn suspension(chrome: &Chrome, wait: &Value) -> Markup {
    html! {
        @if let Some(kind) = wait["kind"].as_str() {
            (cells::line(kind)) " "
            code { (cells::plain(&wait["name"])) }
            @for id in wait["jobs"].as_array().into_iter().flatten() { " " (cells::job(chrome, id)) }
        } @else if !wait.is_null() { code { (cells::plain(wait)) } }
    }
}

pub(super) fn usage(used: &Value) -> Markup {
    let number = |key: &str| used[key].as_u64().unwrap_or_default();
    html! {
        @if !used.is_null() {
            (used["cpu_ms"]) " ms of CPU time, " (cells::bytes(number("memory_bytes"))) " of memory, "
            (number("host_calls")) " host calls"
            @if number("bytes_in") + number("bytes_out") > 0 {
                ", " (cells::bytes(number("bytes_in"))) " received, " (cells::bytes(number("bytes_out"))) " sent"
            }
            @if let Some(digest) = used["sha256"].as_str() {
                ", module " code { (digest.chars().take(12).collect::<String>()) }
            }
        }
    }
}

fn events(chrome: &Chrome, record: &Value, history: &[Value], now: f64) -> Markup {
    html! {
        @if record["has_older_events"] == true {
            p class="soft" { "These are the newest events. All events: " code { "rouse job " (record["id"]) } }
        }
        div class="scroll" tabindex="0" role="region" aria-label="History" {
            table {
                thead { tr { th { "When" } th { "Event" } th { "Attempt" } th { "Worker" } th { "Detail" } } }
                tbody {
                    @for event in history {
                        tr {
                            td class="keep" { (cells::time(&event["at"], now)) }
                            td { (cells::state(cells::text(event, "event"))) }
                            td class="number" { (cells::plain(&event["attempt"])) }
                            td { @if !cells::text(event, "worker").is_empty() { (cells::worker(chrome, cells::text(event, "worker"))) } }
                            td class="message" { (detail(chrome, &event["detail"])) }
                        }
                    }
                }
            }
        }
    }
}

/// The details of an event of the history.
fn detail(chrome: &Chrome, detail: &Value) -> Markup {
    let by = cells::text(detail, "by");
    let retried_as = &detail["as"];
    let names = ["step", "name", "run_at"];
    let known = names.iter().map(|key| cells::plain(&detail[*key]));
    let known = known.into_iter().find(|text| !text.is_empty());
    let message = detail["message"]
        .as_str()
        .filter(|_| chrome.may_read_contents());
    let times = detail["times"].as_i64();
    html! {
        @if !by.is_empty() { "by " (cells::line(by)) @if message.is_some() { ": " } @else { " " } }
        @if let Some(message) = message { (cells::excerpt(message)) }
        @else if retried_as.is_number() { "as " (cells::job(chrome, retried_as)) }
        @else if let Some(known) = known { (known) }
        @else if let Some(times) = times { (cells::number(times)) " times, last at this time" }
    }
}

fn content(chrome: &Chrome, record: &Value, title: &str, name: &str, text: Option<&str>) -> Markup {
    let Some(text) = text else {
        return html! {};
    };
    let is_cut = text.len() > CONTENT_BYTES_MAX;
    let shown = start(text);
    html! {
        section class="card" id=(name) {
            h2 {
                (title) " " small { (cells::bytes(text.len() as u64)) } " "
                a href={ (chrome.base) "/jobs/" (record["id"]) "/" (name) } { "raw" }
            }
            pre tabindex="0" aria-label=(title) { (sanitize::json(&indented(shown))) }
            @if is_cut { p class="soft" { "Only the start is shown." } }
        }
    }
}

/// JSON with line breaks and indentation. The text may be cut anywhere; nothing but white space between values changes,
/// so numbers keep all their digits.
pub(super) fn indented(json: &str) -> String {
    let mut out = String::with_capacity(json.len() * 2);
    let mut depth = 0_usize;
    let (mut in_string, mut escaped) = (false, false);
    let mut chars = json.chars().peekable();
    let line = |out: &mut String, depth: usize| {
        out.push('\n');
        out.extend(std::iter::repeat_n("  ", depth.min(INDENTED_MAX)));
    };
    while let Some(char) = chars.next() {
        if in_string {
            out.push(char);
            in_string = escaped || char != '"';
            escaped = !escaped && char == '\\';
            continue;
        }
        match char {
            '"' => {
                in_string = true;
                out.push(char);
            }
            '{' | '[' => {
                out.push(char);
                while chars.next_if(|next| next.is_whitespace()).is_some() {}
                if chars.peek().is_some_and(|next| matches!(next, '}' | ']')) {
                    out.extend(chars.next());
                } else {
                    depth += 1;
                    line(&mut out, depth);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                line(&mut out, depth);
                out.push(char);
            }
            ',' => {
                out.push(char);
                while chars.next_if(|next| next.is_whitespace()).is_some() {}
                line(&mut out, depth);
            }
            _ => out.push(char),
        }
    }
    out
}

fn log(job: &Job) -> Markup {
    html! {
        section class="card" id="log" {
            h2 { "Log" }
            @if job.log.is_empty() { p class="soft" { "This job has not written anything." } }
            @else {
                @if job.has_older_lines {
                    p class="soft" { "These are the newest lines. All lines: " code { "rouse job logs " (job.record["id"]) } }
                }
                pre class="log" tabindex="0" aria-label="Log" {
                    @for row in &job.log {
                        span class="at" { (row.attempt) " " (cells::line(&row.at)) " " }
                        span class=(match row.level.as_str() { "error" => "error", "warn" | "stderr" => "warn", _ => "" }) {
                            (cells::line(&row.level)) " " (sanitize::line(&row.text))
                        }
                        "\n"
                    }
                }
            }
        }
    }
}

/// A form of [`more`]: the action, its button, a question before it is sent, and its fields (name, label, value).
type MoreForm<'a> = (&'a str, &'a str, &'a str, &'a [(&'a str, &'a str, &'a str)]);

/// Forms of rare actions, which need some input.
fn more(chrome: &Chrome, record: &Value) -> Markup {
    let forms: [MoreForm<'_>; 3] = [
        (
            "signal",
            "Send a signal",
            "",
            &[("name", "Name", ""), ("payload", "Payload (JSON)", "null")],
        ),
        (
            "complete",
            "Complete",
            "End this job and record it as succeeded, with this result?",
            &[("result", "Result (JSON)", "null")],
        ),
        (
            "fail",
            "Fail",
            "End this job and record it as failed, with this message?",
            &[("message", "Message", "")],
        ),
    ];
    html! {
        @if chrome.may_act() {
            details class="card" id="more" {
                summary { "Signal, complete, fail" }
                @for (action, label, asks, fields) in forms {
                    form class="filters" method="post" action={ (chrome.base) "/jobs/" (record["id"]) "/" (action) } {
                        (chrome.token())
                        @for (name, label, value) in fields {
                            label { (label) input type="text" name=(name) value=(value) required autocomplete="off" spellcheck="false"; }
                        }
                        button type="submit" data-ask=[(!asks.is_empty()).then_some(asks)] { (label) }
                    }
                }
            }
        }
    }
}

/// Forms for the priority and the payload of a queued job. A payload that is too large for the page has no form.
fn edit(chrome: &Chrome, record: &Value, payload: Option<&str>) -> Markup {
    let path = |action: &str| format!("{}/jobs/{}/{action}", chrome.base, record["id"]);
    let current = cells::text(record, "priority");
    html! {
        @if chrome.may_act() {
            details class="card" id="edit" {
                summary { "Change priority, payload" }
                form class="filters" method="post" action=(path("priority")) {
                    (chrome.token())
                    label { "Priority"
                        select name="priority" {
                            @for one in ["high", "normal", "low"] { option value=(one) selected[one == current] { (one) } }
                        }
                    }
                    button type="submit" { "Set the priority" }
                }
                @if let Some(payload) = payload.filter(|it| it.len() <= CONTENT_BYTES_MAX) {
                    form class="filters" method="post" action=(path("replace-payload")) {
                        (chrome.token())
                        label class="wide" { "Payload (JSON)"
                            textarea name="payload" rows="6" required spellcheck="false" autocomplete="off" { (payload) }
                        }
                        p class="soft" { "A job with another payload is a new job. This one is cancelled, and keeps its payload and its history." }
                        button type="submit" data-ask="Replace this job with a new one that has this payload?" { "Replace the payload" }
                    }
                }
            }
        }
    }
}

/// Commands for a terminal and for psql: they show this job, or enqueue another one like it.
fn commands(chrome: &Chrome, job: &Job, now: f64) -> Markup {
    let record = &job.record;
    let id = &record["id"];
    let payload = job.payload.as_ref();
    let payload = payload.filter(|payload| payload.len() < COMMAND_BYTES_MAX);
    let again = payload.map(|payload| enqueue_call(record, payload, now));
    html! {
        details class="card" id="commands" {
            summary { "In a terminal, or in psql" }
            p { (cells::command(&format!("rouse job {id}"))) }
            p { (cells::command(&format!("SELECT * FROM rouse.history({id});"))) }
            @if chrome.may_read_contents() && let Some(again) = again.filter(|call| call.len() < COMMAND_BYTES_MAX) {
                p { "Another job like this one: " (cells::command(&again)) }
            }
        }
    }
}

/// The call that enqueues another job like this one. The time at which it may start is included while it is in the
/// future, unless the job waits for its next attempt.
fn enqueue_call(record: &Value, payload: &str, now: f64) -> String {
    let literal = |text: &str| format!("'{}'", text.replace('\'', "''"));
    let mut call = format!(
        "SELECT rouse.enqueue({}, {}",
        literal(cells::text(record, "handler")),
        literal(payload)
    );
    for key in ["queue", "tenant", "source", "priority"] {
        let value = cells::text(record, key);
        let is_default = matches!((key, value), ("queue", "default") | ("priority", "normal"));
        if !value.is_empty() && !is_default {
            call += &format!(", {key} => {}", literal(value));
        }
    }
    let tags = record["tags"].as_array().into_iter().flatten();
    let tags: Vec<String> = tags.filter_map(Value::as_str).map(literal).collect();
    if !tags.is_empty() {
        call += &format!(", tags => ARRAY[{}]", tags.join(", "));
    }
    let due = cells::text(record, "available_at");
    let is_later = when::epoch(due).is_some_and(|at| at > now);
    if is_later && record["attempt"] == 0 {
        call += &format!(", run_at => {}", literal(due));
    }
    sanitize::line(&call) + ");"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::layout::Role;
    use super::*;

    #[test]
    fn attempts_that_are_not_counted_raise_the_maximum() {
        let shown = |job: Value, history: Value| {
            let history = history.as_array().cloned().unwrap_or_default();
            attempt(&job, &history).into_string()
        };
        assert_eq!(
            shown(json!({"attempt": 0, "max_attempts": 3}), json!([])),
            ""
        );
        assert_eq!(
            shown(
                json!({"attempt": 4, "uncounted": 1, "max_attempts": 3}),
                json!([])
            ),
            "4 of 4, of which 1 does not count (lost, suspended or given back)"
        );
        let lost = json!({"attempt": 3, "uncounted": 2});
        let failed = json!([{"event": "failed", "detail": {"max_attempts": 5}}, {"event": "lost", "detail": {}}]);
        assert_eq!(
            shown(lost, failed),
            "3 of 7, of which 2 do not count (lost, suspended or given back)"
        );
        let last = json!({"attempt": 1, "uncounted": 0, "error": {"max_attempts": 5}});
        assert_eq!(shown(last, Value::Null), "1 of 5");
    }

    #[test]
    fn a_page_with_only_the_newest_events_names_the_command_for_all() {
        let shown = |has_older: bool| {
            let record = json!({"id": 7, "has_older_events": has_older});
            let renewed = json!({"event": "renewed", "attempt": 1, "detail": {"times": 3_600}});
            events(&Chrome::default(), &record, &[renewed], 1.0).into_string()
        };
        assert!(shown(true).contains("All events: <code>rouse job 7</code>"));
        let all = shown(false);
        assert!(
            all.contains("3,600 times") && !all.contains("All events"),
            "{all}"
        );
    }

    #[test]
    fn an_error_is_shown_with_its_backtrace_and_all_other_parts() {
        let mut chrome = Chrome {
            role: Role::Viewer,
            ..Chrome::default()
        };
        let record = json!({"state": "failed", "error": {
            "kind": "trap", "guest_kind": "TypeError", "message": "unreachable\n<b>", "location": "lib.rs:1:2",
            "backtrace": ["mill::grind", "<script>"], "stderr": ["Traceback", "  File \"mill.py\""],
            "details": {"order": 7, "stack": "run@mill.js:3\nmain@mill.js:9"},
        }});
        let shown = error(&chrome, &record).into_string();
        for part in [
            "unreachable\n&lt;b&gt;",
            ">trap<",
            ">TypeError<",
            "<code>lib.rs:1:2</code>",
            "mill::grind\n&lt;script&gt;</pre>",
            "Traceback\n  File &quot;mill.py&quot;</pre>",
            "&quot;order&quot;: 7\n}</pre>",
            "run@mill.js:3\nmain@mill.js:9</pre>",
        ] {
            assert!(shown.contains(part), "{part:?}: {shown}");
        }
        let plain = json!({"error": {"kind": "timed_out", "message": "too long", "details": {"stack": "a"}}});
        let plain = error(&chrome, &plain).into_string();
        assert!(plain.contains("id=\"stack\""), "{plain}");
        for id in ["details", "stderr", "backtrace"] {
            assert!(!plain.contains(&format!("id=\"{id}\"")), "{id}: {plain}");
        }
        chrome.role = Role::Anonymous;
        assert!(!error(&chrome, &record).into_string().contains("mill"));
    }

    #[test]
    fn each_job_that_a_job_waits_for_is_a_link() {
        let named = json!({"paid": 17, "packed": {"job": 18, "on_failure": "run"}});
        let shown = after(&Chrome::default(), &named).into_string();
        for part in [
            "paid <a",
            "/jobs/17\"",
            "packed <a",
            "/jobs/18\"",
            ">18</a> (run)",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert_eq!(after(&Chrome::default(), &Value::Null).into_string(), "");
    }

    #[test]
    fn the_call_that_repeats_a_job_has_its_tags_and_its_time_in_the_future() {
        let due = "1970-01-01T02:00:00+00:00";
        let mut record = json!({
            "handler": "a.b", "queue": "default", "tenant": "o'hara", "source": null, "priority": "high",
            "tags": ["gpu", "big"], "available_at": due, "attempt": 0,
        });
        let start = "SELECT rouse.enqueue('a.b', '{}', tenant => 'o''hara', priority => 'high', tags => ARRAY['gpu', 'big']";
        let with_time = format!("{start}, run_at => '{due}');");
        assert_eq!(enqueue_call(&record, "{}", 7_199.0), with_time);
        assert_eq!(enqueue_call(&record, "{}", 7_201.0), format!("{start});"));
        record["attempt"] = json!(1);
        assert_eq!(enqueue_call(&record, "{}", 7_199.0), format!("{start});"));
        let plain = json!({"handler": "a.b", "tags": [], "attempt": 0});
        let call = "SELECT rouse.enqueue('a.b', '{}');";
        assert_eq!(enqueue_call(&plain, "{}", 0.0), call);
    }
}
