//! Why an attempt did not succeed, as it is stored and shown.

use serde::Serialize;
use serde_json::Value;

use crate::harmless::{line, lines};

/// Why an attempt did not succeed, as it is stored with the attempt and shown to people. All of it but the details, which are data
/// for programs, is text without anything that a terminal would obey; a message may have several lines.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AttemptError {
    /// The class.
    pub kind: ErrorKind,
    /// For [`ErrorKind::GuestError`], the handler's own class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_kind: Option<String>,
    /// What went wrong, for people.
    pub message: String,
    /// `file:line:column` of a panic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Frames, innermost first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub backtrace: Vec<String>,
    /// For [`ErrorKind::Trap`], the last lines that the handler wrote to standard error.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stderr: Vec<String>,
    /// The handler's own details.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Value>,
    /// How many attempts there may be in all, lost ones not counted; none where nobody counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<u32>,
}

/// The class of an attempt's error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The handler returned an error.
    GuestError,
    /// The handler panicked.
    Panic,
    /// WebAssembly trapped.
    Trap,
    /// Calls went deeper than the stack.
    StackOverflow,
    /// The handler did something that it is not granted.
    Denied,
    /// The handler ran into its memory limit.
    OutOfMemory,
    /// The handler computed for too long.
    OutOfCpu,
    /// The result is too large.
    OutputTooLarge,
    /// The payload does not fit the handler's schema.
    InvalidPayload,
    /// The result is no JSON, JSON that Postgres cannot store, or does not fit the handler's schema.
    InvalidResult,
    /// The attempt ran longer than its run timeout.
    TimedOut,
    /// The host could not run the handler.
    Unrunnable,
}

impl ErrorKind {
    /// The word under which it is stored and counted.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::GuestError => "guest_error",
            Self::Panic => "panic",
            Self::Trap => "trap",
            Self::StackOverflow => "stack_overflow",
            Self::Denied => "denied",
            Self::OutOfMemory => "out_of_memory",
            Self::OutOfCpu => "out_of_cpu",
            Self::OutputTooLarge => "output_too_large",
            Self::InvalidPayload => "invalid_payload",
            Self::InvalidResult => "invalid_result",
            Self::TimedOut => "timed_out",
            Self::Unrunnable => "unrunnable",
        }
    }
}

impl AttemptError {
    /// An error with a class and a message, and nothing else.
    pub fn new(kind: ErrorKind, message: impl AsRef<str>) -> Self {
        Self {
            kind,
            guest_kind: None,
            message: lines(message.as_ref()),
            location: None,
            backtrace: Vec::new(),
            stderr: Vec::new(),
            details: None,
            max_attempts: None,
        }
    }

    /// The same error with a backtrace.
    pub(super) fn with_backtrace(mut self, backtrace: &[String]) -> Self {
        self.backtrace = backtrace.iter().map(|frame| line(frame)).collect();
        self
    }

    /// As it is stored.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("an AttemptError has only strings for keys")
    }
}

/// The handler's own details as Postgres can store them: NUL characters are replaced. `None` if they are not JSON.
pub(super) fn details_from(bytes: &[u8]) -> Option<Value> {
    serde_json::from_slice(bytes).ok().map(without_nul)
}

fn without_nul(value: Value) -> Value {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => value,
        Value::String(text) => Value::String(clean(&text)),
        Value::Array(items) => items.into_iter().map(without_nul).collect(),
        Value::Object(map) => map
            .into_iter()
            .map(|(key, item)| (clean(&key), without_nul(item)))
            .collect(),
    }
}

/// Postgres text cannot hold NUL; the replacement character shows where one was.
fn clean(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}
