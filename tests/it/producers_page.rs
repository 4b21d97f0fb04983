//! The page for producers: its SQL returns what the page shows.

use rouse::worker::Settings;

use crate::support::TestDb;
use crate::support::page::{blocks, run_sql};
use crate::support::worker::{TestWorker, until_true, watched};

#[tokio::test]
async fn the_sql_on_the_page_for_producers_returns_what_the_page_shows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, _folder) = watched(&["text_stats.wasm"]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    let blocks = blocks("docs/guides/producers.md");
    let sql: Vec<_> = blocks.iter().filter(|block| block.kind == "sql").collect();
    assert!(sql.len() >= 9, "{}", sql.len());
    for block in sql {
        run_sql(&client, block).await;
        // A reader takes a while to get to the statement that looks at a result.
        let done = "SELECT NOT EXISTS (SELECT FROM rouse.jobs WHERE handler = 'text.stats' AND finished_at IS NULL)";
        until_true(&client, done).await;
    }
    worker.drain().await;
}

#[tokio::test]
async fn a_trigger_without_rights_fails_as_the_page_describes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = "CREATE ROLE invoking_clerk LOGIN;
        CREATE SCHEMA shop;
        CREATE TABLE shop.things (id bigint);
        GRANT USAGE ON SCHEMA shop TO invoking_clerk;
        GRANT INSERT ON shop.things TO invoking_clerk;
        CREATE FUNCTION shop.enqueue_thing() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM rouse.enqueue(''shop.invoice''); RETURN NULL; END';
        CREATE TRIGGER enqueue_thing AFTER INSERT ON shop.things FOR EACH ROW EXECUTE FUNCTION shop.enqueue_thing();
        SET ROLE invoking_clerk;";
    client.batch_execute(sql).await.unwrap();
    let refused = client
        .execute("INSERT INTO shop.things VALUES (1)", &[])
        .await;
    let refused = refused.unwrap_err();
    let message = refused
        .as_db_error()
        .expect("an error from the server")
        .message();
    assert_eq!(message, "permission denied for schema rouse");

    client.batch_execute("RESET ROLE").await.unwrap();
    for (call, message) in [
        (
            "SELECT rouse.enqueue('shop.invoice', '{}'::json)",
            "function rouse.enqueue(unknown, json) does not exist",
        ),
        (
            "SELECT rouse.enqueue('shop.invoice', '{1,2}')",
            "invalid input syntax for type json",
        ),
    ] {
        let wrong = client.simple_query(call).await.unwrap_err();
        assert_eq!(wrong.as_db_error().unwrap().message(), message);
        let page = blocks("docs/guides/producers.md");
        let prose: String = page.iter().map(|block| block.before.as_str()).collect();
        assert!(prose.contains(message), "{message}");
    }
}
