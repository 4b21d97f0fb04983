//! The catalog of lanes: its limits, and how lanes are closed and removed.

use rouse::store::{CATALOG_WINDOW, Store};
use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::worker::{TIMEOUT, TestWorker, cancel, enqueue, enqueue_sql, until};

/// Marks every lane as unused for two days.
const UNUSED: &str = "UPDATE rouse.lane SET used_at = now() - interval '2 days'";
/// Marks every lane as closed two days ago.
const RETIRED: &str = "UPDATE rouse.lane SET closed_at = now() - interval '2 days'";

/// The numbers of rows of the catalog that were closed, opened again, and removed.
async fn maintain(store: &Store) -> (i32, i32, i32) {
    store.maintain_lanes().await.unwrap()
}

/// The numbers of open and closed rows of the catalog.
async fn rows(client: &Client) -> (i64, i64) {
    let sql = "SELECT count(*) FILTER (WHERE closed_at IS NULL), count(closed_at) FROM rouse.lane";
    let row = client.query_one(sql, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

/// The message and the hint of an enqueue with these arguments, which must be refused.
async fn refused(client: &Client, args: &str) -> (String, String) {
    let sql = format!("SELECT rouse.enqueue({args})");
    let error = client.query_one(&sql, &[]).await.unwrap_err();
    let error = error.as_db_error().unwrap();
    assert_eq!(error.code().code(), "54000");
    (
        error.message().to_owned(),
        error.hint().unwrap_or_default().to_owned(),
    )
}

#[tokio::test]
async fn lanes_are_limited_and_the_error_explains_what_makes_a_lane() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let limits: (i32, i32) = {
        let sql = "SELECT lanes_per_handler_max, lanes_max FROM rouse.limits";
        let row = client.query_one(sql, &[]).await.unwrap();
        (row.get(0), row.get(1))
    };
    assert_eq!(limits, (1_000, 20_000));
    client
        .batch_execute("UPDATE rouse.limits SET lanes_per_handler_max = 3, lanes_max = 4")
        .await
        .unwrap();
    for args in ["'x'", "'x', priority => 'low'", "'x', tags => '{gpu}'"] {
        enqueue_sql(&client, args).await;
    }
    let (message, hint) = refused(&client, "'x', queue => 'other'").await;
    assert!(
        message.contains("handler x already has 3 lanes"),
        "{message}"
    );
    for part in [
        "queue, priority and tags",
        "lanes_per_handler_max in rouse.limits",
    ] {
        assert!(hint.contains(part), "{hint}");
    }
    enqueue_sql(&client, "'x', tags => '{gpu}'").await;
    enqueue_sql(&client, "'y'").await;
    let (message, hint) = refused(&client, "'z'").await;
    assert!(message.contains("there are already 4 lanes"), "{message}");
    assert!(hint.contains("lanes_max"), "{hint}");

    // Closed lanes do not count.
    let store = db.worker().await;
    client
        .batch_execute(&format!("DELETE FROM rouse.job; {UNUSED}"))
        .await
        .unwrap();
    assert_eq!(maintain(&store).await, (4, 0, 0));
    enqueue_sql(&client, "'x', queue => 'other'").await;
}

#[tokio::test]
async fn the_order_and_the_bounds_of_an_array_of_tags_do_not_make_another_lane() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for tags in ["[0:0]={gpu}", "{gpu}", "[-3:-3]={gpu}", "{gpu,gpu}"] {
        enqueue_sql(&client, &format!("'x', tags => '{tags}'")).await;
    }
    for tags in ["[0:1]={b,a}", "{a,b}", "{b,a}"] {
        enqueue_sql(&client, &format!("'x', tags => '{tags}'")).await;
    }
    let sql = "SELECT l.tags::text, (SELECT count(*) FROM rouse.job AS j WHERE j.lane = l.id) FROM rouse.lane AS l ORDER BY 1";
    let lanes = client.query(sql, &[]).await.unwrap();
    let lanes: Vec<(String, i64)> = lanes.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(lanes, [("{a,b}".to_owned(), 3), ("{gpu}".to_owned(), 4)]);
}

#[tokio::test]
async fn a_lane_is_closed_after_a_day_without_jobs_and_catalogued_again_with_its_next_job() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let ready = enqueue(&client, "x", json!({})).await;
    let scheduled = enqueue_sql(&client, "'y', run_at => now() + interval '1 hour'").await;
    let job = enqueue_sql(&client, "'z'").await;
    let claimed = crate::support::claims::claim(&store, 10).await;
    assert_eq!(claimed.len(), 2);
    enqueue_sql(&client, "'x'").await;
    assert_eq!(maintain(&store).await, (0, 0, 0));
    client.batch_execute(UNUSED).await.unwrap();
    assert_eq!(
        maintain(&store).await,
        (0, 0, 0),
        "each has jobs: ready, scheduled, running"
    );
    for id in [ready, scheduled, job] {
        assert!(cancel(&client, id).await);
    }
    assert_eq!(
        maintain(&store).await,
        (0, 0, 0),
        "the lane had jobs recently"
    );
    client.batch_execute(UNUSED).await.unwrap();
    assert_eq!(maintain(&store).await, (2, 0, 0));
    assert_eq!(rows(&client).await, (1, 2));
    // Ended jobs are still shown with the names of their lane.
    let names: i64 = client
        .query_one("SELECT count(handler) FROM rouse.jobs", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(names, 4);
    enqueue(&client, "z", json!({})).await;
    assert_eq!(rows(&client).await, (2, 2));
    assert_eq!(
        maintain(&store).await,
        (0, 0, 1),
        "the catalog has a row for it"
    );
}

#[tokio::test]
async fn a_job_enqueued_while_its_lane_is_being_closed_runs() {
    let db = TestDb::new().await;
    let (mut producer, mut closing) = (db.client().await, db.client().await);
    let (client, store) = (db.client().await, db.worker().await);
    cancel(&client, enqueue(&client, "noop", json!({})).await).await;
    client.batch_execute(UNUSED).await.unwrap();

    // Enqueued before the lane is closed, committed after it.
    let transaction = producer.transaction().await.unwrap();
    let sql = "SELECT rouse.enqueue('noop')";
    let before: i64 = transaction.query_one(sql, &[]).await.unwrap().get(0);
    assert_eq!(maintain(&store).await, (1, 0, 0));
    transaction.commit().await.unwrap();

    // Enqueued and committed while the lane is being closed in a transaction that commits later.
    client
        .batch_execute("UPDATE rouse.lane SET closed_at = NULL")
        .await
        .unwrap();
    let transaction = closing.transaction().await.unwrap();
    transaction
        .execute("UPDATE rouse.lane SET closed_at = now()", &[])
        .await
        .unwrap();
    let during = enqueue(&client, "noop", json!({})).await;
    transaction.commit().await.unwrap();
    assert_eq!(rows(&client).await, (0, 1));

    // A worker that does not remember the lane.
    let worker = TestWorker::start(&db, Settings::default()).await;
    for id in [before, during] {
        until(&client, id, |job| job.state == "succeeded").await;
    }
    worker.drain().await;
}

#[tokio::test]
async fn a_job_that_appears_in_a_retired_lane_runs_after_the_next_maintenance() {
    let db = TestDb::new().await;
    let (mut producer, client) = (db.client().await, db.client().await);
    let store = db.worker().await;
    cancel(&client, enqueue(&client, "noop", json!({})).await).await;
    let transaction = producer.transaction().await.unwrap();
    let sql = "SELECT rouse.enqueue('noop')";
    let late: i64 = transaction.query_one(sql, &[]).await.unwrap().get(0);
    client.batch_execute(RETIRED).await.unwrap();
    let worker = TestWorker::start(&db, Settings::default()).await;
    // The worker has read the catalog and completed its startup.
    let other = enqueue_sql(&client, "'noop', queue => 'other'").await;
    until(&client, other, |job| job.state == "succeeded").await;
    transaction.commit().await.unwrap();
    // The worker may be maintaining the catalog, on a snapshot from before that commit; a concurrent call then does
    // nothing.
    let reopened = async {
        while rows(&client).await.0 < 2 {
            maintain(&store).await;
        }
    };
    tokio::time::timeout(TIMEOUT, reopened).await.unwrap();
    until(&client, late, |job| job.state == "succeeded").await;
    assert_eq!(rows(&client).await.0, 2, "each lane is open once");
    worker.drain().await;
}

#[tokio::test]
async fn workers_read_retired_lanes_only_at_the_end_of_the_catalog() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let read = async || {
        let lanes = store.catalog_after(i64::MIN, None).await.unwrap().lanes;
        let handlers = lanes.into_iter().map(|lane| (lane.handler, lane.retired));
        handlers.collect::<Vec<_>>()
    };
    enqueue(&client, "old", json!({})).await;
    client.batch_execute(RETIRED).await.unwrap();
    let end = format!(
        "SELECT setval('rouse.lane_seq', last_value + {} - 1) FROM rouse.lane_seq",
        CATALOG_WINDOW - 1
    );
    client.batch_execute(&end).await.unwrap();
    enqueue(&client, "new", json!({})).await;
    let (old, new) = (("old".to_owned(), true), ("new".to_owned(), false));
    assert_eq!(read().await, [old, new.clone()], "the peek sums both");
    enqueue(&client, "newer", json!({})).await;
    assert_eq!(read().await, [new, ("newer".to_owned(), false)]);
}

#[tokio::test]
async fn a_retry_of_a_job_whose_lane_is_retired_runs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let ended = enqueue(&client, "noop", json!({})).await;
    cancel(&client, ended).await;
    client.batch_execute(RETIRED).await.unwrap();
    let sql = "SELECT rouse.retry($1)";
    let retry: i64 = client.query_one(sql, &[&ended]).await.unwrap().get(0);
    assert_eq!(rows(&client).await, (1, 1));
    let worker = TestWorker::start(&db, Settings::default()).await;
    until(&client, retry, |job| job.state == "succeeded").await;
    worker.drain().await;
}

#[tokio::test]
async fn a_closed_lane_is_removed_once_no_kept_row_can_refer_to_it() {
    let db = TestDb::new().await;
    let (mut writer, client) = (db.client().await, db.client().await);
    let store = db.worker().await;
    client
        .batch_execute(
            "CREATE TABLE rouse.finished_20200101 PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')",
        )
        .await
        .unwrap();
    cancel(&client, enqueue(&client, "x", json!({})).await).await;
    // A transaction that started to write before the lane was closed.
    let transaction = writer.transaction().await.unwrap();
    transaction
        .execute("UPDATE rouse.queue SET created_at = now()", &[])
        .await
        .unwrap();
    client
        .batch_execute("UPDATE rouse.lane SET closed_at = now() - interval '3 days'")
        .await
        .unwrap();
    assert_eq!(maintain(&store).await, (0, 0, 0), "an older day is kept");
    client
        .batch_execute("DROP TABLE rouse.finished_20200101")
        .await
        .unwrap();
    assert_eq!(
        maintain(&store).await,
        (0, 0, 0),
        "the writer may know the lane"
    );
    transaction.commit().await.unwrap();
    // Writers of other databases, such as those of other tests, cannot be distinguished.
    let removed = async { while maintain(&store).await != (0, 0, 1) {} };
    tokio::time::timeout(TIMEOUT, removed).await.unwrap();
    assert_eq!(rows(&client).await, (0, 0));
}

/// A queue whose jobs all have a tenant has no job in its lane without a key, which is closed a day after it was added.
#[tokio::test]
async fn changed_settings_are_announced_even_if_only_lanes_with_keys_are_open() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.set_fair_share('mail', policy => 'drr');
             SELECT rouse.enqueue('noop', queue => 'mail', tenant => 'a');
             UPDATE rouse.lane SET closed_at = now() WHERE key = ''",
        )
        .await
        .unwrap();
    let end = async || -> i64 {
        let end = "SELECT max(seq) FROM rouse.lane WHERE closed_at IS NULL";
        client.query_one(end, &[]).await.unwrap().get(0)
    };
    for change in [
        "rouse.set_fair_share('mail', quantum => 2)",
        "rouse.set_gate('all', 'max_concurrent', max => 10)",
        "rouse.delete_gate('all')",
        "rouse.set_shards('mail', 4)",
    ] {
        let before = end().await;
        let change = format!("SELECT {change}");
        client.batch_execute(&change).await.unwrap();
        assert!(end().await > before, "{change}");
    }
}

#[tokio::test]
async fn one_worker_at_a_time_maintains_the_catalog_and_others_do_not_wait() {
    let db = TestDb::new().await;
    let (mut other, client) = (db.client().await, db.client().await);
    let store = db.worker().await;
    cancel(&client, enqueue(&client, "x", json!({})).await).await;
    client.batch_execute(UNUSED).await.unwrap();
    let transaction = other.transaction().await.unwrap();
    transaction
        .batch_execute("LOCK TABLE rouse.lane IN SHARE UPDATE EXCLUSIVE MODE")
        .await
        .unwrap();
    assert_eq!(maintain(&store).await, (0, 0, 0));
    enqueue(&client, "new", json!({})).await;
    transaction.commit().await.unwrap();
    assert_eq!(maintain(&store).await, (1, 0, 0));
}

#[tokio::test]
async fn a_used_queue_stays_in_the_catalog_with_its_last_use() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.worker().await;
    let id = enqueue_sql(&client, "'x', queue => 'once'").await;
    let used =
        "SELECT last_used_at > now() - interval '1 minute' FROM rouse.queues WHERE name = 'once'";
    assert!(client.query_one(used, &[]).await.unwrap().get::<_, bool>(0));
    cancel(&client, id).await;
    client
        .batch_execute(
            "UPDATE rouse.lane SET closed_at = now() - interval '3 days', used_at = now() - interval '4 days'",
        )
        .await
        .unwrap();
    let removed = async { while maintain(&store).await != (0, 0, 1) {} };
    tokio::time::timeout(TIMEOUT, removed).await.unwrap();
    let row = client
        .query_one(
            "SELECT ready, last_used_at BETWEEN now() - interval '5 days' AND now() - interval '3 days' FROM rouse.queues WHERE name = 'once'",
            &[],
        )
        .await
        .unwrap();
    assert_eq!((row.get(0), row.get(1)), (0_i64, true));
    let (code, listed) = crate::commands::run(&db, &["queue", "ls"]);
    assert!(
        code == 0 && listed.contains("once") && listed.contains("last used"),
        "{listed}"
    );
    let never = "SELECT last_used_at IS NULL FROM rouse.queues WHERE name = 'default'";
    assert!(
        client
            .query_one(never, &[])
            .await
            .unwrap()
            .get::<_, bool>(0)
    );
}
