//! Notices to producers whose jobs no live worker can run.

use crate::support::TestDb;
use crate::support::database::raised;

/// The messages of the notices that these statements raise.
async fn notices(db: &TestDb, statements: &str) -> Vec<String> {
    let raised = raised(db, statements).await;
    raised.iter().map(|it| it.message().to_owned()).collect()
}

#[tokio::test]
async fn the_first_job_for_an_unserved_handler_raises_a_notice() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let unserved: Vec<String> = notices(&db, "SELECT rouse.enqueue('email.sned')").await;
    assert_eq!(unserved, Vec::<String>::new(), "no worker is alive");
    let (_alive, _gone) = (db.worker().await, db.worker().await);
    client
        .batch_execute(
            "UPDATE rouse.worker SET handlers = '{email.send}' WHERE worker_id = 'w-1';
             UPDATE rouse.worker SET handlers = '{email.sned2}', dead_at = now() WHERE worker_id = 'w-2'",
        )
        .await
        .unwrap();
    let loads = "UPDATE rouse.worker SET stats = jsonb_build_object('loading', $1::boolean) WHERE worker_id = 'w-1'";
    client.execute(loads, &[&true]).await.unwrap();
    let soon = notices(&db, "SELECT rouse.enqueue('email.soon')").await;
    assert_eq!(
        soon,
        Vec::<String>::new(),
        "a worker is loading its modules"
    );
    client.execute(loads, &[&false]).await.unwrap();
    let raised_notices = notices(
        &db,
        "SELECT rouse.enqueue('email.send'); SELECT rouse.enqueue('email.sned2'); SELECT rouse.enqueue('email.sned2');
         SELECT rouse.enqueue('bound', source => 'legacy'); SELECT rouse.enqueue_many('email.sned3', '{1}')",
    )
    .await;
    let [first, second] = raised_notices.as_slice() else {
        panic!("{raised_notices:?}");
    };
    assert!(
        first.contains("no live worker has the handler email.sned2"),
        "{first}"
    );
    assert!(
        second.contains("no live worker has the handler email.sned3"),
        "{second}"
    );
}

#[tokio::test]
async fn the_first_job_of_a_lane_raises_a_notice_if_no_live_worker_knows_a_tag_key() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (_one, _other, _silent) = (db.worker().await, db.worker().await, db.worker().await);
    client
        .batch_execute(
            r#"UPDATE rouse.worker SET handlers = '{text.stats}', capabilities = '{"text.stats": {"payload_keys": ["text", "top"]}}'
               WHERE worker_id IN ('w-1', 'w-2');
               UPDATE rouse.worker SET handlers = '{text.open}', capabilities = '{"text.open": {}}' WHERE worker_id = 'w-3'"#,
        )
        .await
        .unwrap();
    let raised_notices = notices(
        &db,
        r#"SELECT rouse.enqueue('text.stats', '{"text": "a", "tpo": 3}'); SELECT rouse.enqueue('text.stats', '{"tpo": 3}');
           SELECT rouse.enqueue_unique('text.stats', 'k', '{"txt": "a"}', queue => 'a');
           SELECT rouse.enqueue_many('text.stats', ARRAY['{"tetx": 1}', '{}']::jsonb[], queue => 'b');
           SELECT rouse.enqueue('text.stats', '{"top": 3}', queue => 'c'); SELECT rouse.enqueue('text.stats', '[1]', queue => 'd');
           SELECT rouse.enqueue('text.stats', NULL, queue => 'e'); SELECT rouse.enqueue('text.open', '{"any": 1}')"#,
    )
    .await;
    let of = |key: &str| {
        format!("rouse.enqueue: no live worker knows '{key}' in a payload of text.stats")
    };
    assert_eq!(raised_notices, [of("tpo"), of("txt"), of("tetx")]);

    // A worker's text reaches a producer's terminal.
    client
        .batch_execute(
            r#"UPDATE rouse.worker SET capabilities = '{"text.stats": {"payload_keys": ["text", "\u001b]0;title", "a\nb", "\u202eab", "größe"]}}'
               WHERE worker_id IN ('w-1', 'w-2')"#,
        )
        .await
        .unwrap();
    let again = r#"SELECT rouse.enqueue('text.stats', '{"tpo": 3}', queue => 'f')"#;
    let hint = raised(&db, again).await.remove(0);
    assert_eq!(hint.hint(), Some("Check the key. Known keys: größe, text."));
}
