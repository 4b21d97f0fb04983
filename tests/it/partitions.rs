//! The partitions of the history, and what stands in their way.

use std::time::Duration;

use tokio::time::timeout;

use crate::support::TestDb;

#[tokio::test]
async fn old_partitions_are_dropped_and_one_that_is_being_read_is_left_for_later() {
    let db = TestDb::new().await;
    let (mut reader, client, store) = (db.client().await, db.client().await, db.worker().await);
    client
        .batch_execute(
            "CREATE TABLE rouse.finished_20200101 PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-01') TO ('2020-01-02');
             CREATE TABLE rouse.attempt_20200101 PARTITION OF rouse.attempt FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')",
        )
        .await
        .unwrap();
    let transaction = reader.transaction().await.unwrap();
    transaction
        .query("SELECT FROM rouse.finished", &[])
        .await
        .unwrap();
    assert_eq!(
        store.maintain_partitions(7).await.unwrap(),
        (0, 1),
        "dropped, in use; attempts stay as long as a job may be theirs"
    );
    transaction.rollback().await.unwrap();
    assert_eq!(store.maintain_partitions(7).await.unwrap(), (1, 0));
    assert_eq!(store.maintain_partitions(7).await.unwrap(), (1, 0));
    assert_eq!(
        store.maintain_partitions(7).await.unwrap(),
        (0, 0),
        "recent ones stay"
    );
    assert_eq!(
        store.prepare_partitions().await.unwrap(),
        0,
        "they are there already"
    );
}

#[tokio::test]
async fn what_is_in_use_keeps_nothing_else_from_being_dropped() {
    let db = TestDb::new().await;
    let (mut reader, client, store) = (db.client().await, db.client().await, db.worker().await);
    for day in 1..=4 {
        let sql = format!(
            "CREATE TABLE rouse.finished_2020010{day} PARTITION OF rouse.finished_default
             FOR VALUES FROM ('2020-01-0{day}') TO ('2020-01-0{}')",
            day + 1
        );
        client.batch_execute(&sql).await.unwrap();
    }
    let transaction = reader.transaction().await.unwrap();
    transaction
        .batch_execute("SELECT FROM rouse.finished_20200102; SELECT FROM rouse.finished_20200103")
        .await
        .unwrap();
    assert_eq!(
        store.maintain_partitions(7).await.unwrap(),
        (2, 2),
        "the first and the last"
    );
    assert_eq!(store.maintain_partitions(7).await.unwrap(), (0, 2));
    transaction.rollback().await.unwrap();
    assert_eq!(store.maintain_partitions(7).await.unwrap(), (2, 0));
}

#[tokio::test]
async fn a_partition_that_somebody_rewrites_keeps_no_other_from_being_dropped() {
    let db = TestDb::new().await;
    let (mut other, client, store) = (db.client().await, db.client().await, db.worker().await);
    for day in 1..=2 {
        let sql = format!(
            "CREATE TABLE rouse.finished_2020010{day} PARTITION OF rouse.finished_default
             FOR VALUES FROM ('2020-01-0{day}') TO ('2020-01-0{}')",
            day + 1
        );
        client.batch_execute(&sql).await.unwrap();
    }
    let transaction = other.transaction().await.unwrap();
    transaction
        .batch_execute("LOCK TABLE rouse.finished_20200101 IN ACCESS EXCLUSIVE MODE")
        .await
        .unwrap();
    assert_eq!(store.maintain_partitions(7).await.unwrap(), (1, 1));
    store.maintain_lanes().await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(store.maintain_partitions(7).await.unwrap(), (1, 0));
}

/// With months of 30 days this is one day and more; by the calendar it is in the future.
#[tokio::test]
async fn no_interval_drops_what_is_not_a_day_old() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for keep in ["-1200 mons 36001 days", "23 hours", "-1 day"] {
        let sql = format!("SELECT rouse.drop_partitions('{keep}')");
        let error = client.query(&sql, &[]).await.expect_err("it is refused");
        let error = error.as_db_error().expect("an error of the database");
        assert!(
            error.message().contains("keep must be at least one day"),
            "{keep}: {}",
            error.message()
        );
    }
}

#[tokio::test]
async fn partitions_are_made_for_a_month_at_most() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for ahead in ["32", "-1", "NULL"] {
        let sql = format!("SELECT rouse.prepare_partitions({ahead})");
        let error = client.query(&sql, &[]).await.expect_err("it is refused");
        let error = error.as_db_error().expect("an error of the database");
        assert!(
            error.message().contains("ahead must be 0 to 31 days"),
            "{ahead}: {}",
            error.message()
        );
    }
}

#[tokio::test]
async fn a_lock_that_any_login_can_hold_keeps_nobody_from_making_and_dropping_partitions() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute(
            "SELECT pg_advisory_lock(hashtextextended('rouse.partitions', 0));
             CREATE TABLE rouse.finished_20200101 PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-01') TO ('2020-01-02');
             DO $$ BEGIN EXECUTE format('DROP TABLE rouse.log_%s', to_char(now() AT TIME ZONE 'UTC' + interval '7 days', 'YYYYMMDD')); END $$",
        )
        .await
        .unwrap();
    let prepared = timeout(Duration::from_secs(10), store.prepare_partitions()).await;
    assert_eq!(prepared.expect("it waits for nobody").unwrap(), 1);
    assert_eq!(store.maintain_partitions(7).await.unwrap(), (1, 0));
}

#[tokio::test]
async fn who_makes_partitions_waits_for_who_does_the_same_and_who_drops_them_leaves_it() {
    let db = TestDb::new().await;
    let (mut other, client, store) = (db.client().await, db.client().await, db.worker().await);
    client
        .batch_execute(
            "CREATE TABLE rouse.finished_20200101 PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')",
        )
        .await
        .unwrap();
    let making = other.transaction().await.unwrap();
    making
        .query("SELECT rouse.prepare_partitions(9)", &[])
        .await
        .unwrap();
    assert_eq!(store.maintain_partitions(7).await.unwrap(), (0, 0));
    let waits = client.query_one("SELECT rouse.prepare_partitions(9)", &[]);
    let done = async {
        tokio::task::yield_now().await;
        making.commit().await.unwrap();
    };
    let (made, ()) = tokio::join!(waits, done);
    assert_eq!(made.unwrap().get::<_, i32>(0), 0, "they are there already");
    assert_eq!(store.maintain_partitions(7).await.unwrap(), (1, 0));
}
