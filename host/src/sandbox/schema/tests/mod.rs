//! What fits and what does not, rule by rule; what is refused; what ends although it was made not to.

mod hostile;
mod laws;
mod rules;

use serde_json::Value;

use super::*;

fn schema(written: &str) -> Result<Schema, String> {
    let written: Value = serde_json::from_str(written).expect("the test has JSON");
    Schema::parse(written, &mut PatternBytes::of_a_module())
}

/// Why this value does not fit.
fn misfit(written: &str, value: &str) -> Option<String> {
    let schema = schema(written).unwrap_or_else(|why| panic!("{written}: {why}"));
    schema.check(value.as_bytes()).err()
}

#[test]
fn a_mismatch_tells_the_place_what_is_there_and_the_rule() {
    let written = r##"{"type": "object", "required": ["name"], "properties": {
        "name": {"type": "string"}, "a/b~": {"items": {"$ref": "#/$defs/small"}},
        "shape": {"oneOf": [
            {"properties": {"kind": {"const": "circle"}, "radius": {"type": "number"}}, "required": ["kind", "radius"]},
            {"properties": {"kind": {"const": "square"}, "side": {"type": "number"}}, "required": ["kind", "side"]}]},
        "maybe": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}},
        "additionalProperties": false,
        "$defs": {"small": {"maximum": 9}, "point": {"type": "object", "required": ["x"]}}}"##;
    for (value, told) in [
        (
            "[1]",
            r#"does not fit the schema: at the top is an array; wanted is "type": "object" (#)"#,
        ),
        (
            "{}",
            r#"does not fit the schema: the object at the top has no "name", which is required (#)"#,
        ),
        (
            r#"{"name": 7}"#,
            r#"does not fit the schema: at /name is 7; wanted is "type": "string" (#/properties/name)"#,
        ),
        (
            r#"{"name": "a", "a/b~": [1, 10]}"#,
            r#"does not fit the schema: at /a~1b~0/1 is 10; wanted is "maximum": 9 (#/$defs/small)"#,
        ),
        (
            r#"{"name": "a", "colour": "red"}"#,
            r##"does not fit the schema: at /colour is the string "red", and #/additionalProperties allows nothing there"##,
        ),
        // Of several alternatives it is the one that the value comes closest to.
        (
            r#"{"name": "a", "shape": {"kind": "square", "side": "1"}}"#,
            r#"does not fit the schema: at /shape/side is the string "1"; wanted is "type": "number" (#/properties/shape/oneOf/1/properties/side)"#,
        ),
        (
            r#"{"name": "a", "maybe": {}}"#,
            r#"does not fit the schema: the object at /maybe has no "x", which is required (#/$defs/point)"#,
        ),
        (
            r#"{"name": "a", "maybe": 1}"#,
            r##"does not fit the schema: at /maybe is 1; wanted is "anyOf": [{"$ref":"#/$defs/point"},{"type":"null"}] (#/properties/maybe)"##,
        ),
    ] {
        assert_eq!(misfit(written, value).as_deref(), Some(told));
    }
    assert_eq!(
        misfit(written, "{").as_deref(),
        Some("is no JSON: EOF while parsing an object at line 1 column 1")
    );
}

#[test]
fn a_message_holds_little_of_the_value_and_nothing_that_a_terminal_would_mind() {
    let long = "x".repeat(100_000);
    let nasty = "\\u001b[2J\u{202e}";
    for value in [
        format!(r#"{{"a": "{long}"}}"#),
        format!(r#"{{"a": {{"{long}": 1}}}}"#),
        format!(r#"{{"{nasty}{long}": {{}}}}"#),
        format!(r#"{{"a": "{nasty}"}}"#),
        format!(r#"{{"a": {}}}"#, "7".repeat(100_000)),
    ] {
        let written = r#"{"additionalProperties": {"additionalProperties": false, "type": "object", "minProperties": 1}}"#;
        let told = misfit(written, &value).expect("it does not fit");
        assert!(told.len() < 700, "{told}");
        assert!(!told.contains(['\u{1b}', '\u{202e}']), "{told}");
    }
    let loud = format!(r#"{{"enum": ["{nasty}{long}"], "description": "{long}"}}"#);
    let told = misfit(&loud, "1").expect("it does not fit");
    assert!(told.len() < 700 && !told.contains('\u{202e}'), "{told}");
}

#[test]
fn what_fits_everything_is_not_even_read() {
    for open in [
        "true",
        "{}",
        r#"{"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "AnyValue", "format": "date",
            "description": "anything", "default": 1, "examples": [1], "$defs": {"a": {"type": "null"}}, "later": {"type": 7}}"#,
    ] {
        let schema = schema(open).unwrap();
        assert_eq!(schema.check_quickly(b"no JSON"), Some(Ok(())), "{open}");
    }
}

#[test]
fn a_mistake_in_a_schema_is_refused_with_its_place() {
    for (written, told) in [
        (
            r#"{"type": "int"}"#,
            r#"#: "type" is "int"; it has to be a type of JSON, or a list of such"#,
        ),
        (
            r#"{"properties": {"a/b": {"minimum": "1"}}}"#,
            r#"#/properties/a~1b: "minimum" is "1"; it has to be a number"#,
        ),
        (
            r#"{"items": [{}]}"#,
            r#"#: "items" is [{}]; it has to be a schema (a list of them is "prefixItems")"#,
        ),
        (
            r#"{"allOf": []}"#,
            r#"#: "allOf" is []; it has to be a list of schemas"#,
        ),
        (r#"{"not": 1}"#, r#"#: "not" is 1; it has to be a schema"#),
        (
            r#"{"anyOf": [{}, 3]}"#,
            "#/anyOf/1: is no JSON Schema (an object, true or false)",
        ),
        (
            r#"{"minLength": -1}"#,
            r#"#: "minLength" is -1; it has to be a number of things: 0, 1, 2 …"#,
        ),
        (
            r#"{"multipleOf": 0}"#,
            r#"#: "multipleOf" has to be more than 0"#,
        ),
        (
            r#"{"required": "a"}"#,
            r#"#: "required" is "a"; it has to be a list of names"#,
        ),
        (r#"{"enum": {}}"#, r#"#: "enum" is {}; it has to be a list"#),
        (
            r#"{"uniqueItems": 1}"#,
            r#"#: "uniqueItems" is 1; it has to be true or false"#,
        ),
        (
            r#"{"$defs": {"a": {"pattern": 1}}}"#,
            r#"#/$defs/a: "pattern" is 1; it has to be a regular expression"#,
        ),
        (
            r#"{"$ref": "https://example.com/s"}"#,
            r#"#: "$ref" is "https://example.com/s"; it has to be a place in the same schema: #, or #/$defs/…"#,
        ),
        (
            r##"{"$ref": "#/$defs/b"}"##,
            r##"#: "$ref" is "#/$defs/b"; it has to be a place that there is in the schema"##,
        ),
        (
            r##"{"$ref": "#name"}"##,
            r##"#: "$ref" is "#name"; it has to be a place that there is in the schema"##,
        ),
        (
            r##"{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"not": {"$ref": "#/$defs/a"}}}}"##,
            "comes back to itself without an end",
        ),
        (
            r##"{"$ref": "#"}"##,
            "#: comes back to itself without an end",
        ),
        (
            r#"{"pattern": "(?=a)"}"#,
            "cannot be matched in linear time: error: look-around",
        ),
        (
            r#"{"pattern": "("}"#,
            "cannot be matched in linear time: error: unclosed group",
        ),
        (
            r#"{"pattern": "((a{500}){500}){500}"}"#,
            "the pattern is too large",
        ),
    ] {
        let why = schema(written).expect_err("must be refused");
        assert!(why.contains(told), "{written}: {why}");
    }
}
