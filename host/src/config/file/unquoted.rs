//! `[handlers.mail.send]` where `[handlers."mail.send"]` was meant.

use toml::{Table, Value};

/// Keys of a handler that are tables themselves.
const TABLES: [&str; 7] = [
    "limits", "env", "settings", "state", "dirs", "http", "secrets",
];

/// What to say beside the error of a file that cannot be read, if this seems to be the reason.
pub(super) fn hint(text: &str) -> Option<String> {
    let file = text.parse::<Table>().ok()?;
    let handlers = file.get("handlers")?.as_table()?;
    let (written, meant) = handlers.iter().find_map(|(name, table)| {
        // Whoever has put one name into quotes knows about them.
        let unquoted = !name.contains(['.', '*']);
        let meant = whole_name(name, table.as_table()?).filter(|_| unquoted)?;
        Some((format!("handlers.{meant}"), meant))
    })?;
    Some(format!(
        "where {meant} is a handler, its name has to stand in quotes: [handlers.\"{meant}\"], not [{written}]"
    ))
}

fn whole_name(name: &str, table: &Table) -> Option<String> {
    let (word, inner) = table.iter().find_map(|(key, value)| match value {
        Value::Table(inner) if !TABLES.contains(&key.as_str()) => Some((key, inner)),
        _ => None,
    })?;
    let name = format!("{name}.{word}");
    Some(whole_name(&name, inner).unwrap_or(name))
}
