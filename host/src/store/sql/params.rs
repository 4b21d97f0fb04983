//! Parameters of a handler's statement: converted from JSON to the Postgres text format, by the types of the
//! parameters.

use postgres_types::private::BytesMut;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio_postgres::types::{Format, IsNull, Kind, ToSql, Type, to_sql_checked};

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

/// The parameters of a statement with these types, from a JSON array.
///
/// # Errors
/// A human-readable message: there are too many or too few, or one of them is an object or an array and its type is
/// not.
pub(super) fn from_json(params: &str, types: &[Type]) -> Result<Vec<TextParam>, String> {
    let params: Vec<&RawValue> =
        serde_json::from_str(params).map_err(|error| format!("its parameters: {error}"))?;
    if params.len() != types.len() {
        return Err(format!(
            "it has {} parameters, and the call has {}",
            types.len(),
            params.len()
        ));
    }
    let params = params.into_iter().zip(types).enumerate();
    params
        .map(|(index, (param, of))| {
            let text = text(param.get(), of);
            text.map(TextParam)
                .map_err(|why| format!("parameter ${}: {why}", index + 1))
        })
        .collect()
}

fn text(json: &str, of: &Type) -> Result<Option<String>, String> {
    // A domain has the format of its type.
    if let Kind::Domain(base) = of.kind() {
        return text(json, base);
    }
    let value: Value = serde_json::from_str(json).map_err(|error| error.to_string())?;
    Ok(Some(match (value, of.kind()) {
        (Value::Null, _) => return Ok(None),
        _ if *of == Type::JSON || *of == Type::JSONB => json.to_owned(),
        (Value::Array(_), Kind::Array(member)) => array(json, member)?,
        (Value::String(text), _) => text,
        (Value::Bool(yes), _) => yes.to_string(),
        // As it was written: a float would lose digits of a numeric.
        (Value::Number(_), _) => json.to_owned(),
        (Value::Array(_), _) => return Err(format!("expected a value of type {of}, got an array")),
        (Value::Object(_), _) => {
            return Err(format!("expected a value of type {of}, got an object"));
        }
    }))
}

/// An array in the Postgres text format: `{1,NULL,"a \"b\""}`.
fn array(json: &str, member: &Type) -> Result<String, String> {
    let members: Vec<&RawValue> = serde_json::from_str(json).map_err(|error| error.to_string())?;
    let mut out = String::from("{");
    for (index, json) in members.into_iter().map(RawValue::get).enumerate() {
        if index > 0 {
            out.push(',');
        }
        // Multidimensional arrays have the same type as one-dimensional arrays.
        let is_json = *member == Type::JSON || *member == Type::JSONB;
        if json.starts_with('[') && !is_json {
            out += &array(json, member)?;
            continue;
        }
        match text(json, member)? {
            None => out += "NULL",
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
    }
    out.push('}');
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(json: &str, of: Type) -> Result<Option<String>, String> {
        from_json(&format!("[{json}]"), &[of]).map(|mut params| params.remove(0).0)
    }

    #[test]
    fn values_in_the_notation_of_postgres() {
        for (json, of, text) in [
            ("null", Type::INT8, None),
            ("7", Type::INT8, Some("7")),
            (
                "12345678901234567890.123456789",
                Type::NUMERIC,
                Some("12345678901234567890.123456789"),
            ),
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
    fn refuse_wrong_numbers_of_parameters_and_values_without_a_notation() {
        let few = from_json("[1]", &[Type::INT8, Type::INT8]).unwrap_err();
        assert_eq!(few, "it has 2 parameters, and the call has 1");
        let object = one("{}", Type::INT8).unwrap_err();
        assert_eq!(
            object,
            "parameter $1: expected a value of type int8, got an object"
        );
        assert!(one("[1]", Type::INT8).unwrap_err().contains("an array"));
        assert!(
            one("[{}]", Type::INT8_ARRAY)
                .unwrap_err()
                .contains("an object")
        );
    }
}
