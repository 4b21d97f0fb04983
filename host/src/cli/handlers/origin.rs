//! Which table of `rouse.toml` sets something for a handler.

use std::collections::BTreeMap;

use toml::{Table, Value};

use crate::job::narrowest_first;

/// The tables of a file that count for handlers.
pub(super) struct Tables {
    handlers: BTreeMap<String, Table>,
    limits: Table,
}

impl Tables {
    /// What cannot be read was refused before, with the reason.
    pub(super) fn read(text: &str) -> Self {
        let file: Table = text.parse().unwrap_or_default();
        let table = |name: &str| file.get(name).and_then(Value::as_table).cloned();
        let handlers = table("handlers").unwrap_or_default().into_iter();
        Self {
            handlers: handlers
                .filter_map(|(name, keys)| Some((name, keys.as_table()?.clone())))
                .collect(),
            limits: table("limits").unwrap_or_default(),
        }
    }

    /// Where a key of the handler's own is from, for instance `lease`; none: from no table.
    pub(super) fn of_key(&self, handler: &str, key: &str) -> Option<String> {
        let tables = narrowest_first(&self.handlers, handler).into_iter();
        let mut setting = tables.filter(|(_, keys)| keys.contains_key(key));
        let (pattern, _) = setting.next()?;
        Some(format!("[handlers.\"{pattern}\"]"))
    }

    /// Where a key of one of its tables is from, for instance `keys_max` of `state`.
    pub(super) fn of_table(&self, handler: &str, table: &str, key: &str) -> Option<String> {
        let mut tables = self.inner(handler, table);
        let (name, _) = tables.find(|(_, keys)| keys.contains_key(key))?;
        Some(name)
    }

    /// The narrowest of its tables of this name, for instance of `state`.
    pub(super) fn narrowest(&self, handler: &str, table: &str) -> Option<String> {
        Some(self.inner(handler, table).next()?.0)
    }

    /// The handler's tables of this name, the narrowest first.
    fn inner(&self, handler: &str, table: &str) -> impl Iterator<Item = (String, &Table)> {
        let tables = narrowest_first(&self.handlers, handler).into_iter();
        tables.filter_map(move |(pattern, keys)| {
            let inner = keys.get(table)?.as_table()?;
            Some((format!("[handlers.\"{pattern}\".{table}]"), inner))
        })
    }

    /// Where a limit is from.
    pub(super) fn of_limit(&self, handler: &str, key: &str) -> Option<String> {
        let everyone = || self.limits.contains_key(key).then(|| "[limits]".to_owned());
        self.of_table(handler, "limits", key).or_else(everyone)
    }

    /// Where the memory of an attempt after one that ran out of it is from: a table that sets the usual memory alone sets
    /// this too.
    pub(super) fn of_memory_retry(&self, handler: &str) -> Option<String> {
        self.inner(handler, "limits")
            .chain([("[limits]".to_owned(), &self.limits)])
            .find_map(|(table, limits)| {
                match (
                    limits.contains_key("memory_retry_mb"),
                    limits.contains_key("memory_mb"),
                ) {
                    (true, _) => Some(table),
                    (false, true) => Some(format!("2 × memory_mb of {table}")),
                    (false, false) => None,
                }
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_from_the_narrowest_table_that_sets_it() {
        let tables = Tables::read(
            "[limits]\nmemory_mb = 64\nsteps = 7\n[handlers.\"*\"]\nlease = \"5s\"\n[handlers.\"my.*\".limits]\nmemory_mb = 16\n\
             [handlers.\"my.busy\".limits]\ncpu = \"2s\"\n[handlers.\"my.*\".state]\nkeys_max = 7",
        );
        let limit = |key: &str| tables.of_limit("my.busy", key);
        assert_eq!(
            ["cpu", "memory_mb", "steps", "handles"].map(limit),
            [
                Some("[handlers.\"my.busy\".limits]".into()),
                Some("[handlers.\"my.*\".limits]".into()),
                Some("[limits]".into()),
                None,
            ]
        );
        assert_eq!(
            tables.of_key("my.busy", "lease").as_deref(),
            Some("[handlers.\"*\"]")
        );
        assert_eq!(tables.of_key("my.busy", "grace"), None);
        assert_eq!(
            tables.of_table("my.busy", "state", "keys_max").as_deref(),
            Some("[handlers.\"my.*\".state]")
        );
        for (handler, table) in [
            ("my.busy", "2 × memory_mb of [handlers.\"my.*\".limits]"),
            ("other", "2 × memory_mb of [limits]"),
        ] {
            assert_eq!(tables.of_memory_retry(handler).as_deref(), Some(table));
        }
        assert_eq!(Tables::read("").of_memory_retry("other"), None);
    }
}
