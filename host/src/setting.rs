//! Numbers that an operator sets. One row of a table describes each: its key, bounds and meaning, and the field that holds it.
//!
//! `rouse.toml` is read and checked from the tables, `rouse handlers show` prints from them, and a test writes the tables of
//! docs/reference/configuration.md. A new limit is a field with its default, and a row: [`Limits`](crate::sandbox::Limits) and
//! [`StateQuota`](crate::sandbox::StateQuota) have theirs in `sandbox/settable.rs`, [`Policy`](crate::worker::Policy) in
//! `worker/policy.rs`.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::time::Duration;

use humantime::format_duration;
use serde::de::{DeserializeSeed, Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

/// A struct whose fields an operator can set. Its default has the defaults of its settings.
pub trait Settable: Clone + Default + 'static {
    /// One row for each setting, in the order of the documentation.
    const SETTINGS: &'static [Setting<Self>];

    /// Rejects values that contradict each other. `self` is in force, `here` is set in the table at hand, and `set` in any
    /// table that counts.
    ///
    /// # Errors
    /// What is wrong, as a sentence that starts with the key.
    fn check_together(&self, here: &Overlay<Self>, set: &Overlay<Self>) -> Result<(), String> {
        let _ = (here, set);
        Ok(())
    }
}

/// One setting.
#[derive(Debug)]
pub struct Setting<T: 'static> {
    /// The key in `rouse.toml`.
    pub key: &'static str,
    /// What it may be, as written: a count, bytes, MiB, or milliseconds of a duration.
    bounds: RangeInclusive<u64>,
    /// What it means, for the reference page.
    pub doc: &'static str,
    /// The key from which this one follows: a table that sets that key and not this one sets this one to twice as much.
    twice: Option<&'static str>,
    /// The field that holds it.
    field: fn(&mut T) -> Field<'_>,
}

/// A field, by its type; the type decides how `rouse.toml` writes it.
#[derive(Debug)]
pub enum Field<'a> {
    /// A count, or bytes.
    Usize(&'a mut usize),
    /// A count.
    U32(&'a mut u32),
    /// A count, or bytes.
    U64(&'a mut u64),
    /// Bytes, written in MiB.
    Mib(&'a mut usize),
    /// Written as "90s" or "2h".
    Time(&'a mut Duration),
    /// A number with a fraction.
    Ratio(&'a mut f64),
}

/// A value as `rouse.toml` writes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    /// A count, bytes, or MiB.
    Whole(u64),
    /// A duration.
    Time(Duration),
    /// A number with a fraction.
    Ratio(f64),
}

impl From<u32> for Number {
    fn from(count: u32) -> Self {
        Self::Whole(count.into())
    }
}

impl From<u64> for Number {
    fn from(count: u64) -> Self {
        Self::Whole(count)
    }
}

impl From<usize> for Number {
    fn from(count: usize) -> Self {
        Self::Whole(count as u64)
    }
}

impl From<Duration> for Number {
    fn from(time: Duration) -> Self {
        Self::Time(time)
    }
}

impl From<f64> for Number {
    fn from(ratio: f64) -> Self {
        Self::Ratio(ratio)
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(count) => write!(f, "{count}"),
            Self::Time(time) => write!(f, "{}", format_duration(*time)),
            Self::Ratio(ratio) => write!(f, "{ratio}"),
        }
    }
}

impl Number {
    /// As written in `rouse.toml`.
    pub fn written(self) -> String {
        match self {
            Self::Time(_) => format!("\"{self}\""),
            Self::Whole(_) | Self::Ratio(_) => self.json().to_string(),
        }
    }

    /// As JSON; a duration in milliseconds.
    pub fn json(self) -> Value {
        match self {
            Self::Whole(count) => json!(count),
            Self::Time(time) => json!(millis(time)),
            Self::Ratio(ratio) => json!(ratio),
        }
    }

    /// Rejects a number out of these bounds. `name` is that of the key.
    pub(crate) fn check(self, name: &str, bounds: &RangeInclusive<u64>) -> Result<(), String> {
        let (min, max) = (*bounds.start(), *bounds.end());
        let fits = match self {
            Self::Whole(count) => bounds.contains(&count),
            Self::Time(time) => bounds.contains(&millis(time)),
            Self::Ratio(ratio) => (min as f64..=max as f64).contains(&ratio),
        };
        if fits {
            return Ok(());
        }
        let [min, max] = [min, max].map(|bound| self.bound(bound));
        Err(format!(
            "{name} must be between {min} and {max}, not {self}"
        ))
    }

    /// A bound, in the unit of this number.
    fn bound(self, bound: u64) -> Self {
        match self {
            Self::Whole(_) => Self::Whole(bound),
            Self::Time(_) => Self::Time(Duration::from_millis(bound)),
            Self::Ratio(_) => Self::Ratio(bound as f64),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Field<'_> {
    fn get(self) -> Number {
        match self {
            Self::Usize(count) => Number::Whole(*count as u64),
            Self::U32(count) => Number::Whole((*count).into()),
            Self::U64(count) => Number::Whole(*count),
            Self::Mib(bytes) => Number::Whole((*bytes >> 20) as u64),
            Self::Time(time) => Number::Time(*time),
            Self::Ratio(ratio) => Number::Ratio(*ratio),
        }
    }

    /// The bounds refuse values that do not fit the type.
    fn set(self, number: Number) {
        match (self, number) {
            (Self::Usize(count), Number::Whole(number)) => {
                *count = usize::try_from(number).unwrap_or(usize::MAX);
            }
            (Self::U32(count), Number::Whole(number)) => {
                *count = u32::try_from(number).unwrap_or(u32::MAX);
            }
            (Self::U64(count), Number::Whole(number)) => *count = number,
            (Self::Mib(bytes), Number::Whole(number)) => {
                *bytes = usize::try_from(number)
                    .unwrap_or(usize::MAX)
                    .saturating_mul(1 << 20);
            }
            (Self::Time(time), Number::Time(number)) => *time = number,
            (Self::Ratio(ratio), Number::Ratio(number)) => *ratio = number,
            (field, number) => panic!("{field:?} cannot hold {number:?}"),
        }
    }
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
            field,
        }
    }

    /// With a key from which this one follows: see [`Setting::origin`].
    pub const fn twice(mut self, key: &'static str) -> Self {
        self.twice = Some(key);
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

    /// Which of these tables, the narrowest first, sets it; `None` if none does.
    pub fn origin(&self, tables: &[(String, &Overlay<T>)]) -> Option<String> {
        tables.iter().find_map(|(table, set)| {
            if set.has(self.key) {
                return Some(table.clone());
            }
            let key = self.twice.filter(|key| set.has(key))?;
            Some(format!("2 × {key} of {table}"))
        })
    }

    fn check(&self, table: &str, number: Number) -> Result<(), String> {
        number.check(&format!("{table}.{}", self.key), &self.bounds)
    }

    /// Its row on the reference page.
    #[cfg(test)]
    pub(crate) fn row(&self) -> String {
        let default = self.twice.map(|key| format!("2 × `{key}`"));
        row(self.key, self.default(), default, &self.bounds, self.doc)
    }
}

/// The row of a key on the reference page. `text` describes a default that is not a fixed number.
#[cfg(test)]
pub(crate) fn row(
    key: &str,
    default: Number,
    text: Option<String>,
    bounds: &RangeInclusive<u64>,
    doc: &str,
) -> String {
    let size = |number: Number| match number {
        Number::Whole(bytes) if key.contains("bytes") => size(bytes),
        Number::Whole(_) | Number::Time(_) | Number::Ratio(_) => None,
    };
    let written = || match size(default) {
        Some(size) => format!("`{}` ({size})", default.written()),
        None => format!("`{}`", default.written()),
    };
    let [min, max] = [bounds.start(), bounds.end()].map(|bound| {
        let bound = default.bound(*bound);
        size(bound).unwrap_or_else(|| bound.to_string())
    });
    let default = text.unwrap_or_else(written);
    format!("| `{key}` | {default} | {min} to {max} | {doc} |")
}

/// Bytes in the largest unit that divides them; `None` for single bytes.
#[cfg(test)]
fn size(bytes: u64) -> Option<String> {
    [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")]
        .into_iter()
        .find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift))
        .map(|(shift, unit)| format!("{} {unit}", bytes >> shift))
}

/// The value of a setting is read by the setting.
impl<'de, T> DeserializeSeed<'de> for &Setting<T>
where
    T: Settable,
{
    type Value = Number;

    fn deserialize<D: Deserializer<'de>>(self, input: D) -> Result<Number, D::Error> {
        match self.default() {
            Number::Whole(_) => u64::deserialize(input).map(Number::Whole),
            Number::Time(_) => crate::duration::read(input).map(Number::Time),
            Number::Ratio(_) => f64::deserialize(input).map(Number::Ratio),
        }
    }
}

/// What one table of `rouse.toml` sets. Every key may be left out.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overlay<T> {
    numbers: BTreeMap<&'static str, Number>,
    of: PhantomData<T>,
}

/// The tables that count for a handler, the narrowest first, each with its name and what it sets.
pub type Overlays<'a, T> = Vec<(String, &'a Overlay<T>)>;

impl<T: Settable> Overlay<T> {
    /// With this setting too.
    ///
    /// # Panics
    /// If there is no such key, or its values are of another kind.
    pub fn with(mut self, key: &str, number: impl Into<Number>) -> Self {
        self.set(key, number);
        self
    }

    /// Sets this too.
    ///
    /// # Panics
    /// If there is no such key, or its values are of another kind.
    pub fn set(&mut self, key: &str, number: impl Into<Number>) {
        let setting = T::SETTINGS.iter().find(|setting| setting.key == key);
        let setting = setting.unwrap_or_else(|| panic!("there is no setting {key}"));
        let number = number.into();
        (setting.field)(&mut T::default()).set(number);
        self.insert(setting, number);
    }

    /// The value that is set.
    pub fn get(&self, key: &str) -> Option<Number> {
        debug_assert!(T::SETTINGS.iter().any(|setting| setting.key == key));
        self.numbers.get(key).copied()
    }

    /// A duration that is set.
    pub fn time(&self, key: &str) -> Option<Duration> {
        match self.get(key)? {
            Number::Time(time) => Some(time),
            Number::Whole(_) | Number::Ratio(_) => None,
        }
    }

    /// True if the table sets this key.
    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// These settings over those of a wider table.
    pub fn or(mut self, wider: &Self) -> Self {
        for (key, number) in &wider.numbers {
            self.numbers.entry(key).or_insert(*number);
        }
        self
    }

    /// These settings over others.
    pub fn over(&self, other: &T) -> T {
        let mut all = other.clone();
        for setting in T::SETTINGS {
            let follows = || match self.get(setting.twice?)? {
                Number::Whole(count) => Some(Number::Whole(
                    count.saturating_mul(2).min(*setting.bounds.end()),
                )),
                Number::Time(_) | Number::Ratio(_) => None,
            };
            if let Some(number) = self.get(setting.key).or_else(follows) {
                (setting.field)(&mut all).set(number);
            }
        }
        all
    }

    /// Rejects values out of their bounds. `table` is its name, for the message.
    pub(crate) fn check(&self, table: &str) -> Result<(), String> {
        T::SETTINGS
            .iter()
            .filter_map(|setting| Some((setting, self.get(setting.key)?)))
            .try_for_each(|(setting, number)| setting.check(table, number))
    }

    pub(crate) fn insert(&mut self, setting: &Setting<T>, number: Number) {
        self.numbers.insert(setting.key, number);
    }
}

impl<'de, T: Settable> Deserialize<'de> for Overlay<T> {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        input.deserialize_map(Numbers(PhantomData))
    }
}

struct Numbers<T>(PhantomData<T>);

impl<'de, T: Settable> Visitor<'de> for Numbers<T> {
    type Value = Overlay<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut table = Overlay::default();
        while let Some(key) = map.next_key_seed(Keys::and(&[]))? {
            if let Key::Setting(setting) = key {
                table.insert(setting, map.next_value_seed(setting)?);
            }
        }
        Ok(table)
    }
}

/// A key of a table.
pub(crate) enum Key<T: 'static> {
    /// It sets a number.
    Setting(&'static Setting<T>),
    /// Another key that the table may have.
    Other(&'static str),
}

/// Reads a key of a table: that of a setting, or one of these.
pub(crate) struct Keys<T> {
    others: &'static [&'static str],
    of: PhantomData<T>,
}

impl<T> Keys<T> {
    pub(crate) fn and(others: &'static [&'static str]) -> Self {
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
            return Ok(Key::Setting(setting));
        }
        if let Some(other) = self.others.iter().find(|other| **other == key) {
            return Ok(Key::Other(other));
        }
        let known = T::SETTINGS.iter().map(|setting| setting.key);
        let known = known.chain(self.others.iter().copied());
        let known: Vec<String> = known.map(|key| format!("`{key}`")).collect();
        Err(D::Error::custom(format!(
            "unknown field `{key}`, expected one of {}",
            known.join(", ")
        )))
    }
}

#[cfg(test)]
mod tests {
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
        toml::from_str(text).unwrap()
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
    fn the_origin_is_the_narrowest_table_that_sets_a_key_or_what_it_follows() {
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
}
