//! `rouse handlers types`: types of payloads and results, and typed calls, for producers.
//!
//! Everything in a schema is untrusted: names become identifiers of the language, strings become quoted literals or
//! comments, and a type that the language cannot express becomes a type for any value.

mod go;
mod json_schema;
mod model;
mod names;
mod python;
mod rust;
mod typescript;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args as ClapArgs, ValueEnum};

use self::model::HandlerTypes;
use self::names::Names;
use super::folder::{Folder, FolderLocation};
use super::lock::replace;
use crate::cli::dev_file::Serves;
use crate::cli::text::plain;
use crate::job::pattern_covers;

/// Options of `rouse handlers types`.
#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Prints one source file: types of the payload and the result of each handler, and a function that enqueues its job with \
a connection or transaction that you pass. The file needs a library: pg for ts, psycopg 3 for py, tokio-postgres and \
serde for rust, pgx 5 for go.\n\n  rouse handlers types --lang ts --output src/jobs.ts\n\n\
A type that the language cannot express becomes a type for any value, which the host checks. Run the command again when the handlers have changed; the output depends on \
their schemas alone.")]
pub(super) struct Args {
    /// Only these handlers, by name or pattern such as billing.*; default: all
    #[arg(value_name = "HANDLER")]
    only: Vec<String>,

    /// The language
    #[arg(long, value_enum)]
    lang: Lang,

    /// Write to this file; default: standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// The folder; default: that of a `rouse dev` that runs here, else handlers-wasm
    #[arg(long, value_name = "DIR")]
    handlers: Option<PathBuf>,

    /// Settings; default: those of a `rouse dev` that serves the folder from here, else ./rouse.toml, if there is one
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Lang {
    /// TypeScript, with node-postgres
    Ts,
    /// Python, with psycopg 3
    Py,
    /// Rust, with tokio-postgres
    Rust,
    /// Go, with pgx 5
    Go,
    /// The schemas themselves, in one document
    JsonSchema,
}

/// Prints or writes the types.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let (folder, config) = (args.handlers.as_deref(), args.config.as_deref());
    let location = FolderLocation::resolve(folder, config, Serves::here);
    let folder = Folder::open(&location).await?;
    for pattern in &args.only {
        let mut names = folder.handlers.handlers.keys();
        anyhow::ensure!(
            names.any(|name| pattern_covers(pattern, name)),
            "no handler of the folder is called {}; `rouse handlers` lists them",
            plain(pattern)
        );
    }
    for refusal in &folder.handlers.refused {
        eprintln!(
            "rouse: {} is refused and left out: {}",
            refusal.file,
            plain(&refusal.why)
        );
    }
    let is_chosen = |name: &str| {
        args.only.is_empty()
            || args
                .only
                .iter()
                .any(|pattern| pattern_covers(pattern, name))
    };
    let mut names = Names::default();
    for reserved in RESERVED {
        names.take(reserved);
    }
    let handlers: Vec<HandlerTypes> = folder
        .handlers
        .handlers
        .values()
        .filter(|handler| is_chosen(&handler.manifest.name))
        .map(|handler| HandlerTypes::from_manifest(&handler.manifest, &mut names))
        .collect();
    let text = match args.lang {
        Lang::Ts => typescript::write(&handlers),
        Lang::Py => python::write(&handlers),
        Lang::Rust => rust::write(&handlers),
        Lang::Go => go::write(&handlers),
        Lang::JsonSchema => json_schema::write(&handlers),
    };
    match &args.output {
        None => print!("{text}"),
        Some(path) => {
            replace(path, &text).with_context(|| format!("write {}", path.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Names that the generated files define, and names of the languages' own types.
const RESERVED: &[&str] = &[
    "Queryable",
    "JobId",
    "Int64",
    "Job",
    "EnqueueOptions",
    "Options",
    "Querier",
    "Result",
    "Enqueue",
    "Record",
    "Array",
    "Date",
    "Promise",
    "Any",
    "Union",
    "Literal",
    "TypedDict",
    "NotRequired",
    "TypeAlias",
    "Generic",
    "Connection",
    "Jsonb",
    "Option",
    "Vec",
    "Box",
    "String",
    "Value",
    "Serialize",
    "Deserialize",
    "PhantomData",
    "SystemTime",
    "BTreeMap",
    "Json",
    "ToSql",
    "Error",
    "GenericClient",
    "DeserializeOwned",
    "R",
    "Object",
    "Unknown",
    "Self",
    "None",
    "True",
    "False",
    "Some",
    "Ok",
    "Err",
    "Context",
    "Time",
];

/// The SQL of every call: a null option means its default.
const ENQUEUE: &str = "SELECT rouse.enqueue($1, $2::jsonb, queue => coalesce($3, 'default'), tenant => $4, source => $5, \
priority => coalesce($6, 'normal'), run_at => $7, max_attempts => $8, unique_key => $9, tags => coalesce($10::text[], '{}'), grants => $11::jsonb, lease => $12::text::interval, timeout => $13::text::interval, \
job_timeout => $14::text::interval, after => $15::jsonb)";

/// The first line of each file, without its comment sign.
const HEADER: &str = "Generated by `rouse handlers types`; do not edit.";

/// Text of a schema for a comment: one line, without anything that could end the comment.
fn comment(text: &str) -> String {
    let line: String = text
        .chars()
        .map(
            |it| match it.is_control() || matches!(it, '\u{2028}' | '\u{2029}' | '\u{85}') {
                true => ' ',
                false => it,
            },
        )
        .collect();
    let line = line
        .replace("*/", "* /")
        .replace("\"\"\"", "'''")
        .replace("@ts-", "@ ts-")
        .replace('\\', "/");
    let line = line.trim();
    match line.char_indices().nth(200) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.to_owned(),
    }
}
