//! Which keys a payload may have, for whoever enqueues one: a misspelt key is then noticed before the job fails.

use serde_json::{Map, Value};

/// Keys of one handler, bytes: they are told to the fleet with everything else that a worker can run.
const BYTES_MAX: usize = 512;

/// Words that admit keys beside those of `properties`.
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

/// The keys that this schema (JSON) names for an object. None where it names none, or not all that may be meant: other keys
/// are asked for outright, or come from another part of the schema. A schema that only does not forbid others names all.
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
    fn keys_are_known_where_the_schema_names_all_that_may_be_meant() {
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
