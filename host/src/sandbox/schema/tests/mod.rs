//! What fits and what does not, rule by rule; what is refused; what ends although it was made not to.

mod hostile;
mod laws;
mod patterns;
mod recursive;
mod rules;
mod suite;

use serde_json::Value;

use super::*;

fn schema(written: &str) -> Result<Schema, String> {
    let written: &RawValue = serde_json::from_str(written).expect("the test has JSON");
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
fn a_schema_is_kept_as_it_is_written_in_one_line() {
    let written = "{ \"const\" :\t1e400,\r\n\"title\": \"a \\\" \\\\\" }";
    let schema = schema(written).unwrap();
    let text = r#"{"const":1e400,"title":"a \" \\"}"#;
    assert_eq!(schema.written(), text);
    assert_eq!(format!("{schema:?}"), text);
    assert_eq!(schema, self::schema(text).unwrap());
}

#[test]
fn a_schema_that_is_nested_too_deep_is_refused() {
    let deep = |levels: usize| {
        let (open, close) = ("[".repeat(levels - 1), "]".repeat(levels - 1));
        schema(&format!(r#"{{"unknown": {open}{close}}}"#))
    };
    assert!(deep(128).is_ok());
    let why = deep(129).expect_err("must be refused");
    assert_eq!(why, "is nested deeper than 128 levels");
    assert!(deep(100_000).is_err());
}

#[test]
fn a_mistake_in_a_schema_is_refused_with_its_place() {
    for (written, told) in [
        (
            r#"{"type": "int"}"#,
            r#"#: "type" is "int", expected a JSON type, or a list of them"#,
        ),
        (
            r#"{"properties": {"a/b": {"minimum": "1"}}}"#,
            r#"#/properties/a~1b: "minimum" is "1", expected a number"#,
        ),
        (
            r#"{"items": [{}]}"#,
            r#"#: "items" is [{}], expected a schema (a list of them is "prefixItems")"#,
        ),
        (
            r#"{"allOf": []}"#,
            r#"#: "allOf" is [], expected a list of schemas"#,
        ),
        (r#"{"not": 1}"#, r#"#: "not" is 1, expected a schema"#),
        (
            r#"{"anyOf": [{}, 3]}"#,
            "#/anyOf/1: expected a JSON Schema (an object, true or false)",
        ),
        (
            r#"{"minLength": -1}"#,
            r#"#: "minLength" is -1, expected a count: 0, 1, 2 …"#,
        ),
        (
            r#"{"multipleOf": 0}"#,
            r#"#: "multipleOf" is 0, expected a number above 0 with at most 19 digits"#,
        ),
        (
            r#"{"multipleOf": 12345678901234567890.5}"#,
            r#"#: "multipleOf" is 12345678901234567890.5, expected a number above 0 with at most 19 digits"#,
        ),
        (
            r#"{"maxLength": 1.5}"#,
            r#"#: "maxLength" is 1.5, expected a count: 0, 1, 2 …"#,
        ),
        (
            r#"{"maxLength": -1e400}"#,
            r#"#: "maxLength" is -1e400, expected a count: 0, 1, 2 …"#,
        ),
        (
            r#"{"required": "a"}"#,
            r#"#: "required" is "a", expected a list of names"#,
        ),
        (r#"{"enum": {}}"#, r#"#: "enum" is {}, expected a list"#),
        (
            r#"{"uniqueItems": 1}"#,
            r#"#: "uniqueItems" is 1, expected true or false"#,
        ),
        (
            r#"{"$defs": {"a": {"pattern": 1}}}"#,
            r#"#/$defs/a: "pattern" is 1, expected a regular expression"#,
        ),
        (
            r#"{"$ref": "https://example.com/s"}"#,
            r#"#: "$ref" is "https://example.com/s", which is another document: a schema has to contain all that it refers to"#,
        ),
        (
            r##"{"$ref": "#/$defs/b"}"##,
            r##"#: "$ref" is "#/$defs/b", which leads to nothing in the schema"##,
        ),
        (
            r##"{"$ref": "#name"}"##,
            r##"#: "$ref" is "#name", which leads to nothing in the schema"##,
        ),
        (
            r##"{"$defs": {"a": {"$id": "a", "$ref": "#/$defs/a"}}}"##,
            r##"#/$defs/a: "$ref" is "#/$defs/a", which leads to nothing in the schema"##,
        ),
        (
            r#"{"$ref": "https://["}"#,
            r#"#: "$ref" is "https://[", which is not a URI reference"#,
        ),
        (
            r#"{"$ref": ["a"]}"#,
            r#"#: "$ref" is ["a"], expected a URI reference"#,
        ),
        (
            r#"{"items": {"$id": "urn:a"}, "not": {"$id": "urn:a"}}"#,
            r#"#/not: "$id" is given twice: urn:a"#,
        ),
        (
            r##"{"properties": {"a": {"$id": "#a"}}}"##,
            r##"#/properties/a: "$id" is not a URI without a fragment"##,
        ),
        (
            r#"{"$id": "urn:a", "items": {"$id": "b"}}"#,
            r#"#/items: "$id" is not a URI without a fragment"#,
        ),
        (
            r#"{"items": {"$anchor": "a"}, "not": {"$dynamicAnchor": "a"}}"#,
            r#"#/not: "$dynamicAnchor" is given twice"#,
        ),
        (
            r#"{"items": {"$anchor": 7}}"#,
            r#"#/items: "$anchor" is not a string"#,
        ),
        (
            r##"{"$dynamicRef": "#a", "$defs": {"b": {"$dynamicAnchor": "a"}, "c": {"$id": "c", "$dynamicAnchor": "a"}}}"##,
            r##"#: "$dynamicRef" is "#a", which more than one "$dynamicAnchor" has for its name"##,
        ),
        (
            r##"{"items": {"$recursiveRef": "#"}}"##,
            r#"#/items: "$recursiveRef" is not of 2020-12, expected "$dynamicRef""#,
        ),
        (
            r#"{"$schema": "https://spec.openapis.org/oas/3.1/dialect/base"}"#,
            r#"expected a dialect of https://json-schema.org/: others may turn keywords off"#,
        ),
        (
            r#"{"dependencies": {"a": "b"}}"#,
            "#/dependencies/a: expected a JSON Schema (an object, true or false)",
        ),
        (
            r#"{"dependencies": ["a"]}"#,
            r#"#: "dependencies" is ["a"], expected an object of schemas and lists"#,
        ),
        (
            r##"{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"not": {"$ref": "#/$defs/a"}}}}"##,
            "refers to itself without an end",
        ),
        (r##"{"$ref": "#"}"##, "#: refers to itself without an end"),
        (
            r#"{"properties": {"a": {"pattern": "(?=a)"}}}"#,
            r#"#/properties/a: "(?=a)": patterns are matched in linear time"#,
        ),
    ] {
        let why = schema(written).expect_err("must be refused");
        assert!(why.contains(told), "{written}: {why}");
    }
}
