//! The payload keys that a handler knows, so that an enqueue can warn of a misspelt one.

use serde_json::{Map, Value};

/// The maximum size of the keys of one handler, in bytes. They are part of each registration.
const BYTES_MAX: usize = 512;

/// Keywords that may allow keys in addition to those of `properties`.
const OTHERS: [&str; 12] = [
    "$ref",
    "$dynamicRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "dependentSchemas",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
    "dependencies",
];

/// The keys under `properties` of this schema (JSON); `None` if there are none, or if the schema explicitly allows
/// others. A schema without `additionalProperties` counts as closed, because this is for warnings only.
pub(super) fn payload_keys(schema: &str) -> Option<Vec<String>> {
    let schema: Map<String, Value> = serde_json::from_str(schema).ok()?;
    let is_open = OTHERS.iter().any(|word| schema.contains_key(*word))
        || schema
            .get("additionalProperties")
            .is_some_and(|others| *others != Value::Bool(false));
    let keys = schema.get("properties")?.as_object()?.keys();
    let bytes: usize = keys.clone().map(String::len).sum();
    (!is_open && bytes > 0 && bytes <= BYTES_MAX).then(|| keys.cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::payload_keys;

    #[test]
    fn a_schema_that_allows_other_keys_has_no_known_keys() {
        let known = Some(vec!["text".to_owned()]);
        for (schema, keys) in [
            (r#"{"properties": {"text": true}}"#, &known),
            (
                r#"{"properties": {"text": true}, "additionalProperties": false}"#,
                &known,
            ),
            (
                r#"{"properties": {"text": true}, "additionalProperties": true}"#,
                &None,
            ),
            (
                r#"{"properties": {"text": true}, "additionalProperties": {"type": "string"}}"#,
                &None,
            ),
            (
                r#"{"properties": {"text": true}, "anyOf": [{"required": ["text"]}]}"#,
                &None,
            ),
            (r#"{"properties": {}}"#, &None),
            (r#"{"type": "object"}"#, &None),
            ("true", &None),
        ] {
            assert_eq!(payload_keys(schema), *keys, "{schema}");
        }
        let long = format!(r#"{{"properties": {{"{}": true}}}}"#, "x".repeat(513));
        assert_eq!(payload_keys(&long), None);
    }
}
