//! Brings schema `rouse` up to date: one transaction, under a lock, with a ledger.
//!
//! Any number of hosts may do this at the same time. Each migration is recorded with its sha256;
//! a database whose record says otherwise is refused rather than guessed about.

use sha2::{Digest, Sha256};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, GenericClient, IsolationLevel};

/// One file of `migrations/`.
#[derive(Debug, Clone, Copy)]
pub struct Migration {
    /// The number that its name starts with.
    pub version: i32,
    /// What it does, from its name.
    pub name: &'static str,
    /// The text.
    pub sql: &'static str,
    /// True: hosts older than it must not serve the database any more.
    pub breaking: bool,
}

macro_rules! migration {
    ($version:literal, $name:literal, breaking: $breaking:literal) => {
        Migration {
            version: $version,
            name: $name,
            sql: include_str!(concat!("../../../migrations/", $name, ".sql")),
            breaking: $breaking,
        }
    };
}

/// All migrations of this host, in order.
pub const MIGRATIONS: &[Migration] = &[
    migration!(1, "0001_schema", breaking: true),
    migration!(2, "0002_partitions", breaking: false),
    migration!(3, "0003_enqueue", breaking: false),
    migration!(4, "0004_claim", breaking: false),
    migration!(5, "0005_settle", breaking: false),
    migration!(6, "0006_read", breaking: false),
    migration!(7, "0007_looking", breaking: true),
    migration!(8, "0008_wakeups_at_commit", breaking: false),
    migration!(9, "0009_plans_without_statistics", breaking: false),
    migration!(10, "0010_drops_wait_once", breaking: false),
    migration!(11, "0011_enqueue_prepares_less", breaking: false),
    migration!(12, "0012_claims_end_at_eight_mebibytes", breaking: false),
    migration!(13, "0013_workers_prove_themselves", breaking: true),
    migration!(14, "0014_from_outside", breaking: false),
    migration!(15, "0015_steps_and_progress", breaking: false),
    migration!(16, "0016_fleet", breaking: false),
    migration!(17, "0017_what_waits_too_long", breaking: false),
    migration!(18, "0018_usage_and_logs", breaking: false),
    migration!(19, "0019_what_is_left_and_challenges", breaking: false),
    migration!(20, "0020_losses_are_told", breaking: false),
    migration!(21, "0021_state", breaking: false),
    migration!(22, "0022_jobs_narrow_grants", breaking: false),
    migration!(
        23,
        "0023_what_is_done_outside_is_told",
        breaking: false
    ),
    migration!(
        24,
        "0024_jobs_are_found_by_their_source",
        breaking: false
    ),
    migration!(25, "0025_jobs_leave_no_state", breaking: false),
    migration!(26, "0026_what_little_rights_can_do", breaking: false),
];

/// The roles that the migrations need. Runs before them; an administrator may run it instead.
pub const ROLES_SQL: &str = include_str!("../../../migrations/roles.sql");

/// What a run did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The names of the migrations that were applied; empty: nothing was to do.
    pub applied: Vec<String>,
    /// The schema's version now.
    pub version: i32,
}

/// Why a database cannot be migrated or served.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// Schema `rouse` is not there, or lacks migrations.
    #[error("the database is not migrated (missing: {}); run `rouse migrate` first", .missing.join(", "))]
    NotMigrated {
        /// The names of the missing migrations.
        missing: Vec<String>,
    },
    /// A recorded migration has another text than this host's.
    #[error(
        "migration {name} was applied to this database with another text (sha256 {recorded}, this host has {ours}); \
         somebody changed a released migration: use the host that applied it, or restore its file"
    )]
    Drift {
        /// The migration.
        name: String,
        /// The ledger's digest.
        recorded: String,
        /// This host's digest.
        ours: String,
    },
    /// A newer host has changed the schema in a way that this one cannot serve.
    #[error(
        "the database is at migration {name}, which this host ({ours}) is too old for; upgrade the host"
    )]
    TooNew {
        /// The first breaking migration that this host does not know.
        name: String,
        /// The last migration that this host knows.
        ours: String,
    },
    /// The user may not create the roles, or the schema.
    #[error(
        "{0}; let an administrator run what `rouse migrate --roles-sql` prints, or migrate as a user that may"
    )]
    NotAllowed(String),
    /// The user may not act as the owner of the schema, or the owner may not create it.
    #[error(
        "{why}; an administrator has to run: {}",
        .who.grants()
    )]
    NotOwner {
        /// What was refused.
        why: String,
        /// Who migrates, and where.
        who: Who,
    },
    /// Handlers speak UTF-8, and one row in anything else would hold up its lane.
    #[error(
        "the database has the encoding {0}; Rouse needs one that was created with ENCODING 'UTF8'"
    )]
    Encoding(String),
    /// The database does not answer.
    #[error("{0}")]
    Unreachable(String),
    /// A statement failed; nothing was changed.
    #[error("{what}: {}", super::describe(.error))]
    Sql {
        /// What was being done.
        what: String,
        /// What Postgres said.
        error: tokio_postgres::Error,
    },
}

/// Who migrates which database; the names as they stand in SQL.
#[derive(Debug, Clone)]
pub struct Who {
    user: String,
    database: String,
}

impl Who {
    async fn am_i(client: &impl GenericClient) -> Result<Self, MigrateError> {
        let rows = client
            .query_typed(
                "SELECT quote_ident(session_user), quote_ident(current_database())",
                &[],
            )
            .await
            .map_err(sql("ask for the user"))?;
        let row = rows.first().expect("a SELECT without FROM returns one row");
        Ok(Self {
            user: row.get(0),
            database: row.get(1),
        })
    }

    /// What lets the user act as the owner, and create the schema.
    fn grants(&self) -> String {
        let Self { user, database } = self;
        format!(
            "GRANT rouse_owner TO {user}; GRANT CREATE ON DATABASE {database} TO {user}, rouse_owner;"
        )
    }
}

/// One line of the ledger.
struct Recorded {
    version: i32,
    name: String,
    sha256: String,
    breaking: bool,
}

/// Applies what is missing. All of it or, on an error, nothing.
pub async fn run(client: &mut Client) -> Result<Report, MigrateError> {
    run_these(client, MIGRATIONS).await
}

/// [`run`], with a list of its own.
pub async fn run_these(
    client: &mut Client,
    migrations: &[Migration],
) -> Result<Report, MigrateError> {
    // A stricter default of the database's would show the ledger as it was before the lock.
    let transaction = client
        .build_transaction()
        .isolation_level(IsolationLevel::ReadCommitted)
        .read_only(false)
        .start()
        .await
        .map_err(sql("begin"))?;
    // Held until the commit. Whoever comes second finds the ledger complete.
    transaction
        .batch_execute("SELECT pg_advisory_xact_lock(hashtextextended('rouse.migrate', 0))")
        .await
        .map_err(sql("take the migration lock"))?;
    let recorded = ledger(&transaction).await?;
    compare(&recorded, migrations)?;
    let missing: Vec<&Migration> = missing(&recorded, migrations).collect();
    if !missing.is_empty() {
        let who = Who::am_i(&transaction).await?;
        if recorded.is_empty() {
            found(&transaction, &who).await?;
        }
        transaction
            .batch_execute("SET LOCAL ROLE rouse_owner")
            .await
            .map_err(owned("act as rouse_owner", &who))?;
        for migration in &missing {
            transaction
                .batch_execute(migration.sql)
                .await
                .map_err(sql(migration.name))?;
            transaction
                .execute(
                    "INSERT INTO rouse.migration (version, name, sha256, breaking) VALUES ($1, $2, $3, $4)",
                    &[
                        &migration.version,
                        &migration.name,
                        &digest(migration.sql),
                        &migration.breaking,
                    ],
                )
                .await
                .map_err(sql("write the ledger"))?;
        }
    }
    let applied = missing.iter().map(|one| one.name.to_string()).collect();
    transaction.commit().await.map_err(sql("commit"))?;
    let known = migrations.iter().map(|one| one.version);
    let version = known
        .chain(recorded.iter().map(|one| one.version))
        .max()
        .unwrap_or(0);
    Ok(Report { applied, version })
}

/// Refuses a database that this host cannot serve. Changes nothing.
pub async fn check(client: &impl GenericClient) -> Result<(), MigrateError> {
    let recorded = ledger(client).await?;
    compare(&recorded, MIGRATIONS)?;
    let missing: Vec<String> = missing(&recorded, MIGRATIONS)
        .map(|one| one.name.to_string())
        .collect();
    if missing.is_empty() {
        Ok(())
    } else {
        Err(MigrateError::NotMigrated { missing })
    }
}

/// Roles, schema and ledger: what the first migration stands on.
async fn found(client: &impl GenericClient, who: &Who) -> Result<(), MigrateError> {
    client
        .batch_execute(ROLES_SQL)
        .await
        .map_err(allowed("create the roles"))?;
    client
        .batch_execute(
            "CREATE SCHEMA IF NOT EXISTS rouse AUTHORIZATION rouse_owner;
             SET LOCAL ROLE rouse_owner;
             CREATE TABLE rouse.migration (
                 version    integer PRIMARY KEY,
                 name       text NOT NULL,
                 sha256     text NOT NULL,
                 breaking   boolean NOT NULL,
                 applied_at timestamptz NOT NULL DEFAULT now());
             GRANT SELECT ON rouse.migration TO PUBLIC;
             RESET ROLE",
        )
        .await
        .map_err(owned("create schema rouse", who))
}

async fn ledger(client: &impl GenericClient) -> Result<Vec<Recorded>, MigrateError> {
    let rows = client
        .query_typed(
            "SELECT to_regclass('rouse.migration') IS NOT NULL, current_setting('server_encoding')",
            &[],
        )
        .await
        .map_err(sql("look for the ledger"))?;
    let found = rows.first().expect("a SELECT without FROM returns one row");
    let encoding: String = found.get(1);
    if encoding != "UTF8" {
        return Err(MigrateError::Encoding(encoding));
    }
    if !found.get::<_, bool>(0) {
        return Ok(Vec::new());
    }
    let rows = client
        .query_typed(
            "SELECT version, name, sha256, breaking FROM rouse.migration ORDER BY version",
            &[],
        )
        .await
        .map_err(sql("read the ledger"))?;
    Ok(rows
        .iter()
        .map(|row| Recorded {
            version: row.get(0),
            name: row.get(1),
            sha256: row.get(2),
            breaking: row.get(3),
        })
        .collect())
}

fn missing<'a>(
    recorded: &[Recorded],
    migrations: &'a [Migration],
) -> impl Iterator<Item = &'a Migration> {
    let there: Vec<i32> = recorded.iter().map(|one| one.version).collect();
    migrations
        .iter()
        .filter(move |one| !there.contains(&one.version))
}

/// Every recorded migration is either ours, to the letter, or one that a newer host added
/// without breaking us.
fn compare(recorded: &[Recorded], migrations: &[Migration]) -> Result<(), MigrateError> {
    for theirs in recorded {
        match migrations.iter().find(|one| one.version == theirs.version) {
            Some(ours) if digest(ours.sql) != theirs.sha256 => {
                return Err(MigrateError::Drift {
                    name: theirs.name.clone(),
                    recorded: theirs.sha256.clone(),
                    ours: digest(ours.sql),
                });
            }
            None if theirs.breaking => {
                return Err(MigrateError::TooNew {
                    name: theirs.name.clone(),
                    ours: migrations.last().map_or("none", |one| one.name).to_string(),
                });
            }
            Some(_) | None => {}
        }
    }
    Ok(())
}

fn digest(text: &str) -> String {
    format!("{:x}", Sha256::digest(text))
}

fn sql(what: &str) -> impl FnOnce(tokio_postgres::Error) -> MigrateError {
    let what = what.to_string();
    move |error| MigrateError::Sql { what, error }
}

/// Like [`sql`], where a refusal means that an administrator is needed.
fn allowed(what: &str) -> impl FnOnce(tokio_postgres::Error) -> MigrateError {
    let what = what.to_string();
    move |error| {
        if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) {
            MigrateError::NotAllowed(format!("cannot {what}: {}", super::describe(&error)))
        } else {
            MigrateError::Sql { what, error }
        }
    }
}

/// Like [`sql`], where a refusal means that the user, or the owner, lacks a right.
fn owned(what: &str, who: &Who) -> impl FnOnce(tokio_postgres::Error) -> MigrateError {
    let (what, who) = (what.to_string(), who.clone());
    move |error| {
        if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) {
            let why = format!("cannot {what}: {}", super::describe(&error));
            MigrateError::NotOwner { why, who }
        } else {
            MigrateError::Sql { what, error }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_the_folder_in_order() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../migrations");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with('0'))
            .collect();
        files.sort();
        let listed: Vec<String> = MIGRATIONS
            .iter()
            .map(|one| format!("{}.sql", one.name))
            .collect();
        assert_eq!(files, listed);
        for (place, one) in (1..).zip(MIGRATIONS) {
            assert_eq!(one.version, place);
            assert!(one.name.starts_with(&format!("{place:04}_")));
        }
    }
}
