//! JSON that passes through the host unparsed.

use serde::ser::{Error as _, Serialize, Serializer};
use serde_json::value::RawValue;

/// The text of a JSON value, which the host passes on as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonText(pub String);

impl Serialize for JsonText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let value: &RawValue = serde_json::from_str(&self.0).map_err(S::Error::custom)?;
        value.serialize(serializer)
    }
}
