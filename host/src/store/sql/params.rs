//! Parameters of a handler's statement: converted from JSON to the Postgres text format, by the types of the
//! parameters.

use std::fmt;

use postgres_types::private::BytesMut;
use serde::Deserializer as _;
use serde::de::{Error as _, SeqAccess, Visitor};
use serde_json::value::RawValue;
use tokio_postgres::types::{Format, IsNull, Kind, ToSql, Type, to_sql_checked};

use crate::job::is_readable;

/// A parameter in text format; `None` is NULL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TextParam(Option<String>);

impl ToSql for TextParam {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut BytesMut,
    ) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        Ok(match &self.0 {
            None => IsNull::Yes,
            Some(text) => {
                out.extend_from_slice(text.as_bytes());
                IsNull::No
            }
        })
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    fn encode_format(&self, _: &Type) -> Format {
        Format::Text
    }

    to_sql_checked!();
}

/// Postgres arrays have at most this many dimensions.
const DIMENSIONS_MAX: usize = 6;

/// The parameters of a statement with these types, from a JSON array. A guest chooses the array, and the host does not
/// count the memory for it, so it is not parsed into values, which take up to 100 times as much.
///
/// # Errors
/// A human-readable message: there are too many or too few, or one of them is an object or an array and its type is
/// not.
pub(super) fn from_json(params: &str, types: &[Type]) -> Result<Vec<TextParam>, String> {
    let mut texts = Vec::with_capacity(types.len());
    let mut count = 0;
    for_each(params, |param| {
        texts.extend(types.get(count).map(|of| text(param, of)));
        count += 1;
        Ok(())
    })
    .map_err(|error| format!("its parameters: {error}"))?;
    if count != types.len() {
        return Err(format!(
            "wrong number of parameters: expected {}, got {count}",
            types.len(),
        ));
    }
    let texts = texts.into_iter().enumerate();
    texts
        .map(|(index, text)| {
            text.map(TextParam)
                .map_err(|why| format!("parameter ${}: {why}", index + 1))
        })
        .collect()
}

/// Calls a function with the text of each member of a JSON array, until it refuses one.
fn for_each<'a>(
    json: &'a str,
    each: impl FnMut(&'a str) -> Result<(), String>,
) -> Result<(), String> {
    let mut refused = None;
    let members = Members {
        each,
        refused: &mut refused,
    };
    let mut reader = serde_json::Deserializer::from_str(json);
    let read = reader.deserialize_seq(members).and_then(|()| reader.end());
    match refused {
        Some(why) => Err(why),
        None => read.map_err(|error| error.to_string()),
    }
}

struct Members<'a, F> {
    each: F,
    refused: &'a mut Option<String>,
}

impl<'de, F: FnMut(&'de str) -> Result<(), String>> Visitor<'de> for Members<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut members: A) -> Result<(), A::Error> {
        while let Some(member) = members.next_element::<&'de RawValue>()? {
            if let Err(why) = (self.each)(member.get()) {
                *self.refused = Some(why);
                return Err(A::Error::custom("a member is refused"));
            }
        }
        Ok(())
    }
}

/// The text of a valid JSON value; `None` for NULL.
fn text(json: &str, of: &Type) -> Result<Option<String>, String> {
    // A domain has the format of its type.
    if let Kind::Domain(base) = of.kind() {
        return text(json, base);
    }
    Ok(Some(match (json.as_bytes().first(), of.kind()) {
        (Some(b'n'), _) => return Ok(None),
        _ if is_json(of) && !is_readable(json) => {
            return Err("it is nested too deeply, or a number in it is out of range".into());
        }
        _ if is_json(of) => json.to_owned(),
        (Some(b'['), Kind::Array(member)) => {
            let mut out = String::new();
            array(json, member, 1, &mut out)?;
            out
        }
        (Some(b'['), _) => return Err(format!("expected a value of type {of}, got an array")),
        (Some(b'{'), _) => {
            return Err(format!("expected a value of type {of}, got an object"));
        }
        (Some(b'"'), _) => serde_json::from_str(json).map_err(|error| error.to_string())?,
        // `true`, `false`, or a number as it was written: a float would lose digits of a numeric.
        _ => json.to_owned(),
    }))
}

fn is_json(of: &Type) -> bool {
    *of == Type::JSON || *of == Type::JSONB
}

/// Appends an array in the Postgres text format: `{1,NULL,"a \"b\""}`.
fn array(json: &str, member: &Type, dimensions: usize, out: &mut String) -> Result<(), String> {
    if dimensions > DIMENSIONS_MAX {
        return Err(format!("an array has at most {DIMENSIONS_MAX} dimensions"));
    }
    let mut before = '{';
    for_each(json, |json| {
        out.push(before);
        before = ',';
        // Multidimensional arrays have the same type as one-dimensional arrays.
        if json.starts_with('[') && !is_json(member) {
            return array(json, member, dimensions + 1, out);
        }
        match text(json, member)? {
            None => out.push_str("NULL"),
            Some(text) => {
                out.push('"');
                for c in text.chars() {
                    if matches!(c, '"' | '\\') {
                        out.push('\\');
                    }
                    out.push(c);
                }
                out.push('"');
            }
        }
        Ok(())
    })?;
    if before == '{' {
        out.push('{');
    }
    out.push('}');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(json: &str, of: Type) -> Result<Option<String>, String> {
        from_json(&format!("[{json}]"), &[of]).map(|mut params| params.remove(0).0)
    }

    #[test]
    fn values_are_written_in_the_notation_of_postgres() {
        for (json, of, text) in [
            ("null", Type::INT8, None),
            ("7", Type::INT8, Some("7")),
            (
                "12345678901234567890.123456789",
                Type::NUMERIC,
                Some("12345678901234567890.123456789"),
            ),
            ("1e400", Type::NUMERIC, Some("1e400")),
            ("true", Type::BOOL, Some("true")),
            ("\"a \\\"b\\\"\"", Type::TEXT, Some("a \"b\"")),
            (
                "\"2026-01-01T00:00:00Z\"",
                Type::TIMESTAMPTZ,
                Some("2026-01-01T00:00:00Z"),
            ),
            ("\"x\"", Type::JSONB, Some("\"x\"")),
            ("{\"a\":[1]}", Type::JSON, Some("{\"a\":[1]}")),
            ("[1,null,3]", Type::INT8_ARRAY, Some("{\"1\",NULL,\"3\"}")),
            ("[[1],[2]]", Type::INT4_ARRAY, Some("{{\"1\"},{\"2\"}}")),
            (
                r#"["a,b","c\"d","e\\f","NULL"]"#,
                Type::TEXT_ARRAY,
                Some(r#"{"a,b","c\"d","e\\f","NULL"}"#),
            ),
            (
                r#"[{"a":1},[2]]"#,
                Type::JSONB_ARRAY,
                Some(r#"{"{\"a\":1}","[2]"}"#),
            ),
            ("[]", Type::TEXT_ARRAY, Some("{}")),
            ("\"{1,2}\"", Type::INT8_ARRAY, Some("{1,2}")),
        ] {
            assert_eq!(one(json, of), Ok(text.map(str::to_owned)), "{json}");
        }
    }

    #[test]
    fn the_depth_of_arrays_and_json_is_limited() {
        let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(
            one(&nested(6), Type::INT8_ARRAY),
            Ok(Some(r#"{{{{{{"1"}}}}}}"#.to_owned()))
        );
        for depth in [7, 1_000_000] {
            let why = one(&nested(depth), Type::INT8_ARRAY).unwrap_err();
            assert_eq!(why, "parameter $1: an array has at most 6 dimensions");
            let json = one(&nested(depth), Type::JSONB);
            assert_eq!(json.is_ok(), depth == 7, "{depth}");
        }
        assert!(
            one("1e400", Type::JSON)
                .unwrap_err()
                .contains("out of range")
        );
    }

    #[test]
    fn wrong_numbers_of_parameters_and_values_without_a_notation_are_refused() {
        let few = from_json("[1]", &[Type::INT8, Type::INT8]).unwrap_err();
        assert_eq!(few, "wrong number of parameters: expected 2, got 1");
        let object = one("{}", Type::INT8).unwrap_err();
        assert_eq!(
            object,
            "parameter $1: expected a value of type int8, got an object"
        );
        let many = format!("[{}1]", "1,".repeat(1_000_000));
        let many = from_json(&many, &[Type::INT8]).unwrap_err();
        assert_eq!(many, "wrong number of parameters: expected 1, got 1000001");
        let second = from_json(r#"[1, {}]"#, &[Type::INT8, Type::INT8]).unwrap_err();
        assert!(second.starts_with("parameter $2: "), "{second}");
        assert!(from_json("7", &[]).unwrap_err().contains("an array"));
        assert!(one("[1]", Type::INT8).unwrap_err().contains("an array"));
        assert!(
            one("[{}]", Type::INT8_ARRAY)
                .unwrap_err()
                .contains("an object")
        );
    }
}
