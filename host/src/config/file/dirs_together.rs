//! Rejects entries of `dirs` that contradict each other.

use std::collections::BTreeMap;
use std::path::Path;

use super::dir_table::DirTable;
use super::handler_table::HandlerTable;
use super::resolved_path::ResolvedPath;
use crate::job::pattern_covers;

/// An entry with its handler and its resolved directory.
struct Entry<'a> {
    handler: &'a str,
    table: &'a DirTable,
    resolved: ResolvedPath,
}

/// Rejects two entries that contradict each other. A handler sees one directory at a path, a directory has one quota
/// for all handlers that write to it, and no directory is inside another one that handlers may change.
pub(super) fn check_together(
    handlers: &BTreeMap<String, HandlerTable>,
    folder: &Path,
) -> Result<(), String> {
    let mut before: Vec<Entry<'_>> = Vec::new();
    for (handler, table) in handlers {
        for dir in &table.dirs {
            let entry = Entry {
                handler,
                table: dir,
                resolved: ResolvedPath::resolve(&folder.join(&dir.dir)),
            };
            for other in &before {
                other.check_with(&entry)?;
                other.check_above(&entry)?;
                entry.check_above(other)?;
            }
            before.push(entry);
        }
    }
    Ok(())
}

impl Entry<'_> {
    /// Its name in messages.
    fn name(&self) -> String {
        format!("handlers.\"{}\".dirs at {}", self.handler, self.table.at)
    }

    fn check_with(&self, other: &Self) -> Result<(), String> {
        let both = || format!("{} and {}", self.name(), other.name());
        let one_handler = pattern_covers(self.handler, other.handler)
            || pattern_covers(other.handler, self.handler);
        // The same entry may occur twice, for a pattern and for a handler that matches it.
        let same = self.table.mode == other.table.mode && self.resolved.end == other.resolved.end;
        if one_handler && self.table.at == other.table.at && !same {
            return Err(format!(
                "{}: a handler can see one directory there; give one of them another path",
                both()
            ));
        }
        let both_write = self.table.writes() && other.table.writes();
        if both_write
            && self.resolved.end == other.resolved.end
            && self.table.quota() != other.table.quota()
        {
            return Err(format!(
                "{}: both are {}, with different quotas; a directory has one quota for all handlers that write to it, so give both the \
                 same bytes_max and files_max",
                both(),
                other.table.dir.display()
            ));
        }
        Ok(())
    }

    /// A handler that may change a directory could replace an entry in it by another directory or by a link.
    fn check_above(&self, beneath: &Self) -> Result<(), String> {
        if !self.table.writes() || !beneath.resolved.is_beneath(&self.resolved.end) {
            return Ok(());
        }
        Err(format!(
            "{} is {}, which is reached through {}, where {} lets handlers write: they could replace it, and \
             bypass a quota; grant directories that do not contain each other, or {} with mode = \"read\"",
            beneath.name(),
            beneath.table.dir.display(),
            self.table.dir.display(),
            self.name(),
            self.table.dir.display()
        ))
    }
}
