//! Schemas and values that are designed to be expensive: all checks end with a result.

use std::time::{Duration, Instant};

use super::schema;

/// The time limit of a check on a machine that is busy with other tests; most take 1 % of it.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs the check on a stack that is smaller than that of any thread for guests.
fn checked(written: String, value: String) -> Result<(), String> {
    let start = Instant::now();
    let thread = std::thread::Builder::new().stack_size(1 << 20);
    let check = move || {
        let schema = schema(&written).expect("the schema is accepted");
        assert!(matches!(
            schema.check_quickly(value.as_bytes()),
            None | Some(Err(_))
        ));
        schema.check(value.as_bytes())
    };
    let checked = thread.spawn(check).expect("a thread").join();
    assert!(start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
    checked.expect("a check does not panic")
}

fn refused(written: &str, value: &str, words: &str) {
    let why = checked(written.into(), value.into()).expect_err("must be refused");
    let start: String = why.chars().take(300).collect();
    assert!(why.contains(words), "{start}");
}

/// Each level tries both alternatives of the next, and collects the evaluated properties of either: 2^40 in all.
fn doubling() -> String {
    let levels: String = (0..40)
        .map(|n| {
            let next = format!(r##"{{"$ref": "#/$defs/l{}"}}"##, n + 1);
            format!(r#""l{n}": {{"anyOf": [{next}, {next}]}},"#)
        })
        .collect();
    format!(
        r##"{{"$ref": "#/$defs/l0", "unevaluatedProperties": false, "$defs": {{{levels} "l40": true}}}}"##
    )
}

#[test]
fn the_check_of_alternatives_that_double_at_each_level_ends() {
    refused(&doubling(), "{}", "too many steps");
    // Each level is tried once if no evaluated properties are collected, or if each is also a level of the value.
    let once = doubling().replace("unevaluatedProperties", "title");
    assert_eq!(schema(&once).unwrap().check(b"{}"), Ok(()));
    let deep = format!("{}1{}", "[".repeat(60), "]".repeat(60));
    let written =
        r##"{"anyOf": [{"items": {"$ref": "#"}}, {"items": {"$ref": "#"}}], "type": "array"}"##;
    refused(written, &deep, "/0/0/0/0");
}

#[test]
fn deep_nesting_is_rejected() {
    let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    let list = r##"{"items": {"$ref": "#"}, "type": "array"}"##;
    assert_eq!(schema(list).unwrap().check(deep(512).as_bytes()), Ok(()));
    refused(list, &deep(513), "nested deeper than 512 levels");
    refused(list, &deep(10_000), "nested deeper than 512 levels");
    refused(r#"{"const": 1}"#, &deep(10_000), "nested deeper");
    refused(r#"{"uniqueItems": true}"#, &deep(10_000), "nested deeper");
    refused(
        r#"{"type": "object"}"#,
        &deep(10_000),
        "expected an object, got an array",
    );
    // Depth that the schema does not check is ignored.
    let array = schema(r#"{"type": "array"}"#).unwrap();
    assert_eq!(array.check(deep(100_000).as_bytes()), Ok(()));
    // References alone do not count as nesting, unless they have other rules.
    let chain = |besides: &str| {
        let links: String = (0..5_000)
            .map(|n| format!(r##""d{n}": {{{besides} "$ref": "#/$defs/d{}"}},"##, n + 1))
            .collect();
        format!(r##"{{"$ref": "#/$defs/d0", "$defs": {{{links} "d5000": {{"type": "null"}}}}}}"##)
    };
    refused(&chain(""), "1", "expected null, got 1 (#/$defs/d5000)");
    refused(&chain(r#""minimum": 0,"#), "1", "nested deeper");
    // A pointer as long as the value is deep.
    let objects = format!("{}1{}", r#"{"a":"#.repeat(200), "}".repeat(200));
    refused(
        r##"{"additionalProperties": {"$ref": "#"}, "type": "object"}"##,
        &objects,
        "/a/a/a/a",
    );
}

#[test]
fn reservations_for_an_object_are_bounded_across_schema_levels() {
    let members: Vec<String> = (0..40_000).map(|n| format!("\"{n}\":1")).collect();
    let value = format!("{{\"a\":1,{}}}", members.join(","));
    for (open, close) in [
        ("{\"dependentSchemas\": {\"a\": ", "}}"),
        ("{\"unevaluatedProperties\": true, \"allOf\": [", "]}"),
    ] {
        let written = format!("{}false{}", open.repeat(50), close.repeat(50));
        let why = checked(written, value.clone()).expect_err("must be refused");
        // Either may be found first.
        assert!(
            why.contains("does not match") || why.contains("too many steps"),
            "{why:.200}"
        );
    }
}

#[test]
fn a_cancelled_check_ends() {
    let looks = std::cell::Cell::new(0);
    let unwanted = || {
        looks.set(looks.get() + 1);
        looks.get() == 3
    };
    let ended = schema(&doubling()).unwrap().check_while(b"{}", &unwanted);
    assert_eq!((ended.is_err(), looks.get()), (true, 3));
}

#[test]
fn uniqueness_is_checked_quickly_for_any_list() {
    let numbers: Vec<String> = (0..200_000).map(|n| format!("{n}e1")).collect();
    let list = format!("[{}]", numbers.join(","));
    let unique = schema(r#"{"uniqueItems": true}"#).unwrap();
    let start = Instant::now();
    assert_eq!(unique.check(list.as_bytes()), Ok(()));
    assert!(start.elapsed() < TIMEOUT);
    let list = format!("[{},1999990]", numbers.join(","));
    refused(
        r#"{"uniqueItems": true}"#,
        &list,
        "expected unique items, got duplicates",
    );
}

#[test]
fn expensive_patterns_and_numbers_are_bounded() {
    let long = format!("\"{}\"", "a".repeat(1 << 18));
    refused(
        r#"{"pattern": "^(a+)+$|(a|b)*b(a|b){1000}"}"#,
        &long,
        "too many steps",
    );
    refused(
        r#"{"pattern": "^(a*)*b$"}"#,
        &long,
        "expected a string that matches",
    );
    let digits = "7".repeat(1 << 18);
    let rules: Vec<String> = (1..5_000)
        .map(|n| format!(r#"{{"type": "integer", "multipleOf": {n}}}"#))
        .collect();
    let written = format!(
        r#"{{"not": {{"anyOf": [{{"type": "string"}}, {}]}}}}"#,
        rules.join(",")
    );
    refused(&written, &digits, "expected a value that does not match");
    let rules = format!(
        r#"{{"allOf": [{}]}}"#,
        vec![r#"{"type": "integer"}"#; 5_000].join(",")
    );
    refused(&rules, &digits, "too many steps");
    let rules = vec![r#"{"not": {"multipleOf": 18446744073709551557}}"#; 2_000].join(",");
    refused(
        &format!(r#"{{"allOf": [{rules}]}}"#),
        &digits,
        "too many steps",
    );
    let empty = format!("[{}\"\"]", "\"\",".repeat(500_000));
    refused(
        r#"{"items": {"pattern": "(.{1,900})?$"}}"#,
        &empty,
        "too many steps",
    );
}

#[test]
fn evaluated_properties_are_collected_only_if_needed() {
    let mut written = r#"{"additionalProperties": true}"#.to_owned();
    for _ in 0..40 {
        written = format!(r#"{{"anyOf": [{written}]}}"#);
    }
    let members: Vec<String> = (0..100_000).map(|n| format!(r#""{n}": 1"#)).collect();
    let object = format!("{{{}}}", members.join(","));
    let written = format!(
        r#"{{"allOf": [{}], "unevaluatedProperties": false}}"#,
        vec![written; 20].join(",")
    );
    refused(&written, &object, "too many steps");
}

#[test]
fn a_value_with_too_many_parts_is_rejected() {
    let list = |parts: usize| format!("[{}0]", "0,".repeat(parts));
    let numbers = r#"{"items": {"type": "integer"}}"#;
    let schema = schema(numbers).unwrap();
    assert_eq!(schema.check(list(2_000_000).as_bytes()), Ok(()));
    refused(numbers, &list(5_000_000), "it has more than 4194304 values");
}

#[test]
fn long_uris_of_embedded_schemas_are_refused_before_they_multiply() {
    let embedded: Vec<String> = (0..5_000).map(|n| format!(r#"{{"$id": "{n}"}}"#)).collect();
    let (name, embedded) = ("x".repeat(500_000), embedded.join(","));
    let written = format!(r#"{{"$id": "https://a.test/{name}/", "allOf": [{embedded}]}}"#);
    let start = Instant::now();
    let why = schema(&written).expect_err("the URI is too long");
    assert!(why.contains("the maximum is 2048"), "{why:.300}");
    assert!(start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
    let name = "x".repeat(1_000);
    let written = format!(r#"{{"$id": "https://a.test/{name}/", "allOf": [{embedded}]}}"#);
    assert!(schema(&written).is_ok());
}

#[test]
fn schemas_of_a_megabyte_compile_in_time() {
    let start = Instant::now();
    // A property with a long name, and many subschemas under it.
    let many: Vec<String> = (0..20_000).map(|n| format!(r#""{n}": {{}}"#)).collect();
    let name = "x".repeat(500_000);
    let written = format!(
        r#"{{"properties": {{"{name}": {{"properties": {{{}}}}}}}}}"#,
        many.join(",")
    );
    schema(&written).unwrap();
    let patterns: Vec<String> = (0..20_000).map(|n| format!(r#""^a{n}$": true"#)).collect();
    let written = format!(r#"{{"patternProperties": {{{}}}}}"#, patterns.join(","));
    assert!(schema(&written).unwrap_err().contains("too large"));
    let references = vec![r##"{"$ref": "#/allOf/0"}"##; 40_000].join(",");
    schema(&format!(r#"{{"allOf": [true, {references}]}}"#)).unwrap();
    // Each reference is looked up among the anchors that share a name.
    let anchors: Vec<String> = (0..8_000)
        .map(|n| format!(r#""{n}": {{"$dynamicAnchor": "n{n}"}}"#))
        .collect();
    let anchors = anchors.join(",");
    let references = vec![r##"{"$dynamicRef": "#u"}"##; 20_000].join(",");
    let written = format!(
        r#"{{"$defs": {{"a": {{"$id": "a", "$defs": {{{anchors}}}}}, "b": {{"$id": "b", "$defs": {{{anchors}}}}}}},
            "allOf": [{{"$dynamicAnchor": "u"}}, {references}]}}"#
    );
    schema(&written).unwrap();
    assert!(start.elapsed() < TIMEOUT, "{:?}", start.elapsed());
}
