//! What does not match, for people.

use super::Excerpt;
use super::json::{Json, Kind, Location};
use super::node::{Compiled, NodeId};

/// A value is quoted as far as it can be recognised.
const FOUND_CHARS_MAX: usize = 40;

/// A rule, and the part of a value that does not match it.
#[derive(Clone, Copy)]
pub(super) struct Mismatch<'s> {
    pub(super) at: Location,
    pub(super) node: NodeId,
    pub(super) keyword: &'static str,
    pub(super) detail: Detail<'s>,
}

/// What a keyword alone does not say.
#[derive(Clone, Copy)]
pub(super) enum Detail<'s> {
    None,
    /// A property is not there.
    Missing(&'s str),
    /// There are so many items or properties.
    Count(u64),
    /// More than one alternative matches.
    MatchesMany,
}

impl Mismatch<'_> {
    /// How much it says about an alternative for the value at this location: 0 where it only tells alternatives apart, 2 where
    /// something further inside does not match.
    pub(super) fn tells(&self, at: Location) -> u8 {
        match self.keyword {
            "const" | "enum" => 0,
            _ if self.at != at => 2,
            "type" => 0,
            _ => 1,
        }
    }

    /// The rest of a sentence: where it is, what the schema expects there, what there is, and where the schema says so.
    pub(super) fn told(
        &self,
        schema: &Compiled,
        written: Json<'_>,
        json: Json<'_>,
        excerpt: Excerpt,
    ) -> String {
        let at = match json.pointer(self.at) {
            (top, _) if top.is_empty() => String::new(),
            (pointer, false) => format!(" at {}", excerpt.of(&pointer)),
            (pointer, true) => format!(" at the name of {}", excerpt.of(&pointer)),
        };
        let rule = schema.rule(written, self.node, self.keyword);
        let rule_at = schema.pointer(written, self.node);
        let what = match (self.detail, rule) {
            (Detail::Missing(name), _) => {
                format!("missing the required property \"{}\"", excerpt.of(name))
            }
            (Detail::MatchesMany, _) => "expected exactly one match in \"oneOf\", got more".into(),
            (Detail::None | Detail::Count(_), None) => match rule_at.rsplit('/').next() {
                Some("additionalProperties" | "unevaluatedProperties") => {
                    "unexpected property".into()
                }
                Some("items" | "unevaluatedItems") => "unexpected item".into(),
                Some(_) | None => {
                    format!("expected no value, got {}", found(json, self.at, excerpt))
                }
            },
            (Detail::None, Some(rule)) => {
                let expected = expected(self.keyword, written, rule, excerpt);
                format!("expected {expected}, got {}", found(json, self.at, excerpt))
            }
            (Detail::Count(count), Some(rule)) => {
                let expected = expected(self.keyword, written, rule, excerpt);
                format!("expected {expected}, got {count}")
            }
        };
        format!("{at}: {what} ({})", excerpt.of(&rule_at))
    }
}

/// What a keyword expects, from what is written under it.
fn expected(keyword: &str, written: Json<'_>, rule: Location, excerpt: Excerpt) -> String {
    let value = excerpt.of(written.raw(rule));
    let counted = |one: &str, more: &str| match &*value {
        "1" => format!("1 {one}"),
        _ => format!("{value} {more}"),
    };
    match keyword {
        "type" => types(written, rule),
        "const" => value,
        "enum" | "oneOf" => format!("one of {value}"),
        "anyOf" => format!("any of {value}"),
        "not" => format!("no match of {value}"),
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
        "uniqueItems" => "items that all differ".into(),
        "contains" => format!("more items that match {value}"),
        "maxContains" => format!("at most {} for \"contains\"", counted("match", "matches")),
        "minProperties" => format!("at least {}", counted("property", "properties")),
        "maxProperties" => format!("at most {}", counted("property", "properties")),
        other => format!("\"{other}\": {value}"),
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
        [one] => (*one).into(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// What stands there, as far as it can be recognised.
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
        Some((end, _)) => format!("{}…", excerpt.of(&raw[..end])),
        None => excerpt.of(raw),
    }
}
