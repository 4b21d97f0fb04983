//! What holds where several tables fit a handler: each key from the narrowest table that sets it.

use humantime::format_duration;

use super::File;
use super::handler_table::HandlerTable;
use super::state_table::StateTable;
use crate::job::narrowest_first;
use crate::sandbox;
use crate::worker::Overrides;

impl File {
    /// The state of this handler, or of every handler of this pattern, where one is granted.
    pub(super) fn state(&self, handler: &str) -> Option<StateTable> {
        let tables = narrowest_first(&self.handlers, handler).into_iter();
        let states = tables.filter_map(|(_, table)| table.state.clone());
        states.reduce(|set, wider| set.or(&wider))
    }

    /// Says what cannot hold together, with the table that brought it about. `sandbox` and `overrides` are what becomes of
    /// this file.
    pub(super) fn check_in_force(
        &self,
        handler: &str,
        table: &HandlerTable,
        sandbox: &sandbox::Settings,
        overrides: &Overrides,
    ) -> Result<(), String> {
        let name = format!("handlers.\"{handler}\"");
        let limits = sandbox.limits(handler);
        table.limits.check(&format!("{name}.limits"), &limits)?;
        if table.state.is_some()
            && let Some(state) = self.state(handler)
        {
            state.check_together(&format!("{name}.state"))?;
        }
        let over = overrides.of(handler);
        if (table.retry_initial.is_some() || table.retry_max.is_some())
            && let (Some(initial), Some(max)) = (over.retry_initial, over.retry_max)
            && initial > max
        {
            return Err(format!(
                "{name}: retry_initial, the first wait, is {}, and retry_max, the longest one, only {}",
                format_duration(initial),
                format_duration(max)
            ));
        }
        Ok(())
    }
}
