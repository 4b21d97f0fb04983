//! Python, for psycopg 3.

use std::fmt::Write as _;

use serde_json::Value;

use super::model::{Definition, HandlerTypes, Type, distinct};
use super::names::{Names, snake};
use super::{ENQUEUE, HEADER, comment};

const START: &str = r#"from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, NotRequired, TypeAlias, TypedDict, TypeVar, Union

from psycopg import Connection
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

R = TypeVar("R")


@dataclass(frozen=True)
class Job(Generic[R]):
    """The id of a job, with the type of its result."""

    id: int


class EnqueueOptions(TypedDict, total=False):
    """Options of rouse.enqueue. Options that are left out have their defaults."""

    queue: str
    tenant: str
    source: str
    priority: Literal["high", "normal", "low"]
    run_at: datetime
    max_attempts: int
    unique_key: str
    tags: list[str]
    grants: Any
    lease: timedelta
    timeout: timedelta
    job_timeout: timedelta
    after: Any


def result(connection: Connection[Any], job: Job[R]) -> R | None:
    """Returns the result of a job; None until it has succeeded."""
    with connection.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute("SELECT rouse.result(%s)", (job.id,)).fetchone()
    value: R | None = row[0] if row else None
    return value


def _enqueue(
    connection: Connection[Any], handler: str, payload: Any, options: EnqueueOptions | None
) -> int:
    given: EnqueueOptions = options or {}
    params = (
        handler,
        Jsonb(payload),
        given.get("queue"),
        given.get("tenant"),
        given.get("source"),
        given.get("priority"),
        given.get("run_at"),
        given.get("max_attempts"),
        given.get("unique_key"),
        given.get("tags"),
        Jsonb(given["grants"]) if "grants" in given else None,
        given.get("lease"),
        given.get("timeout"),
        given.get("job_timeout"),
        Jsonb(given["after"]) if "after" in given else None,
    )
    with connection.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(_ENQUEUE, params).fetchone()
    assert row is not None
    return int(row[0])
"#;

pub(super) fn write(handlers: &[HandlerTypes]) -> String {
    let mut sql = ENQUEUE.to_owned();
    for number in (1..=15).rev() {
        sql = sql.replace(&format!("${number}"), "%s");
    }
    // A timedelta is already an interval.
    let sql = sql.replace("%s::text::interval", "%s");
    let mut out = format!("# {HEADER}\n\n{START}\n\n_ENQUEUE = \"{sql}\"\n");
    let mut names = Names::default();
    for reserved in [
        "result",
        "_enqueue",
        "dataclass",
        "datetime",
        "timedelta",
        "tuple_row",
        "int",
        "str",
        "float",
        "bool",
        "list",
        "dict",
    ]
    .iter()
    .chain(KEYWORDS)
    {
        names.take(reserved);
    }
    for types in handlers {
        for definition in &types.definitions {
            write_definition(&mut out, definition);
        }
        let name = names.take(&snake(&types.handler));
        let (payload, result) = (&types.payload, &types.result);
        let handler = Value::from(types.handler.as_str());
        let _ = write!(
            out,
            "\n\ndef {name}(\n    connection: Connection[Any], payload: {payload}, options: EnqueueOptions | None = None\n) -> Job[{result}]:\n    \"\"\"Enqueues {}. {} \"\"\"\n    return Job(_enqueue(connection, {handler}, payload, options))\n",
            comment(&types.handler),
            comment(&types.description),
        );
    }
    out
}

fn write_definition(out: &mut String, definition: &Definition) {
    out.push('\n');
    let description = comment(&definition.description);
    if !description.is_empty() {
        let _ = writeln!(out, "#: {description}");
    }
    let name = &definition.name;
    let _ = match &definition.of {
        // With names in quotes, any key is possible.
        Type::Object(fields) => {
            let _ = writeln!(out, "{name} = TypedDict(\n    \"{name}\",\n    {{");
            for field in fields {
                let description = comment(&field.description);
                if !description.is_empty() {
                    let _ = writeln!(out, "        #: {description}");
                }
                let of = match field.required {
                    true => expression(&field.of),
                    false => format!("NotRequired[{}]", expression(&field.of)),
                };
                let _ = writeln!(out, "        {}: {of},", Value::from(field.name.as_str()));
            }
            writeln!(out, "    }},\n)")
        }
        of => writeln!(out, "{name}: TypeAlias = {}", expression(of)),
    };
}

/// Names are in quotes, because they may be defined later.
fn expression(of: &Type) -> String {
    match of {
        Type::Any => "Any".into(),
        Type::Null => "None".into(),
        Type::Boolean => "bool".into(),
        Type::Integer | Type::Long | Type::Unsigned => "int".into(),
        Type::Number => "float".into(),
        Type::Text => "str".into(),
        Type::Literal(value) => format!("Literal[{}]", literal(value)),
        Type::List(of) => format!("list[{}]", expression(of)),
        Type::Map(of) => format!("dict[str, {}]", expression(of)),
        Type::Object(_) => unreachable!("objects are definitions"),
        Type::Union(all) => {
            let all = distinct(all.iter().map(expression));
            match &*all {
                [one] => one.clone(),
                all => format!("Union[{}]", all.join(", ")),
            }
        }
        Type::Named(name) => format!("\"{name}\""),
    }
}

fn literal(value: &Value) -> String {
    match value {
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        // The escapes of JSON strings are also those of Python.
        other => other.to_string(),
    }
}

const KEYWORDS: &[&str] = &[
    "and", "as", "assert", "async", "await", "break", "class", "continue", "def", "del", "elif",
    "else", "except", "finally", "for", "from", "global", "if", "import", "in", "is", "lambda",
    "nonlocal", "not", "or", "pass", "raise", "return", "try", "while", "with", "yield", "match",
    "case", "type", "none", "true", "false", "print", "object",
];
