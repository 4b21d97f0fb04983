//! An example payload for a handler, made from its schema.

use serde_json::{Map, Value, json};

/// Schemas may refer to themselves, and deeper examples are unreadable.
const DEPTH_MAX: usize = 8;

/// A small value for the schema, with only the required properties. It may break other rules, such as a pattern.
pub(super) fn payload(schema: &Value) -> Value {
    value(schema, schema, 0)
}

fn value(schema: &Value, root: &Value, depth: usize) -> Value {
    if depth > DEPTH_MAX {
        return Value::Null;
    }
    let first = |key: &str| schema[key].as_array().and_then(|list| list.first());
    if let Some(given) = first("examples")
        .or_else(|| schema.get("default"))
        .or_else(|| schema.get("const"))
        .or_else(|| first("enum"))
    {
        return given.clone();
    }
    if let Some(path) = schema["$ref"].as_str() {
        let referred = path.strip_prefix('#').and_then(|path| root.pointer(path));
        return referred.map_or(Value::Null, |schema| value(schema, root, depth + 1));
    }
    if let Some(choice) = first("anyOf")
        .or_else(|| first("oneOf"))
        .or_else(|| first("allOf"))
    {
        return value(choice, root, depth + 1);
    }
    match schema["type"].as_str().or_else(|| first("type")?.as_str()) {
        Some("string") => json!("hello"),
        Some("integer" | "number") => schema.get("minimum").cloned().unwrap_or(json!(1)),
        Some("boolean") => json!(false),
        Some("array") => json!([]),
        Some("object") => {
            let required = schema["required"].as_array().into_iter().flatten();
            let properties: Map<_, _> = required
                .filter_map(Value::as_str)
                .map(|key| {
                    let property = &schema["properties"][key];
                    (key.to_string(), value(property, root, depth + 1))
                })
                .collect();
            Value::Object(properties)
        }
        Some(_) | None => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_example_has_only_the_required_keys() {
        let schema = json!({
            "type": "object",
            "required": ["name", "size", "mode", "tags", "loud", "to", "either"],
            "properties": {
                "name": {"type": "string"},
                "size": {"type": "integer", "minimum": 0},
                "mode": {"enum": ["fast", "slow"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "loud": {"type": "boolean"},
                "to": {"$ref": "#/$defs/Address"},
                "either": {"anyOf": [{"type": ["number", "null"]}, {"type": "null"}]},
                "more": {"type": "string"},
            },
            "$defs": {"Address": {"type": "string", "examples": ["ada@example.com"]}},
        });
        assert_eq!(
            payload(&schema),
            json!({
                "name": "hello", "size": 0, "mode": "fast", "tags": [], "loud": false,
                "to": "ada@example.com", "either": 1,
            })
        );
    }

    #[test]
    fn empty_and_recursive_schemas_give_an_example_too() {
        assert_eq!(payload(&json!(true)), Value::Null);
        assert_eq!(payload(&json!({"$ref": "elsewhere"})), Value::Null);
        let endless = json!({
            "type": "object",
            "required": ["next"],
            "properties": {"next": {"$ref": "#"}},
        });
        assert!(payload(&endless).pointer("/next/next").is_some());
    }
}
