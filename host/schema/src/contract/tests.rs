//! Contracts of schemas.

use serde_json::json;
use serde_json::value::RawValue;

use super::{Contract, Parameter, Parameters};
use crate::{PatternBytes, Schema};

fn contract(schema: &serde_json::Value) -> Contract {
    let written = RawValue::from_string(schema.to_string()).unwrap();
    let quote = |text: &str, _| text.to_owned();
    let schema = Schema::parse(&written, &mut PatternBytes::for_module(), quote).unwrap();
    schema.contract()
}

fn refuses(schema: serde_json::Value) -> String {
    contract(&schema).refuses.unwrap_or_default()
}

#[test]
fn the_rules_for_a_value_become_a_predicate() {
    for (schema, expected) in [
        (json!(true), ""),
        (json!(false), "1 == 1"),
        (json!({"type": "string"}), r#"$.type() != "string""#),
        (
            json!({"type": ["integer", "null"]}),
            r#"!(($.type() == "number" && $.floor() == $) || $.type() == "null")"#,
        ),
        (
            json!({"minimum": -2.5}),
            r#"($.type() == "number" && $ < -2.5)"#,
        ),
        (
            json!({"exclusiveMaximum": 7}),
            r#"($.type() == "number" && $ >= 7)"#,
        ),
        (
            json!({"multipleOf": 3}),
            r#"($.type() == "number" && ($ % 3) != 0)"#,
        ),
        (
            json!({"minLength": 1}),
            r#"($.type() == "string" && $ == "")"#,
        ),
        (
            json!({"maxLength": 9}),
            r#"($.type() == "string" && $ like_regex "^.{10}" flag "s")"#,
        ),
        (
            json!({"pattern": "^[a-c]+\\d$"}),
            r#"($.type() == "string" && !($ like_regex "^(?:[a-c])+[0-9]$" flag "s"))"#,
        ),
        (
            json!({"maxItems": 2}),
            r#"($.type() == "array" && $.size() > 2)"#,
        ),
        (
            json!({"required": ["a\"b"]}),
            r#"($.type() == "object" && (exists($."a\"b")) is unknown)"#,
        ),
        (
            json!({"enum": ["x", 1, null, [2]]}),
            r#"!((($.type() == "string" && ($ == "x")) || ($.type() == "number" && ($ == 1)) || ($.type() == "null" && ($ == null)) || $.type() == "array"))"#,
        ),
        (json!({"enum": []}), "1 == 1"),
    ] {
        assert_eq!(refuses(schema.clone()), expected, "{schema}");
    }
}

#[test]
fn values_within_a_value_are_reached_by_filters() {
    for (schema, expected) in [
        (
            json!({"properties": {"a": {"type": "string"}}}),
            r#"exists($."a" ? (@.type() != "string"))"#,
        ),
        (
            json!({"items": {"items": {"type": "null"}}}),
            r#"exists($[*] ? (exists(@[*] ? (@.type() != "null"))))"#,
        ),
        (
            json!({"prefixItems": [{"type": "null"}], "items": false}),
            r#"(exists($[0] ? (@.type() != "null")) || exists($[1 to last] ? (1 == 1)))"#,
        ),
        (
            json!({"properties": {"a": true}, "additionalProperties": false}),
            r#"($.type() == "object" && exists($.keyvalue() ? (!(@.key == "a"))))"#,
        ),
        (
            json!({"additionalProperties": {"type": "string"}}),
            r#"($.type() == "object" && exists($.keyvalue() ? (exists(@.value ? (@.type() != "string")))))"#,
        ),
        (
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}),
            r#"$.type() != "string""#,
        ),
        (
            json!({"anyOf": [{"type": "string"}, {"type": "null"}]}),
            r#"($.type() != "string" && $.type() != "null")"#,
        ),
        (
            json!({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}),
            r#"(($.type() != "string" || ($.type() == "string" && $ == "")) && $.type() != "null")"#,
        ),
    ] {
        assert_eq!(refuses(schema.clone()), expected, "{schema}");
    }
}

#[test]
fn rules_that_jsonpath_cannot_express_are_left_out() {
    for schema in [
        json!({"not": {"type": "string"}}),
        json!({"if": {"type": "string"}, "then": false}),
        json!({"uniqueItems": true}),
        json!({"contains": {"type": "string"}}),
        json!({"minProperties": 1}),
        json!({"propertyNames": {"maxLength": 3}}),
        json!({"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": false}),
        json!({"dependentRequired": {"a": ["b"]}}),
        json!({"unevaluatedProperties": false}),
        json!({"minLength": 256}),
        json!({"maxLength": 255}),
        json!({"pattern": "\\bword"}),
        json!({"pattern": "(a{200}){200}"}),
        json!({"pattern": "(|a)*"}),
        json!({"anyOf": [{"type": "string"}, {"not": {"type": "number"}}]}),
        json!({"required": ["a\u{0}"]}),
        json!({"minimum": 1e301}),
    ] {
        assert_eq!(refuses(schema.clone()), "", "{schema}");
    }
}

#[test]
fn an_untrusted_schema_stays_within_the_limits() {
    let recursive = json!({"$defs": {"tree": {"properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}, "n": {"type": "integer"}}}}, "$ref": "#/$defs/tree"});
    let doubled: serde_json::Map<_, _> = (0..60)
        .map(|n| {
            let next = json!({"$ref": format!("#/$defs/d{}", n + 1)});
            (
                format!("d{n}"),
                json!({"anyOf": [next, next], "properties": {"a": next, "b": next}}),
            )
        })
        .chain([("d60".to_owned(), json!({"type": "string"}))])
        .collect();
    let doubled = json!({"$ref": "#/$defs/d0", "$defs": doubled});
    let wide: serde_json::Map<_, _> = (0..10_000)
        .map(|n| {
            (
                format!("property_{n}"),
                json!({"type": "string", "enum": ["a", "b"]}),
            )
        })
        .collect();
    let long: Vec<String> = (0..10_000).map(|n| format!("value {n}")).collect();
    for schema in [
        recursive,
        doubled,
        json!({"properties": wide}),
        json!({"enum": long}),
    ] {
        let contract = contract(&schema);
        let refuses = contract.refuses.unwrap_or_default();
        assert!(
            refuses.len() <= super::REFUSES_BYTES_MAX,
            "{}",
            refuses.len()
        );
        let rules = contract.rules.to_string();
        assert!(rules.len() <= super::RULES_BYTES_MAX, "{}", rules.len());
    }
}

#[test]
fn a_rule_that_does_not_fit_leaves_out_only_itself() {
    let properties = |count: usize| {
        let names = (0..count).map(|n| (format!("property_{n}"), json!({"type": "string"})));
        json!({"properties": names.collect::<serde_json::Map<_, _>>(), "required": ["property_0"]})
    };
    let wide = contract(&properties(1_500)).rules;
    assert_eq!(wide["checks"].as_array().map(Vec::len), Some(1));
    let first = &wide["properties"]["property_0"]["checks"][0]["problem"];
    assert_eq!(first.as_str(), Some("expected string"));
    let count = wide["properties"]
        .as_object()
        .map_or(0, serde_json::Map::len);
    assert!((400..1_500).contains(&count), "{count}");
    assert!(wide.to_string().len() <= super::RULES_BYTES_MAX);

    let deep = (0..13).fold(properties(150), |of, _| json!({"properties": {"a": of}}));
    let rules = contract(&deep).rules;
    let inner = (0..13).fold(&rules, |rules, _| &rules["properties"]["a"]);
    let count = inner["properties"]
        .as_object()
        .map_or(0, serde_json::Map::len);
    assert_eq!(count, 150);
}

#[test]
fn properties_become_parameters_and_required_ones_come_first() {
    let schema = json!({
        "type": "object",
        "properties": {
            "when": {"type": "string", "format": "date-time"},
            "to": {"type": "string", "description": "Who gets it"},
            "count": {"type": ["integer", "null"], "default": 3},
            "big": {"type": "integer", "format": "uint64"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "mode": {"anyOf": [{"$ref": "#/$defs/Mode"}, {"type": "null"}]},
            "more": {"default": {"a": [1]}},
            "wrong": {"type": "integer", "default": "x'; DROP TABLE"},
        },
        "required": ["to", "when"],
        "$defs": {"Mode": {"type": "string", "enum": ["a", "b"]}},
    });
    let parameter = |name: &str, sql_type, required, default: Option<&str>| Parameter {
        name: name.to_owned(),
        sql_type,
        required,
        default: default.map(str::to_owned),
        description: (name == "to").then(|| "Who gets it".to_owned()),
    };
    assert_eq!(
        contract(&schema).parameters,
        Parameters::Each(vec![
            parameter("to", "text", true, None),
            parameter("when", "timestamptz", true, None),
            parameter("big", "numeric", false, None),
            parameter("count", "bigint", false, Some("3")),
            parameter("mode", "text", false, None),
            parameter("more", "jsonb", false, Some(r#"{"a":[1]}"#)),
            parameter("tags", "text[]", false, None),
            parameter("wrong", "bigint", false, None),
        ])
    );
}

#[test]
fn payloads_that_cannot_be_split_into_parameters_are_passed_whole() {
    let with = |name: &str| json!({"type": "object", "properties": {name: {"type": "string"}}});
    let many: serde_json::Map<_, _> = (0..81).map(|n| (format!("p{n}"), json!(true))).collect();
    for (schema, expected) in [
        (json!(true), "jsonb"),
        (json!({"type": "string"}), "text"),
        (
            json!({"type": "array", "items": {"type": "integer"}}),
            "bigint[]",
        ),
        (json!({"type": "object"}), "jsonb"),
        (
            json!({"type": ["object", "null"], "properties": {"a": true}}),
            "jsonb",
        ),
        (
            json!({"oneOf": [{"type": "string"}, {"type": "object"}]}),
            "jsonb",
        ),
        (with(""), "jsonb"),
        (with("rouse_queue"), "jsonb"),
        (with("$12"), "jsonb"),
        (with(&"x".repeat(64)), "jsonb"),
        (with("a\u{0}"), "jsonb"),
        (json!({"type": "object", "properties": many}), "jsonb"),
        (
            json!({"type": "object", "properties": {"a": true}, "required": ["b"]}),
            "jsonb",
        ),
    ] {
        assert_eq!(
            contract(&schema).parameters,
            Parameters::Whole(expected),
            "{schema}"
        );
    }
    let nothing = json!({"type": "object", "additionalProperties": false});
    assert_eq!(contract(&nothing).parameters, Parameters::Each(Vec::new()));
}
