//! Backups and the erasure of personal data, with the statements of the guides.

use std::path::Path;
use std::process::Command;

use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::commands::run;
use crate::support::page::blocks_of;
use crate::support::worker::{TestWorker, ended, enqueue, enqueue_sql};
use crate::support::{TestDb, scratch, skip};

/// The first block of this kind, on this page, that contains this text.
fn block(page: &str, kind: &str, text: &str) -> String {
    let mut blocks = blocks_of(page, kind).into_iter();
    let found = blocks.find(|block| block.contains(text));
    found.unwrap_or_else(|| panic!("no {kind} with {text} in {page}"))
}

async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(client: &Client, sql: &str) -> T {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

fn execute(program: &Path, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Restores a dump into a database with these commands of Postgres.
fn restore(bin: &Path, commands: &str, dump: &str, into: &TestDb) {
    for command in commands.lines() {
        let command = command.replace("\"$DATABASE_URL\"", &into.url());
        let command = command.replace("app.dump", dump);
        let (program, args) = command.split_once(' ').expect("a command");
        execute(&bin.join(program), &args.split(' ').collect::<Vec<_>>());
    }
}

/// A payload that is stored in `rouse.payload`.
fn large() -> Value {
    json!({"line": "x".repeat(4096), "times": 1})
}

/// What triggers derive from other tables, and the positions of the sequences.
const DERIVED: &str = "
    SELECT concat_ws(', ',
        (SELECT string_agg(w.worker_id, ', ') FROM rouse.live_worker AS w), (SELECT count(*) FROM rouse.audit_outbox),
        (SELECT string_agg(format('%s at %s', s.sequencename, s.last_value), ', ' ORDER BY s.sequencename)
         FROM pg_sequences AS s WHERE s.schemaname = 'rouse'))";

#[tokio::test]
async fn a_database_that_was_restored_from_a_dump_continues_with_its_jobs() {
    const GUIDE: &str = "docs/guides/backups.md";
    let db = TestDb::new().await;
    let client = db.client().await;
    let bin: String = one(
        &client,
        "SELECT setting FROM pg_config WHERE name = 'BINDIR'",
    )
    .await;
    let bin = Path::new(&bin);
    if !bin.join("pg_dump").exists() {
        skip("there is no pg_dump beside the server (apt-get install postgresql-client)");
        return;
    }
    let worker = TestWorker::start(&db, Settings::default()).await;
    let before = enqueue(&client, "test.print", large()).await;
    assert_eq!(ended(&client, before).await.state, "succeeded");
    worker.drain().await;
    let _alive = db.worker().await;
    client
        .batch_execute(
            "SELECT rouse.schedule('nightly', 'test.print', '{}', cron => '0 3 * * *');
             SELECT rouse.set_fair_share('fair', 'drr')",
        )
        .await
        .unwrap();
    let print = json!({"line": "x", "times": 1});
    let small = enqueue(&client, "test.print", print.clone()).await;
    let of_tenant = format!("'test.print', '{print}', queue => 'fair', tenant => 'acme'");
    let fair = enqueue_sql(&client, &of_tenant).await;
    let last = enqueue(&client, "test.print", large()).await;
    let derived: String = one(&client, DERIVED).await;

    let dump = scratch("dump").join("app.dump");
    let dump = dump.to_str().unwrap();
    let file = format!("--file={dump}");
    execute(&bin.join("pg_dump"), &["--format=custom", &file, &db.url()]);
    let together = "pg_restore --dbname=\"$DATABASE_URL\" app.dump";
    for commands in [together, &block(GUIDE, "console", "--data-only")] {
        let restored = TestDb::unmigrated().await;
        restore(bin, commands, dump, &restored);
        let client = restored.client().await;
        assert_eq!(one::<String>(&client, DERIVED).await, derived, "{commands}");
        client
            .batch_execute(&block(GUIDE, "sql", "setval"))
            .await
            .unwrap();
        let (code, output) = run(&restored, &["migrate"]);
        assert_eq!(code, 0, "{output}");
        assert!(!output.contains("applied"), "nothing is missing: {output}");

        let worker = TestWorker::start(&restored, Settings::default()).await;
        for id in [before, small, fair, last] {
            assert_eq!(ended(&client, id).await.state, "succeeded");
        }
        let next = enqueue(&client, "test.print", large()).await;
        assert!(next > last + 1_000_000_000, "{next} after {last}");
        assert_eq!(ended(&client, next).await.state, "succeeded");
        worker.drain().await;
        let schedules = "SELECT string_agg(name, ',') FROM rouse.schedules";
        assert_eq!(one::<String>(&client, schedules).await, "nightly");
    }
}

#[tokio::test]
async fn the_statements_of_the_guide_erase_the_ended_jobs_of_a_tenant() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let of = async |tenant: &str| {
        let payload = large();
        let id = enqueue_sql(
            &client,
            &format!("'test.print', '{payload}', tenant => '{tenant}'"),
        )
        .await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
        id
    };
    let (erased, other) = (of("customer-42").await, of("customer-43").await);
    worker.drain().await;
    let kept = async |id: i64| -> Vec<i64> {
        let tables = ["finished", "payload", "attempt", "log"];
        let mut counts = Vec::new();
        for table in tables {
            let key = if table == "finished" { "id" } else { "job" };
            let sql = format!("SELECT count(*) FROM rouse.{table} WHERE {key} = {id}");
            counts.push(one::<i64>(&client, &sql).await);
        }
        counts
    };
    let of_other = kept(other).await;
    assert_eq!(kept(erased).await, of_other);
    assert!(of_other[0] == 1 && of_other[1] == 1, "{of_other:?}");

    let statements = block(
        "docs/guides/jobs-and-queues.md",
        "sql",
        "CREATE TEMPORARY TABLE erased",
    );
    client
        .batch_execute(&format!("SET ROLE rouse_owner; {statements} RESET ROLE"))
        .await
        .unwrap();
    assert_eq!(kept(erased).await, [0; 4]);
    assert_eq!(kept(other).await, of_other);
}
