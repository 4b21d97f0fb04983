//! Lanes among thousands of others, with their keys or gates.

use std::time::Duration;

use crate::support::{TestDb, until_quicker_than};

use super::{BACKLOG, rows_read};

#[tokio::test]
async fn a_producer_looks_up_its_lane_after_the_catalog_has_grown() {
    const READ: &str = "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
         FROM pg_stat_xact_user_tables WHERE relid = 'rouse.lane'::regclass";
    const ENQUEUE: &str = "SELECT rouse.enqueue($1), rouse.enqueue_many($1, '{1}'::jsonb[])";
    let db = TestDb::new().await;
    let (mut producer, client) = (db.client().await, db.client().await);
    client.query(ENQUEUE, &[&"x"]).await.unwrap();
    client.batch_execute("ANALYZE rouse.lane").await.unwrap();
    // The session keeps the plans that it makes now.
    for _ in 0..10 {
        producer.query(ENQUEUE, &[&"x"]).await.unwrap();
    }
    client
        .query(
            "SELECT rouse.enqueue('handler' || n) FROM generate_series(1, $1::integer) AS n",
            &[&BACKLOG],
        )
        .await
        .unwrap();
    // The lane at the end of the catalog.
    client.query(ENQUEUE, &[&"y"]).await.unwrap();
    let transaction = producer.transaction().await.unwrap();
    let before: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    transaction.query(ENQUEUE, &[&"y"]).await.unwrap();
    let after: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    assert!(
        after - before <= 10,
        "{} lanes were read for two",
        after - before
    );
}

/// Both sessions keep the plans that they made while there was one key.
#[tokio::test]
async fn producers_and_claims_look_up_their_keys_alone_among_thousands() {
    let db = TestDb::new().await;
    let (mut producer, mut worker, client) =
        (db.client().await, db.client().await, db.client().await);
    let enqueue =
        |tenant: &str| format!("SELECT rouse.enqueue('x', queue => 'mail', tenant => '{tenant}')");
    let claim = "SELECT count(*) FROM rouse.claim((SELECT max(incarnation) FROM rouse.worker), sha256('key'), 7,
         ARRAY(SELECT ROW(l.id, 0, 60000, 1, NULL)::rouse.claim_order FROM rouse.lane AS l WHERE l.key <> '' ORDER BY l.id LIMIT 10), 10)";
    client
        .batch_execute(
            "SELECT rouse.set_fair_share('mail', policy => 'drr'),
                    rouse.set_gate('few', 'max_concurrent', key => '{tenant}', max => 1000),
                    rouse.set_gate('rate', 'throttle', key => '{tenant}', max => 1000, period => '1 s', burst => 1000),
                    rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')",
        )
        .await
        .unwrap();
    client.batch_execute(&enqueue("first")).await.unwrap();
    client
        .batch_execute("ANALYZE rouse.lane, rouse.gate_key, rouse.job")
        .await
        .unwrap();
    for _ in 0..10 {
        producer.batch_execute(&enqueue("first")).await.unwrap();
        worker.batch_execute(claim).await.unwrap();
    }
    client
        .batch_execute(&format!(
            "SELECT rouse.enqueue('x', queue => 'mail', tenant => 't' || n) FROM generate_series(1, {BACKLOG}) AS n;
             INSERT INTO rouse.gate_key (gate, key, until) SELECT 'rate', 't' || n, now() FROM generate_series(1, {BACKLOG}) AS n"
        ))
        .await
        .unwrap();
    let last = enqueue(&format!("t{BACKLOG}"));
    let read = rows_read(&mut producer, "rouse.lane", &last).await;
    assert!(read <= 20, "{read} lanes were read for one job");
    let read = rows_read(&mut worker, "rouse.gate_key", claim).await;
    assert!(read <= 100, "{read} keys were read for ten lanes");
}

/// The lanes share the only key of the throttle. Postgres may or may not remember the result for a key, depending on
/// estimates.
#[tokio::test]
async fn a_claim_counts_the_starts_of_a_throttle_once_for_all_its_lanes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.set_gate('few', 'max_concurrent', key => '{tenant}', max => 1000);
             SELECT rouse.set_gate('api', 'throttle', max => 1000, period => '1 day');
             SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}');
             SELECT rouse.enqueue('x', tenant => 't' || n) FROM generate_series(1, 100) AS n;
             CREATE SEQUENCE public.counted;
             GRANT USAGE ON SEQUENCE public.counted TO PUBLIC;
             ALTER FUNCTION rouse._tokens RENAME TO _uncounted_tokens;
             CREATE FUNCTION rouse._tokens(
                 p_max integer, p_period_ms bigint, p_burst integer, p_starts timestamptz[], p_until timestamptz, p_at timestamptz)
             RETURNS TABLE (tokens integer, wait_ms bigint) LANGUAGE plpgsql AS $$
             BEGIN
                 PERFORM nextval('public.counted');
                 RETURN QUERY SELECT * FROM rouse._uncounted_tokens(p_max, p_period_ms, p_burst, p_starts, p_until, p_at);
             END $$;
             SET enable_memoize = off",
        )
        .await
        .unwrap();
    let claim = "SELECT count(id) FROM rouse.claim((SELECT max(incarnation) FROM rouse.worker), sha256('key'), 7,
         ARRAY(SELECT ROW(l.id, 0, 60000, 1, NULL)::rouse.claim_order FROM rouse.lane AS l WHERE l.key <> ''), 1)";
    let claimed: i64 = client.query_one(claim, &[]).await.unwrap().get(0);
    assert_eq!(claimed, 1);
    let counted = "SELECT last_value FROM public.counted";
    let counted: i64 = client.query_one(counted, &[]).await.unwrap().get(0);
    assert_eq!(counted, 2, "before the claim, and after it");
}

/// Gates are found by the queues and handlers of the lanes: comparing each gate with each lane would take half a
/// minute.
#[tokio::test]
async fn a_claim_from_ten_thousand_lanes_among_twenty_thousand_gates_takes_moments() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let claim = "SELECT count(*) FROM rouse.claim((SELECT max(incarnation) FROM rouse.worker), sha256('key'), 7,
             ARRAY(SELECT ROW(n, 0, 60000, 1, NULL)::rouse.claim_order FROM generate_series(1, 10000) AS n), 10)";
    client
        .batch_execute(
            r#"SELECT rouse.set_gate('few', 'max_concurrent', handler => 'h0', key => '{tenant}', max => 1),
                      rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}');
               INSERT INTO rouse.lane (id, queue, handler, priority, tags, key)
               SELECT n, 'mail', 'h0', 'normal', '{}', format('{"tenant": "t%s"}', n) FROM generate_series(1, 10000) AS n"#,
        )
        .await
        .unwrap();
    // The session keeps the plans that it makes while there is one gate.
    for _ in 0..2 {
        client.batch_execute(claim).await.unwrap();
    }
    // The gates are inserted without the triggers of the table. If ALTER TABLE disabled the triggers, the other session
    // would make new plans.
    db.client()
        .await
        .batch_execute(
            "SET session_replication_role = replica;
             INSERT INTO rouse.gate (name, kind, handler, max)
             SELECT 'g' || n, 'max_concurrent', 'h' || n, 10 FROM generate_series(1, 20000) AS n",
        )
        .await
        .unwrap();
    until_quicker_than(Duration::from_secs(10), async || {
        client.batch_execute(claim).await.unwrap();
    })
    .await;
}
