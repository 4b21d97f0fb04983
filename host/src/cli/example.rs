//! An example payload for a handler, made from its schema.

use std::cell::Cell;
use std::collections::HashMap;

use rouse_schema::Schema;
use serde_json::{Map, Value, json};

/// Schemas may refer to themselves, and deeper examples are unreadable.
const DEPTH_MAX: usize = 8;
/// The maximum number of schemas that are read for one example.
const SCHEMAS_MAX: usize = 1_000;
/// The maximum number of examples that are tried, each with other alternatives of the schema.
const TRIED_MAX: usize = 8;
/// Longer strings are unreadable.
const CHARS_MAX: u64 = 100;
/// Longer lists are unreadable.
const ITEMS_MAX: u64 = 10;

/// A small payload that matches the schema, as JSON, with only the required properties. `None` if none was found: some
/// rules are not considered, such as patterns.
pub(super) fn payload(schema: &Schema) -> Option<String> {
    // There is no example for a schema with numbers that a `Value` cannot hold.
    let written: Value = serde_json::from_str(schema.written()).ok()?;
    (0..TRIED_MAX)
        .map(|choice| Example::new(&written, choice).value(&written, 0))
        .map(|payload| payload.to_string())
        .find(|payload| matches!(schema.check_quickly(payload.as_bytes()), Some(Ok(()))))
}

/// One example.
struct Example<'a> {
    /// The whole schema, to which references refer.
    root: &'a Value,
    /// Which alternative is chosen, wherever the schema has several.
    choice: usize,
    /// The number of schemas that may still be read.
    schemas: Cell<usize>,
}

/// The rules of a schema and of those that it includes.
#[derive(Default)]
struct Rules<'a> {
    properties: HashMap<&'a str, &'a Value>,
    required: Vec<&'a str>,
    others: HashMap<&'a str, &'a Value>,
}

impl<'a> Example<'a> {
    fn new(root: &'a Value, choice: usize) -> Self {
        Self {
            root,
            choice,
            schemas: Cell::new(SCHEMAS_MAX),
        }
    }

    fn value(&self, schema: &'a Value, depth: usize) -> Value {
        let mut rules = Rules::default();
        self.collect(schema, depth, &mut rules);
        let given = self
            .choose(rules.get("examples"))
            .or_else(|| rules.get("default"))
            .or_else(|| rules.get("const"))
            .or_else(|| self.choose(rules.get("enum")));
        if let Some(given) = given {
            return given.clone();
        }
        let kind = rules.get("type");
        match kind.and_then(|kind| kind.as_str().or_else(|| self.choose(Some(kind))?.as_str())) {
            Some("string") => rules.string(),
            Some("integer" | "number") => rules.number(),
            Some("boolean") => json!(false),
            Some("array") => {
                let items = rules.count("minItems").unwrap_or(0).min(ITEMS_MAX);
                let item = |_| self.part(rules.get("items"), depth);
                Value::Array((0..items).map(item).collect())
            }
            Some("object") => self.object(&rules, depth),
            None if !rules.required.is_empty() => self.object(&rules, depth),
            Some(_) | None => Value::Null,
        }
    }

    fn object(&self, rules: &Rules<'a>, depth: usize) -> Value {
        let properties: Map<_, _> = rules
            .required
            .iter()
            .map(|name| {
                let property = rules.properties.get(name).copied();
                (name.to_string(), self.part(property, depth))
            })
            .collect();
        Value::Object(properties)
    }

    /// A property or an item. Without a schema, anything matches.
    fn part(&self, schema: Option<&'a Value>, depth: usize) -> Value {
        schema.map_or(Value::Null, |schema| self.value(schema, depth + 1))
    }

    /// Adds the rules of a schema, and of those that it includes: `$ref`, `allOf`, and one choice of `anyOf` and
    /// `oneOf`. The schema's own rules take precedence.
    fn collect(&self, schema: &'a Value, depth: usize, rules: &mut Rules<'a>) {
        if depth > DEPTH_MAX || self.schemas.get() == 0 {
            return;
        }
        self.schemas.set(self.schemas.get() - 1);
        let mut included: Vec<&'a Value> = Vec::new();
        for (key, rule) in schema.as_object().into_iter().flatten() {
            match (key.as_str(), rule) {
                ("properties", Value::Object(properties)) => {
                    for (name, property) in properties {
                        rules.properties.entry(name).or_insert(property);
                    }
                }
                ("required", Value::Array(names)) => {
                    rules
                        .required
                        .extend(names.iter().filter_map(Value::as_str));
                }
                ("$ref", Value::String(path)) => {
                    let pointer = path.strip_prefix('#');
                    included.extend(pointer.and_then(|pointer| self.root.pointer(pointer)));
                }
                ("allOf", Value::Array(all)) => included.extend(all),
                ("anyOf" | "oneOf", choices) => included.extend(self.choose(Some(choices))),
                (key, rule) => {
                    rules.others.entry(key).or_insert(rule);
                }
            }
        }
        for schema in included {
            self.collect(schema, depth + 1, rules);
        }
    }

    /// An element of a list of alternatives.
    fn choose(&self, list: Option<&'a Value>) -> Option<&'a Value> {
        let list = list?.as_array()?;
        list.get(self.choice).or(list.last())
    }
}

impl<'a> Rules<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.others.get(key).copied()
    }

    fn count(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    /// `hello`, or as much of it, repeated, as the limits on the length permit.
    fn string(&self) -> Value {
        let chars_max = self.count("maxLength").unwrap_or(u64::MAX);
        let chars_min = self.count("minLength").unwrap_or(0);
        let chars = chars_max.min(5).max(chars_min).min(CHARS_MAX);
        let text: String = "hello".chars().cycle().take(chars as usize).collect();
        Value::String(text)
    }

    /// The minimum if there is one, or 1, or a smaller number if 1 is too large.
    fn number(&self) -> Value {
        let beside = |bound: &Value, by: i64| match bound.as_i64() {
            Some(bound) => Some(json!(bound.checked_add(by)?)),
            None => Some(json!(bound.as_f64()? + by as f64)),
        };
        let minimum = self.get("minimum").cloned();
        let minimum = minimum.or_else(|| beside(self.get("exclusiveMinimum")?, 1));
        let maximum = self.get("maximum").cloned();
        let maximum = maximum.or_else(|| beside(self.get("exclusiveMaximum")?, -1));
        let small = maximum.filter(|max| max.as_f64().is_some_and(|max| max < 1.0));
        minimum
            .or(small)
            .or_else(|| self.get("multipleOf").cloned())
            .unwrap_or(json!(1))
    }
}

#[cfg(test)]
mod tests {
    use rouse_schema::PatternBytes;
    use serde_json::value::to_raw_value;

    use super::*;

    /// The example for this schema, which matches it.
    fn example(schema: Value) -> Option<Value> {
        let written = to_raw_value(&schema).unwrap();
        let quote = |text: &str, _: usize| text.to_owned();
        let schema = Schema::parse(&written, &mut PatternBytes::for_module(), quote).unwrap();
        let payload = payload(&schema)?;
        assert_eq!(schema.check(payload.as_bytes()), Ok(()), "{payload}");
        Some(serde_json::from_str(&payload).unwrap())
    }

    #[test]
    fn an_example_has_only_the_required_keys() {
        let schema = json!({
            "type": "object",
            "required": ["name", "size", "mode", "tags", "loud", "to", "either"],
            "properties": {
                "name": {"type": "string"},
                "size": {"type": "integer", "minimum": 0},
                "mode": {"enum": ["fast", "slow"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "loud": {"type": "boolean"},
                "to": {"$ref": "#/$defs/Address"},
                "either": {"anyOf": [{"type": ["number", "null"]}, {"type": "null"}]},
                "more": {"type": "string"},
            },
            "$defs": {"Address": {"type": "string", "examples": ["ada@example.com"]}},
        });
        assert_eq!(
            example(schema),
            Some(json!({
                "name": "hello", "size": 0, "mode": "fast", "tags": [], "loud": false,
                "to": "ada@example.com", "either": 1,
            }))
        );
    }

    #[test]
    fn an_example_keeps_to_the_limits_of_its_schema() {
        for (schema, payload) in [
            (json!({"type": "string", "minLength": 8}), json!("hellohel")),
            (json!({"type": "string", "maxLength": 2}), json!("he")),
            (
                json!({"type": "string", "pattern": "^[a-z]+$"}),
                json!("hello"),
            ),
            (
                json!({"type": "integer", "exclusiveMinimum": 10}),
                json!(11),
            ),
            (
                json!({"type": "number", "exclusiveMinimum": 0.5}),
                json!(1.5),
            ),
            (json!({"type": "integer", "exclusiveMaximum": 0}), json!(-1)),
            (json!({"type": "integer", "maximum": 9}), json!(1)),
            (json!({"type": "integer", "multipleOf": 5}), json!(5)),
            (
                json!({"type": "array", "minItems": 2, "items": {"type": "integer"}}),
                json!([1, 1]),
            ),
            (json!(true), json!(null)),
        ] {
            assert_eq!(example(schema.clone()), Some(payload), "{schema}");
        }
    }

    #[test]
    fn alternatives_are_combined_with_the_rules_beside_them_and_tried_one_after_the_other() {
        let beside = json!({
            "type": "object",
            "required": ["id"],
            "properties": {"id": {"type": "integer"}, "phone": {"type": "string"}},
            "anyOf": [
                {"required": ["email"], "properties": {"email": {"type": "string", "pattern": "@"}}},
                {"required": ["phone"]},
            ],
        });
        assert_eq!(example(beside), Some(json!({"id": 1, "phone": "hello"})));
        let all = json!({"allOf": [
            {"type": "object", "required": ["a"], "properties": {"a": {"type": "boolean"}}},
            {"required": ["b"], "properties": {"b": {"$ref": "#/$defs/B"}}},
        ], "$defs": {"B": {"type": "integer", "minimum": 7}}});
        assert_eq!(example(all), Some(json!({"a": false, "b": 7})));
    }

    #[test]
    fn without_a_simple_payload_that_matches_there_is_no_example() {
        let endless = json!({
            "type": "object",
            "required": ["next", "other"],
            "properties": {"next": {"$ref": "#"}, "other": {"$ref": "#"}},
        });
        for schema in [
            json!({"type": "string", "pattern": "^[0-9]{4}$"}),
            json!({"type": "string", "minLength": 1_000}),
            json!({"type": "string", "default": 1}),
            json!(false),
            endless,
        ] {
            assert_eq!(example(schema.clone()), None, "{schema}");
        }
    }
}
