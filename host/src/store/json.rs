//! [`JsonText`] on the wire: `jsonb`, or its text.

use std::borrow::Cow;

use crate::job::JsonText;
use bytes::{BufMut, BytesMut};
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

type Error = Box<dyn std::error::Error + Sync + Send>;

impl<'a> FromSql<'a> for JsonText {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Error> {
        let text = match (ty, raw.split_first()) {
            (&Type::TEXT, _) => raw,
            // jsonb is sent as its version, 1, and the text.
            (_, Some((1, text))) => text,
            _ => return Err("the version of this jsonb is unknown".into()),
        };
        Ok(Self(std::str::from_utf8(text)?.to_string()))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::JSONB || *ty == Type::TEXT
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

/// JSON that may be borrowed.
#[derive(Debug)]
pub(super) struct CowJson<'a>(pub(super) Cow<'a, JsonText>);

impl ToSql for CowJson<'_> {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Error> {
        self.0.as_ref().to_sql(ty, out)
    }

    fn accepts(ty: &Type) -> bool {
        <JsonText as ToSql>::accepts(ty)
    }

    to_sql_checked!();
}
