//! Keys of tables of `rouse.toml`. Only a key that has a row can be read.

use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Error};
use serde::{Deserialize, Deserializer};

use super::{Settable, Setting};

/// A key whose value is not a number: a text, a path, a word, a list or a table.
#[derive(Debug)]
pub struct Entry {
    /// The key in `rouse.toml`.
    pub key: &'static str,
    /// What its value may be, for the reference page.
    values: &'static str,
    /// What applies without the key. `None`: the table needs the key.
    default: Option<&'static str>,
    /// What it means, for the reference page and for `--help`.
    pub doc: &'static str,
    /// The options and variables that override it.
    overridden_by: &'static [&'static str],
}

impl Entry {
    /// Describes a key that may be left out.
    pub const fn new(
        key: &'static str,
        values: &'static str,
        default: &'static str,
        doc: &'static str,
    ) -> Self {
        Self {
            key,
            values,
            default: Some(default),
            doc,
            overridden_by: &[],
        }
    }

    /// Describes a key that the table needs.
    pub const fn required(key: &'static str, values: &'static str, doc: &'static str) -> Self {
        Self {
            key,
            values,
            default: None,
            doc,
            overridden_by: &[],
        }
    }

    /// With the options and variables that override it.
    pub const fn overridden_by(mut self, names: &'static [&'static str]) -> Self {
        self.overridden_by = names;
        self
    }

    /// True if the table needs the key.
    pub(crate) fn is_required(&self) -> bool {
        self.default.is_none()
    }

    /// The help of the option that overrides it.
    pub(crate) fn help(&self) -> String {
        let default = self.default.unwrap_or_default().replace('`', "");
        format!("{}; default: {default}", self.doc)
    }

    /// Its row on the reference page.
    #[cfg(test)]
    pub(crate) fn row(&self) -> String {
        let default = self.default.unwrap_or("required");
        let by = overrides(self.overridden_by);
        let (key, values, doc) = (self.key, self.values, self.doc);
        format!("| `{key}` | {default} | {values} | {doc}{by} |")
    }

    /// The options and variables that override it.
    #[cfg(test)]
    pub(crate) fn overrides(&self) -> &'static [&'static str] {
        self.overridden_by
    }
}

/// The end of a row's meaning: the options and variables that override the key.
#[cfg(test)]
pub(super) fn overrides(names: &[&str]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!(". Overridden by {}", names.join(" and ")),
    }
}

/// A key of a table, by its row.
pub(crate) enum Key<T: 'static> {
    /// It sets a number.
    Number(&'static Setting<T>),
    /// It sets something else.
    Other(&'static Entry),
}

/// Reads a key of a table that has the numbers of `T` and these other keys. An unknown key is an error that lists the known ones.
pub(crate) struct Keys<T> {
    others: &'static [Entry],
    of: PhantomData<T>,
}

impl<T> Keys<T> {
    pub(crate) fn and(others: &'static [Entry]) -> Self {
        Self {
            others,
            of: PhantomData,
        }
    }
}

impl<'de, T: Settable> DeserializeSeed<'de> for Keys<T> {
    type Value = Key<T>;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Key<T>, D::Error> {
        let key = String::deserialize(input)?;
        if let Some(setting) = T::SETTINGS.iter().find(|setting| setting.key == key) {
            return Ok(Key::Number(setting));
        }
        if let Some(other) = self.others.iter().find(|other| other.key == key) {
            return Ok(Key::Other(other));
        }
        let others = self.others.iter().map(|other| other.key);
        let known = others.chain(T::SETTINGS.iter().map(|setting| setting.key));
        let known: Vec<String> = known.map(|key| format!("`{key}`")).collect();
        Err(D::Error::custom(format!(
            "unknown field `{key}`, expected one of {}",
            known.join(", ")
        )))
    }
}
