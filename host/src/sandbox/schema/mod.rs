//! JSON Schema (2020-12): whether a payload or a result fits what the module says of its handler.
//!
//! Schema and value both come from strangers. So the work is counted in steps and ends, nesting ends, patterns run in linear
//! time, numbers are compared by their digits, and whatever cannot be checked within that does not fit. What is
//! evaluated and what is not: `docs/explanation/attempts.md`; why this is our own: `docs/decisions/schemas-are-checked-by-our-own.md`.

mod ecma;
mod json;
mod number;
mod pattern;
mod pointer;

mod node;
mod references;

mod compile;
mod evaluate;
mod remembered;

mod canonical;
mod mismatch;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use serde_json::value::RawValue;

use evaluate::{Stop, evaluate};
use json::Document;
use node::Compiled;

use crate::harmless::printable;

/// All patterns of one module together, bytes: a thousand ordinary ones.
const PATTERNS_BYTES_MAX: usize = 16 << 20;

/// Steps that any value may take. One is a keyword looked at, or 32 bytes: 50 to 100 ns.
const STEPS_BASE: u64 = 2_000_000;

/// And for each byte of the value: dozens of alternatives for each small object of a long list.
const STEPS_PER_BYTE: u64 = 8;

/// As many are done within a millisecond, in which nobody else has to wait for the thread.
const QUICK_STEPS: u64 = 10_000;

/// Larger values take longer than that to be read alone.
const QUICK_BYTES: usize = 64 << 10;

/// Arrays and objects within each other in a schema.
const LEVELS_MAX: usize = 128;

/// A part of a schema is quoted as far as people read it.
const EXCERPT_BYTES_MAX: usize = 200;

/// A JSON Schema as a module wrote it, ready to be checked against.
#[derive(Clone)]
pub struct Schema {
    written: Arc<Document<'static>>,
    /// None where everything fits.
    compiled: Option<Arc<Compiled>>,
}

/// How many bytes the patterns of a module may still have.
pub(super) struct PatternBytes(usize);

impl PatternBytes {
    pub(super) fn of_a_module() -> Self {
        Self(PATTERNS_BYTES_MAX)
    }
}

impl Schema {
    /// Everything fits.
    pub(super) fn open() -> Self {
        let anything = Document::read(b"true").expect("it is JSON");
        Self {
            written: Arc::new(anything),
            compiled: None,
        }
    }

    /// Reads a schema, in which numbers are what their digits say.
    ///
    /// # Errors
    /// What is wrong with it, with the place in it, for the author of the module.
    pub(super) fn parse(written: &RawValue, patterns: &mut PatternBytes) -> Result<Self, String> {
        let text = compact(written.get());
        let written = Document::read(text.as_bytes());
        let written = written.map_err(|_| "has too many parts")?.into_owned();
        if written.json().levels() > LEVELS_MAX {
            return Err(format!("is nested deeper than {LEVELS_MAX} levels"));
        }
        let compiled = compile::compile(written.json(), &mut patterns.0)?;
        Ok(Self {
            compiled: (!compiled.is_open()).then(|| Arc::new(compiled)),
            written: Arc::new(written),
        })
    }

    /// The schema as the module wrote it, in one line: JSON, whose numbers may be beyond what a `serde_json::Value` holds.
    pub fn written(&self) -> &str {
        self.written.text()
    }

    /// Checks a JSON text. None where that takes longer than a millisecond: then [`check`](Self::check) has to do it, where
    /// blocking is allowed.
    pub(super) fn check_quickly(&self, text: &[u8]) -> Option<Result<(), String>> {
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

    /// Checks a JSON text. Blocks, for seconds at most.
    ///
    /// # Errors
    /// Where it does not match, or cannot be checked; the rest of a sentence, like "does not match …".
    pub fn check(&self, text: &[u8]) -> Result<(), String> {
        self.check_while(text, &|| false)
    }

    /// As [`check`](Self::check); ends, with any answer, soon after nobody wants it any more.
    pub(super) fn check_while(
        &self,
        text: &[u8],
        unwanted: &dyn Fn() -> bool,
    ) -> Result<(), String> {
        let Some(compiled) = &self.compiled else {
            return Ok(());
        };
        let steps = STEPS_BASE + STEPS_PER_BYTE * text.len() as u64;
        self.fits(compiled, text, steps, unwanted)
            .map_err(|why| why.to_string())
    }

    fn fits(
        &self,
        compiled: &Compiled,
        text: &[u8],
        steps: u64,
        unwanted: &dyn Fn() -> bool,
    ) -> Result<(), Misfit> {
        let document = Document::read(text).map_err(Misfit::Unread)?;
        let json = document.json();
        evaluate(compiled, json, steps, unwanted).map_err(|stop| match stop {
            Stop::TooManySteps => Misfit::TooManySteps,
            Stop::TooDeep => Misfit::TooDeep,
            Stop::Mismatch(mismatch) => {
                Misfit::Mismatch(mismatch.told(compiled, self.written.json(), json))
            }
        })
    }
}

/// The same schema is written the same.
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
            Self::Unread(json::Unread::NoJson(error)) => write!(f, "is not JSON: {error}"),
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

/// The same JSON without blanks between its parts.
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

/// A text of a stranger in a message.
fn excerpt(text: &str) -> String {
    printable(text, EXCERPT_BYTES_MAX)
}
