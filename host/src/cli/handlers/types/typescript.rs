//! TypeScript, for node-postgres.

use std::fmt::Write as _;

use serde_json::Value;

use super::model::{Definition, HandlerTypes, Type, distinct, is_inexact};
use super::names::{Names, lower_camel};
use super::{ENQUEUE, HEADER, comment};

const START: &str = r#"/** A client, pool client or pool of pg: the job is enqueued in its transaction. */
export interface Queryable {
  query(text: string, values: unknown[]): Promise<{ rows: Record<string, unknown>[] }>;
}

/** The id of a job, with the type of its result. It is a string, because a bigint may exceed what a number holds. */
export type JobId<Result> = string & { readonly result?: Result };

/** An integer that may exceed Number.MAX_SAFE_INTEGER. A number does not hold all digits of an integer beyond that. */
export type Int64 = number;

/** Options of rouse.enqueue. Options that are left out have their defaults. */
export interface EnqueueOptions {
  queue?: string;
  tenant?: string;
  source?: string;
  priority?: "high" | "normal" | "low";
  runAt?: Date;
  maxAttempts?: number;
  uniqueKey?: string;
  tags?: string[];
  grants?: unknown;
  /** For instance "30 seconds"; the timeouts have the same form. */
  lease?: string;
  timeout?: string;
  jobTimeout?: string;
  after?: unknown;
}

/** Returns the result of a job; null until it has succeeded. */
export async function result<Result>(db: Queryable, job: JobId<Result>): Promise<Result | null> {
  const { rows } = await db.query("SELECT rouse.result($1::bigint) AS result", [job]);
  return (rows[0]?.["result"] ?? null) as Result | null;
}

async function enqueue<Result>(
  db: Queryable,
  handler: string,
  payload: unknown,
  options: EnqueueOptions,
): Promise<JobId<Result>> {
  const json = (value: unknown) => (value === undefined ? null : JSON.stringify(value));
  const { rows } = await db.query(ENQUEUE, [
    handler,
    JSON.stringify(payload),
    options.queue ?? null,
    options.tenant ?? null,
    options.source ?? null,
    options.priority ?? null,
    options.runAt ?? null,
    options.maxAttempts ?? null,
    options.uniqueKey ?? null,
    options.tags ?? null,
    json(options.grants),
    options.lease ?? null,
    options.timeout ?? null,
    options.jobTimeout ?? null,
    json(options.after),
  ]);
  return String(rows[0]?.["id"]) as JobId<Result>;
}
"#;

pub(super) fn write(handlers: &[HandlerTypes]) -> String {
    let mut out = format!("// {HEADER}\n\nconst ENQUEUE =\n  \"{ENQUEUE} AS id\";\n\n{START}");
    let mut names = Names::default();
    for reserved in ["result", "enqueue", "json", "db", "payload", "options"]
        .iter()
        .chain(KEYWORDS)
    {
        names.take(reserved);
    }
    for types in handlers {
        for definition in &types.definitions {
            write_definition(&mut out, definition);
        }
        let name = names.take(&lower_camel(&types.handler));
        let (payload, result) = (&types.payload, &types.result);
        let handler = Value::from(types.handler.as_str());
        let _ = write!(
            out,
            "\n/** Enqueues {}. {} */\nexport function {name}(\n  db: Queryable,\n  payload: {payload},\n  options: EnqueueOptions = {{}},\n): Promise<JobId<{result}>> {{\n  return enqueue(db, {handler}, payload, options);\n}}\n",
            comment(&types.handler),
            comment(&types.description),
        );
    }
    out
}

fn write_definition(out: &mut String, definition: &Definition) {
    out.push('\n');
    describe(out, "", &definition.description);
    let _ = match &definition.of {
        Type::Object(fields) => {
            let _ = writeln!(out, "export type {} = {{", definition.name);
            for field in fields {
                describe(out, "  ", &field.description);
                let optional = if field.required { "" } else { "?" };
                let name = Value::from(field.name.as_str());
                let _ = writeln!(out, "  {name}{optional}: {};", expression(&field.of));
            }
            writeln!(out, "}};")
        }
        of => writeln!(out, "export type {} = {};", definition.name, expression(of)),
    };
}

fn describe(out: &mut String, indent: &str, description: &str) {
    let description = comment(description);
    if !description.is_empty() {
        let _ = writeln!(out, "{indent}/** {description} */");
    }
}

fn expression(of: &Type) -> String {
    match of {
        Type::Any => "unknown".into(),
        Type::Null => "null".into(),
        Type::Boolean => "boolean".into(),
        Type::Integer | Type::Number => "number".into(),
        // JSON.stringify and JSON.parse have no other type for numbers.
        Type::Long | Type::Unsigned => "Int64".into(),
        Type::Text => "string".into(),
        // A literal type would be that of the rounded number.
        Type::Literal(value) if value.is_number() && is_inexact(value) => "Int64".into(),
        Type::Literal(value) => value.to_string(),
        Type::List(of) => format!("Array<{}>", expression(of)),
        // An index signature may refer to itself.
        Type::Map(of) => format!("{{ [key: string]: {} }}", expression(of)),
        Type::Object(_) => unreachable!("objects are definitions"),
        Type::Union(all) => distinct(all.iter().map(expression)).join(" | "),
        Type::Named(name) => name.clone(),
    }
}

const KEYWORDS: &[&str] = &[
    "await",
    "break",
    "case",
    "catch",
    "class",
    "const",
    "continue",
    "debugger",
    "default",
    "delete",
    "do",
    "else",
    "enum",
    "export",
    "extends",
    "false",
    "finally",
    "for",
    "function",
    "if",
    "import",
    "in",
    "instanceof",
    "new",
    "null",
    "return",
    "super",
    "switch",
    "this",
    "throw",
    "true",
    "try",
    "typeof",
    "var",
    "void",
    "while",
    "with",
    "yield",
    "let",
    "static",
    "implements",
    "interface",
    "package",
    "private",
    "protected",
    "public",
    "arguments",
    "eval",
    "undefined",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_integer_that_a_number_may_not_hold_has_a_type_that_says_so() {
        for (of, code) in [
            (Type::Integer, "number"),
            (Type::Number, "number"),
            (Type::Long, "Int64"),
            (Type::List(Box::new(Type::Unsigned)), "Array<Int64>"),
            (Type::Union(vec![Type::Long, Type::Null]), "Int64 | null"),
            (
                Type::Literal(9_007_199_254_740_991_u64.into()),
                "9007199254740991",
            ),
            (Type::Literal(9_007_199_254_740_993_u64.into()), "Int64"),
            (Type::Literal("x".into()), "\"x\""),
            (
                Type::Union(vec![
                    Type::Literal(i64::MAX.into()),
                    Type::Literal("x".into()),
                    Type::Literal(u64::MAX.into()),
                ]),
                "Int64 | \"x\"",
            ),
        ] {
            assert_eq!(expression(&of), code);
        }
        let comment = "A number does not hold all digits of an integer beyond that. */\nexport type Int64 = number;\n";
        assert!(write(&[]).contains(comment));
    }
}
