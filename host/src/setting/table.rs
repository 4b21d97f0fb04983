//! Reads the tables of `rouse.toml`, each by the rows of its keys. Only a key that has a row can be read.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{Entry, Overlay, Settable, Setting};

/// A table. Its default is the table without any key.
pub(crate) trait Table: Default {
    /// The struct whose rows are the numbers of the table; `()` if it has none.
    type Numbers: Settable;
    /// What to write in place of a value of another type, for the error.
    const EXPECTED: &'static str;
    /// The keys that are not numbers.
    const ENTRIES: &'static [Entry];

    /// The numbers that the table sets.
    fn numbers(&mut self) -> Option<&mut Overlay<Self::Numbers>> {
        None
    }

    /// Notes which keys the table sets, except numbers, for their origin.
    fn note(&mut self, keys: Vec<&'static str>) {
        let _ = keys;
    }

    /// Reads the value of a key that is not a number.
    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error>;
}

/// Reads a table. A key without a row is an error, and so is a missing key that the table needs.
pub(crate) fn read<'de, T: Table, D: Deserializer<'de>>(input: D) -> Result<T, D::Error> {
    input.deserialize_map(Reader(PhantomData))
}

/// A table that has only numbers.
impl<T: Settable> Table for Overlay<T> {
    type Numbers = T;
    const EXPECTED: &'static str = "a table";
    const ENTRIES: &'static [Entry] = &[];

    fn numbers(&mut self) -> Option<&mut Self> {
        Some(self)
    }

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, _: &mut A) -> Result<(), A::Error> {
        unreachable!("{key} is not a number, and has no row")
    }
}

/// The numbers of a table whose bounds are not checked yet ([`Overlay::check`]): messages name the table, and only the
/// caller that reads the table knows its name.
pub(crate) struct Unchecked<T>(pub(crate) Overlay<T>);

impl<'de, T: Settable> Deserialize<'de> for Unchecked<T> {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        read(input).map(Self)
    }
}

struct Reader<T>(PhantomData<T>);

impl<'de, T: Table> Visitor<'de> for Reader<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut table = T::default();
        let mut set = Vec::new();
        while let Some(key) = map.next_key_seed(Keys::<T>(PhantomData))? {
            match key {
                Key::Number(setting) => {
                    let number = map.next_value_seed(setting)?;
                    let numbers = table
                        .numbers()
                        .expect("a table with rows of numbers has them");
                    numbers.insert(setting, number);
                }
                Key::Other(entry) => {
                    table.read(entry.key, &mut map)?;
                    set.push(entry.key);
                }
            }
        }
        let mut required = T::ENTRIES.iter().filter(|entry| entry.is_required());
        if let Some(missing) = required.find(|entry| !set.contains(&entry.key)) {
            return Err(A::Error::missing_field(missing.key));
        }
        table.note(set);
        Ok(table)
    }
}

/// A key of a table, by its row.
enum Key<T: Table> {
    /// It sets a number.
    Number(&'static Setting<T::Numbers>),
    /// It sets something else.
    Other(&'static Entry),
}

/// Reads a key of a table. An unknown key is an error that lists the known ones.
struct Keys<T>(PhantomData<T>);

impl<'de, T: Table> DeserializeSeed<'de> for Keys<T> {
    type Value = Key<T>;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Key<T>, D::Error> {
        let key = String::deserialize(input)?;
        let numbers = T::Numbers::SETTINGS;
        if let Some(setting) = numbers.iter().find(|setting| setting.key == key) {
            return Ok(Key::Number(setting));
        }
        if let Some(other) = T::ENTRIES.iter().find(|other| other.key == key) {
            return Ok(Key::Other(other));
        }
        let others = T::ENTRIES.iter().map(|other| other.key);
        let known = others.chain(numbers.iter().map(|setting| setting.key));
        let known: Vec<String> = known.map(|key| format!("`{key}`")).collect();
        Err(Error::custom(format!(
            "unknown field `{key}`, expected one of {}",
            known.join(", ")
        )))
    }
}
