//! Which tables of the file count for a handler, and which of them sets a value.

use super::File;
use super::handler_table::HandlerTable;
use crate::job::narrowest_first;
use crate::sandbox::{Limits, StateQuota};
use crate::setting::Overlays;
use crate::worker::Policy;

impl File {
    /// The tables that set `lease` to `job_delay`.
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

    /// The table that sets `instances`.
    pub fn instances_origin(&self, handler: &str) -> Option<String> {
        self.origin(handler, |table| table.instances.is_some())
    }

    /// The table that sets `fine_clocks`.
    pub fn fine_clocks_origin(&self, handler: &str) -> Option<String> {
        self.origin(handler, |table| table.fine_clocks.is_some())
    }

    /// The narrowest of the handler's tables with this name: `env`, `settings` or `state`.
    pub fn table_of(&self, handler: &str, key: &str) -> Option<String> {
        let has_it = |table: &HandlerTable| match key {
            "env" => table.env.is_some(),
            "settings" => table.settings.is_some(),
            "state" => table.state.is_some(),
            _ => false,
        };
        let (pattern, _) = self.tables(handler).find(|(_, table)| has_it(table))?;
        Some(inner(pattern, key))
    }

    fn origin(&self, handler: &str, sets: impl Fn(&HandlerTable) -> bool) -> Option<String> {
        let (pattern, _) = self.tables(handler).find(|(_, table)| sets(table))?;
        Some(name(pattern))
    }

    fn tables(&self, handler: &str) -> impl Iterator<Item = (&str, &HandlerTable)> {
        narrowest_first(&self.handlers, handler).into_iter()
    }
}

fn name(pattern: &str) -> String {
    format!("[handlers.\"{pattern}\"]")
}

fn inner(pattern: &str, key: &str) -> String {
    format!("[handlers.\"{pattern}\".{key}]")
}
