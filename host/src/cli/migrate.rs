//! `rouse migrate`: brings schema `rouse` up to date.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args as ClapArgs;
use serde_json::json;

use super::target::Target;
use super::text::as_json;
use crate::duration;
use crate::store::migrate::{self, MigrateError};

/// Options of `rouse migrate`.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    target: Target,

    /// Only check: exit 1 if migrations are missing, or functions or privileges were dropped or changed
    #[arg(long)]
    check: bool,

    /// How long to wait for locks of other sessions; each try delays producers and workers by at most 150 ms for each
    /// lock
    #[arg(long, value_name = "TIME", value_parser = duration::argument, default_value = "60s")]
    wait: Duration,

    /// Print the SQL that creates the roles, for an administrator to run; needs no database
    #[arg(long, conflicts_with_all = ["check", "json"])]
    roles_sql: bool,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// Migrates, checks, or prints.
pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.roles_sql {
        print!("{}", migrate::ROLES_SQL);
        println!(
            "-- Then let the user who runs `rouse migrate` act as the owner and create the schema:"
        );
        println!(
            "--   GRANT rouse_owner TO the_user; GRANT CREATE ON DATABASE the_database TO the_user, rouse_owner;"
        );
        println!(
            "-- and grant the other logins their roles: GRANT rouse_worker TO …; GRANT rouse_producer TO …; GRANT rouse_operator TO …;"
        );
        return Ok(ExitCode::SUCCESS);
    }
    let connector = args.target.connector()?;
    let mut client = connector.client().await?;
    if args.check {
        let checked = match migrate::check(&client).await {
            Ok(()) => migrate::check_in_force(&mut client).await,
            Err(error) => Err(error),
        };
        return match args.json {
            true => print_check(checked),
            false => {
                checked?;
                println!("the database is up to date");
                Ok(ExitCode::SUCCESS)
            }
        };
    }
    let mut keeper = connector.client().await?;
    let report = migrate::run(&mut client, &mut keeper, args.wait).await?;
    if args.json {
        let report = json!({"applied": report.applied, "version": report.version, "restored": report.restored});
        println!("{}", as_json(report));
    } else if report.applied.is_empty() {
        println!(
            "nothing to do: the database is at version {}",
            report.version
        );
    } else {
        for name in &report.applied {
            println!("applied {name}");
        }
        for difference in &report.restored {
            println!("restored: {difference}");
        }
        println!("the database is at version {}", report.version);
    }
    Ok(ExitCode::SUCCESS)
}

/// The result of a check as JSON.
fn print_check(checked: Result<(), MigrateError>) -> anyhow::Result<ExitCode> {
    let (missing, differences) = match checked {
        Ok(()) => (Vec::new(), Vec::new()),
        Err(MigrateError::NotMigrated { missing }) => (missing, Vec::new()),
        Err(MigrateError::NotInForce { differences }) => (Vec::new(), differences),
        Err(error) => return Err(error.into()),
    };
    let up_to_date = missing.is_empty() && differences.is_empty();
    let found = json!({"up_to_date": up_to_date, "missing": missing, "differences": differences});
    println!("{}", as_json(found));
    Ok(match up_to_date {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
