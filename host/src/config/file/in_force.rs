//! What holds where several tables fit a handler: each key from the narrowest table that sets it.

use humantime::format_duration;

use super::File;
use super::handler_table::HandlerTable;
use super::state_table::StateTable;
use crate::job::narrowest_first;
use crate::sandbox::Limits;
use crate::worker::Override;

impl File {
    /// The tables that fit this handler, or every handler of this pattern, the narrowest first.
    fn fitting<'a>(&'a self, handler: &str) -> impl DoubleEndedIterator<Item = &'a HandlerTable> {
        let tables = narrowest_first(&self.handlers, handler).into_iter();
        tables.map(|(_, table)| table)
    }

    /// Its state, where one is granted.
    pub(super) fn state(&self, handler: &str) -> Option<StateTable> {
        let tables = self.fitting(handler);
        let states = tables.filter_map(|table| table.state.clone());
        states.reduce(|set, wider| set.or(&wider))
    }

    /// Its limits.
    pub(super) fn limits(&self, handler: &str) -> Limits {
        let everyone = self.limits.set().over(&Limits::default());
        let widest_first = self.fitting(handler).rev();
        widest_first.fold(everyone, |limits, table| table.limits.set().over(&limits))
    }

    fn over(&self, handler: &str) -> Override {
        let tables = self.fitting(handler);
        tables.fold(Override::default(), |set, wider| set.or(&wider.over()))
    }

    /// Says what cannot hold together, with the table that brought it about.
    pub(super) fn check_in_force(&self, handler: &str, table: &HandlerTable) -> Result<(), String> {
        let name = format!("handlers.\"{handler}\"");
        let limits = self.limits(handler);
        table.limits.check(&format!("{name}.limits"), &limits)?;
        if table.state.is_some()
            && let Some(state) = self.state(handler)
        {
            state.check_together(&format!("{name}.state"))?;
        }
        let over = self.over(handler);
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
