//! JSON that is carried, not read: `jsonb` on the wire, bytes here.

use bytes::{BufMut, BytesMut};
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

/// The text of a JSON value. Payloads and results pass through the host without being parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonText(pub String);

type Error = Box<dyn std::error::Error + Sync + Send>;

impl<'a> FromSql<'a> for JsonText {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Error> {
        // jsonb is sent as its version, 1, and the text.
        match raw.split_first() {
            Some((1, text)) => Ok(Self(std::str::from_utf8(text)?.to_string())),
            _ => Err("jsonb of an unknown version".into()),
        }
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSONB
    }
}

impl ToSql for JsonText {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Error> {
        out.put_u8(1);
        out.extend_from_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSONB
    }

    to_sql_checked!();
}
