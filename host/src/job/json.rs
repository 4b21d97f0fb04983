//! JSON that passes through the host unparsed.

/// The text of a JSON value. The host does not parse payloads and results.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonText(pub String);
