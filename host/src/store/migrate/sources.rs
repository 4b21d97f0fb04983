//! The folder `migrations/`, as it is part of the program.

use std::fmt::Write as _;

/// One migration: a change of tables.
#[derive(Debug, Clone, Copy)]
pub struct Migration {
    /// The number that its name starts with.
    pub version: i32,
    /// What it does, from its name.
    pub name: &'static str,
    /// The text. Where its first line is `-- rouse: no transaction`, it runs outside a transaction, statement by statement (each ends
    /// with a semicolon at the end of a line): for `CREATE INDEX CONCURRENTLY` and the like, nothing else. It is run again where it failed half
    /// way, and has to allow for that (`DROP INDEX CONCURRENTLY IF EXISTS` first).
    pub sql: &'static str,
}

/// The first line of a migration that runs outside a transaction.
const OUTSIDE: &str = "-- rouse: no transaction\n";

impl Migration {
    /// True where it says that it runs outside a transaction.
    pub(super) fn is_outside_a_transaction(&self) -> bool {
        self.sql.starts_with(OUTSIDE)
    }

    /// Its statements, where each ends with its line.
    pub(super) fn statements(&self) -> impl Iterator<Item = &str> {
        self.sql
            .split_inclusive(";\n")
            .filter(|text| text.contains(';'))
    }
}

/// One file of `migrations/functions/`, which can be applied again and again.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// Its name, with the folder.
    pub name: &'static str,
    /// The text.
    pub sql: &'static str,
}

/// How this host calls the functions of workers: one more with each change that a host of before would not survive. Why, and what else
/// goes with it: docs/decisions/two-protocols-are-served.md.
pub const PROTOCOL: i32 = 1;

/// All that schema `rouse` is made of.
#[derive(Debug, Clone, Copy)]
pub struct Sources<'a> {
    /// The oldest and the newest protocol number of hosts that these functions serve.
    pub protocols: (i32, i32),
    /// What changes tables, in order; each is applied once.
    pub migrations: &'a [Migration],
    /// Functions, views and triggers, in the order in which they can be defined.
    pub functions: &'a [Source],
    /// Comments and rights, which are given once only these functions are left.
    pub rights: &'a [Source],
}

impl Sources<'_> {
    /// The digest of all that is applied again when it changes.
    pub(super) fn digest(&self) -> String {
        let (oldest, newest) = self.protocols;
        let mut all = format!("protocols {oldest} to {newest}\n");
        for source in self.functions.iter().chain(self.rights) {
            // Writing to a String does not fail.
            let _ = write!(all, "{}\n{}\n", source.name, source.sql);
        }
        super::digest(&all)
    }
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

/// This host's.
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
        "payloads",
        "enqueue",
        "look",
        "claim",
        "settle",
        "adopt",
        "steps",
        "state",
        "admin",
        "views",
        "find"
    ),
    rights: sources!("comments", "grants"),
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
    fn the_list_is_the_folder_in_order() {
        let listed: Vec<String> = ALL
            .migrations
            .iter()
            .map(|one| format!("{}.sql", one.name))
            .collect();
        assert_eq!(files("", |name| name.starts_with('0')), listed);
        for (place, one) in (1..).zip(ALL.migrations) {
            assert_eq!(one.version, place);
            assert!(one.name.starts_with(&format!("{place:04}_")));
        }
    }

    #[test]
    fn every_topic_is_listed() {
        let mut listed: Vec<String> = ALL
            .functions
            .iter()
            .chain(ALL.rights)
            .map(|one| format!("{}.sql", one.name.trim_start_matches("functions/")))
            .collect();
        listed.sort();
        assert_eq!(files("functions", |_| true), listed);
    }

    #[test]
    fn a_function_or_view_stands_once() {
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
        for one in ALL.migrations {
            assert!(!one.sql.contains("CREATE OR REPLACE"), "{}", one.name);
        }
    }

    #[test]
    fn a_migration_outside_a_transaction_is_taken_apart_where_its_lines_end() {
        let one = Migration {
            version: 2,
            name: "0002_x",
            sql: "-- rouse: no transaction\n-- Why;\nDROP INDEX CONCURRENTLY IF EXISTS rouse.x;\n\nCREATE INDEX CONCURRENTLY x\n    ON rouse.job (id);\n\n",
        };
        assert!(one.is_outside_a_transaction());
        assert_eq!(
            one.statements().map(str::trim).collect::<Vec<_>>(),
            [
                "-- rouse: no transaction\n-- Why;",
                "DROP INDEX CONCURRENTLY IF EXISTS rouse.x;",
                "CREATE INDEX CONCURRENTLY x\n    ON rouse.job (id);"
            ]
        );
        assert!(!ALL.migrations[0].is_outside_a_transaction());
    }
}
