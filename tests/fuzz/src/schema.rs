//! Schemas, and values that are checked against them.

use anyhow::{Context as _, Result};
use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rouse::sandbox::Manifest;
use serde_json::{Map, Value, json};

const NAMES: &[&str] = &["a", "b", "c", "a/b~", "", "é"];
const TYPES: &[&str] = &[
    "null", "boolean", "number", "integer", "string", "array", "object", "any",
];
const NUMBERS: &[&str] = &[
    "0",
    "-0.0",
    "1",
    "2.5",
    "1e400",
    "-1e-400",
    "18446744073709551616",
    "1E+99999999999999999999",
    "0.30000000000000004",
];
const SNIPPETS: &[&str] = &[
    "a",
    "[a-z]",
    ".",
    "\\d",
    "(a|b)",
    "\\w+",
    "{1,300}",
    "*",
    "+?",
    "^",
    "$",
    "|",
    "[^",
    "]",
    "(",
    ")",
    "\\p{L}",
    "\\b",
    "(?=",
    "{9999}",
    "\\B",
    "[^\\s-]",
    "\\cC",
    "\\uD83D",
    "\\uDE00",
    "\\u{1F600}",
    "-",
    "\\",
];
const SUBSCHEMA: &[&str] = &[
    "items",
    "contains",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "not",
    "if",
    "then",
    "else",
];
const LISTS: &[&str] = &["allOf", "anyOf", "oneOf", "prefixItems"];
const BY_NAME: &[&str] = &[
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
];
const COUNTS: &[&str] = &[
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
];
const BOUNDS: &[&str] = &[
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

fn pick<'a>(random: &mut StdRng, from: &[&'a str]) -> &'a str {
    from.choose(random).expect("a non-empty list")
}

/// A schema, often valid.
pub(crate) fn schema(random: &mut StdRng, depth: u32) -> Value {
    if depth == 0 || random.random_ratio(1, 8) {
        return Value::Bool(random.random_ratio(3, 4));
    }
    let mut map = Map::new();
    for _ in 0..random.random_range(1..4) {
        let (keyword, written) = match random.random_range(0..14) {
            0 => {
                let known = if random.random_ratio(1, 50) { 8 } else { 7 };
                ("type", json!(pick(random, &TYPES[..known])))
            }
            1 => ("const", value(random, 2)),
            2 => ("enum", json!([value(random, 1), value(random, 1)])),
            3 => ("required", json!([pick(random, NAMES)])),
            4 => ("uniqueItems", json!(random.random::<bool>())),
            5 => ("pattern", json!(pattern(random))),
            6 | 7 => ("$ref", json!(reference(random))),
            8 => (pick(random, COUNTS), json!(random.random_range(0..4))),
            9 => (
                pick(random, BOUNDS),
                json!(f64::from(random.random_range(-40..40)) / 4.0),
            ),
            10 => {
                let count = random.random_range(1..4);
                let list: Vec<Value> = (0..count).map(|_| schema(random, depth - 1)).collect();
                (pick(random, LISTS), json!(list))
            }
            11 | 12 => {
                let mut named = Map::new();
                for _ in 0..random.random_range(0..4) {
                    named.insert(pick(random, NAMES).into(), schema(random, depth - 1));
                }
                (pick(random, BY_NAME), Value::Object(named))
            }
            _ => (pick(random, SUBSCHEMA), schema(random, depth - 1)),
        };
        map.insert(keyword.into(), written);
    }
    Value::Object(map)
}

fn pattern(random: &mut StdRng) -> String {
    (0..random.random_range(0..6))
        .map(|_| pick(random, SNIPPETS))
        .collect()
}

fn reference(random: &mut StdRng) -> String {
    match random.random_range(0..4) {
        0 => "#".into(),
        1 => format!("#/$defs/{}", pick(random, NAMES)),
        2 => format!("#/{}/0", pick(random, LISTS)),
        _ => format!("#/{}", pick(random, SUBSCHEMA)),
    }
}

/// A value that serde_json can represent.
pub(crate) fn value(random: &mut StdRng, depth: u32) -> Value {
    match random.random_range(0..if depth == 0 { 5 } else { 7 }) {
        0 => Value::Null,
        1 => json!(random.random::<bool>()),
        2 => json!(random.random_range(-3..4)),
        3 => json!(random.random_range(-1e3..1e3)),
        4 => json!(pick(random, NAMES)),
        5 => (0..random.random_range(0..4))
            .map(|_| value(random, depth - 1))
            .collect(),
        _ => {
            let names = (0..random.random_range(0..4)).map(|_| pick(random, NAMES));
            let names: Vec<&str> = names.collect();
            names
                .into_iter()
                .map(|name| (name.to_owned(), value(random, depth - 1)))
                .collect()
        }
    }
}

/// A value as text, with features that serde_json cannot represent: large numbers, repeated names, deep nesting.
pub(crate) fn text(random: &mut StdRng, depth: u32) -> String {
    match random.random_range(0..if depth == 0 { 4 } else { 8 }) {
        0 | 1 => value(random, 0).to_string(),
        2 => pick(random, NUMBERS).into(),
        3 => pick(
            random,
            &[
                "\"\\ud800\"",
                "\"\\u0061\"",
                "\"\u{1f600}\"",
                "\"\\\"\\\\\"",
            ],
        )
        .into(),
        4 | 5 => {
            let items: Vec<String> = (0..random.random_range(0..5))
                .map(|_| text(random, depth - 1))
                .collect();
            format!("[{}]", items.join(" , "))
        }
        6 => {
            let members = (0..random.random_range(0..5)).map(|_| {
                format!(
                    "{}: {}",
                    json!(pick(random, NAMES)),
                    text(random, depth - 1)
                )
            });
            let members: Vec<String> = members.collect();
            format!("{{{}}}", members.join(","))
        }
        _ => {
            let levels = random.random_range(1..2_000);
            format!(
                "{}{}{}",
                "[".repeat(levels),
                text(random, 0),
                "]".repeat(levels)
            )
        }
    }
}

pub(crate) fn generate(random: &mut StdRng) -> Vec<u8> {
    let depth = random.random_range(1..6);
    json!({"schema": schema(random, depth), "value": text(random, 4)})
        .to_string()
        .into_bytes()
}

pub(crate) fn run(input: &[u8]) -> Result<&'static str> {
    let input: Value = serde_json::from_slice(input).context("read the case")?;
    let value = input["value"].as_str().context("the case has no value")?;
    let manifest = json!({"handlers": [{"name": "a", "input_schema": input["schema"]}]});
    let Ok(manifest) = Manifest::parse(&manifest.to_string()) else {
        return Ok("refused");
    };
    match manifest.handlers[0].input_schema.check(value.as_bytes()) {
        Ok(()) => Ok("matches"),
        Err(why) => {
            assert!(why.len() < 2 << 10, "a message of {} bytes", why.len());
            Ok(match why.starts_with("cannot") {
                true => "not checked",
                false => "does not match",
            })
        }
    }
}
