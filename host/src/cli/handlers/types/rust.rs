//! Rust, for tokio-postgres.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::Value;

use super::model::{Definition, HandlerTypes, Type};
use super::names::{Names, snake, upper_camel};
use super::{ENQUEUE, HEADER, comment};

const START: &str = r#"use std::marker::PhantomData;
use std::time::SystemTime;

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio_postgres::types::Json;
use tokio_postgres::{Error, GenericClient};

/// The id of a job, with the type of its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job<R> {
    pub id: i64,
    result: PhantomData<fn() -> R>,
}

/// Options of rouse.enqueue. Options that are `None` have their defaults.
#[derive(Debug, Clone, Default)]
pub struct EnqueueOptions<'a> {
    pub queue: Option<&'a str>,
    pub tenant: Option<&'a str>,
    pub source: Option<&'a str>,
    /// `high`, `normal` or `low`.
    pub priority: Option<&'a str>,
    pub run_at: Option<SystemTime>,
    pub max_attempts: Option<i32>,
    pub unique_key: Option<&'a str>,
    pub tags: Option<&'a [&'a str]>,
    pub grants: Option<Value>,
    /// For instance `30 seconds`; the timeouts have the same form.
    pub lease: Option<&'a str>,
    pub timeout: Option<&'a str>,
    pub job_timeout: Option<&'a str>,
    pub after: Option<Value>,
}

impl<R: DeserializeOwned> Job<R> {
    /// The result; `None` until the job has succeeded.
    pub async fn result(&self, client: &impl GenericClient) -> Result<Option<R>, Error> {
        let row = client.query_one("SELECT rouse.result($1)", &[&self.id]).await?;
        let result: Option<Json<R>> = row.try_get(0)?;
        Ok(result.map(|Json(result)| result))
    }
}

async fn enqueue<R>(
    client: &impl GenericClient,
    handler: &str,
    payload: Value,
    options: &EnqueueOptions<'_>,
) -> Result<Job<R>, Error> {
    let row = client
        .query_one(
            ENQUEUE,
            &[
                &handler,
                &Json(payload),
                &options.queue,
                &options.tenant,
                &options.source,
                &options.priority,
                &options.run_at,
                &options.max_attempts,
                &options.unique_key,
                &options.tags,
                &options.grants.as_ref().map(Json),
                &options.lease,
                &options.timeout,
                &options.job_timeout,
                &options.after.as_ref().map(Json),
            ],
        )
        .await?;
    Ok(Job {
        id: row.try_get(0)?,
        result: PhantomData,
    })
}
"#;

const DERIVES: &str = "#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]";

pub(super) fn write(handlers: &[HandlerTypes]) -> String {
    let mut out = format!("// {HEADER}\n\n{START}\nconst ENQUEUE: &str = \"{ENQUEUE}\";\n");
    let mut names = Names::default();
    for reserved in ["enqueue"].iter().chain(KEYWORDS) {
        names.take(reserved);
    }
    for types in handlers {
        let recursive = types.recursive();
        for definition in &types.definitions {
            write_definition(&mut out, definition, &recursive);
        }
        let name = names.take(&snake(&types.handler));
        let (payload, result) = (&types.payload, &types.result);
        let handler = string(&types.handler);
        let _ = write!(
            out,
            "\n/// Enqueues {}. {}\npub async fn {name}(\n    client: &impl GenericClient,\n    payload: &{payload},\n    options: &EnqueueOptions<'_>,\n) -> Result<Job<{result}>, Error> {{\n    let payload = serde_json::to_value(payload).expect(\"a payload is JSON\");\n    enqueue(client, {handler}, payload, options).await\n}}\n",
            comment(&types.handler),
            comment(&types.description),
        );
    }
    out
}

fn write_definition(out: &mut String, definition: &Definition, recursive: &BTreeSet<&str>) {
    out.push('\n');
    describe(out, "", &definition.description);
    let name = &definition.name;
    let (of, is_nullable) = definition.of.without_null();
    if let (Some(strings), false) = (definition.of.strings(), is_nullable) {
        let _ = writeln!(out, "{DERIVES}\npub enum {name} {{");
        let mut variants = Names::default();
        for text in strings {
            let variant = variants.take(&variant(text));
            let _ = writeln!(
                out,
                "    #[serde(rename = {})]\n    {variant},",
                string(text)
            );
        }
        out.push_str("}\n");
        return;
    }
    let _ = match (&definition.of, of) {
        (Type::Object(fields), _) => {
            let _ = writeln!(out, "{DERIVES}\npub struct {name} {{");
            let mut names = Names::default();
            for field in fields {
                describe(out, "    ", &field.description);
                let (of, is_nullable) = field.of.without_null();
                let of = expression(&of, recursive, true);
                let is_optional = !field.required || is_nullable;
                let ident = ident(&names.take(&snake(&field.name)));
                let mut attributes = Vec::new();
                if ident != field.name {
                    attributes.push(format!("rename = {}", string(&field.name)));
                }
                if !field.required {
                    attributes
                        .push("default, skip_serializing_if = \"Option::is_none\"".to_owned());
                }
                if !attributes.is_empty() {
                    let _ = writeln!(out, "    #[serde({})]", attributes.join(", "));
                }
                let of = if is_optional && field.of != Type::Null {
                    format!("Option<{of}>")
                } else {
                    of
                };
                let of = if !field.required && field.of == Type::Null {
                    "Option<()>".to_owned()
                } else {
                    of
                };
                let _ = writeln!(out, "    pub {ident}: {of},");
            }
            writeln!(out, "}}")
        }
        (Type::Union(_), Type::Union(all)) => {
            let _ = writeln!(out, "{DERIVES}\n#[serde(untagged)]\npub enum {name} {{");
            let mut variants = Names::default();
            let null = is_nullable.then_some(Type::Null);
            let mut written = BTreeSet::new();
            for of in all.iter().chain(&null) {
                let code = expression(of, recursive, true);
                // serde would never choose a second variant of the same type.
                if !written.insert(code.clone()) {
                    continue;
                }
                let variant = variants.take(match of {
                    Type::Named(name) => name,
                    Type::Any => "Any",
                    Type::Null => "Null",
                    Type::Boolean => "Boolean",
                    Type::Integer | Type::Long => "Integer",
                    Type::Unsigned => "Unsigned",
                    Type::Number => "Number",
                    Type::Text => "Text",
                    Type::Literal(_) => "Literal",
                    Type::List(_) => "List",
                    Type::Map(_) | Type::Object(_) | Type::Union(_) => "Map",
                });
                let _ = match of {
                    Type::Null => writeln!(out, "    {variant},"),
                    _ => writeln!(out, "    {variant}({code}),"),
                };
            }
            writeln!(out, "}}")
        }
        // An alias cannot refer back to itself.
        _ if recursive.contains(&**name) => writeln!(out, "pub type {name} = Value;"),
        (of, _) => writeln!(
            out,
            "pub type {name} = {};",
            expression(of, recursive, false)
        ),
    };
}

fn describe(out: &mut String, indent: &str, description: &str) {
    let description = comment(description);
    if !description.is_empty() {
        let _ = writeln!(out, "{indent}/// {description}");
    }
}

/// The type as Rust code. `direct`: the value is stored in the type that contains it, so a cycle needs a box.
fn expression(of: &Type, recursive: &BTreeSet<&str>, direct: bool) -> String {
    match of {
        Type::Any | Type::Object(_) => "Value".into(),
        Type::Null => "()".into(),
        Type::Boolean | Type::Literal(Value::Bool(_)) => "bool".into(),
        Type::Unsigned => "u64".into(),
        Type::Literal(Value::Number(number)) if !number.is_i64() => "u64".into(),
        Type::Integer | Type::Long | Type::Literal(Value::Number(_)) => "i64".into(),
        Type::Number => "f64".into(),
        Type::Text | Type::Literal(_) => "String".into(),
        Type::List(of) => format!("Vec<{}>", expression(of, recursive, false)),
        Type::Map(of) => format!(
            "std::collections::BTreeMap<String, {}>",
            expression(of, recursive, false)
        ),
        Type::Union(_) => match of.without_null() {
            (Type::Union(_), _) => "Value".into(),
            (of, _) => format!("Option<{}>", expression(&of, recursive, direct)),
        },
        Type::Named(name) if direct && recursive.contains(&**name) => format!("Box<{name}>"),
        Type::Named(name) => name.clone(),
    }
}

fn variant(text: &str) -> String {
    match upper_camel(text).as_str() {
        "Self" => "SelfValue".to_owned(),
        other => other.to_owned(),
    }
}

fn ident(name: &str) -> String {
    match name {
        "self" | "super" | "crate" | "_" => format!("{name}_"),
        name if KEYWORDS.contains(&name) => format!("r#{name}"),
        name => name.to_owned(),
    }
}

fn string(text: &str) -> String {
    // `Debug` escapes as Rust does.
    format!("{text:?}")
}

const KEYWORDS: &[&str] = &[
    "as", "async", "await", "break", "const", "continue", "dyn", "else", "enum", "extern", "false",
    "fn", "for", "gen", "if", "impl", "in", "let", "loop", "match", "mod", "move", "mut", "pub",
    "ref", "return", "static", "struct", "trait", "true", "type", "unsafe", "use", "where",
    "while", "abstract", "become", "box", "do", "final", "macro", "override", "priv", "try",
    "typeof", "unsized", "virtual", "yield", "self", "super", "crate",
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn integers_have_the_type_that_holds_them() {
        for (of, code) in [
            (Type::Integer, "i64"),
            (Type::Long, "i64"),
            (Type::Unsigned, "u64"),
            (Type::Literal(json!(-1)), "i64"),
            (Type::Literal(json!(i64::MAX)), "i64"),
            (Type::Literal(json!(u64::MAX)), "u64"),
            (Type::Union(vec![Type::Unsigned, Type::Null]), "Option<u64>"),
        ] {
            assert_eq!(expression(&of, &BTreeSet::new(), false), code);
        }
    }
}
