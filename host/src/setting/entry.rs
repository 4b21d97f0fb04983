//! The rows of keys that are not numbers.

/// A key whose value is not a number: a text, a path, a word, a list or a table.
#[derive(Debug)]
pub struct Entry {
    /// The key in `rouse.toml`.
    pub key: &'static str,
    /// What its value may be, for the reference page.
    pub values: &'static str,
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
