//! JSON that passes through the host as text.

/// The text of a JSON value. Payloads and results pass through the host without being parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonText(pub String);
