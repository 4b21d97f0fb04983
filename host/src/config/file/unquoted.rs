//! Detects `[handlers.mail.send]`, which should be `[handlers."mail.send"]`.

use toml::{Table, Value};

use super::handler_table::HandlerTable;
use crate::setting::table::Table as _;

/// A hint for a file that cannot be parsed, if a missing quote seems to be the reason.
pub(super) fn hint(text: &str) -> Option<String> {
    let file = text.parse::<Table>().ok()?;
    let handlers = file.get("handlers")?.as_table()?;
    let (written, meant) = handlers.iter().find_map(|(name, table)| {
        // A quoted name with a dot was quoted on purpose.
        let unquoted = !name.contains(['.', '*']);
        let meant = whole_name(name, table.as_table()?).filter(|_| unquoted)?;
        Some((format!("handlers.{meant}"), meant))
    })?;
    Some(format!(
        "if {meant} is a handler, write its name in quotes: [handlers.\"{meant}\"], not [{written}]"
    ))
}

fn whole_name(name: &str, table: &Table) -> Option<String> {
    let (word, inner) = table.iter().find_map(|(key, value)| match value {
        Value::Table(inner) if !is_key(key) => Some((key, inner)),
        _ => None,
    })?;
    let name = format!("{name}.{word}");
    Some(whole_name(&name, inner).unwrap_or(name))
}

/// True for a key of a handler's table.
fn is_key(word: &str) -> bool {
    HandlerTable::ENTRIES.iter().any(|entry| entry.key == word)
}
