//! The part of a schema that Postgres can check, and the parameters of a SQL function that takes its payloads.
//!
//! A contract is data: a jsonpath predicate that is true only for values that [`Schema::check`] refuses too. A rule
//! that jsonpath cannot express exactly is left out, and so is a rule that exceeds the limits: a schema is untrusted,
//! and each enqueue evaluates its predicate. Paths are strict: a missing key, or a value of another type, makes that
//! part of the predicate unknown, and an unknown predicate does not refuse anything.

mod parameters;
mod regex;

use serde_json::{Value, json};

use self::regex::to_postgres;
use super::Schema;
use super::json::{Json, Kind, Location};
use super::node::{Compiled, Node, NodeId, Types};
pub use parameters::{Parameter, Parameters};

/// The maximum length of a predicate, in bytes. It is kept in a row of a table, with those of other versions.
const REFUSES_BYTES_MAX: usize = 3500;

/// The maximum length of the text of the rules for messages, in bytes.
const RULES_BYTES_MAX: usize = 64 << 10;

/// The keys of a node of these rules take at most this many bytes, with their punctuation.
const KEYS_BYTES: usize = 96;

/// The maximum number of subschemas that are read, counting each use of a shared one.
const VISITS_MAX: usize = 2000;

/// The maximum nesting depth that is read.
const DEPTH_MAX: usize = 16;

/// Postgres expands `{n}` in patterns up to this number.
const REPEATS_MAX: u64 = 255;

/// The maximum length of a number in a predicate, in bytes.
const NUMBER_BYTES_MAX: usize = 40;

/// The maximum length of a rule in a message, in characters.
const SHOWN_MAX: usize = 100;

/// The part of a schema that Postgres can check.
#[derive(Debug, Clone, PartialEq)]
pub struct Contract {
    /// A jsonpath predicate, without its mode `strict`; `None` if it refuses nothing.
    pub refuses: Option<String>,
    /// The same rules by location, as `rouse._find_violation` reads them (migrations/functions/contract.sql).
    pub rules: Value,
    /// The parameters of the typed function.
    pub parameters: Parameters,
}

impl Schema {
    /// The part of this schema that Postgres can check.
    pub fn contract(&self) -> Contract {
        let Some(compiled) = &self.compiled else {
            return Contract {
                refuses: None,
                rules: json!({}),
                parameters: Parameters::Whole("jsonb"),
            };
        };
        let writer = |bytes_max| Writer {
            written: self.written.json(),
            compiled,
            bytes_left: bytes_max,
            visits_left: VISITS_MAX,
            depth: 0,
        };
        Contract {
            refuses: writer(REFUSES_BYTES_MAX).refuses(NodeId(0), "$"),
            rules: writer(RULES_BYTES_MAX)
                .rules(NodeId(0))
                .unwrap_or_else(|| json!({})),
            parameters: parameters::from_schema(compiled, self.written.json()),
        }
    }
}

/// One rule of a subschema for the value itself, not for the values within it.
struct Check {
    refuses: String,
    /// The human-readable problem.
    problem: String,
    /// True if the message shows the value.
    shows: bool,
}

impl Check {
    fn new(refuses: String, problem: impl Into<String>) -> Self {
        Self {
            refuses,
            problem: problem.into(),
            shows: true,
        }
    }
}

struct Writer<'a> {
    written: Json<'a>,
    compiled: &'a Compiled,
    bytes_left: usize,
    visits_left: usize,
    depth: usize,
}

impl<'a> Writer<'a> {
    /// The predicate of a subschema for the value `at` (`$` or `@`). `None` if it refuses nothing that can be
    /// expressed.
    fn refuses(&mut self, id: NodeId, at: &str) -> Option<String> {
        let node = self.enter(id)?;
        let checks = self.checks(id, node, at).into_iter();
        let mut any: Vec<String> = checks.map(|check| check.refuses).collect();
        any.extend(self.child_predicates(node, at));
        for same in same_value(node) {
            any.extend(self.refuses(same, at));
        }
        self.depth -= 1;
        // Parts that do not fit are left out.
        any.retain(|part| self.take(part.len() + 4));
        any_of(any)
    }

    fn enter(&mut self, id: NodeId) -> Option<&'a Node> {
        if self.depth == DEPTH_MAX || self.visits_left == 0 {
            return None;
        }
        self.depth += 1;
        self.visits_left -= 1;
        Some(self.compiled.node(id))
    }

    /// The rules of a subschema as a tree. `None` if there are none, or none that fit.
    fn rules(&mut self, id: NodeId) -> Option<Value> {
        let node = self.enter(id)?;
        let bytes_left = self.bytes_left;
        let rules = self.rules_that_fit(id, node);
        self.depth -= 1;
        let rules = (!rules.is_empty()).then_some(Value::Object(rules));
        let bytes = rules.as_ref().map_or(0, |rules| rules.to_string().len());
        self.bytes_left = bytes_left.saturating_sub(bytes);
        rules
    }

    /// The same for a node that was entered. Each part is deducted before the parts within it, so that a part which
    /// does not fit leaves out only itself.
    fn rules_that_fit(&mut self, id: NodeId, node: &'a Node) -> serde_json::Map<String, Value> {
        let mut rules = serde_json::Map::new();
        let bytes_left = self.bytes_left;
        let checks = self.checks(id, node, "$").into_iter();
        // The predicates of alternatives were deducted there, and are deducted here with the check.
        self.bytes_left = bytes_left;
        let array = node.array.as_ref();
        let prefix = array.map_or(&[][..], |array| &array.prefix_items[..]);
        // Each item of the prefix has a comma, or is an empty node with one.
        if !self.take(KEYS_BYTES + 3 * prefix.len()) {
            return rules;
        }
        let mut checks: Vec<Value> = checks
            .map(|check| {
                let refuses = format!("strict {}", check.refuses);
                json!({"refuses": refuses, "problem": check.problem, "shows": check.shows})
            })
            .collect();
        checks.retain(|check| self.take(check.to_string().len() + 1));
        if !checks.is_empty() {
            rules.insert("checks".into(), json!(checks));
        }
        if let Some(object) = &node.object {
            let others = object
                .additional_properties
                .filter(|_| object.pattern_properties.is_empty());
            let listed = object.properties.keys().map(|name| &**name);
            let listed: Vec<&str> = listed.filter(|name| is_storable(name)).collect();
            let listed = json!(listed);
            let bytes = listed.to_string().len();
            match others.filter(|_| self.take(bytes)) {
                Some(id) if self.compiled.node(id).never => {
                    rules.insert("known".into(), listed);
                }
                Some(id) => match self.rules(id) {
                    Some(others) => {
                        rules.insert("listed".into(), listed);
                        rules.insert("others".into(), others);
                    }
                    None => self.bytes_left += bytes,
                },
                None => {}
            }
            let mut properties = serde_json::Map::new();
            for (name, id) in object
                .properties
                .iter()
                .filter(|(name, _)| is_storable(name))
            {
                let bytes = Value::from(&**name).to_string().len() + 2;
                if !self.take(bytes) {
                    continue;
                }
                match self.rules(*id) {
                    Some(rules) => {
                        properties.insert(name.to_string(), rules);
                    }
                    None => self.bytes_left += bytes,
                }
            }
            if !properties.is_empty() {
                rules.insert("properties".into(), json!(properties));
            }
        }
        let prefix: Vec<Value> = prefix
            .iter()
            .map(|id| self.rules(*id).unwrap_or_else(|| json!({})))
            .collect();
        if !prefix.is_empty() {
            rules.insert("prefix".into(), json!(prefix));
        }
        let items = array.and_then(|array| array.items);
        if let Some(items) = items.and_then(|id| self.rules(id)) {
            rules.insert("items".into(), items);
        }
        let same = same_value(node).into_iter();
        let same: Vec<Value> = same
            .filter_map(|id| self.take(1).then(|| self.rules(id))?)
            .collect();
        if !same.is_empty() {
            rules.insert("same".into(), json!(same));
        }
        rules
    }

    /// Deducts this many bytes; false if they do not fit.
    fn take(&mut self, bytes: usize) -> bool {
        let fits = bytes <= self.bytes_left;
        if fits {
            self.bytes_left -= bytes;
        }
        fits
    }

    /// The rules of a subschema for the value itself.
    fn checks(&mut self, id: NodeId, node: &Node, at: &str) -> Vec<Check> {
        let mut checks = Vec::new();
        if node.never {
            checks.push(Check::new("1 == 1".into(), "is not allowed"));
        }
        if let Some(types) = &node.types {
            checks.push(type_check(*types, at));
        }
        for keyword in ["const", "enum"] {
            if let Some(location) = self.compiled.rule(self.written, id, keyword) {
                checks.extend(self.values_check(keyword, location, at));
            }
        }
        if node.number.is_some() {
            for (keyword, refuses, problem) in [
                ("minimum", "<", "expected at least"),
                ("exclusiveMinimum", "<=", "expected more than"),
                ("maximum", ">", "expected at most"),
                ("exclusiveMaximum", ">=", "expected less than"),
            ] {
                if let Some(number) = self.number(id, keyword) {
                    let refuses = format!("({at}.type() == \"number\" && {at} {refuses} {number})");
                    checks.push(Check::new(refuses, format!("{problem} {number}")));
                }
            }
            if let Some(number) = self.number(id, "multipleOf") {
                let refuses = format!("({at}.type() == \"number\" && ({at} % {number}) != 0)");
                checks.push(Check::new(
                    refuses,
                    format!("expected a multiple of {number}"),
                ));
            }
        }
        if let Some(string) = &node.string {
            let is_string = format!("{at}.type() == \"string\"");
            match string.min_length {
                Some(1) => {
                    let refuses = format!("({is_string} && {at} == \"\")");
                    checks.push(Check::new(refuses, "expected at least 1 character"));
                }
                Some(min @ 2..=REPEATS_MAX) => {
                    let refuses =
                        format!("({is_string} && !({at} like_regex \"^.{{{min}}}\" flag \"s\"))");
                    checks.push(Check::new(
                        refuses,
                        format!("expected at least {min} characters"),
                    ));
                }
                Some(_) | None => {}
            }
            if let Some(max) = string.max_length.filter(|max| *max < REPEATS_MAX) {
                let refuses = format!(
                    "({is_string} && {at} like_regex \"^.{{{}}}\" flag \"s\")",
                    max + 1
                );
                checks.push(Check::new(
                    refuses,
                    format!("expected at most {max} characters"),
                ));
            }
            if let Some(location) = self.compiled.rule(self.written, id, "pattern")
                && let Some(pattern) = to_postgres(&self.written.string(location))
                && let Some(literal) = literal(&pattern)
            {
                let refuses = format!("({is_string} && !({at} like_regex {literal} flag \"s\"))");
                let shown = shown(&self.written.string(location));
                checks.push(Check::new(refuses, format!("expected a match of {shown}")));
            }
        }
        if let Some(array) = &node.array {
            let is_array = format!("{at}.type() == \"array\"");
            if let Some(min) = array.min_items.filter(|min| *min > 0) {
                let refuses = format!("({is_array} && {at}.size() < {min})");
                checks.push(Check::new(
                    refuses,
                    format!("expected at least {min} items"),
                ));
            }
            if let Some(max) = array.max_items {
                let refuses = format!("({is_array} && {at}.size() > {max})");
                checks.push(Check::new(refuses, format!("expected at most {max} items")));
            }
        }
        if let Some(object) = &node.object {
            for name in &object.required {
                // In strict mode a missing key is an error.
                if let Some(key) = literal(name) {
                    checks.push(Check {
                        refuses: format!(
                            "({at}.type() == \"object\" && (exists({at}.{key})) is unknown)"
                        ),
                        problem: format!("the property {} is missing", shown(name)),
                        shows: false,
                    });
                }
            }
        }
        if let Some(combined) = &node.combined {
            for alternatives in [&combined.any_of, &combined.one_of] {
                let all: Option<Vec<String>> = alternatives
                    .iter()
                    .map(|id| self.refuses(*id, at))
                    .collect();
                if let Some(all) = all.filter(|all| !all.is_empty()) {
                    let refuses = format!("({})", all.join(" && "));
                    checks.push(Check::new(refuses, "matches none of the alternatives"));
                }
            }
        }
        checks
    }

    /// The predicates for the values within a value.
    fn child_predicates(&mut self, node: &Node, at: &str) -> Vec<String> {
        let mut any = Vec::new();
        if let Some(object) = &node.object {
            for (name, id) in &object.properties {
                if let (Some(key), Some(refuses)) = (literal(name), self.refuses(*id, "@")) {
                    any.push(format!("exists({at}.{key} ? ({refuses}))"));
                }
            }
            let others = object
                .additional_properties
                .filter(|_| object.pattern_properties.is_empty());
            any.extend(others.and_then(|id| {
                let keys = object.properties.keys().filter_map(|name| literal(name));
                let keys = keys.map(|key| format!("@.key == {key}")).collect();
                let is_other = any_of(keys).map(|is_known| format!("!({is_known})"));
                let is_refused = match self.compiled.node(id).never {
                    true => None,
                    false => Some(format!("exists(@.value ? ({}))", self.refuses(id, "@")?)),
                };
                let both: Vec<String> = is_other.into_iter().chain(is_refused).collect();
                let filter = match both.is_empty() {
                    true => String::new(),
                    false => format!(" ? ({})", both.join(" && ")),
                };
                Some(format!(
                    "({at}.type() == \"object\" && exists({at}.keyvalue(){filter}))"
                ))
            }));
        }
        if let Some(array) = &node.array {
            for (index, id) in array.prefix_items.iter().enumerate() {
                if let Some(refuses) = self.refuses(*id, "@") {
                    any.push(format!("exists({at}[{index}] ? ({refuses}))"));
                }
            }
            if let Some(refuses) = array.items.and_then(|id| self.refuses(id, "@")) {
                let indices = match array.prefix_items.len() {
                    0 => "*".to_owned(),
                    first => format!("{first} to last"),
                };
                any.push(format!("exists({at}[{indices}] ? ({refuses}))"));
            }
        }
        any
    }

    /// Lists and objects among the values are not compared: any list or object passes.
    fn values_check(&self, keyword: &str, location: Location, at: &str) -> Option<Check> {
        let json = self.written;
        let values: Vec<Location> = match keyword {
            "enum" => json.items(location).collect(),
            _ => vec![location],
        };
        let mut passes: Vec<String> = Vec::new();
        let mut of_kind = |kind: &str, equal: Vec<String>| {
            if let Some(equal) = any_of(equal) {
                passes.push(format!("({at}.type() == \"{kind}\" && ({equal}))"));
            }
        };
        let equal = |kind: Kind, write: &dyn Fn(Location) -> Option<String>| {
            let same = values.iter().filter(|value| json.kind(**value) == kind);
            same.filter_map(|value| Some(format!("{at} == {}", write(*value)?)))
                .collect::<Vec<_>>()
        };
        // A string that Postgres cannot store is left out: no value equals it. If a number cannot be written here, any
        // number passes.
        of_kind(
            "string",
            equal(Kind::String, &|value| literal(&json.string(value))),
        );
        let numbers = values
            .iter()
            .filter(|value| json.kind(**value) == Kind::Number);
        let numbers: Option<Vec<String>> = numbers
            .map(|value| Some(format!("{at} == {}", number(json.raw(*value))?)))
            .collect();
        match numbers {
            Some(numbers) => of_kind("number", numbers),
            None => passes.push(format!("{at}.type() == \"number\"")),
        }
        let mut of_kind = |kind: &str, equal: Vec<String>| {
            if let Some(equal) = any_of(equal) {
                passes.push(format!("({at}.type() == \"{kind}\" && ({equal}))"));
            }
        };
        of_kind(
            "boolean",
            equal(Kind::Boolean, &|value| Some(json.raw(value).to_owned())),
        );
        of_kind("null", equal(Kind::Null, &|_| Some("null".to_owned())));
        for (kind, name) in [(Kind::Array, "array"), (Kind::Object, "object")] {
            if values.iter().any(|value| json.kind(*value) == kind) {
                passes.push(format!("{at}.type() == \"{name}\""));
            }
        }
        let refuses = match any_of(passes) {
            Some(passes) => format!("!({passes})"),
            None => "1 == 1".to_owned(),
        };
        let expected = shown(json.raw(location));
        Some(Check::new(
            refuses,
            match keyword {
                "enum" => format!("expected one of {expected}"),
                _ => format!("expected {expected}"),
            },
        ))
    }

    fn number(&self, id: NodeId, keyword: &str) -> Option<String> {
        let location = self.compiled.rule(self.written, id, keyword)?;
        number(self.written.raw(location))
    }
}

/// The subschemas for the same value that all have to match.
fn same_value(node: &Node) -> Vec<NodeId> {
    let combined = node.combined.as_ref();
    combined.map_or_else(Vec::new, |it| {
        it.references.iter().chain(&it.all_of).copied().collect()
    })
}

fn type_check(types: Types, at: &str) -> Check {
    let of = |name: &str| format!("{at}.type() == \"{name}\"");
    let names: Vec<_> = types.names().collect();
    let passes: Vec<_> = names
        .iter()
        .map(|name| match *name {
            "integer" => format!("({} && {at}.floor() == {at})", of("number")),
            name => of(name),
        })
        .collect();
    let refuses = match &passes[..] {
        [] => "1 == 1".to_owned(),
        [_] if names != ["integer"] => format!("{at}.type() != \"{}\"", names[0]),
        _ => format!("!({})", passes.join(" || ")),
    };
    Check::new(refuses, format!("expected {}", names.join(" or ")))
}

/// The alternatives in parentheses if there are several, so that the result can be part of any predicate.
fn any_of(mut any: Vec<String>) -> Option<String> {
    match any.len() {
        0 => None,
        1 => any.pop(),
        _ => Some(format!("({})", any.join(" || "))),
    }
}

/// True if Postgres can store this text, that is, if it does not contain NUL characters.
fn is_storable(text: &str) -> bool {
    !text.contains('\0')
}

/// A string of jsonpath; `None` if Postgres cannot store it.
fn literal(text: &str) -> Option<String> {
    // The escapes of jsonpath are a superset of those of JSON.
    is_storable(text).then(|| Value::from(text).to_string())
}

/// A number of jsonpath; `None` if it is too long, or too large to write out.
fn number(raw: &str) -> Option<String> {
    let power = raw.to_ascii_lowercase();
    let power = power.split_once('e').map_or("0", |(_, power)| power);
    let is_small = power.parse::<i32>().is_ok_and(|power| power.abs() <= 300);
    (raw.len() <= NUMBER_BYTES_MAX && is_small).then(|| raw.to_owned())
}

/// A part of the schema in a message.
fn shown(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .filter(|it| !it.is_control())
        .take(SHOWN_MAX)
        .collect();
    if text.chars().count() > SHOWN_MAX {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests;
