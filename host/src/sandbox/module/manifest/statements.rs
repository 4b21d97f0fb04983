//! The SQL statements that a handler declares. Postgres checks their text when the host prepares them.

use std::collections::HashSet;

use crate::job::Statement;

/// The maximum number of statements of a handler; more of them belong in several handlers.
pub(super) const STATEMENTS_MAX: usize = 64;

/// The maximum length of a name: that of an identifier in Postgres.
pub(super) const NAME_CHARS_MAX: usize = 63;

/// The maximum size of a statement, whose text is sent with each call.
pub(super) const SQL_BYTES_MAX: usize = 16 << 10;

/// Checks the names and sizes of statements.
pub(super) fn check(statements: Vec<Statement>) -> Result<Vec<Statement>, String> {
    if statements.len() > STATEMENTS_MAX {
        return Err(format!(
            "at most {STATEMENTS_MAX} statements are allowed; there are {}",
            statements.len()
        ));
    }
    let mut names = HashSet::new();
    for Statement { name, sql, .. } in &statements {
        if !is_name(name) {
            return Err(format!(
                "statements: {name:?} is not a valid name: it must be 1 to {NAME_CHARS_MAX} of a-z, 0-9 and _, and must not start with a digit"
            ));
        }
        if !names.insert(name) {
            return Err(format!("statements: {name} is declared twice"));
        }
        if sql.trim().is_empty() || sql.contains('\0') || sql.len() > SQL_BYTES_MAX {
            return Err(format!(
                "statements: the text of {name} must be 1 to {SQL_BYTES_MAX} bytes long, without NUL"
            ));
        }
    }
    Ok(statements)
}

/// True for a name that needs no quotes in Postgres, TOML and JSON.
pub(super) fn is_name(name: &str) -> bool {
    (1..=NAME_CHARS_MAX).contains(&name.len())
        && !name.starts_with(|first: char| first.is_ascii_digit())
        && name
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statement(name: &str, sql: &str) -> Statement {
        serde_json::from_value(serde_json::json!({"name": name, "sql": sql})).expect("a statement")
    }

    #[test]
    fn refuse_names_and_statements_that_cannot_be_prepared() {
        let one = |name: &str, sql: &str| check(vec![statement(name, sql)]);
        assert!(one("mark_paid", "SELECT 1").is_ok());
        for (name, sql, why) in [
            ("", "SELECT 1", "valid name"),
            ("1st", "SELECT 1", "digit"),
            ("Mark", "SELECT 1", "a-z"),
            ("a\"b", "SELECT 1", "valid name"),
            ("a", " \n", "bytes"),
            ("a", "SELECT '\0'", "NUL"),
            ("a", &"x".repeat(SQL_BYTES_MAX + 1), "16384"),
        ] {
            let refused = one(name, sql).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
        let twice = check(vec![statement("a", "SELECT 1"); 2]).unwrap_err();
        assert!(twice.contains("twice"), "{twice}");
        let many = (0..65).map(|i| statement(&format!("a{i}"), "SELECT 1"));
        assert!(check(many.collect()).is_err());
    }
}
