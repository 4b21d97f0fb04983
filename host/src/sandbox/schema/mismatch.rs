//! What does not fit, for people.

use super::excerpt;
use super::json::{Json, Kind, Place};
use super::node::{Compiled, NodeId};

/// A value is quoted as far as it can be recognised.
const FOUND_CHARS_MAX: usize = 40;

/// A rule, and the part of a value that does not fit it.
#[derive(Clone, Copy)]
pub(super) struct Mismatch<'s> {
    pub(super) at: Place,
    pub(super) node: NodeId,
    pub(super) keyword: &'static str,
    pub(super) detail: Detail<'s>,
}

/// What a keyword alone does not tell.
#[derive(Clone, Copy)]
pub(super) enum Detail<'s> {
    None,
    /// A property is not there.
    Missing(&'s str),
    /// It fits more than one alternative.
    FitsMany,
}

impl Mismatch<'_> {
    /// How much it tells of an alternative for the value at this place: 0 where it only tells alternatives apart, 2 where
    /// something further inside does not fit.
    pub(super) fn tells(&self, at: Place) -> u8 {
        match self.keyword {
            "const" | "enum" => 0,
            _ if self.at != at => 2,
            "type" => 0,
            _ => 1,
        }
    }

    /// Where it is, what is there, and which rule that does not fit.
    pub(super) fn told(&self, schema: &Compiled, written: Json<'_>, json: Json<'_>) -> String {
        let at = match json.pointer(self.at).0 {
            top if top.is_empty() => "at the top".to_owned(),
            pointer => format!("at {}", excerpt(&pointer)),
        };
        let found = found(json, self.at);
        let rule = schema.rule(written, self.node, self.keyword);
        let rule = rule.map(|rule| {
            let rule = written.raw(rule);
            excerpt(&format!("\"{}\": {rule}", self.keyword))
        });
        let pointer = excerpt(&schema.pointer(written, self.node));
        match (&self.detail, rule) {
            (Detail::Missing(name), _) => {
                format!(
                    "the object {at} has no \"{}\", which is required ({pointer})",
                    excerpt(name)
                )
            }
            (Detail::FitsMany, _) => {
                format!("{at} is {found}, which fits more than one of \"oneOf\" ({pointer})")
            }
            (Detail::None, Some(rule)) => format!("{at} is {found}; wanted is {rule} ({pointer})"),
            (Detail::None, None) => {
                format!("{at} is {found}, and {pointer} allows nothing there")
            }
        }
    }
}

/// What stands there, as far as it can be recognised.
fn found(json: Json<'_>, at: Place) -> String {
    let raw = json.raw(at);
    match json.kind(at) {
        Kind::Null | Kind::Boolean => raw.to_owned(),
        Kind::Number => shortened(raw),
        Kind::String => format!("the string {}", shortened(raw)),
        Kind::Array => "an array".to_owned(),
        Kind::Object => "an object".to_owned(),
    }
}

fn shortened(raw: &str) -> String {
    match raw.char_indices().nth(FOUND_CHARS_MAX) {
        Some((end, _)) => format!("{}…", excerpt(&raw[..end])),
        None => excerpt(raw),
    }
}
