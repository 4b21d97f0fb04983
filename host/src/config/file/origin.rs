//! Which tables of the file count for a handler, and which of them sets a value.

use super::File;
use super::handler_table::HandlerTable;
use crate::job::most_specific_first;
use crate::sandbox::{Limits, StateQuota};
use crate::setting::Overlays;
use crate::worker::Policy;

impl File {
    /// The tables that set the keys from `lease` to `job_delay`.
    pub fn policy_of(&self, handler: &str) -> Overlays<'_, Policy> {
        let tables = self.tables(handler);
        tables
            .map(|(pattern, table)| (name(pattern), &table.policy))
            .collect()
    }

    /// The tables that set limits.
    pub fn limits_of(&self, handler: &str) -> Overlays<'_, Limits> {
        let tables = self.tables(handler);
        tables
            .map(|(pattern, table)| (inner(pattern, "limits"), &table.limits))
            .chain([("[limits]".to_owned(), &self.limits)])
            .collect()
    }

    /// The tables that grant state.
    pub fn state_of(&self, handler: &str) -> Overlays<'_, StateQuota> {
        let tables = self.tables(handler);
        tables
            .filter_map(|(pattern, table)| Some((inner(pattern, "state"), table.state.as_ref()?)))
            .collect()
    }

    /// The most specific of the handler's tables that sets this key, which is not a number.
    pub fn origin(&self, handler: &str, key: &str) -> Option<String> {
        self.most_specific_with(handler, key).map(name)
    }

    /// The most specific of the handler's tables with this name: `env`, `settings`, `state` or `sql`.
    pub fn table_of(&self, handler: &str, key: &str) -> Option<String> {
        let is_table = ["env", "settings", "state", "sql"].contains(&key);
        let pattern = self.most_specific_with(handler, key).filter(|_| is_table)?;
        Some(inner(pattern, key))
    }

    fn most_specific_with(&self, handler: &str, key: &str) -> Option<&str> {
        let sets = |table: &HandlerTable| table.set.contains(&key);
        let (pattern, _) = self.tables(handler).find(|(_, table)| sets(table))?;
        Some(pattern)
    }

    fn tables(&self, handler: &str) -> impl Iterator<Item = (&str, &HandlerTable)> {
        most_specific_first(&self.handlers, handler).into_iter()
    }
}

fn name(pattern: &str) -> String {
    format!("[handlers.\"{pattern}\"]")
}

fn inner(pattern: &str, key: &str) -> String {
    format!("[handlers.\"{pattern}\".{key}]")
}
