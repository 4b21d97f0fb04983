//! Matches and mismatches of each rule, rejected schemas, and hostile input that must not run forever.

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
    Schema::parse(written, &mut PatternBytes::for_module(), quoted)
}

/// Quotes like the host: control characters become escapes.
fn quoted(text: &str, bytes_max: usize) -> String {
    let mut quoted = String::new();
    for character in text.chars() {
        if quoted.len() >= bytes_max {
            quoted.push('…');
            break;
        }
        match character.is_control() || character == '\u{202e}' {
            true => quoted.extend(character.escape_unicode()),
            false => quoted.push(character),
        }
    }
    quoted
}

/// The error of a value that does not match.
fn mismatch(written: &str, value: &str) -> Option<String> {
    let schema = schema(written).unwrap_or_else(|why| panic!("{written}: {why}"));
    schema.check(value.as_bytes()).err()
}

#[test]
fn a_mismatch_names_the_location_the_expectation_and_the_value() {
    let written = r##"{"type": "object", "required": ["name"], "properties": {
        "name": {"type": "string"}, "a/b~": {"items": {"$ref": "#/$defs/small"}},
        "shape": {"oneOf": [
            {"properties": {"kind": {"const": "circle"}, "radius": {"type": "number"}}, "required": ["kind", "radius"]},
            {"properties": {"kind": {"const": "square"}, "side": {"type": "number"}}, "required": ["kind", "side"]}]},
        "maybe": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}},
        "additionalProperties": false,
        "$defs": {"small": {"maximum": 9}, "point": {"type": "object", "required": ["x"]}}}"##;
    for (value, message) in [
        ("[1]", ": expected an object, got an array (#)"),
        ("{}", r#": missing required property "name" (#)"#),
        (
            r#"{"name": 7}"#,
            " at /name: expected a string, got 7 (#/properties/name)",
        ),
        (
            r#"{"name": "a", "a/b~": [1, 10]}"#,
            " at /a~1b~0/1: expected at most 9, got 10 (#/$defs/small)",
        ),
        (
            r#"{"name": "a", "colour": "red"}"#,
            " at /colour: unexpected property (#/additionalProperties)",
        ),
        // The error is about the alternative that the value comes closest to.
        (
            r#"{"name": "a", "shape": {"kind": "square", "side": "1"}}"#,
            r#" at /shape/side: expected a number, got "1" (#/properties/shape/oneOf/1/properties/side)"#,
        ),
        (
            r#"{"name": "a", "maybe": {}}"#,
            r#" at /maybe: missing required property "x" (#/$defs/point)"#,
        ),
        (
            r#"{"name": "a", "maybe": 1}"#,
            r##" at /maybe: expected a match for any of {"$ref":"#/$defs/point"}, {"type":"null"}; got 1 (#/properties/maybe)"##,
        ),
    ] {
        let message = format!("does not match the schema{message}");
        assert_eq!(mismatch(written, value), Some(message));
    }
    assert_eq!(
        mismatch(written, "{").as_deref(),
        Some("is not JSON: EOF while parsing an object at line 1 column 1")
    );
}

#[test]
fn each_keyword_has_its_message() {
    for (written, value, message) in [
        ("false", "1", "expected no value, got 1"),
        (
            r#"{"properties": {"a": false}}"#,
            r#"{"a": {}}"#,
            "expected no value, got an object",
        ),
        (
            r#"{"type": "integer"}"#,
            "1.5",
            "expected an integer, got 1.5",
        ),
        (r#"{"type": ["null"]}"#, "[]", "expected null, got an array"),
        (
            r#"{"type": ["string", "boolean", "array"]}"#,
            "null",
            "expected a string, a boolean or an array, got null",
        ),
        (r#"{"type": []}"#, "1", "expected no value, got 1"),
        (r#"{"const": "a"}"#, "true", r#"expected "a", got true"#),
        (
            r#"{"enum": ["a", 1]}"#,
            "2",
            r#"expected one of "a", 1; got 2"#,
        ),
        (
            r#"{"minimum": 1e400}"#,
            "2",
            "expected at least 1e400, got 2",
        ),
        (
            r#"{"exclusiveMinimum": 2}"#,
            "2",
            "expected more than 2, got 2",
        ),
        (r#"{"maximum": 2}"#, "3", "expected at most 2, got 3"),
        (
            r#"{"exclusiveMaximum": 2}"#,
            "2",
            "expected less than 2, got 2",
        ),
        (
            r#"{"multipleOf": 2}"#,
            "3",
            "expected a multiple of 2, got 3",
        ),
        (r#"{"enum": ["a"]}"#, "2", r#"expected "a", got 2"#),
        (r#"{"enum": []}"#, "2", "expected no value, got 2"),
        (
            r#"{"contains": {"const": 1}}"#,
            "[2]",
            r#"expected at least 1 item that matches {"const":1}, got 0"#,
        ),
        (
            r#"{"minLength": 1}"#,
            r#""""#,
            r#"expected at least 1 character, got """#,
        ),
        (
            r#"{"maxLength": 2}"#,
            r#""abc""#,
            r#"expected at most 2 characters, got "abc""#,
        ),
        (
            r#"{"pattern": "^a"}"#,
            r#""b""#,
            r#"expected a string that matches "^a", got "b""#,
        ),
        (
            r#"{"minItems": 2}"#,
            "[7]",
            "expected at least 2 items, got 1",
        ),
        (
            r#"{"maxItems": 1}"#,
            "[7, 8]",
            "expected at most 1 item, got 2",
        ),
        (
            r#"{"uniqueItems": true}"#,
            "[7, 7]",
            "expected unique items, got duplicates",
        ),
        (
            r#"{"prefixItems": [true], "items": false}"#,
            "[7, 7]",
            " at /1: unexpected item",
        ),
        (
            r#"{"unevaluatedItems": false}"#,
            "[7]",
            " at /0: unexpected item",
        ),
        (
            r#"{"contains": {"const": 1}, "minContains": 2}"#,
            "[1]",
            r#"expected at least 2 items that match {"const":1}, got 1"#,
        ),
        (
            r#"{"contains": {"const": 1}, "maxContains": 1}"#,
            "[1, 1, 1]",
            r#"expected at most 1 item that matches {"const":1}, got 3"#,
        ),
        (
            r#"{"minProperties": 1}"#,
            "{}",
            "expected at least 1 property, got 0",
        ),
        (
            r#"{"maxProperties": 0}"#,
            r#"{"a": 1}"#,
            "expected at most 0 properties, got 1",
        ),
        (
            r#"{"dependentRequired": {"a": ["b"]}}"#,
            r#"{"a": 1}"#,
            r#"missing required property "b""#,
        ),
        (
            r#"{"propertyNames": {"maxLength": 1}}"#,
            r#"{"a/b": 1}"#,
            r#" at /a~1b (property name): expected at most 1 character, got "a/b""#,
        ),
        (
            r#"{"not": {"const": 1}}"#,
            "1",
            r#"expected a value that does not match {"const":1}, got 1"#,
        ),
        (
            r#"{"oneOf": [{"type": "null"}, {"type": "string"}]}"#,
            "1",
            r#"expected a match for exactly one of {"type":"null"}, {"type":"string"}; got 1"#,
        ),
        (
            r#"{"oneOf": [true, {}]}"#,
            "1",
            r#"expected a match for exactly one schema of "oneOf", got several"#,
        ),
    ] {
        let why = mismatch(written, value).expect("it does not match");
        assert!(why.contains(&format!("{message} (#")), "{written}: {why}");
    }
}

#[test]
fn a_message_quotes_little_of_the_value_and_no_control_characters() {
    let long = "x".repeat(100_000);
    let harmful = "\\u001b[2J\u{202e}";
    for value in [
        format!(r#"{{"a": "{long}"}}"#),
        format!(r#"{{"a": {{"{long}": 1}}}}"#),
        format!(r#"{{"{harmful}{long}": {{}}}}"#),
        format!(r#"{{"a": "{harmful}"}}"#),
        format!(r#"{{"a": {}}}"#, "7".repeat(100_000)),
    ] {
        let written = r#"{"additionalProperties": {"additionalProperties": false, "type": "object", "minProperties": 1}}"#;
        let message = mismatch(written, &value).expect("it does not match");
        assert!(message.len() < 700, "{message}");
        assert!(!message.contains(['\u{1b}', '\u{202e}']), "{message}");
    }
    let hostile = format!(r#"{{"enum": ["{harmful}{long}"], "description": "{long}"}}"#);
    let message = mismatch(&hostile, "1").expect("it does not match");
    assert!(
        message.len() < 700 && !message.contains('\u{202e}'),
        "{message}"
    );
}

#[test]
fn a_schema_that_everything_matches_skips_parsing() {
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
fn a_schema_keeps_its_text_on_one_line() {
    let written = "{ \"const\" :\t1e400,\r\n\"title\": \"a \\\" \\\\\" }";
    let schema = schema(written).unwrap();
    let text = r#"{"const":1e400,"title":"a \" \\"}"#;
    assert_eq!(schema.written(), text);
    assert_eq!(format!("{schema:?}"), text);
    assert_eq!(schema, self::schema(text).unwrap());
}

#[test]
fn a_schema_that_is_nested_too_deeply_is_refused() {
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
fn an_error_in_a_schema_is_reported_with_its_location() {
    for (written, message) in [
        (
            r#"{"type": "int"}"#,
            r#"#: "type" is "int", expected a JSON type, or an array of them"#,
        ),
        (
            r#"{"properties": {"a/b": {"minimum": "1"}}}"#,
            r#"#/properties/a~1b: "minimum" is "1", expected a number"#,
        ),
        (
            r#"{"items": [{}]}"#,
            r#"#: "items" is [{}], expected a schema (an array of them is "prefixItems")"#,
        ),
        (
            r#"{"allOf": []}"#,
            r#"#: "allOf" is [], expected an array of schemas"#,
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
            r#"#: "required" is "a", expected an array of names"#,
        ),
        (r#"{"enum": {}}"#, r#"#: "enum" is {}, expected an array"#),
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
            r#"#: "$ref" is "https://example.com/s", which is another document: a schema has to contain everything that it refers to"#,
        ),
        (
            r##"{"$ref": "#/$defs/b"}"##,
            r##"#: "$ref" is "#/$defs/b", which does not exist in the schema"##,
        ),
        (
            r##"{"$ref": "#name"}"##,
            r##"#: "$ref" is "#name", which does not exist in the schema"##,
        ),
        (
            r##"{"$defs": {"a": {"$id": "a", "$ref": "#/$defs/a"}}}"##,
            r##"#/$defs/a: "$ref" is "#/$defs/a", which does not exist in the schema"##,
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
            r##"#: "$dynamicRef" is "#a", which is ambiguous: more than one "$dynamicAnchor" has this name, and"##,
        ),
        (
            r##"{"items": {"$recursiveRef": "#"}}"##,
            r#"#/items: "$recursiveRef" is not part of 2020-12, expected "$dynamicRef""#,
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
            "refers to itself endlessly",
        ),
        (r##"{"$ref": "#"}"##, "#: refers to itself endlessly"),
        (
            r#"{"properties": {"a": {"pattern": "(?=a)"}}}"#,
            r#"#/properties/a: "(?=a)": patterns are matched in linear time"#,
        ),
    ] {
        let why = schema(written).expect_err("must be refused");
        assert!(why.contains(message), "{written}: {why}");
    }
}
