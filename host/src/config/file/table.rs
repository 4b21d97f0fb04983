//! Reads the tables of `rouse.toml`, each by the rows of its keys.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserializer;
use serde::de::{Error as _, MapAccess, Visitor};

use crate::setting::{Entry, Key, Keys, Overlay, Settable};

/// A table. Its default is the table without any key.
pub(super) trait Table: Default {
    /// The struct whose rows are the numbers of the table; `()` if it has none.
    type Numbers: Settable;
    /// What to write instead of another type, for the error.
    const EXPECTED: &'static str;
    /// The keys that are not numbers.
    const ENTRIES: &'static [Entry];

    /// The numbers that the table sets.
    fn numbers(&mut self) -> Option<&mut Overlay<Self::Numbers>> {
        None
    }

    /// Reads the value of a key that is not a number.
    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error>;
}

/// Reads a table. A key without a row is an error, and so is a missing key that the table needs.
pub(super) fn read<'de, T: Table, D: Deserializer<'de>>(input: D) -> Result<T, D::Error> {
    input.deserialize_map(Reader(PhantomData))
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
        while let Some(key) = map.next_key_seed(Keys::<T::Numbers>::and(T::ENTRIES))? {
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
        let missing = T::ENTRIES
            .iter()
            .find(|entry| entry.is_required() && !set.contains(&entry.key));
        match missing {
            Some(entry) => Err(A::Error::missing_field(entry.key)),
            None => Ok(table),
        }
    }
}
