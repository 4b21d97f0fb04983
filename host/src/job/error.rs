//! The error of an attempt, as it is stored and displayed.

use serde::Serialize;

use super::JsonText;
use super::result::storable_json;
use crate::sanitize::{line, lines};

/// The error of an attempt, as it is stored with the attempt and displayed. The details are data for programs. All
/// other text is free of terminal control sequences. A message may have several lines.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AttemptError {
    /// The class.
    pub kind: ErrorKind,
    /// For [`ErrorKind::GuestError`], the class that the handler gave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_kind: Option<String>,
    /// A human-readable message.
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
    /// The details that the handler gave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<JsonText>,
    /// The maximum number of attempts. Those that were lost, suspended or given back do not count. `None` if attempts
    /// are not counted, as for an invocation.
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
    /// The handler's calls exceeded its stack.
    StackOverflow,
    /// The handler used a capability that it is not granted.
    Denied,
    /// The handler reached its memory limit.
    OutOfMemory,
    /// The handler used more CPU time than its limit.
    OutOfCpu,
    /// The result is too large.
    OutputTooLarge,
    /// The payload does not match the handler's schema.
    InvalidPayload,
    /// The result is not JSON, is JSON that Postgres cannot store, or does not match the handler's schema.
    InvalidResult,
    /// The attempt ran longer than its run timeout.
    TimedOut,
    /// Postgres refused an effect of the handler.
    EffectFailed,
    /// The host could not run the handler.
    Unrunnable,
}

impl ErrorKind {
    /// The word used in stored errors and in metrics.
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
            Self::EffectFailed => "effect_failed",
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

    /// The error as it is stored.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("all keys of an AttemptError are strings")
    }
}

/// The handler's details in a form that Postgres can store. `None` if they are not JSON, or are JSON that cannot be
/// stored.
pub(super) fn details_from(bytes: Vec<u8>) -> Option<JsonText> {
    storable_json(String::from_utf8(bytes).ok()?)
}
