//! The partitions of the history, and what stands in their way.

use crate::support::TestDb;

#[tokio::test]
async fn old_partitions_are_dropped_and_one_that_is_being_read_is_left_for_later() {
    let db = TestDb::new().await;
    let (mut reader, client, store) = (db.client().await, db.client().await, db.worker().await);
    client
        .batch_execute(
            "CREATE TABLE rouse.finished_20200101 PARTITION OF rouse.finished FOR VALUES FROM ('2020-01-01') TO ('2020-01-02');
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
        store.drop_partitions(7).await.unwrap(),
        (1, 1),
        "dropped, in use"
    );
    transaction.rollback().await.unwrap();
    assert_eq!(store.drop_partitions(7).await.unwrap(), (1, 0));
    assert_eq!(
        store.drop_partitions(7).await.unwrap(),
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
            "CREATE TABLE rouse.finished_2020010{day} PARTITION OF rouse.finished
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
        store.drop_partitions(7).await.unwrap(),
        (2, 2),
        "the first and the last"
    );
    assert_eq!(store.drop_partitions(7).await.unwrap(), (0, 2));
    transaction.rollback().await.unwrap();
    assert_eq!(store.drop_partitions(7).await.unwrap(), (2, 0));
}
