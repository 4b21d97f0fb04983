//! Messages about values that do not match a schema.

use super::Excerpt;
use super::json::{Json, Kind, Location};
use super::node::{Compiled, NodeId};

/// A value is quoted up to this length, which is enough to recognise it.
const FOUND_CHARS_MAX: usize = 40;

/// A rule, and the part of a value that does not match it.
#[derive(Clone, Copy)]
pub(super) struct Mismatch<'s> {
    pub(super) at: Location,
    pub(super) node: NodeId,
    pub(super) keyword: &'static str,
    pub(super) detail: Detail<'s>,
}

/// Details that the keyword alone does not imply.
#[derive(Clone, Copy)]
pub(super) enum Detail<'s> {
    None,
    /// The name of a missing property.
    Missing(&'s str),
    /// The number of items or properties.
    Count(u64),
    /// More than one alternative matches.
    MatchesMany,
}

impl Mismatch<'_> {
    /// The relevance of this mismatch of one alternative for the value at `at`: 0 if it only distinguishes
    /// alternatives, 2 if the mismatch is deeper inside the value.
    pub(super) fn relevance(&self, at: Location) -> u8 {
        match self.keyword {
            "const" | "enum" => 0,
            _ if self.at != at => 2,
            "type" => 0,
            _ => 1,
        }
    }

    /// The rest of the sentence "… does not match the schema": the location in the value, the expected and the actual
    /// value, and the location in the schema.
    pub(super) fn describe(
        &self,
        schema: &Compiled,
        written: Json<'_>,
        json: Json<'_>,
        excerpt: Excerpt,
    ) -> String {
        let at = match json.pointer(self.at) {
            (top, _) if top.is_empty() => String::new(),
            (pointer, false) => format!(" at {}", excerpt.shorten(&pointer)),
            (pointer, true) => format!(" at {} (property name)", excerpt.shorten(&pointer)),
        };
        let rule_at = schema.pointer(written, self.node);
        let problem = match (self.detail, schema.rule(written, self.node, self.keyword)) {
            (Detail::Missing(name), _) => {
                format!("missing required property \"{}\"", excerpt.shorten(name))
            }
            (Detail::MatchesMany, _) => {
                "expected a match for exactly one schema of \"oneOf\", got several".into()
            }
            (Detail::None | Detail::Count(_), None) => match rule_at.rsplit('/').next() {
                Some("additionalProperties" | "unevaluatedProperties") => {
                    "unexpected property".into()
                }
                Some("items" | "unevaluatedItems") => "unexpected item".into(),
                Some(_) | None => {
                    format!("expected no value, got {}", found(json, self.at, excerpt))
                }
            },
            (Detail::None, Some(_)) if self.keyword == "uniqueItems" => {
                "expected unique items, got duplicates".into()
            }
            (Detail::None, Some(rule)) => {
                let expected = self.expected(schema, written, rule, excerpt);
                format!("expected {expected} got {}", found(json, self.at, excerpt))
            }
            (Detail::Count(count), Some(rule)) => {
                let expected = self.expected(schema, written, rule, excerpt);
                format!("expected {expected} got {count}")
            }
        };
        format!("{at}: {problem} ({})", excerpt.shorten(&rule_at))
    }

    /// What the keyword expects, from its value in the schema, with the punctuation before "got": a semicolon after a
    /// list.
    fn expected(
        &self,
        schema: &Compiled,
        written: Json<'_>,
        rule: Location,
        excerpt: Excerpt,
    ) -> String {
        let value = excerpt.shorten(written.raw(rule));
        let counted = |singular: &str, plural: &str| match &*value {
            "1" => format!("1 {singular}"),
            _ => format!("{value} {plural}"),
        };
        // The schema of "contains", if this is a rule about its matches.
        let contained = || {
            let contains = schema.rule(written, self.node, "contains");
            contains.map_or_else(String::new, |rule| excerpt.shorten(written.raw(rule)))
        };
        let list = || {
            let values: Vec<&str> = written.items(rule).map(|item| written.raw(item)).collect();
            (values.len(), excerpt.shorten(&values.join(", ")))
        };
        let expected = match self.keyword {
            "type" => types(written, rule),
            "const" => value,
            "enum" => match list() {
                (0, _) => "no value".into(),
                (1, value) => value,
                (_, values) => return format!("one of {values};"),
            },
            "anyOf" => return format!("a match for any of {};", list().1),
            "oneOf" => return format!("a match for exactly one of {};", list().1),
            "not" => format!("a value that does not match {value}"),
            "minimum" => format!("at least {value}"),
            "exclusiveMinimum" => format!("more than {value}"),
            "maximum" => format!("at most {value}"),
            "exclusiveMaximum" => format!("less than {value}"),
            "multipleOf" => format!("a multiple of {value}"),
            "minLength" => format!("at least {}", counted("character", "characters")),
            "maxLength" => format!("at most {}", counted("character", "characters")),
            "pattern" => format!("a string that matches {value}"),
            "minItems" => format!("at least {}", counted("item", "items")),
            "maxItems" => format!("at most {}", counted("item", "items")),
            "contains" => {
                let min = schema.rule(written, self.node, "minContains");
                match min.map_or("1", |min| written.raw(min)) {
                    "1" => format!("at least 1 item that matches {value}"),
                    min => format!("at least {} items that match {value}", excerpt.shorten(min)),
                }
            }
            "maxContains" => {
                let items = counted("item that matches", "items that match");
                format!("at most {items} {}", contained())
            }
            "minProperties" => format!("at least {}", counted("property", "properties")),
            "maxProperties" => format!("at most {}", counted("property", "properties")),
            other => format!("a match for \"{other}\": {value}"),
        };
        format!("{expected},")
    }
}

fn types(written: Json<'_>, rule: Location) -> String {
    let names: Vec<Location> = match written.kind(rule) {
        Kind::Array => written.items(rule).collect(),
        Kind::Null | Kind::Boolean | Kind::Number | Kind::String | Kind::Object => vec![rule],
    };
    let types = names.into_iter().map(|name| match &*written.string(name) {
        "integer" => "an integer",
        "number" => "a number",
        "string" => "a string",
        "boolean" => "a boolean",
        "array" => "an array",
        "object" => "an object",
        _ => "null",
    });
    match types.collect::<Vec<_>>().as_slice() {
        [] => "no value".into(),
        [only] => (*only).into(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// The value that was found, shortened.
fn found(json: Json<'_>, at: Location, excerpt: Excerpt) -> String {
    match json.kind(at) {
        Kind::Null | Kind::Boolean | Kind::Number | Kind::String => {
            shortened(json.raw(at), excerpt)
        }
        Kind::Array => "an array".to_owned(),
        Kind::Object => "an object".to_owned(),
    }
}

fn shortened(raw: &str, excerpt: Excerpt) -> String {
    match raw.char_indices().nth(FOUND_CHARS_MAX) {
        Some((end, _)) => format!("{}…", excerpt.shorten(&raw[..end])),
        None => excerpt.shorten(raw),
    }
}
