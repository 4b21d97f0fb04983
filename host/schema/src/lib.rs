//! Checks JSON against JSON Schemas (2020-12), neither of which is trusted.
//!
//! Rouse gets the schema from a WebAssembly module, and the JSON from a producer or a guest. Other evaluators trust the
//! schema, but a schema can demand unbounded work; `docs/decisions/own-schema-evaluator.md` has the reasons for this
//! evaluator.
//!
//! Every check ends: work is counted in steps, nesting is limited, and patterns match in linear time. Numbers are
//! compared by their digits, so nothing is rounded. JSON that cannot be checked within these limits does not match.
//! Messages quote schemas and JSON through the caller's [`Quote`].
//!
//! No rule that decides whether JSON matches is skipped: [`Schema::parse`] rejects a schema with a rule that it does
//! not evaluate. This crate never reads another document, starts a thread or writes a log, and it knows neither the
//! host nor wasmtime. `docs/explanation/attempts.md` lists what is evaluated and what is not.

mod ecma;
mod json;
mod number;
mod pattern;
mod pointer;

mod node;
mod references;

mod cache;
mod compile;
mod evaluate;

mod canonical;
mod mismatch;

mod contract;

#[cfg(test)]
mod tests;

pub use contract::{Contract, Parameter, Parameters};

use std::fmt;
use std::sync::Arc;

use serde_json::value::RawValue;

use evaluate::{Stop, evaluate};
use json::Document;
use node::Compiled;

/// The maximum size of all patterns of one module, in bytes: enough for a thousand ordinary ones.
const PATTERNS_BYTES_MAX: usize = 16 << 20;

/// The steps that are allowed for any value. A step is one keyword, or 32 bytes: 50 to 100 ns.
const STEPS_BASE: u64 = 2_000_000;

/// Additional steps for each byte of the value: enough for dozens of alternatives for each small object of a long list.
const STEPS_PER_BYTE: u64 = 8;

/// This many steps take less than a millisecond, for which it is acceptable to block the thread.
const QUICK_STEPS: u64 = 10_000;

/// Parsing a value of more bytes takes longer than a millisecond.
const QUICK_BYTES: usize = 64 << 10;

/// The maximum nesting of arrays and objects in a schema.
const LEVELS_MAX: usize = 128;

/// The length at which a part of a schema or a value is cut in a message, in bytes.
const EXCERPT_BYTES_MAX: usize = 200;

/// Writes text from a schema or from JSON into a message: safe to show in a terminal, and cut after about `bytes_max`
/// bytes.
pub type Quote = fn(text: &str, bytes_max: usize) -> String;

/// A JSON Schema as a module wrote it, ready to be checked against.
#[derive(Clone)]
pub struct Schema {
    written: Arc<Document<'static>>,
    excerpt: Excerpt,
    /// `None` if every value matches.
    compiled: Option<Arc<Compiled>>,
}

/// The remaining size of a module's patterns, in bytes.
pub struct PatternBytes(usize);

impl PatternBytes {
    /// The budget for all schemas of one module: 16 MiB.
    pub fn for_module() -> Self {
        Self(PATTERNS_BYTES_MAX)
    }
}

impl Schema {
    /// The schema `true`, which every value matches.
    pub fn open() -> Self {
        let anything = Document::read(b"true").expect("it is JSON");
        Self {
            written: Arc::new(anything),
            // Nothing is ever quoted, because every value matches.
            excerpt: Excerpt(|_, _| String::new()),
            compiled: None,
        }
    }

    /// Parses a schema. Numbers keep their exact digits. `patterns` is the budget for its patterns; `quote` quotes the
    /// schema in messages, and later the JSON that does not match it.
    ///
    /// # Errors
    /// The problem and its location, for the author of the module.
    pub fn parse(
        written: &RawValue,
        patterns: &mut PatternBytes,
        quote: Quote,
    ) -> Result<Self, String> {
        let excerpt = Excerpt(quote);
        let text = compact(written.get());
        let written = Document::read(text.as_bytes());
        let written = written.map_err(|_| "has too many parts")?.into_owned();
        if written.json().levels() > LEVELS_MAX {
            return Err(format!("is nested deeper than {LEVELS_MAX} levels"));
        }
        let compiled = compile::compile(written.json(), &mut patterns.0, excerpt)?;
        Ok(Self {
            compiled: (!compiled.is_open()).then(|| Arc::new(compiled)),
            written: Arc::new(written),
            excerpt,
        })
    }

    /// The schema as the module wrote it, on one line: JSON, whose numbers may exceed what a `serde_json::Value` can
    /// hold.
    pub fn written(&self) -> &str {
        self.written.text()
    }

    /// Checks a JSON text. `None` if that takes longer than a millisecond: in that case, call [`check`](Self::check)
    /// from a thread that may block.
    ///
    /// # Errors
    /// As for [`check`](Self::check).
    pub fn check_quickly(&self, text: &[u8]) -> Option<Result<(), String>> {
        let Some(compiled) = &self.compiled else {
            return Some(Ok(()));
        };
        if text.len() > QUICK_BYTES {
            return None;
        }
        match self.fits(compiled, text, QUICK_STEPS, &|| false) {
            Err(Misfit::TooManySteps) => None,
            Err(why) => Some(Err(why.to_string())),
            Ok(()) => Some(Ok(())),
        }
    }

    /// Checks a JSON text. Blocks, for at most a few seconds.
    ///
    /// # Errors
    /// If it does not match, or cannot be checked: the rest of a sentence, such as "does not match …".
    pub fn check(&self, text: &[u8]) -> Result<(), String> {
        self.check_while(text, &|| false)
    }

    /// Like [`check`](Self::check), but ends soon after `is_cancelled` returns true.
    ///
    /// # Errors
    /// As for [`check`](Self::check); after a cancellation, any of them.
    pub fn check_while(&self, text: &[u8], is_cancelled: &dyn Fn() -> bool) -> Result<(), String> {
        let Some(compiled) = &self.compiled else {
            return Ok(());
        };
        let steps = STEPS_BASE + STEPS_PER_BYTE * text.len() as u64;
        self.fits(compiled, text, steps, is_cancelled)
            .map_err(|why| why.to_string())
    }

    fn fits(
        &self,
        compiled: &Compiled,
        text: &[u8],
        steps: u64,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Misfit> {
        let document = Document::read(text).map_err(Misfit::Unread)?;
        let json = document.json();
        evaluate(compiled, json, steps, is_cancelled).map_err(|stop| match stop {
            Stop::TooManySteps => Misfit::TooManySteps,
            Stop::TooDeep => Misfit::TooDeep,
            Stop::Mismatch(mismatch) => Misfit::Mismatch(mismatch.describe(
                compiled,
                self.written.json(),
                json,
                self.excerpt,
            )),
        })
    }
}

/// Schemas are equal if they have the same text.
impl PartialEq for Schema {
    fn eq(&self, other: &Self) -> bool {
        self.written() == other.written()
    }
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.written())
    }
}

/// Why a value is not accepted.
enum Misfit {
    Unread(json::Unread),
    Mismatch(String),
    TooManySteps,
    TooDeep,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unread(json::Unread::NotJson(error)) => write!(f, "is not JSON: {error}"),
            Self::Unread(json::Unread::TooManyParts) => write!(
                f,
                "cannot be checked against the schema: it has more than {} values",
                json::PARTS_MAX
            ),
            Self::Mismatch(what) => write!(f, "does not match the schema{what}"),
            Self::TooManySteps => f.write_str(
                "cannot be checked against the schema: that would take too many steps (alternatives within alternatives, or large patterns)",
            ),
            Self::TooDeep => write!(
                f,
                "cannot be checked against the schema: value and schema are nested deeper than {} levels",
                evaluate::DEPTH_MAX
            ),
        }
    }
}

/// The same JSON without white space between its parts.
fn compact(text: &str) -> String {
    let mut in_string = false;
    let mut escaped = false;
    let keeps = |character: &char| {
        match (in_string, character) {
            _ if escaped => escaped = false,
            (true, '\\') => escaped = true,
            (_, '"') => in_string = !in_string,
            (true, _) => {}
            (false, character) => return !character.is_ascii_whitespace(),
        }
        true
    };
    text.chars().filter(keeps).collect()
}

/// Quotes untrusted text in messages, cut to a readable length.
#[derive(Clone, Copy)]
struct Excerpt(Quote);

impl Excerpt {
    fn shorten(self, text: &str) -> String {
        (self.0)(text, EXCERPT_BYTES_MAX)
    }
}
