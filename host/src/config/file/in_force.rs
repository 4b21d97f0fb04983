//! The settings in force for a handler if several tables match it: each setting comes from the most specific table that
//! sets it.

use super::File;
use super::handler_table::HandlerTable;
use crate::job::SqlLimits;
use crate::sandbox::{Limits, StateQuota};
use crate::setting::{Overlay, Settable, in_table};
use crate::worker::Policy;

impl File {
    /// The quota of the state of this handler, or of every handler of this pattern, if state is granted.
    pub(super) fn state(&self, handler: &str) -> Option<StateQuota> {
        let tables = self.state_of(handler);
        (!tables.is_empty()).then(|| in_force(&tables))
    }

    /// Checks the numbers of a table: each separately, then together with the values of less specific tables.
    pub(super) fn check_in_force(&self, handler: &str, table: &HandlerTable) -> Result<(), String> {
        let name = format!("handlers.\"{handler}\"");
        check::<Policy>(&name, &table.policy, &self.policy_of(handler))?;
        check::<Limits>(
            &format!("{name}.limits"),
            &table.limits,
            &self.limits_of(handler),
        )?;
        if let Some(sql) = &table.sql {
            // Less specific tables do not set them: the most specific table with statements counts as a whole.
            let limits = sql.limits();
            let table = format!("{name}.sql");
            check::<SqlLimits>(&table, limits, &[(table.clone(), limits)])?;
        }
        match &table.state {
            Some(state) => {
                check::<StateQuota>(&format!("{name}.state"), state, &self.state_of(handler))
            }
            None => Ok(()),
        }
    }

    /// Checks the numeric settings of the host.
    pub(super) fn check_host(&self) -> Result<(), String> {
        check("", &self.host, &[(String::new(), &self.host)])
    }

    /// Checks `[limits]`.
    pub(super) fn check_limits(&self) -> Result<(), String> {
        check("limits", &self.limits, &[(String::new(), &self.limits)])
    }
}

fn check<T: Settable>(
    name: &str,
    here: &Overlay<T>,
    tables: &[(String, &Overlay<T>)],
) -> Result<(), String> {
    here.check(name)?;
    let all = tables
        .iter()
        .fold(Overlay::default(), |set, (_, wider)| set.or(wider));
    in_force(tables)
        .check_together(here, &all)
        .map_err(|why| in_table(name, &why))
}

fn in_force<T: Settable>(tables: &[(String, &Overlay<T>)]) -> T {
    let widest_first = tables.iter().rev();
    widest_first.fold(T::default(), |all, (_, set)| set.over(&all))
}
