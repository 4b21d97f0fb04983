//! The folder `migrations/`, embedded in the program.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

/// One migration: a change to tables.
#[derive(Debug, Clone, Copy)]
pub struct Migration {
    /// The number at the start of its name.
    pub version: i32,
    /// Its name: the number, and the change.
    pub name: &'static str,
    /// The SQL text. If its first line is `-- rouse: no transaction`, it runs outside a transaction, statement by
    /// statement (each ends with a semicolon at the end of a line). This is only for `CREATE INDEX CONCURRENTLY` and
    /// similar statements. It is run again if it has failed halfway, and has to allow for that (`DROP INDEX
    /// CONCURRENTLY IF EXISTS` first).
    pub sql: &'static str,
}

/// The first line of a migration that runs outside a transaction.
const OUTSIDE: &str = "-- rouse: no transaction\n";

impl Migration {
    /// True if it is marked to run outside a transaction.
    pub(super) fn is_outside_a_transaction(&self) -> bool {
        self.sql.starts_with(OUTSIDE)
    }

    /// Its statements; each ends at the end of a line.
    pub(super) fn statements(&self) -> impl Iterator<Item = &str> {
        self.sql
            .split_inclusive(";\n")
            .filter(|text| text.contains(';'))
    }
}

/// One file of `migrations/functions/`, which can be applied repeatedly.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// Its name, with the folder.
    pub name: &'static str,
    /// The SQL text.
    pub sql: &'static str,
}

/// The protocol between this host and the functions for workers. Incremented by each change that is incompatible with
/// older hosts. Reasons and consequences: docs/decisions/two-protocols-are-served.md.
pub const PROTOCOL: i32 = 1;

/// All sources of schema `rouse`.
#[derive(Debug, Clone, Copy)]
pub struct Sources<'a> {
    /// The oldest and the newest protocol number of hosts that these functions serve.
    pub protocols: (i32, i32),
    /// Changes to tables, in order; each is applied once.
    pub migrations: &'a [Migration],
    /// Functions, views and triggers, in an order in which they can be defined.
    pub functions: &'a [Source],
    /// Comments and privileges, which are applied after vanished functions are dropped.
    pub privileges: &'a [Source],
}

impl Sources<'_> {
    /// The digest of everything that is applied again when it changes.
    pub(super) fn digest(&self) -> String {
        let (oldest, newest) = self.protocols;
        let mut all = format!("protocols {oldest} to {newest}\n");
        for source in self.functions.iter().chain(self.privileges) {
            // Writing to a String cannot fail.
            let _ = write!(all, "{}\n{}\n", source.name, source.sql);
        }
        digest(&all)
    }
}

/// The sha256 of a text, as the ledger records it.
pub(super) fn digest(text: &str) -> String {
    format!("{:x}", Sha256::digest(text))
}

macro_rules! migration {
    ($version:literal, $name:literal) => {
        Migration {
            version: $version,
            name: $name,
            sql: include_str!(concat!("../../../../migrations/", $name, ".sql")),
        }
    };
}

macro_rules! sources {
    ($($topic:literal),*) => {
        &[$(Source {
            name: concat!("functions/", $topic),
            sql: include_str!(concat!("../../../../migrations/functions/", $topic, ".sql")),
        }),*]
    };
}

/// The sources of this host.
pub const ALL: Sources<'static> = Sources {
    protocols: (1, PROTOCOL),
    migrations: &[migration!(1, "0001_schema")],
    functions: sources!(
        "types",
        "history",
        "partitions",
        "locks",
        "logins",
        "workers",
        "wake",
        "lanes",
        "gates",
        "fair",
        "direct",
        "shards",
        "payloads",
        "dependencies",
        "deadlines",
        "enqueue",
        "look",
        "claim",
        "settle",
        "children",
        "suspensions",
        "adopt",
        "steps",
        "effects",
        "state",
        "admin",
        "edit",
        "chains",
        "flows",
        "schedules",
        "fire",
        "declared",
        "views",
        "contract",
        "find",
        "wait",
        "why",
        "triggers"
    ),
    privileges: sources!("comments", "grants"),
};

/// The roles that the migrations need. Runs before them; an administrator may run it instead.
pub const ROLES_SQL: &str = include_str!("../../../../migrations/roles.sql");

#[cfg(test)]
mod tests {
    use super::*;

    fn files(folder: &str, wanted: fn(&str) -> bool) -> Vec<String> {
        let folder = format!("{}/../migrations/{folder}", env!("CARGO_MANIFEST_DIR"));
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| wanted(name))
            .collect();
        files.sort();
        files
    }

    #[test]
    fn the_list_matches_the_folder_in_order() {
        let listed: Vec<String> = ALL
            .migrations
            .iter()
            .map(|migration| format!("{}.sql", migration.name))
            .collect();
        assert_eq!(files("", |name| name.starts_with('0')), listed);
        for (number, migration) in (1..).zip(ALL.migrations) {
            assert_eq!(migration.version, number);
            assert!(migration.name.starts_with(&format!("{number:04}_")));
        }
    }

    #[test]
    fn every_topic_is_listed() {
        let mut listed: Vec<String> = ALL
            .functions
            .iter()
            .chain(ALL.privileges)
            .map(|migration| format!("{}.sql", migration.name.trim_start_matches("functions/")))
            .collect();
        listed.sort();
        assert_eq!(files("functions", |_| true), listed);
    }

    #[test]
    fn each_function_or_view_is_defined_once() {
        let mut names: Vec<&str> = ALL
            .functions
            .iter()
            .flat_map(|source| source.sql.lines())
            .filter_map(|line| {
                line.strip_prefix("CREATE OR REPLACE FUNCTION ")
                    .or_else(|| line.strip_prefix("CREATE OR REPLACE VIEW "))
            })
            .collect();
        let all = names.len();
        assert!(all > 70, "{all}");
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        for migration in ALL.migrations {
            assert!(
                !migration.sql.contains("CREATE OR REPLACE"),
                "{}",
                migration.name
            );
        }
    }

    #[test]
    fn a_migration_outside_a_transaction_is_split_at_semicolons_that_end_a_line() {
        let migration = Migration {
            version: 2,
            name: "0002_x",
            sql: "-- rouse: no transaction\n-- Why;\nDROP INDEX CONCURRENTLY IF EXISTS rouse.x;\n\nCREATE INDEX CONCURRENTLY x\n    ON rouse.job (id);\n\n",
        };
        assert!(migration.is_outside_a_transaction());
        assert_eq!(
            migration.statements().map(str::trim).collect::<Vec<_>>(),
            [
                "-- rouse: no transaction\n-- Why;",
                "DROP INDEX CONCURRENTLY IF EXISTS rouse.x;",
                "CREATE INDEX CONCURRENTLY x\n    ON rouse.job (id);"
            ]
        );
        assert!(!ALL.migrations[0].is_outside_a_transaction());
    }
}
