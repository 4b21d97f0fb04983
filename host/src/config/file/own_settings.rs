//! `[handlers."…".settings]` and `[handlers."…".env]`: values for the handler itself.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

/// Settings are read at each attempt; larger data belongs in a file.
const SETTINGS_BYTES_MAX: usize = 64 << 10;

/// Names and values of all variables of a handler together.
const ENV_BYTES_MAX: usize = 64 << 10;

/// The settings of a handler as a JSON object. Dates and times become strings.
#[derive(Debug, Clone)]
pub(super) struct OwnSettings(pub(super) Value);

impl<'de> Deserialize<'de> for OwnSettings {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let table = toml::Table::deserialize(input)?;
        let settings = json(toml::Value::Table(table)).map_err(serde::de::Error::custom)?;
        match settings.to_string().len() {
            0..=SETTINGS_BYTES_MAX => Ok(Self(settings)),
            bytes => Err(serde::de::Error::custom(format!(
                "settings are {bytes} bytes long as JSON; at most {SETTINGS_BYTES_MAX} are allowed"
            ))),
        }
    }
}

fn json(value: toml::Value) -> Result<Value, String> {
    Ok(match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => serde_json::Number::from_f64(number)
            .map(Value::Number)
            .ok_or_else(|| format!("settings cannot contain {number}: JSON cannot express it"))?,
        toml::Value::Boolean(yes) => yes.into(),
        toml::Value::Datetime(at) => at.to_string().into(),
        toml::Value::Array(values) => {
            Value::Array(values.into_iter().map(json).collect::<Result<_, _>>()?)
        }
        toml::Value::Table(table) => {
            let entries = table
                .into_iter()
                .map(|(key, value)| Ok((key, json(value)?)));
            Value::Object(entries.collect::<Result<Map<_, _>, String>>()?)
        }
    })
}

/// Rejects invalid variables.
pub(super) fn check_env(env: &BTreeMap<String, String>) -> Result<(), String> {
    let is_name = |name: &String| !name.is_empty() && !name.contains(['=', '\0']);
    if let Some(name) = env.keys().find(|name| !is_name(name)) {
        return Err(format!("{name:?} is not the name of a variable"));
    }
    if let Some((name, _)) = env.iter().find(|(_, value)| value.contains('\0')) {
        return Err(format!("{name} has a NUL in its value"));
    }
    let bytes: usize = env
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum();
    match bytes {
        0..=ENV_BYTES_MAX => Ok(()),
        _ => Err(format!(
            "the variables are {bytes} bytes long; at most {ENV_BYTES_MAX} are allowed"
        )),
    }
}
