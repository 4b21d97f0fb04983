//! Sends [`JsonText`] as `jsonb`, reads it from `jsonb` or text, and reads JSON of any login for display.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::job::JsonText;
use bytes::{BufMut, BytesMut};
use serde_json::Value;
use serde_json::value::RawValue;
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

/// The depth to which JSON is taken apart if a part of it cannot be read as a [`Value`]: deep enough for the details of
/// an error in a list of jobs.
const PARTS_DEPTH: u32 = 8;

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

/// JSON for display. Producers, workers and modules choose parts of it, and Postgres accepts numbers and nesting depths
/// that [`Value`] cannot hold: such parts are strings here, which contain their JSON.
#[derive(Debug)]
pub(super) struct ShownJson(pub(super) Value);

impl<'a> FromSql<'a> for ShownJson {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Error> {
        let JsonText(text) = JsonText::from_sql(ty, raw)?;
        Ok(Self(shown(&text, PARTS_DEPTH)))
    }

    fn accepts(ty: &Type) -> bool {
        <JsonText as FromSql<'_>>::accepts(ty)
    }
}

/// The first column of these rows.
pub(super) fn shown_rows(rows: &[Row]) -> Vec<Value> {
    let values = rows.iter().map(|row| row.get::<_, ShownJson>(0));
    values.map(|ShownJson(value)| value).collect()
}

fn shown(text: &str, depth: u32) -> Value {
    if let Ok(value) = serde_json::from_str(text) {
        return value;
    }
    if depth > 0 {
        if let Ok(fields) = serde_json::from_str::<BTreeMap<String, &RawValue>>(text) {
            let part = |(key, raw): (String, &RawValue)| (key, shown(raw.get(), depth - 1));
            return Value::Object(fields.into_iter().map(part).collect());
        }
        if let Ok(items) = serde_json::from_str::<Vec<&RawValue>>(text) {
            let part = |raw: &&RawValue| shown(raw.get(), depth - 1);
            return Value::Array(items.iter().map(part).collect());
        }
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn parts_that_only_postgres_can_hold_are_strings() {
        let (large, deep) = (
            format!("1{}", "0".repeat(400)),
            "[".repeat(200) + &"]".repeat(200),
        );
        let text = format!(
            r#"{{"payload": {{"n": {large}, "m": 1}}, "handlers": [{{"max": {large}}}, 2], "deep": {{"is": {deep}}}}}"#
        );
        let read = shown(&text, PARTS_DEPTH);
        assert_eq!(read["payload"], json!({"n": large, "m": 1}));
        assert_eq!(read["handlers"], json!([{"max": large}, 2]));
        // The lists down to the last depth are taken apart.
        let mut part = &read["deep"]["is"];
        while let Some(inner) = part.get(0) {
            part = inner;
        }
        assert!(
            part.as_str().is_some_and(|rest| deep.contains(rest)),
            "{part}"
        );
    }

    #[test]
    fn other_json_is_read_as_it_is() {
        for text in ["null", "[1.5, \"a\", {\"b\": null}]", "{}"] {
            let expected: Value = serde_json::from_str(text).unwrap();
            assert_eq!(shown(text, PARTS_DEPTH), expected);
        }
    }
}
