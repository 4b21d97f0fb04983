//! The contract of a handler, from what its module declares.

use rouse_schema::{Contract, Parameter, Parameters, Schema};
use serde_json::{Value, json};

use crate::sandbox::Handler;

/// The maximum length of the description of a parameter in the comment of its function, in characters.
const DESCRIPTION_MAX: usize = 200;

/// The contract of a handler, as `rouse.publish_contracts` takes it.
pub(super) fn written(handler: &Handler) -> Value {
    let manifest = &handler.manifest;
    let Contract {
        refuses,
        rules,
        parameters,
    } = manifest.input_schema.contract();
    let mut contract = json!({
        "handler": manifest.name,
        "version": storable(&manifest.version),
        "sha256": handler.module.digest.to_string(),
        "schema": manifest.input_schema.written(),
        "refuses": refuses.map(|refuses| unless_without_payload(&manifest.input_schema, refuses)),
        "rules": rules,
        "comment": comment(&manifest.description, &parameters),
    });
    match parameters {
        Parameters::Whole(sql_type) => contract["payload_type"] = sql_type.into(),
        Parameters::Each(all) => {
            let all = all.iter().map(|it| {
                json!({"name": it.name, "type": it.sql_type, "required": it.required, "default": it.default})
            });
            contract["parameters"] = all.collect();
        }
    }
    contract
}

/// The predicate of a contract. A job that was enqueued without a payload has `{}`, which the host also accepts for a
/// handler whose payload may be `null` (`sandbox/attempt/contract.rs`).
fn unless_without_payload(schema: &Schema, refuses: String) -> String {
    match schema.check(b"{}").is_err() && schema.check(b"null").is_ok() {
        true => format!("({refuses}) && !($.type() == \"object\" && !exists($.keyvalue()))"),
        false => refuses,
    }
}

/// The comment of the function.
fn comment(description: &str, parameters: &Parameters) -> String {
    let mut comment = storable(description);
    let described = |parameter: &Parameter| {
        let text = storable(parameter.description.as_ref()?).replace('\n', " ");
        let text: String = text.chars().take(DESCRIPTION_MAX).collect();
        Some(format!("  {}: {text}", parameter.name))
    };
    if let Parameters::Each(all) = parameters {
        let lines: Vec<String> = all.iter().filter_map(described).collect();
        if !lines.is_empty() {
            comment.push_str("\n\nParameters:\n");
            comment.push_str(&lines.join("\n"));
        }
    }
    comment
}

/// Text without control characters: Postgres does not store NUL, and terminals obey some of the others.
fn storable(text: &str) -> String {
    let keeps = |character: &char| *character == '\n' || !character.is_control();
    text.chars().filter(keeps).collect()
}
