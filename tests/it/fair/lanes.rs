//! The lanes of the keys of a fair queue, and what hosts read of its settings.

use rouse::store::FairVersion;

use crate::support::TestDb;

#[tokio::test]
async fn jobs_get_lanes_by_the_key_of_their_queue() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let lanes = async |queue: &str| -> Vec<String> {
        let lanes = "SELECT l.key || ' ' || count(j.id) FROM rouse.lane AS l JOIN rouse.job AS j ON j.lane = l.id
                     WHERE l.queue = $1 GROUP BY l.key ORDER BY l.key";
        let rows = client.query(lanes, &[&queue]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    };
    for (queue, key, expected) in [
        ("t", "tenant", ["", r#"{"tenant": "a"}"#].as_slice()),
        ("h", "handler", [""].as_slice()),
        ("s", "source", ["", r#"{"source": "x"}"#].as_slice()),
        (
            "th",
            "tenant-and-handler",
            ["", r#"{"tenant": "a"}"#].as_slice(),
        ),
    ] {
        // A lane that was open before the change, whose jobs stay in it.
        let enqueue = format!(
            "SELECT rouse.enqueue('greet', queue => '{queue}', tenant => 'a', source => 'x'),
                    rouse.enqueue('greet', queue => '{queue}')"
        );
        client.batch_execute(&enqueue).await.unwrap();
        assert_eq!(lanes(queue).await, [" 2"], "{queue}");
        client
            .batch_execute(&format!(
                "SELECT rouse.set_fair_share('{queue}', policy => 'drr', key => '{key}')"
            ))
            .await
            .unwrap();
        client.batch_execute(&enqueue).await.unwrap();
        client
            .batch_execute(&format!(
                "SELECT rouse.enqueue_many('greet', ARRAY['1']::jsonb[], queue => '{queue}', tenant => 'a', source => 'x');
                 SELECT (rouse.enqueue_unique('greet', 'k{queue}', queue => '{queue}', tenant => 'a', source => 'x')).id,
                        rouse.enqueue_flow(jsonb_build_array(jsonb_build_object(
                            'name', 'one', 'handler', 'greet', 'queue', '{queue}', 'tenant', 'a', 'source', 'x')))"
            ))
            .await
            .unwrap();
        let all = lanes(queue).await;
        let keys: Vec<&str> = all
            .iter()
            .map(|lane| lane.rsplit_once(' ').unwrap().0)
            .collect();
        assert_eq!(keys, expected, "{queue}");
        let keyed = all.last().unwrap();
        let jobs = if expected.len() == 2 { "4" } else { "7" };
        assert_eq!(keyed.rsplit_once(' ').unwrap().1, jobs, "{queue}: {all:?}");
        // Changes the setting back.
        client
            .batch_execute(&format!(
                "SELECT rouse.set_fair_share('{queue}', policy => 'fifo')"
            ))
            .await
            .unwrap();
        client.batch_execute(&enqueue).await.unwrap();
        assert_eq!(
            lanes(queue)
                .await
                .last()
                .unwrap()
                .rsplit_once(' ')
                .unwrap()
                .1,
            if expected.len() == 2 { "4" } else { "9" }
        );
    }
}

#[tokio::test]
async fn a_retry_is_in_the_lane_of_its_key_although_the_failed_job_was_not() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let fail = "SELECT rouse.fail(rouse.enqueue('greet', queue => 'mail', tenant => t), 'no') FROM unnest('{a,b}'::text[]) AS t";
    client.batch_execute(fail).await.unwrap();
    let retried = async |policy: &str| -> Vec<String> {
        let set = format!("SELECT rouse.set_fair_share('mail', policy => '{policy}')");
        client.batch_execute(&set).await.unwrap();
        let retry = "SELECT rouse.retry_jobs('{\"state\": \"failed\"}')";
        client.batch_execute(retry).await.unwrap();
        let keys = "SELECT l.key FROM rouse.job AS j JOIN rouse.lane AS l ON l.id = j.lane ORDER BY j.tenant";
        let rows = client.query(keys, &[]).await.unwrap();
        let fail = "SELECT rouse.fail(j.id, 'no') FROM rouse.job AS j";
        client.batch_execute(fail).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    };
    assert_eq!(
        retried("drr").await,
        [r#"{"tenant": "a"}"#, r#"{"tenant": "b"}"#]
    );
    assert_eq!(retried("fifo").await, ["", ""]);
}

#[tokio::test]
async fn tenants_beyond_the_limit_of_lanes_share_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.set_fair_share('mail', policy => 'drr'); UPDATE rouse.limits SET keyed_lanes_max = 2;
             SELECT rouse.enqueue('greet', queue => 'mail', tenant => n::text) FROM generate_series(1, 5) AS n;
             SELECT rouse.enqueue('greet', queue => 'mail', tenant => '1')",
        )
        .await
        .unwrap();
    let rows = client
        .query(
            "SELECT l.key, count(*) FROM rouse.job AS j JOIN rouse.lane AS l ON l.id = j.lane GROUP BY l.key ORDER BY l.key",
            &[],
        )
        .await
        .unwrap();
    let lanes: Vec<(String, i64)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(
        lanes,
        [
            ("*".into(), 3),
            (r#"{"tenant": "1"}"#.into(), 2),
            (r#"{"tenant": "2"}"#.into(), 1)
        ]
    );
}

/// The session has reached the limit of lanes before. Without a lane of its own, a new tenant would share one with others
/// until that lane has had no job for a day.
#[tokio::test]
async fn a_session_counts_lanes_again_after_a_minute_or_if_the_clock_was_set_back() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT rouse.set_fair_share('mail', policy => 'drr')")
        .await
        .unwrap();
    let lane_of_new_tenant = async |tenant: &str, seconds: i32| -> String {
        client
            .execute(
                "SELECT set_config('rouse.count_keyed_lanes_at', (date_part('epoch', clock_timestamp()) + $1::integer)::text, false)",
                &[&seconds],
            )
            .await
            .unwrap();
        let enqueue = "SELECT rouse.enqueue('greet', queue => 'mail', tenant => $1)";
        let id: i64 = client.query_one(enqueue, &[&tenant]).await.unwrap().get(0);
        let key = "SELECT l.key FROM rouse.job AS j JOIN rouse.lane AS l ON l.id = j.lane WHERE j.id = $1";
        client.query_one(key, &[&id]).await.unwrap().get(0)
    };
    assert_eq!(lane_of_new_tenant("a", -1).await, r#"{"tenant": "a"}"#);
    assert_eq!(lane_of_new_tenant("b", 3600).await, r#"{"tenant": "b"}"#);
    assert_eq!(lane_of_new_tenant("c", 59).await, "*");
}

/// The entries of an index have at most 2,704 bytes. These texts can hardly be compressed.
#[tokio::test]
async fn tenants_that_are_too_long_for_the_catalog_together_with_their_tags_share_a_lane() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let tags = "ARRAY(SELECT left('t' || translate(string_agg(encode(sha256(convert_to(concat(n, '-', m), 'UTF8')), 'base64'), ''), '+/=', '..'), 128)
                      FROM generate_series(1, 16) AS n, generate_series(1, 4) AS m GROUP BY n)";
    // 200 characters, of three bytes each.
    let tenant = |seed: i32| {
        format!(
            "(SELECT string_agg(chr(19968 + (hashint4(n + {seed}) & 8191)), '') FROM generate_series(1, 200) AS n)"
        )
    };
    let (one, other) = (tenant(0), tenant(1_000));
    let enqueue = format!(
        "SELECT rouse.set_fair_share('mail', policy => 'drr');
         SELECT rouse.enqueue('greet', queue => 'mail', tenant => {one}, tags => {tags});
         SELECT rouse.enqueue('greet', queue => 'mail', tenant => {other}, tags => {tags});
         SELECT rouse.enqueue('greet', queue => 'mail', tenant => 'short', tags => {tags});
         SELECT rouse.enqueue('greet', queue => 'mail', tenant => {one})"
    );
    client.batch_execute(&enqueue).await.unwrap();
    let sql = "SELECT CASE WHEN length(l.key) > 200 THEN 'long' ELSE l.key END || ' ' || cardinality(l.tags) || ' ' || count(*)
               FROM rouse.job AS j JOIN rouse.lane AS l ON l.id = j.lane GROUP BY l.key, l.tags ORDER BY 1";
    let rows = client.query(sql, &[]).await.unwrap();
    let lanes: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(lanes, ["* 16 3", "long 0 1"]);
}

/// A lane that was added by a transaction which had not seen the change is divided by the next maintenance.
#[tokio::test]
async fn a_lane_that_is_added_during_a_change_is_divided_later() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut other = db.client().await;
    let open = other.transaction().await.unwrap();
    open.batch_execute("SELECT rouse.enqueue('greet', queue => 'mail', tenant => 'a')")
        .await
        .unwrap();
    client
        .batch_execute("SELECT rouse.set_fair_share('mail', policy => 'drr')")
        .await
        .unwrap();
    open.commit().await.unwrap();
    let divided = "SELECT coalesce(max(l.divided_by::text), 'not') FROM rouse.lane AS l WHERE l.queue = 'mail' AND l.key = ''";
    let by: String = client.query_one(divided, &[]).await.unwrap().get(0);
    assert_eq!(by, "not");
    db.worker().await.maintain_lanes().await.unwrap();
    let by: String = client.query_one(divided, &[]).await.unwrap().get(0);
    assert_eq!(by, "{tenant}");
}

/// New lanes are frequent, and each queue may have a megabyte of weights.
#[tokio::test]
async fn a_host_reads_the_settings_of_fair_queues_again_only_after_a_change() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.store());
    let read = async |known: Option<FairVersion>| {
        let catalog = store.catalog_after(i64::MIN, known).await;
        catalog.unwrap().fair
    };
    let none = read(None).await.expect("no version is known");
    assert!(none.queues.is_empty());
    assert_eq!(read(Some(none.version)).await, None);
    let mut known = none.version;
    for (queue, quantum) in [("mail", 2), ("sms", 3), ("mail", 4)] {
        let set = format!(
            "SELECT rouse.set_fair_share('{queue}', policy => 'drr', quantum => {quantum})"
        );
        client.batch_execute(&set).await.unwrap();
        let changed = read(Some(known)).await.expect("they have changed");
        assert_eq!(changed.queues[queue].quantum, quantum);
        known = changed.version;
        client
            .batch_execute(
                "SELECT rouse.enqueue('greet', queue => 'mail', tenant => gen_random_uuid()::text)",
            )
            .await
            .unwrap();
        assert_eq!(read(Some(known)).await, None, "a new lane changes nothing");
        let all = read(None).await.expect("no version is known");
        assert_eq!(all.queues, changed.queues);
    }
    client
        .batch_execute(
            "SELECT rouse.set_fair_share(q.name, policy => 'fifo') FROM unnest(ARRAY['mail', 'sms']) AS q(name)",
        )
        .await
        .unwrap();
    let changed = read(Some(known)).await.expect("they have changed");
    assert!(changed.queues.is_empty());
}
