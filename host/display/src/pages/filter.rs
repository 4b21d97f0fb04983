//! The filter of the list of jobs: a form, its query, and what the database reads.

use super::layout::Chrome;
use crate::when;
use maud::{Markup, html};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};

/// The states of jobs, in the order in which a job passes through them.
pub(super) const STATES: [&str; 6] = [
    "queued",
    "running",
    "succeeded",
    "failed",
    "timed_out",
    "cancelled",
];

/// The fields of a query or a form, decoded, in their order.
#[derive(Debug, Clone, Default)]
pub struct Pairs(pub Vec<(String, String)>);

impl Pairs {
    /// The first value of this name that is not empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        let mut found = self.0.iter().filter(|(key, _)| key == name);
        let value = found.find(|(_, value)| !value.trim().is_empty())?;
        Some(value.1.trim())
    }

    /// All values of this name.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let found = self.0.iter().filter(move |(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// Conditions on jobs, which must all match; as they were typed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct JobFilter {
    /// One of these states; empty: any.
    pub states: Vec<String>,
    /// Fields that are compared, by their names in the form and in the filter of `rouse.search_jobs`.
    fields: Vec<(&'static str, String)>,
}

/// Fields that compare contents, which anonymous users may not see.
const OF_CONTENTS: [&str; 3] = ["error", "kind", "payload"];

/// All fields except the states: name, label, an example.
const FIELDS: [(&str, &str, &str); 11] = [
    ("handler", "Handler", "email.send"),
    ("queue", "Queue", "default"),
    ("tenant", "Tenant", ""),
    ("source", "Source", ""),
    ("tag", "Tag", "gpu"),
    ("unique_key", "Unique key", ""),
    ("error", "Text in the error", "timeout"),
    ("kind", "Kind of error", "denied"),
    ("payload", "Payload contains", "/customer/id=42"),
    ("since", "Since", "2h, or 2027-01-31T08:00Z"),
    ("until", "Until", "10m"),
];

impl JobFilter {
    /// Reads a query or a form.
    ///
    /// # Errors
    /// If a value cannot be read, with a sentence for the user.
    pub fn read(pairs: &Pairs) -> Result<Self, String> {
        let mut filter = Self::default();
        for state in pairs.all("state").filter(|state| !state.is_empty()) {
            if !STATES.contains(&state) {
                return Err(format!("{state:?} is not a state of a job"));
            }
            filter.states.push(state.to_owned());
        }
        for (name, _, _) in FIELDS {
            if let Some(value) = pairs.get(name) {
                filter.fields.push((name, value.to_owned()));
            }
        }
        if let Some(payload) = filter.get("payload") {
            pointer(payload)?;
        }
        Ok(filter)
    }

    /// Jobs in these states.
    pub fn for_states(states: &[&str]) -> Self {
        Self {
            states: states.iter().map(|&state| state.to_owned()).collect(),
            fields: Vec::new(),
        }
    }

    /// The same filter with this condition, instead of an earlier one on the same field.
    pub fn with(mut self, name: &'static str, value: &str) -> Self {
        self.fields.retain(|(key, _)| *key != name);
        self.fields.push((name, value.to_owned()));
        self
    }

    fn get(&self, name: &str) -> Option<&str> {
        let found = self.fields.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| value.as_str())
    }

    /// True if its result reveals something about payloads or errors.
    pub fn looks_at_contents(&self) -> bool {
        self.fields
            .iter()
            .any(|(name, _)| OF_CONTENTS.contains(name))
    }

    /// True if it matches only jobs that have ended.
    pub fn is_of_ended(&self) -> bool {
        !self.states.is_empty()
            && !self
                .states
                .iter()
                .any(|state| ["queued", "running"].contains(&state.as_str()))
    }

    /// The query of the list, without `?`.
    pub fn query(&self) -> String {
        let states = self.states.iter().map(|state| ("state", state.as_str()));
        let fields = self
            .fields
            .iter()
            .map(|(key, value)| (*key, value.as_str()));
        let encoded = states
            .chain(fields)
            .map(|(key, value)| format!("{key}={}", utf8_percent_encode(value, NON_ALPHANUMERIC)));
        encoded.collect::<Vec<_>>().join("&")
    }

    /// The filter of `rouse.search_jobs`. `now`: the database's clock, seconds since 1970; ages count from it.
    pub fn json(&self, now: f64) -> Value {
        let mut filter = Map::new();
        if !self.states.is_empty() {
            filter.insert("state".to_owned(), json!(self.states));
        }
        for (name, value) in &self.fields {
            let value = match *name {
                "payload" => pointer(value).map(|(pointer, value)| json!({pointer: value})),
                "since" | "until" => Ok(at(value, now).into()),
                _ => Ok(value.as_str().into()),
            };
            // `read` has already rejected an invalid pointer.
            filter.insert((*name).to_owned(), value.unwrap_or_default());
        }
        filter.into()
    }

    /// The filter of `rouse.search_jobs` for a fixed set of jobs: those that had ended (live jobs: were enqueued) by
    /// `until`, seconds since 1970.
    pub fn until(&self, until: f64) -> Value {
        let mut filter = self.json(until);
        if self.get("until").is_none() {
            filter["until"] = at("0s", until).into();
        }
        filter
    }

    /// The conditions on one line.
    pub fn words(&self) -> String {
        let states = self.states.join(" or ");
        let states = (!states.is_empty()).then(|| format!("state = {states}"));
        let fields = self
            .fields
            .iter()
            .map(|(name, value)| format!("{name} = {value}"));
        let words: Vec<_> = states.into_iter().chain(fields).collect();
        match words.is_empty() {
            true => "all jobs".to_owned(),
            false => words.join(", "),
        }
    }

    /// The form.
    pub(super) fn form(&self, chrome: &Chrome) -> Markup {
        html! {
            form class="filters" method="get" action={ (chrome.base) "/jobs" } role="search" {
                fieldset class="wide" {
                    legend class="soft" { "State" }
                    @for state in STATES {
                        label {
                            input type="checkbox" name="state" value=(state)
                                checked[self.states.iter().any(|it| it == state)];
                            (state.replace('_', " "))
                        }
                    }
                }
                @for (index, (name, label, example)) in FIELDS.into_iter().enumerate() {
                    @if chrome.may_read_contents() || !OF_CONTENTS.contains(&name) { label {
                        (label)
                        input type=(if index == 0 { "search" } else { "text" }) name=(name)
                            value=(self.get(name).unwrap_or_default())
                            placeholder=[(!example.is_empty()).then_some(example)]
                            autocomplete="off" spellcheck="false";
                    } }
                }
                div class="more" {
                    button type="submit" class="main" { "Search" }
                    a class="button" href={ (chrome.base) "/jobs" } { "Clear" }
                }
            }
        }
    }

    /// The same conditions as hidden fields of another form.
    pub(super) fn hidden(&self) -> Markup {
        html! {
            @for state in &self.states { input type="hidden" name="state" value=(state); }
            @for (name, value) in &self.fields { input type="hidden" name=(name) value=(value); }
        }
    }
}

/// Parses `POINTER=VALUE`. A value that is not JSON is a string.
fn pointer(text: &str) -> Result<(String, Value), String> {
    let wanted = "“Payload contains” needs a JSON pointer and a value, such as /customer/id=42";
    let (pointer, value) = text.split_once('=').ok_or(wanted)?;
    if !pointer.starts_with('/') {
        return Err(wanted.to_owned());
    }
    let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    Ok((pointer.to_owned(), value))
}

/// A time as the database parses it. An age counts from `now`; everything else is left to the database.
fn at(text: &str, now: f64) -> String {
    let Ok(age) = humantime::parse_duration(text) else {
        return text.to_owned();
    };
    when::rfc3339(now - age.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> Pairs {
        Pairs(pairs.iter().map(|&(k, v)| (k.into(), v.into())).collect())
    }

    #[test]
    fn a_form_becomes_a_filter_and_its_query_is_read_as_the_same_filter() {
        let filter = JobFilter::read(&pairs(&[
            ("state", "failed"),
            ("state", "timed_out"),
            ("handler", " mail "),
            ("tenant", ""),
            ("payload", "/id=42"),
            ("since", "2h"),
        ]))
        .unwrap();
        assert_eq!(
            filter.json(10_800.0),
            json!({"state": ["failed", "timed_out"], "handler": "mail", "payload": {"/id": 42}, "since": "1970-01-01T01:00:00.000000Z"})
        );
        assert!(filter.is_of_ended());
        let query = filter.query();
        assert_eq!(
            query,
            "state=failed&state=timed%5Fout&handler=mail&payload=%2Fid%3D42&since=2h"
        );
        let form = filter.form(&Chrome::default()).into_string();
        assert!(form.contains(r#"value="failed" checked"#), "{form}");
    }

    #[test]
    fn invalid_values_are_reported_in_a_sentence() {
        let error = |key, value| JobFilter::read(&pairs(&[(key, value)])).unwrap_err();
        assert!(error("state", "done").contains("is not a state"));
        assert!(error("payload", "id").contains("/customer/id=42"));
        assert!(
            JobFilter::read(&pairs(&[("other", "x")]))
                .unwrap()
                .query()
                .is_empty()
        );
    }
}
