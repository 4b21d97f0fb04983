//! The rules of the standard (JSON Schema 2020-12, validation and applicators), a few cases each.

use super::schema;

/// A schema, values that match it, values that do not.
type Case = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
);

const CASES: &[Case] = &[
    // Any type.
    ("false", &[], &["null", "{}"]),
    (
        r#"{"type": "null"}"#,
        &["null"],
        &["0", "\"\"", "false", "{}", "[]"],
    ),
    (
        r#"{"type": "boolean"}"#,
        &["true", "false"],
        &["0", "null", "\"true\""],
    ),
    (
        r#"{"type": "number"}"#,
        &["1", "-0.5", "1e400"],
        &["\"1\"", "null"],
    ),
    (
        r#"{"type": "integer"}"#,
        &[
            "1",
            "-7",
            "1.0",
            "1e3",
            "1.5e1",
            "1e400",
            "0.0",
            "-0",
            "340282366920938463463374607431768211457",
            "10e-1",
        ],
        &["1.5", "1e-1", "0.10e0", "\"1\"", "1e-400"],
    ),
    (r#"{"type": "string"}"#, &["\"\""], &["1", "[\"\"]"]),
    (
        r#"{"type": ["array", "null"]}"#,
        &["[]", "null"],
        &["{}", "0"],
    ),
    (r#"{"type": []}"#, &[], &["{}", "0"]),
    (
        r#"{"const": 1}"#,
        &["1", "1.0", "10e-1"],
        &["true", "\"1\"", "1.01", "[1]"],
    ),
    (
        r#"{"const": 0}"#,
        &["0", "-0", "0e7", "0.00"],
        &["false", "null", "\"\""],
    ),
    (
        r#"{"const": {"a": [1, {"b": null}], "c": "ä/"}}"#,
        &[
            r#"{"c": "\u00e4\/", "a": [1.0, {"b": null}]}"#,
            r#"{"a": 0, "c": "ä/", "a": [1, {"b": null}]}"#,
        ],
        &[
            r#"{"a": [1, {"b": 0}], "c": "ä/"}"#,
            r#"{"a": [1, {"b": null}]}"#,
            r#"{"a": [{"b": null}, 1], "c": "ä/"}"#,
        ],
    ),
    (
        r#"{"enum": ["a", 2, null, [1, 2]]}"#,
        &["\"a\"", "\"\\u0061\"", "2.0", "null", "[1,2]"],
        &["\"A\"", "[2,1]", "[1,2,3]"],
    ),
    (r#"{"enum": []}"#, &[], &["null"]),
    (
        r#"{"enum": [12, "12"]}"#,
        &["12", "\"12\""],
        &["\"12e2\"", "[12]"],
    ),
    // Numbers.
    (
        r#"{"minimum": 2}"#,
        &["2", "2.0", "2.0000000000000000000001", "1e400", "\"1\""],
        &["1.9999999999999999999999", "-3", "0"],
    ),
    (
        r#"{"maximum": -1.5}"#,
        &["-1.5", "-2", "-1e400"],
        &["-1.4999999999999999999", "0", "1"],
    ),
    (
        r#"{"exclusiveMinimum": 0}"#,
        &["1e-400", "1"],
        &["0", "-0.0", "0e5", "-1e-400"],
    ),
    (
        r#"{"exclusiveMaximum": 18446744073709551615}"#,
        &["18446744073709551614"],
        &["18446744073709551615", "18446744073709551616"],
    ),
    (
        r#"{"multipleOf": 0.01}"#,
        &["0.07", "19.99", "4.35", "1e300", "0", "-0.01"],
        &["0.075", "1e-3"],
    ),
    (
        r#"{"multipleOf": 3}"#,
        &["9", "-12", "3e30", "99999999999999999999999"],
        &["10", "1.5", "1e300", "3e-1"],
    ),
    (
        r#"{"multipleOf": 1e308}"#,
        &["2e308", "0", "1e309"],
        &["1e307", "1"],
    ),
    // Every digit counts, in schemas too.
    (
        r#"{"const": 99.43984295500535}"#,
        &["99.43984295500535", "9943984295500535e-14"],
        &["99.43984295500536", "99.4398429550053500001"],
    ),
    (
        r#"{"enum": [18446744073709551616, 0.1000000000000000000001]}"#,
        &["18446744073709551616", "0.1000000000000000000001"],
        &["18446744073709551617", "18446744073709552000", "0.1"],
    ),
    (
        r#"{"const": 1e400}"#,
        &["1e400", "10e399"],
        &["1e401", "1.0000000000000000000001e400"],
    ),
    (
        r#"{"exclusiveMinimum": 9007199254740993, "maximum": 1e400}"#,
        &["9007199254740994", "1e400"],
        &["9007199254740993", "9007199254740992.5", "1e401"],
    ),
    (r#"{"multipleOf": 1e400}"#, &["3e400", "0"], &["1e399", "1"]),
    (
        r#"{"multipleOf": 1.234567890123456789}"#,
        &["1.234567890123456789", "2469135780246913578e-18"],
        &["1.234567890123456788", "1.2345678901234568"],
    ),
    (
        r#"{"minLength": 0e400, "maxLength": 1e400}"#,
        &["\"\"", "\"abc\""],
        &[],
    ),
    (r#"{"minItems": 2e19}"#, &["1"], &["[]", "[1]"]),
    (r#"{"maxItems": 10e-1}"#, &["[]", "[1]"], &["[1, 2]"]),
    // Strings: characters are counted, not bytes.
    (
        r#"{"minLength": 2, "maxLength": 3}"#,
        &["\"ab\"", "\"äöü\"", "\"😀😀\"", "\"\\ud83d\\ude00b\"", "7"],
        &["\"a\"", "\"😀\"", "\"abcd\"", "\"\""],
    ),
    (r#"{"minLength": 2.0}"#, &["\"ab\""], &["\"a\""]),
    (
        r#"{"pattern": "b+"}"#,
        &["\"abc\"", "5"],
        &["\"ac\"", "\"\""],
    ),
    (
        r#"{"pattern": "^\\d{3}$"}"#,
        &["\"123\""],
        &["\"1234\"", "\"123\\n\"", "\"١٢٣\""],
    ),
    (
        r#"{"pattern": "^[\\w.&&~~[-]+$"}"#,
        &["\"a_.&~[-9\""],
        &["\"ä\"", "\"]\"", "\"\""],
    ),
    (
        r#"{"pattern": "^[+--]$"}"#,
        &["\"+\"", "\",\"", "\"-\""],
        &["\".\"", "\"*\""],
    ),
    (
        r#"{"pattern": "^[--/]$"}"#,
        &["\"-\"", "\".\"", "\"/\""],
        &["\"0\"", "\",\""],
    ),
    (
        r#"{"pattern": "\\bfoo\\b"}"#,
        &["\"a foo b\"", "\"éfoo\""],
        &["\"afoo\""],
    ),
    (
        r#"{"pattern": "^\\p{L}+\\/[^\\D]\\u0041$"}"#,
        &["\"äß/1A\""],
        &["\"ä1/1A\"", "\"ä/xA\""],
    ),
    (
        r#"{"pattern": "^[^]$|[]"}"#,
        &["\"a\"", "\"\\n\""],
        &["\"\"", "\"ab\""],
    ),
    (r#"{"format": "date-time"}"#, &["\"never\"", "1"], &[]),
    // Arrays.
    (
        r#"{"items": {"type": "integer"}}"#,
        &["[]", "[1, 2]", "{\"a\": \"b\"}"],
        &["[1, \"2\"]"],
    ),
    (r#"{"items": false}"#, &["[]"], &["[null]"]),
    (
        r#"{"prefixItems": [{"type": "string"}, {"type": "null"}]}"#,
        &["[]", "[\"a\"]", "[\"a\", null, 7]"],
        &["[1]", "[\"a\", 1]"],
    ),
    (
        r#"{"prefixItems": [{"type": "string"}], "items": {"type": "null"}}"#,
        &["[\"a\"]", "[\"a\", null, null]"],
        &["[\"a\", \"b\"]", "[null]"],
    ),
    (
        r#"{"prefixItems": [true], "items": false, "minItems": 1}"#,
        &["[1]"],
        &["[]", "[1, 2]"],
    ),
    (
        r#"{"contains": {"const": 5}}"#,
        &["[5]", "[1, 5, 5]", "{}"],
        &["[]", "[1]"],
    ),
    (
        r#"{"contains": {"const": 5}, "minContains": 2, "maxContains": 3}"#,
        &["[5, 1, 5]", "[5, 5, 5]"],
        &["[5]", "[5, 5, 5, 5]"],
    ),
    (
        r#"{"contains": {"const": 5}, "minContains": 0}"#,
        &["[]", "[1]"],
        &[],
    ),
    (
        r#"{"minContains": 2, "maxContains": 0}"#,
        &["[]", "[1]"],
        &[],
    ),
    (
        r#"{"minItems": 1, "maxItems": 2}"#,
        &["[1]", "[1, 2]", "\"\""],
        &["[]", "[1, 2, 3]"],
    ),
    (
        r#"{"uniqueItems": true}"#,
        &[
            "[]",
            "[1, true]",
            "[0, false]",
            "[[1], 1]",
            "[{\"a\": 1}, {\"a\": 2}]",
            "[\"a\", \"b\"]",
            "[\"1\", 1]",
            "[[1, 2], [12]]",
        ],
        &[
            "[1, 2, 1.0]",
            "[{\"a\": 1, \"b\": 2}, {\"b\": 2, \"a\": 1}]",
            "[\"a\", \"\\u0061\"]",
            "[null, null]",
            "[[], []]",
            "[0, -0.0]",
        ],
    ),
    (r#"{"uniqueItems": false}"#, &["[1, 1]"], &[]),
    // Objects.
    (
        r#"{"properties": {"a": {"type": "integer"}}}"#,
        &["{}", "{\"a\": 1}", "{\"b\": \"c\"}", "[]"],
        &["{\"a\": \"1\"}"],
    ),
    (
        r#"{"properties": {"a": {"type": "integer"}}}"#,
        &["{\"a\": \"1\", \"a\": 1}"],
        &["{\"a\": 1, \"a\": \"1\"}", "{\"\\u0061\": \"1\"}"],
    ),
    (
        r#"{"required": ["a", "b"]}"#,
        &["{\"a\": null, \"b\": 1}", "[]"],
        &["{}", "{\"a\": 1}"],
    ),
    (
        r#"{"properties": {"a": true}, "additionalProperties": false}"#,
        &["{}", "{\"a\": 1}"],
        &["{\"b\": 1}"],
    ),
    (
        r#"{"additionalProperties": {"type": "null"}}"#,
        &["{\"a\": null}"],
        &["{\"a\": 1}"],
    ),
    (
        r#"{"properties": {"ab": true}, "patternProperties": {"^a": {"type": "integer"}, "b$": {"maximum": 9}}, "additionalProperties": false}"#,
        &["{\"ax\": 1}", "{\"ab\": 9}", "{\"xb\": 2}"],
        &[
            "{\"ax\": \"1\"}",
            "{\"ab\": 10}",
            "{\"ab\": \"1\"}",
            "{\"c\": 1}",
        ],
    ),
    (
        r#"{"propertyNames": {"maxLength": 2, "pattern": "^[a-z]*$"}}"#,
        &["{\"ab\": 1}", "{\"\": 1}"],
        &["{\"abc\": 1}", "{\"A\": 1}"],
    ),
    (
        r#"{"propertyNames": {"enum": ["a", "b"]}}"#,
        &["{\"a\": 1}"],
        &["{\"c\": 1}"],
    ),
    (r#"{"propertyNames": false}"#, &["{}"], &["{\"c\": 1}"]),
    (
        r#"{"minProperties": 1, "maxProperties": 2}"#,
        &["{\"a\": 1}", "{\"a\": 1, \"a\": 2, \"b\": 3}"],
        &["{}", "{\"a\": 1, \"b\": 1, \"c\": 1}"],
    ),
    (
        r#"{"dependentRequired": {"a": ["b"]}}"#,
        &["{}", "{\"b\": 1}", "{\"a\": 1, \"b\": 2}"],
        &["{\"a\": 1}"],
    ),
    (
        r#"{"dependentSchemas": {"a": {"required": ["b"]}}}"#,
        &["{}", "{\"a\": 1, \"b\": 2}", "[\"a\"]"],
        &["{\"a\": 1}"],
    ),
    // Subschemas for the same value.
    (
        r#"{"allOf": [{"minimum": 1}, {"maximum": 2}]}"#,
        &["1", "2"],
        &["0", "3"],
    ),
    (
        r#"{"anyOf": [{"type": "null"}, {"minimum": 1}]}"#,
        &["null", "1", "\"a\""],
        &["0"],
    ),
    (
        r#"{"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}"#,
        &["2", "3"],
        &["1", "6"],
    ),
    (
        r#"{"oneOf": [{"const": "a"}, {"const": "b"}]}"#,
        &["\"a\"", "\"b\""],
        &["\"c\""],
    ),
    (r#"{"not": {"type": "string"}}"#, &["1"], &["\"a\""]),
    (
        r#"{"type": "integer", "not": {"const": 0}}"#,
        &["1", "-1"],
        &["0", "\"a\""],
    ),
    (
        r#"{"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"minimum": 2}}"#,
        &["\"ab\"", "2", "null"],
        &["\"a\"", "1"],
    ),
    (
        r#"{"if": {"type": "string"}, "then": {"minLength": 2}}"#,
        &["\"ab\"", "1"],
        &["\"a\""],
    ),
    (r#"{"then": false, "else": false}"#, &["1"], &[]),
    // References.
    (
        r##"{"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"minimum": 1}}}"##,
        &["1", "5"],
        &["0", "6"],
    ),
    (
        r##"{"properties": {"next": {"$ref": "#"}}, "additionalProperties": false}"##,
        &["{}", "{\"next\": {\"next\": {}}}"],
        &["{\"next\": {\"last\": {}}}"],
    ),
    (
        r##"{"$ref": "#/$defs/a~1b%25~0", "$defs": {"a/b%~": {"type": "null"}}}"##,
        &["null"],
        &["1"],
    ),
    (
        r##"{"items": {"$ref": "#/properties/a"}, "properties": {"a": {"type": "null"}}}"##,
        &["[null]", "{\"a\": null}"],
        &["[1]", "{\"a\": 1}"],
    ),
    (
        r##"{"$ref": "#/$defs/list", "$defs": {"list": {"anyOf": [{"type": "null"}, {"type": "object", "required": ["head", "tail"], "properties": {"tail": {"$ref": "#/$defs/list"}}}]}}}"##,
        &[
            "null",
            "{\"head\": 1, \"tail\": {\"head\": 2, \"tail\": null}}",
        ],
        &["1", "{\"head\": 1, \"tail\": {\"head\": 2}}"],
    ),
    // References by name, and embedded schemas with their own `$id`.
    (
        r##"{"properties": {"a": {"$ref": "#n"}, "b": {"$dynamicRef": "#d"}}, "$defs": {"x": {"$anchor": "n", "type": "null"}, "y": {"$dynamicAnchor": "d", "const": 1}}}"##,
        &["{\"a\": null, \"b\": 1}"],
        &["{\"a\": 1}", "{\"b\": null}"],
    ),
    (
        r#"{"$id": "Tree", "type": "object", "properties": {"within": {"items": {"$ref": "Tree"}}}}"#,
        &["{\"within\": [{\"within\": []}]}"],
        &["{\"within\": [{\"within\": [1]}]}"],
    ),
    (
        r##"{"$id": "https://example.com/a/b.json", "items": {"anyOf": [{"$ref": "c.json#/$defs/null"}, {"$ref": "/d#one"}, {"$ref": "#/$defs/two"}]},
            "$defs": {"c": {"$id": "c.json", "$defs": {"null": {"type": "null"}}}, "d": {"$id": "https://example.com/d", "$defs": {"one": {"$anchor": "one", "const": 1}}}, "two": {"const": 2}}}"##,
        &["[null, 1, 2]"],
        &["[3]"],
    ),
    // In an embedded schema, # is its root.
    (
        r##"{"properties": {"a": {"$id": "urn:uuid:0", "items": {"$ref": "#/$defs/b"}, "$defs": {"b": {"type": "null"}}}}, "$defs": {"b": {"const": 1}}}"##,
        &["{\"a\": [null]}"],
        &["{\"a\": [1]}"],
    ),
    // Members that only look like names are ignored.
    (
        r##"{"$ref": "#a", "enum": [{"$anchor": "a"}, null], "properties": {"$anchor": true, "$id": {"$anchor": "a", "maximum": 1}}}"##,
        &["null", "{\"$anchor\": \"a\"}"],
        &["1", "{\"$id\": 2}"],
    ),
    // Keywords of earlier drafts.
    (
        r#"{"dependencies": {"a": ["b"], "c": {"required": ["d"]}, "e": false}}"#,
        &[
            "{\"a\": 1, \"b\": 1, \"c\": 1, \"d\": 1}",
            "{\"b\": 1}",
            "[\"a\"]",
        ],
        &["{\"a\": 1}", "{\"c\": 1}", "{\"e\": 1}"],
    ),
    (
        r##"{"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "definitions": {"a": {"type": "null"}}}"##,
        &["null"],
        &["1"],
    ),
    // Unevaluated properties and items.
    (
        r#"{"prefixItems": [true], "allOf": [{"prefixItems": [true, true]}, {"contains": {"const": 7}}], "unevaluatedItems": {"type": "null"}}"#,
        &["[1, 2, null, 7, null]", "[7]", "{\"a\": 1}", "1"],
        &["[1, 2, 3, 7]", "[1, 2]"],
    ),
    (
        r#"{"anyOf": [{"prefixItems": [{"const": 1}]}, {"prefixItems": [true, {"const": 2}]}], "unevaluatedItems": false}"#,
        &["[]", "[1]", "[1, 2]", "[3, 2]"],
        &["[1, 3]", "[1, 2, 3]"],
    ),
    (
        r#"{"allOf": [{"items": true}], "unevaluatedItems": false}"#,
        &["[1]"],
        &[],
    ),
    (
        r#"{"items": {"unevaluatedItems": false}, "unevaluatedItems": false}"#,
        &["[[], 1]"],
        &["[[1]]"],
    ),
    (
        r#"{"allOf": [{"unevaluatedItems": {"type": "integer"}}], "unevaluatedItems": false}"#,
        &["[1]"],
        &["[null]"],
    ),
    (
        r#"{"if": {"prefixItems": [{"const": 1}]}, "then": {"prefixItems": [true, true]}, "unevaluatedItems": false, "unevaluatedProperties": false}"#,
        &["[1, 2]", "{}"],
        &["[1, 2, 3]", "[2]", "{\"a\": 1}"],
    ),
    (
        r#"{"properties": {"a": true}, "allOf": [{"properties": {"b": true}}, {"patternProperties": {"^x": true}}], "unevaluatedProperties": false}"#,
        &["{\"a\": 1, \"b\": 2, \"xyz\": 3}", "[1]", "{}"],
        &["{\"c\": 1}"],
    ),
    (
        r#"{"anyOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}], "unevaluatedProperties": false}"#,
        &["{\"a\": 1, \"b\": 2}", "{\"a\": 1}"],
        &["{\"a\": \"x\", \"b\": 2}", "{\"c\": 1}"],
    ),
    (
        r#"{"oneOf": [{"properties": {"t": {"const": 1}, "a": true}, "required": ["t"]}, {"properties": {"t": {"const": 2}, "b": true}, "required": ["t"]}], "unevaluatedProperties": false}"#,
        &["{\"t\": 1, \"a\": 0}", "{\"t\": 2, \"b\": 0}"],
        &["{\"t\": 1, \"b\": 0}"],
    ),
    (
        r#"{"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"properties": {"b": true}}, "else": {"properties": {"c": true}}, "unevaluatedProperties": false}"#,
        &["{\"a\": 1, \"b\": 2}", "{\"c\": 2}"],
        &["{\"a\": 1, \"c\": 2}", "{\"a\": 2}", "{\"b\": 2}"],
    ),
    (
        r##"{"$ref": "#/$defs/base", "unevaluatedProperties": {"type": "null"}, "$defs": {"base": {"properties": {"a": true}}}}"##,
        &["{\"a\": 1, \"b\": null}"],
        &["{\"a\": 1, \"b\": 1}"],
    ),
    (
        r#"{"not": {"not": {"properties": {"a": true}}}, "unevaluatedProperties": false}"#,
        &["{}"],
        &["{\"a\": 1}"],
    ),
    (
        r#"{"allOf": [{"additionalProperties": true}], "unevaluatedProperties": false}"#,
        &["{\"a\": 1}"],
        &[],
    ),
    (
        r#"{"allOf": [{"unevaluatedProperties": true}], "unevaluatedProperties": false}"#,
        &["{\"a\": 1}"],
        &[],
    ),
    (
        r#"{"properties": {"a": {"properties": {"b": true}}}, "unevaluatedProperties": false}"#,
        &["{\"a\": {\"c\": 1}}"],
        &["{\"b\": 1}"],
    ),
    (
        r#"{"dependentSchemas": {"a": {"properties": {"a": true, "b": true}}}, "unevaluatedProperties": false}"#,
        &["{\"a\": 1, \"b\": 1}"],
        &["{\"b\": 1}"],
    ),
];

#[test]
fn rules_match_the_standard() {
    for (written, fitting, unfitting) in CASES {
        let schema = schema(written).unwrap_or_else(|why| panic!("{written}: {why}"));
        for value in *fitting {
            assert_eq!(schema.check(value.as_bytes()), Ok(()), "{written}: {value}");
        }
        for value in *unfitting {
            let checked = schema.check(value.as_bytes());
            assert!(checked.is_err(), "{written}: {value}");
        }
    }
}
