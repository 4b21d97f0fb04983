//! The settings of an operator. One row describes each key: its name, values, default and meaning.
//!
//! Everything else follows from the rows: how `rouse.toml` and the options of `rouse serve` are read and checked, what
//! `rouse handlers show` and `--help` print, and the tables of docs/reference/configuration.md, which a test writes.
//!
//! - A number is a field with its default, and a [`Setting`]. [`Limits`](crate::sandbox::Limits),
//!   [`StateQuota`](crate::sandbox::StateQuota) and [`Quota`](crate::sandbox::Quota) have their rows in
//!   `sandbox/settable.rs`, [`Policy`](crate::worker::Policy) in `worker/policy.rs`, and
//!   [`HostSettings`](crate::config::HostSettings), the numbers of the whole host, in `config/file/host_settings.rs`.
//! - Any other key has an [`Entry`] where its table is read: at the top of the file in `config/file.rs`, otherwise in a
//!   file for each table in `config/file/`.

mod entry;
mod number;
mod overlay;
pub(crate) mod table;

use std::ops::RangeInclusive;

use serde::de::DeserializeSeed;
use serde::{Deserialize, Deserializer};

pub use entry::Entry;
pub use number::{Field, Number};
pub use overlay::{Overlay, Overlays};

use crate::duration;

/// A struct whose fields an operator can set. Its default has the defaults of its settings.
pub trait Settable: Clone + Default + 'static {
    /// One row for each setting, in the order of the documentation.
    const SETTINGS: &'static [Setting<Self>];

    /// Rejects values that contradict each other. `self` has the effective values, `here` the values of this table, and
    /// `set` the values of all tables that apply.
    ///
    /// # Errors
    /// The problem, as a sentence that starts with the key.
    fn check_together(&self, here: &Overlay<Self>, set: &Overlay<Self>) -> Result<(), String> {
        let _ = (here, set);
        Ok(())
    }
}

/// The numbers of a table that has none.
impl Settable for () {
    const SETTINGS: &'static [Setting<Self>] = &[];
}

/// One number.
#[derive(Debug)]
pub struct Setting<T: 'static> {
    /// The key in `rouse.toml`.
    pub key: &'static str,
    /// The range of its values, in the unit of the file: a count, bytes, MiB, or the milliseconds of a duration.
    bounds: RangeInclusive<u64>,
    /// Its meaning, for the reference page and for `--help`.
    pub doc: &'static str,
    /// The key that this one follows: a table that sets that key, but not this one, sets this one to twice that value.
    twice: Option<&'static str>,
    /// The default as text, if it is not a fixed number.
    default_text: Option<&'static str>,
    /// The option of `rouse serve` and `rouse dev` that overrides it.
    option: Option<&'static str>,
    /// The field that holds it.
    field: fn(&mut T) -> Field<'_>,
}

/// The row of this key.
///
/// # Panics
/// If there is no such key.
pub fn setting<T: Settable>(key: &str) -> &'static Setting<T> {
    let setting = T::SETTINGS.iter().find(|setting| setting.key == key);
    setting.unwrap_or_else(|| panic!("there is no setting {key}"))
}

impl<T: Settable> Setting<T> {
    /// Describes a setting.
    pub const fn new(
        key: &'static str,
        bounds: RangeInclusive<u64>,
        field: fn(&mut T) -> Field<'_>,
        doc: &'static str,
    ) -> Self {
        Self {
            key,
            bounds,
            doc,
            twice: None,
            default_text: None,
            option: None,
            field,
        }
    }

    /// With a key that this one follows: see [`Setting::origin`].
    pub const fn twice(mut self, key: &'static str) -> Self {
        self.twice = Some(key);
        self
    }

    /// With a default that is not a fixed number, as text.
    pub const fn default_text(mut self, words: &'static str) -> Self {
        self.default_text = Some(words);
        self
    }

    /// With the option of `rouse serve` and `rouse dev` that overrides it, such as `--slots`.
    pub const fn option(mut self, option: &'static str) -> Self {
        self.option = Some(option);
        self
    }

    /// The value in this struct.
    pub fn get(&self, of: &T) -> Number {
        (self.field)(&mut of.clone()).get()
    }

    /// The default.
    pub fn default(&self) -> Number {
        self.get(&T::default())
    }

    /// The key in JSON, with its unit.
    pub fn json_key(&self) -> String {
        match self.default() {
            Number::Time(_) => format!("{}_ms", self.key),
            Number::Whole(_) | Number::Ratio(_) => self.key.to_owned(),
        }
    }

    /// The first of these tables, the most specific first, that sets it; `None` if none does.
    pub fn origin(&self, tables: &[(String, &Overlay<T>)]) -> Option<String> {
        tables.iter().find_map(|(table, set)| {
            if set.has(self.key) {
                return Some(table.clone());
            }
            let key = self.twice.filter(|key| set.has(key))?;
            Some(format!("2 × {key} of {table}"))
        })
    }

    /// The value of an option.
    ///
    /// # Errors
    /// The expected value, as a sentence without its subject: clap names the option and the value first.
    pub(crate) fn parse(&self, text: &str) -> Result<Number, String> {
        let [min, max] = [self.bounds.start(), self.bounds.end()];
        match self.default() {
            Number::Whole(_) => {
                let count = text.parse().ok();
                let count = count.filter(|count| self.bounds.contains(count));
                count
                    .map(Number::Whole)
                    .ok_or_else(|| format!("expected a whole number from {min} to {max}"))
            }
            Number::Time(_) => {
                let time = Number::Time(duration::argument(text)?);
                time.check(&self.bounds).map(|()| time)
            }
            Number::Ratio(_) => {
                let ratio = text.parse().map(Number::Ratio);
                let ratio = ratio.map_err(|_| "expected a number".to_owned())?;
                ratio.check(&self.bounds).map(|()| ratio)
            }
        }
    }

    /// The help of the option that overrides it.
    pub(crate) fn help(&self) -> String {
        let default = match self.default_text {
            Some(words) => words.to_owned(),
            None => self.default().to_string(),
        };
        format!("{}, {}; default: {default}", self.doc, self.values())
    }

    /// Rejects a value that is out of the bounds. `table` is empty at the top of the file.
    fn check(&self, table: &str, number: Number) -> Result<(), String> {
        let name = in_table(table, self.key);
        let check = number.check(&self.bounds);
        check.map_err(|why| format!("{name} {why}"))
    }

    /// Its bounds, in its unit.
    fn values(&self) -> String {
        let default = self.default();
        let [min, max] = [self.bounds.start(), self.bounds.end()].map(|bound| {
            let bound = default.bound(*bound);
            self.size(bound).unwrap_or_else(|| bound.to_string())
        });
        format!("{min} to {max}")
    }

    /// A number of bytes in the largest unit that divides it; `None` if that is a byte, and for other numbers.
    fn size(&self, number: Number) -> Option<String> {
        match number {
            Number::Whole(bytes) if self.key.contains("bytes") => size(bytes),
            Number::Whole(_) | Number::Time(_) | Number::Ratio(_) => None,
        }
    }

    /// Its row on the reference page.
    #[cfg(test)]
    pub(crate) fn row(&self) -> String {
        let default = self.default();
        let default = match (self.twice, self.default_text, self.size(default)) {
            (Some(key), _, _) => format!("2 × `{key}`"),
            (None, Some(words), _) => words.to_owned(),
            (None, None, Some(size)) => format!("`{}` ({size})", default.written()),
            (None, None, None) => format!("`{}`", default.written()),
        };
        let by = entry::overrides(self.overrides());
        let (key, values, doc) = (self.key, self.values(), self.doc);
        format!("| `{key}` | {default} | {values} | {doc}{by} |")
    }

    /// The option that overrides it.
    #[cfg(test)]
    pub(crate) fn overrides(&self) -> &[&'static str] {
        self.option.as_slice()
    }

    /// False if the default depends on the machine or on another setting.
    #[cfg(test)]
    pub(crate) fn has_fixed_default(&self) -> bool {
        self.default_text.is_none()
    }
}

/// A key with its table, for messages. The top of the file has no name.
pub(crate) fn in_table(table: &str, key: &str) -> String {
    match table {
        "" => key.to_owned(),
        table => format!("{table}.{key}"),
    }
}

/// Bytes in the largest unit that divides them; `None` if that is a byte.
fn size(bytes: u64) -> Option<String> {
    [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")]
        .into_iter()
        .find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift))
        .map(|(shift, unit)| format!("{} {unit}", bytes >> shift))
}

/// Reads the value of the setting, by its type.
impl<'de, T> DeserializeSeed<'de> for &Setting<T>
where
    T: Settable,
{
    type Value = Number;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Number, D::Error> {
        match self.default() {
            Number::Whole(_) => u64::deserialize(input).map(Number::Whole),
            Number::Time(_) => duration::read(input).map(Number::Time),
            Number::Ratio(_) => f64::deserialize(input).map(Number::Ratio),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[derive(Debug, Clone, Default, PartialEq)]
    struct Sizes {
        memory: usize,
        more: usize,
        wait: Duration,
        share: f64,
    }

    impl Settable for Sizes {
        const SETTINGS: &'static [Setting<Self>] = &[
            Setting::new("memory_mb", 1..=100, |of| Field::Mib(&mut of.memory), ""),
            Setting::new(
                "more_mb",
                1..=100,
                |of: &mut Self| Field::Mib(&mut of.more),
                "",
            )
            .twice("memory_mb"),
            Setting::new("wait", 2000..=60_000, |of| Field::Time(&mut of.wait), ""),
            Setting::new("share", 0..=1, |of| Field::Ratio(&mut of.share), ""),
        ];
    }

    fn table(text: &str) -> Overlay<Sizes> {
        toml::from_str::<table::Unchecked<Sizes>>(text).unwrap().0
    }

    #[test]
    fn apply_what_is_set_and_keep_the_rest() {
        let base = Sizes {
            memory: 1 << 20,
            more: 2 << 20,
            share: 0.5,
            ..Sizes::default()
        };
        let wait = Duration::from_secs(3);
        assert_eq!(table("wait = \"3s\"").over(&base), Sizes { wait, ..base });
    }

    #[test]
    fn a_setting_follows_another_in_the_same_table_up_to_its_bound() {
        for (text, more) in [
            ("memory_mb = 8", 16),
            ("memory_mb = 60", 100),
            ("memory_mb = 8\nmore_mb = 8", 8),
        ] {
            let sizes = table(text).over(&Sizes::default());
            assert_eq!(sizes.more, more << 20, "{text}");
        }
    }

    #[test]
    fn the_origin_is_the_most_specific_table_that_sets_a_key_or_what_it_follows() {
        let (narrow, wide) = (table("memory_mb = 8"), table("more_mb = 9\nwait = \"3s\""));
        let tables = [("[narrow]".into(), &narrow), ("[wide]".into(), &wide)];
        let origins: Vec<_> = Sizes::SETTINGS
            .iter()
            .map(|setting| setting.origin(&tables))
            .collect();
        let names = ["[narrow]", "2 × memory_mb of [narrow]", "[wide]"];
        let mut expected: Vec<_> = names.map(|name| Some(name.to_owned())).into();
        expected.push(None);
        assert_eq!(origins, expected);
    }

    #[test]
    fn bounds_are_in_the_unit_of_the_value() {
        for (text, message) in [
            (
                "memory_mb = 0",
                "x.memory_mb must be between 1 and 100, not 0",
            ),
            ("wait = \"1s\"", "x.wait must be between 2s and 1m, not 1s"),
            ("share = 1.5", "x.share must be between 0 and 1, not 1.5"),
            ("share = nan", "x.share must be between 0 and 1, not NaN"),
        ] {
            assert_eq!(table(text).check("x"), Err(message.into()));
        }
        assert_eq!(table("share = 1\nwait = \"1m\"").check("x"), Ok(()));
    }

    #[test]
    fn programs_set_values_up_to_the_bounds() {
        let wait = Duration::from_secs(60);
        let set = Overlay::<Sizes>::default().with("wait", wait);
        assert_eq!(set.time("wait"), Some(wait));
    }

    #[test]
    #[should_panic(expected = "wait must be between 2s and 1m, not 1s")]
    fn programs_cannot_set_values_that_are_out_of_their_bounds() {
        Overlay::<Sizes>::default().set("wait", Duration::from_secs(1));
    }
}
