//! Properties that hold for every schema and every value.

use proptest::prelude::*;
use serde_json::json;

use super::super::number::Decimal;
use super::*;

pub(super) fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3..4i64).prop_map(Value::from),
        (-4..4i64).prop_map(|quarters| Value::from(quarters as f64 / 4.0)),
        "[ab\u{e4}]{0,3}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 20, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map("[abc]", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

const TYPES: &[&str] = &[
    "null", "boolean", "integer", "number", "string", "array", "object",
];

fn any_schema() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<bool>().prop_map(Value::from),
        proptest::sample::select(TYPES).prop_map(|name| json!({ "type": name })),
        value().prop_map(|value| json!({ "const": value })),
        proptest::collection::vec(value(), 0..3).prop_map(|values| json!({ "enum": values })),
        (-3..4i64, -3..4i64)
            .prop_map(|(min, max)| json!({ "minimum": min, "exclusiveMaximum": max })),
        (1..4i64).prop_map(|of| json!({ "multipleOf": of })),
        (0..3u64, 0..3u64).prop_map(|(min, max)| json!({ "minLength": min, "maxLength": max })),
        "[ab^$+*.?]{0,4}".prop_map(|pattern| json!({ "pattern": pattern })),
        any::<bool>().prop_map(|unique| json!({ "uniqueItems": unique })),
        proptest::collection::vec("[abc]", 0..2).prop_map(|names| json!({ "required": names })),
    ];
    leaf.prop_recursive(3, 20, 3, |inner| {
        let many = proptest::collection::vec(inner.clone(), 1..4);
        let names = proptest::collection::btree_map("[abc]", inner.clone(), 0..3);
        prop_oneof![
            inner.clone().prop_map(|inner| json!({ "items": inner })),
            inner.clone().prop_map(|inner| json!({ "contains": inner })),
            inner.clone().prop_map(|inner| json!({ "not": inner })),
            (names, inner.clone()).prop_map(
                |(names, rest)| json!({ "properties": names, "additionalProperties": rest })
            ),
            (many.clone(), inner.clone())
                .prop_map(|(all, rest)| json!({ "anyOf": all, "unevaluatedProperties": rest })),
            many.clone().prop_map(|all| json!({ "allOf": all })),
            many.clone().prop_map(|all| json!({ "oneOf": all })),
            (many, inner.clone()).prop_map(|(all, then)| json!({ "if": all[0], "then": then })),
        ]
    })
}

/// `None` if the schema itself is rejected because of its pattern.
fn fits(written: &Value, value: &Value) -> Option<bool> {
    let schema = schema(&written.to_string()).ok()?;
    Some(schema.check(value.to_string().as_bytes()).is_ok())
}

proptest! {
    #[test]
    fn equivalent_schemas_give_the_same_result(written in any_schema(), value in value()) {
        let Some(fit) = fits(&written, &value) else { return Ok(()) };
        for (same, fit) in [
            (json!({ "not": { "not": written } }), fit),
            (json!({ "not": written }), !fit),
            (json!({ "allOf": [true, written] }), fit),
            (json!({ "anyOf": [false, written] }), fit),
            (json!({ "oneOf": [written, false] }), fit),
            (json!({ "oneOf": [written, written] }), false),
            (json!({ "if": written, "else": false }), fit),
            (json!({ "$ref": "#/$defs/s", "$defs": { "s": written } }), fit),
        ] {
            prop_assert_eq!(fits(&same, &value), Some(fit), "{}", same);
        }
        for (within, whole, fit) in [
            (json!({ "items": written }), json!([value]), fit),
            (json!({ "prefixItems": [written] }), json!([value]), fit),
            (json!({ "contains": written }), json!([value]), fit),
            (json!({ "properties": { "p": written } }), json!({ "p": value }), fit),
            (json!({ "patternProperties": { "^p$": written } }), json!({ "p": value }), fit),
            (json!({ "additionalProperties": written }), json!({ "p": value }), fit),
            (json!({ "unevaluatedProperties": written }), json!({ "p": value }), fit),
        ] {
            prop_assert_eq!(fits(&within, &whole), Some(fit), "{} {}", within, whole);
        }
    }

    #[test]
    fn a_quick_check_agrees_with_a_full_one(written in any_schema(), value in value()) {
        if let Ok(schema) = schema(&written.to_string()) {
            let text = value.to_string();
            if let Some(quickly) = schema.check_quickly(text.as_bytes()) {
                prop_assert_eq!(quickly, schema.check(text.as_bytes()));
            }
        }
    }

    #[test]
    fn unique_items_agree_with_equality(list in proptest::collection::vec(value(), 0..6)) {
        // Except numbers, for which `Value` distinguishes spellings.
        let number = |value: &Value| value.to_string().contains(".0");
        prop_assume!(!list.iter().any(number));
        let repeated = (1..list.len()).any(|n| list[..n].contains(&list[n]));
        prop_assert_eq!(fits(&json!({ "uniqueItems": true }), &json!(list)), Some(!repeated));
        for value in &list {
            let first = value == &list[0];
            prop_assert_eq!(fits(&json!({ "const": list[0] }), value), Some(first));
        }
    }

    #[test]
    fn numbers_compare_by_value(a in any::<i64>(), b in any::<i64>(), places in 0..25usize, unit in 1..5_000u64) {
        // The same number, with the decimal point shifted.
        let moved = format!("{}e{places}", decimal(a, places));
        let plain = a.to_string();
        prop_assert_eq!(Decimal::read(&moved), Decimal::read(&plain));
        prop_assert_eq!(Decimal::read(&plain).cmp(&Decimal::read(&b.to_string())), a.cmp(&b));
        let scaled = decimal(a, 2);
        let hundredths = format!("{unit}e-2");
        let multiple = Decimal::read(&scaled).is_multiple_of(&Decimal::read(&hundredths));
        prop_assert_eq!(multiple, i128::from(a) % i128::from(unit) == 0);
        prop_assert_eq!(Decimal::read(&scaled).is_integer(), a % 100 == 0);
    }

    #[test]
    fn a_number_equals_its_text(bits in any::<u64>(), digits in "[1-9][0-9]{0,40}") {
        let double = f64::from_bits(bits);
        prop_assume!(double.is_finite());
        for text in [double.to_string(), format!("{double:e}"), digits] {
            let number = schema(&format!(r#"{{"const": {text}, "minimum": {text}, "maximum": {text}}}"#)).unwrap();
            prop_assert_eq!(number.check(text.as_bytes()), Ok(()));
            let larger = schema(&format!(r#"{{"exclusiveMinimum": {text}}}"#)).unwrap();
            prop_assert!(larger.check(text.as_bytes()).is_err());
        }
    }

    #[test]
    fn arbitrary_input_never_panics(written in "\\PC{0,40}", pattern in "[\\[\\]\\\\^$a-z0-9&~{}(),?*+|.-]{0,12}", text in "\\PC{0,20}") {
        let schema = json!({ "pattern": pattern, "properties": { &written: { "pattern": text } }, "$ref": written });
        let _ = super::schema(&schema.to_string());
        if let Ok(schema) = super::schema(&json!({ "pattern": pattern }).to_string()) {
            let _ = schema.check(json!(text).to_string().as_bytes());
            let _ = schema.check(text.as_bytes());
        }
    }
}

/// The number with its decimal point moved to the left.
fn decimal(number: i64, places: usize) -> String {
    let sign = if number < 0 { "-" } else { "" };
    let digits = number.unsigned_abs().to_string();
    let digits = format!(
        "{}{digits}",
        "0".repeat((places + 1).saturating_sub(digits.len()))
    );
    let (whole, fraction) = digits.split_at(digits.len() - places);
    match fraction {
        "" => format!("{sign}{whole}"),
        _ => format!("{sign}{whole}.{fraction}"),
    }
}
