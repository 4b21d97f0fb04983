//! The numbers that one table of `rouse.toml`, or the command line, sets.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::Duration;

use super::{Number, Settable, Setting, setting};

/// What one table of `rouse.toml` sets. Every key may be left out.
///
/// Programs set values with [`with`](Self::with) or [`set`](Self::set), which check them:
///
/// ```
/// use rouse::sandbox::Limits;
/// use rouse::setting::Overlay;
///
/// let limits: Overlay<Limits> = Overlay::default().with("memory_mb", 8_u32);
/// # let _: toml::Table = toml::from_str("memory_mb = 0").unwrap();
/// ```
///
/// They cannot read an overlay from text, because its values would not be checked:
///
/// ```compile_fail,E0277
/// use rouse::sandbox::Limits;
/// use rouse::setting::Overlay;
///
/// let limits: Overlay<Limits> = toml::from_str("memory_mb = 0").unwrap();
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overlay<T> {
    numbers: BTreeMap<&'static str, Number>,
    of: PhantomData<T>,
}

/// The tables that apply to a handler, the most specific first, each with its name and what it sets.
pub type Overlays<'a, T> = Vec<(String, &'a Overlay<T>)>;

impl<T: Settable> Overlay<T> {
    /// The overlay with this setting added.
    ///
    /// # Panics
    /// If there is no such key, its values are of another kind, or this one is out of its bounds.
    pub fn with(mut self, key: &str, number: impl Into<Number>) -> Self {
        self.set(key, number);
        self
    }

    /// Adds this setting.
    ///
    /// # Panics
    /// If there is no such key, its values are of another kind, or this one is out of its bounds.
    pub fn set(&mut self, key: &str, number: impl Into<Number>) {
        let setting = setting::<T>(key);
        let number = number.into();
        (setting.field)(&mut T::default()).set(number);
        setting
            .check("", number)
            .unwrap_or_else(|why| panic!("{why}"));
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

    /// True if the table sets nothing.
    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// True if the table sets this key.
    pub fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// These settings, and those of a wider table for all other keys.
    pub fn or(mut self, wider: &Self) -> Self {
        for (key, number) in &wider.numbers {
            self.numbers.entry(key).or_insert(*number);
        }
        self
    }

    /// The other settings, with these in place of their own values.
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

    /// Rejects values that are out of their bounds. `table` is the name of the table, for the message; the top of the
    /// file has none.
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
