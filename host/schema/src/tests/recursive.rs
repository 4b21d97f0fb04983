//! Schemas of recursive types, as schemars writes them: matching values are accepted at any depth.

use proptest::prelude::*;
use serde_json::json;

use super::super::cache::Cache;
use super::super::evaluate::{Check, Stop};
use super::super::json::Document;
use super::*;

/// `#[serde(tag = "type")] enum Expr { Add { left, right }, Sub, Mul, Div, Neg { of }, Num { value } }`; `tag` maps the
/// name of a variant to its tag.
fn expressions(keyword: &str, tag: impl Fn(&str) -> Value) -> String {
    let expr = json!({ "$ref": "#" });
    let two = |name: &str| {
        json!({ "type": "object", "required": ["type", "left", "right"],
            "properties": { "left": expr, "right": expr, "type": tag(name) } })
    };
    let names = ["Add", "Sub", "Mul", "Div"];
    let mut variants: Vec<Value> = names.into_iter().map(two).collect();
    variants.push(json!({ "type": "object", "required": ["type", "of"],
        "properties": { "of": expr, "type": tag("Neg") } }));
    variants.push(json!({ "type": "object", "required": ["type", "value"],
        "properties": { "type": tag("Num"), "value": { "type": "number" } } }));
    let defs: serde_json::Map<String, Value> = names
        .into_iter()
        .chain(["Neg", "Num"])
        .map(|name| {
            (
                format!("{name}Tag"),
                json!({ "type": "string", "const": name }),
            )
        })
        .collect();
    json!({ keyword: variants, "$defs": defs }).to_string()
}

fn constant(name: &str) -> Value {
    json!({ "type": "string", "const": name })
}

/// `1 - 1 - 1 …`, nested on the left or on the right.
fn nested(depth: usize, side: &str, innermost: &str) -> String {
    let other = if side == "left" { "right" } else { "left" };
    let open = format!(r#"{{"type":"Div","{other}":{{"type":"Num","value":1}},"{side}":"#);
    format!("{}{innermost}{}", open.repeat(depth), "}".repeat(depth))
}

fn balanced(depth: usize) -> String {
    match depth {
        0 => r#"{"type":"Num","value":1.5}"#.into(),
        _ => {
            let within = balanced(depth - 1);
            format!(r#"{{"left":{within},"right":{within},"type":"Sub"}}"#)
        }
    }
}

const NUM: &str = r#"{"type":"Num","value":7}"#;

#[test]
fn a_payload_of_a_recursive_type_matches_at_any_depth() {
    let reference = |name: &str| json!({ "$ref": format!("#/$defs/{name}Tag") });
    // The alternative cannot be decided early: the distinguishing property comes last.
    let untagged = json!({ "$ref": "#/$defs/Expr", "$defs": { "Expr": { "anyOf": [
        { "type": "object", "required": ["left", "right"], "additionalProperties": false,
          "properties": { "left": { "$ref": "#/$defs/Expr" }, "right": { "$ref": "#/$defs/Expr" }, "type": { "items": {}, "const": "Add" } } },
        { "type": "object", "required": ["left", "right"],
          "properties": { "left": { "$ref": "#/$defs/Expr" }, "right": { "$ref": "#/$defs/Expr" }, "type": { "items": {}, "const": "Mul" } } },
        { "type": "object", "required": ["left", "right"],
          "properties": { "left": { "$ref": "#/$defs/Expr" }, "right": { "$ref": "#/$defs/Expr" }, "type": { "items": {} } } },
        { "type": "object", "required": ["value"], "properties": { "value": { "type": "number" } } },
    ] } } });
    // Each variant has its own property name, and the contents are optional.
    let optional = json!({ "anyOf": [{ "$ref": "#/$defs/Expr" }, { "type": "null" }] });
    let named = json!({ "$ref": "#/$defs/Expr", "$defs": {
        "Expr": { "oneOf": [{ "$ref": "#/$defs/Two" }, { "$ref": "#/$defs/Num" }] },
        "Two": { "type": "object", "required": ["type"],
            "properties": { "left": optional, "right": optional, "type": { "enum": ["Div", "Sub"] } } },
        "Num": { "type": "object", "required": ["type", "value"],
            "properties": { "type": { "const": "Num" }, "value": { "type": "number" } } },
    } });
    for written in [
        named.to_string(),
        expressions("oneOf", constant),
        expressions("anyOf", constant),
        expressions("oneOf", reference),
        expressions("anyOf", reference),
        untagged.to_string(),
    ] {
        let schema = schema(&written).unwrap();
        for depth in [8, 20, 120] {
            for side in ["left", "right"] {
                let value = nested(depth, side, NUM);
                assert_eq!(schema.check(value.as_bytes()), Ok(()), "{depth} {written}");
            }
        }
        // 130,000 numbers.
        let value = balanced(12);
        assert_eq!(schema.check(value.as_bytes()), Ok(()), "{written}");
        let why = schema.check(nested(100, "left", "7").as_bytes());
        assert!(why.unwrap_err().contains("/left/left/left"), "{written}");
    }
}

#[test]
fn a_tag_decides_before_other_properties_are_checked() {
    let tagged = schema(&expressions("oneOf", constant)).unwrap();
    let value = nested(100, "left", NUM);
    let forgetful = Cache::bounded(1, u64::MAX);
    assert_eq!(ends(&tagged, &value, forgetful).unwrap(), "fits");
    let invalid = nested(10, "left", r#"{"type":"Num","value":"7"}"#);
    let why = tagged
        .check_quickly(invalid.as_bytes())
        .unwrap()
        .unwrap_err();
    assert!(
        why.contains(&format!("{}/value", "/left".repeat(10))),
        "{why}"
    );
}

/// The result of a check with this cache.
fn ends(schema: &Schema, value: &str, cache: Cache<'static>) -> Option<String> {
    let compiled = schema.compiled.as_ref()?;
    let document = Document::read(value.as_bytes()).unwrap_or_else(|_| panic!("it is JSON"));
    let mut check = Check::new(compiled, document.json(), 1 << 20, &|| false);
    check.cache = cache;
    Some(match check.whole() {
        Ok(()) => "fits".into(),
        Err(Stop::Mismatch(mismatch)) => mismatch.describe(
            compiled,
            schema.written.json(),
            document.json(),
            schema.excerpt,
        ),
        Err(Stop::TooManySteps) => "too many steps".into(),
        Err(Stop::TooDeep) => "too deep".into(),
    })
}

#[test]
fn a_full_cache_keeps_the_most_expensive_results() {
    let written = expressions("anyOf", |name| json!({ "items": {}, "const": name }));
    let schema = schema(&written).unwrap();
    let value = balanced(9);
    assert_eq!(
        ends(&schema, &value, Cache::bounded(1, u64::MAX)).unwrap(),
        "too many steps"
    );
    assert_eq!(
        ends(&schema, &value, Cache::bounded(64, 8)).unwrap(),
        "fits"
    );
}

/// Definitions with nested references to each other.
fn definitions() -> impl Strategy<Value = Value> {
    let name = proptest::sample::select(vec!["a", "b", "c"]);
    let leaf = prop_oneof![
        3 => name.clone().prop_map(|name| json!({ "$ref": format!("#/$defs/{name}") })),
        1 => Just(json!({ "type": "integer" })),
        1 => Just(json!({ "const": 1 })),
        1 => Just(json!({ "required": ["a"] })),
        1 => Just(json!(true)),
    ];
    let within = leaf.prop_recursive(3, 16, 3, move |inner| {
        let many = proptest::collection::vec(inner.clone(), 1..4);
        prop_oneof![
            many.clone().prop_map(|all| json!({ "anyOf": all })),
            many.clone().prop_map(|all| json!({ "oneOf": all })),
            many.prop_map(|all| json!({ "allOf": all, "unevaluatedProperties": false })),
            inner.clone().prop_map(|inner| json!({ "not": inner })),
            (name.clone(), inner.clone())
                .prop_map(|(name, inner)| json!({ "properties": { name: inner } })),
            inner.prop_map(|inner| json!({ "items": inner })),
        ]
    });
    (within.clone(), within.clone(), within.clone(), within).prop_map(|(top, a, b, c)| {
        json!({ "anyOf": [{ "$ref": "#/$defs/a" }, top], "$defs": { "a": a, "b": b, "c": c } })
    })
}

proptest! {
    #[test]
    fn cached_results_equal_computed_results(written in definitions(), value in super::laws::value()) {
        if let Ok(schema) = schema(&written.to_string()) {
            let value = value.to_string();
            let uncached = ends(&schema, &value, Cache::bounded(1, u64::MAX));
            prop_assert_eq!(&ends(&schema, &value, Cache::bounded(1 << 16, 1)), &uncached);
            prop_assert_eq!(&ends(&schema, &value, Cache::bounded(3, 1)), &uncached);
        }
    }
}
