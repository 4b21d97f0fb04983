//! The rows that a statement reads depend on its arguments, not on the statistics of Postgres.

mod deadlines;
mod lanes;
mod old_versions;
mod one_job;
mod operators;
mod people;

use std::time::Duration;

use tokio_postgres::Client;
use tokio_postgres::types::ToSql;

use crate::support::{TestDb, until_quicker_than};

const JOBS: usize = 10;
const BACKLOG: i32 = 3_000;
const FENCE: i64 = 7;

/// Runs a call in a transaction of its own; returns the ids that it returns, and the number of rows of `rouse.job` that
/// it has read.
async fn run(client: &mut Client, sql: &str, params: &[&(dyn ToSql + Sync)]) -> (Vec<i64>, i64) {
    // Counted by this session since it last reported to the server.
    const READ: &str = "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
         FROM pg_stat_xact_user_tables WHERE relid = 'rouse.job'::regclass";
    let transaction = client.transaction().await.unwrap();
    let before: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    let rows = transaction.query(sql, params).await.unwrap();
    let after: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    transaction.commit().await.unwrap();
    (rows.iter().map(|row| row.get(0)).collect(), after - before)
}

/// Performs each routine action of a worker once, on ten jobs; returns the rows that each call has read.
async fn run_worker_actions(client: &mut Client) -> Vec<(&'static str, i64)> {
    // A worker with a known key.
    const REGISTER: &str =
        "SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
    const CLAIM: &str = "SELECT id FROM rouse.claim((SELECT max(incarnation) FROM rouse.worker), sha256('key'), $1,
         ARRAY(SELECT ROW(o.lane, o.after, o.lease_ms, NULL, NULL)::rouse.claim_order FROM unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS o(lane, after, lease_ms)), $5)";
    const CLAIMED: &str = "SELECT id FROM rouse.claimed((SELECT max(incarnation) FROM rouse.worker), sha256('key'), $1, $2)";
    const RENEW: &str = "SELECT id FROM rouse.renew((SELECT max(incarnation) FROM rouse.worker), sha256('key'), $1, $2, $3)";
    const SETTLE: &str = "SELECT id FROM rouse.settle((SELECT max(incarnation) FROM rouse.worker), sha256('key'),
         ARRAY(SELECT ROW(s.id, s.fence, s.state, 1, s.result::jsonb, s.error::jsonb, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::rouse.settlement
               FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::text[]) AS s(id, fence, state, result, error)), '{}', $6)";
    const REPORT: &str = "SELECT * FROM rouse.report((SELECT max(incarnation) FROM rouse.worker), sha256('key'),
         ARRAY(SELECT ROW(r.id, $1, 50, 'half')::rouse.progress_report FROM unnest($2::bigint[]) AS r(id)), '{}', '{}')";
    const REPORT_USAGE: &str = "SELECT 1::bigint FROM rouse.report_usage((SELECT max(incarnation) FROM rouse.worker), sha256('key'),
         ARRAY(SELECT ROW(r.id, $1, 1, 1, 1, 1, 1)::rouse.attempt_usage FROM unnest($2::bigint[]) AS r(id)))";
    const PROMOTE: &str = "SELECT promoted::bigint FROM rouse.promote((SELECT max(incarnation) FROM rouse.worker), sha256('key'), $1, NULL)";
    const ORPHANS: &str = "SELECT id FROM rouse.orphans((SELECT max(incarnation) FROM rouse.worker), sha256('key'), $1, NULL, $2, NULL, 3, 10000)";
    const ADOPT: &str = "SELECT id FROM rouse.adopt((SELECT max(incarnation) FROM rouse.worker), sha256('key'), $1,
         ARRAY(SELECT ROW(o.id, $2, 'running', 0, 0, 60000)::rouse.adoption FROM unnest($3::bigint[]) AS o(id))) AS adopted(id)";
    const NEWEST: &str = "SELECT unnest(lanes) FROM rouse.newest_lanes((SELECT last_value FROM rouse.turn_seq) - $1, 2000)";
    const OVERDUE: &str = "SELECT lane FROM rouse.overdue($1, $2, 0, 1500, $3)";
    // The positions of all lanes are below this one, so that the peek adds up none.
    const PEEK: &str = "SELECT 1::bigint FROM rouse.peek($1, $2, 1000000, 0, NULL, NULL, '{}')";
    client.query(REGISTER, &[]).await.unwrap();
    let wanted = i32::try_from(JOBS).unwrap();
    let lanes = client
        .query("SELECT DISTINCT id FROM rouse.lane", &[])
        .await
        .unwrap();
    let lanes: Vec<i64> = lanes.iter().map(|row| row.get(0)).collect();
    let (cursors, leases) = (vec![i64::MIN; lanes.len()], vec![60_000_i64; lanes.len()]);
    let (fences, ten_leases) = ([FENCE; JOBS], [60_000_i64; JOBS]);

    let mut read = Vec::new();
    let (_, rows) = run(client, PEEK, &[&lanes, &cursors]).await;
    read.push(("peek", rows));
    let orders: [&(dyn ToSql + Sync); 5] = [&FENCE, &lanes, &cursors, &leases, &wanted];
    let (mut ids, rows) = run(client, CLAIM, &orders).await;
    read.push(("claim", rows));
    // If fewer jobs were claimed, placeholders fill the list: the plans are the same.
    ids.resize(JOBS, -1);
    let (_, rows) = run(client, CLAIMED, &[&FENCE, &ids]).await;
    read.push(("claimed", rows));
    let (_, rows) = run(client, RENEW, &[&&ids[..], &&fences[..], &&ten_leases[..]]).await;
    read.push(("renew", rows));
    let (_, rows) = run(client, REPORT, &[&FENCE, &ids]).await;
    read.push(("report", rows));
    let (_, rows) = run(client, REPORT_USAGE, &[&FENCE, &ids]).await;
    read.push(("report_usage", rows));
    client
        .batch_execute(
            "UPDATE rouse.job SET lease_until = now() - interval '1 s' WHERE state = 'running'",
        )
        .await
        .unwrap();
    let (orphans, rows) = run(client, ORPHANS, &[&lanes, &wanted]).await;
    read.push(("orphans", rows));
    let (_, rows) = run(client, ADOPT, &[&FENCE, &FENCE, &orphans]).await;
    read.push(("adopt", rows));
    // There are a few retries and a few releases; the other jobs succeed.
    let states: Vec<&str> = (0..JOBS)
        .map(|n| if n < 2 { "queued" } else { "succeeded" })
        .collect();
    let results: Vec<Option<&str>> = (0..JOBS).map(|n| (n >= 2).then_some("1")).collect();
    let errors: Vec<Option<&str>> = (0..JOBS).map(|n| (n == 0).then_some("{}")).collect();
    let settle: [&(dyn ToSql + Sync); 6] = [&ids, &&fences[..], &states, &results, &errors, &true];
    let (_, rows) = run(client, SETTLE, &settle).await;
    read.push(("settle", rows));
    let (_, rows) = run(client, PROMOTE, &[&wanted]).await;
    read.push(("promote", rows));
    let (_, rows) = run(client, OVERDUE, &[&lanes, &cursors, &wanted]).await;
    read.push(("overdue", rows));
    let (_, rows) = run(client, NEWEST, &[&i64::from(wanted)]).await;
    read.push(("newest_lanes", rows));
    read
}

async fn backlog(client: &Client) {
    client
        .query(
            "SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[$1::integer]))",
            &[&BACKLOG],
        )
        .await
        .unwrap();
}

fn assert_few(read: &[(&str, i64)], when: &str) {
    for (call, rows) in read {
        assert!(
            *rows <= 12 * i64::try_from(JOBS).unwrap(),
            "{when}: {call} read {rows} rows for {JOBS} jobs: {read:?}"
        );
    }
}

#[tokio::test]
async fn plans_made_while_the_table_was_empty_still_look_up_each_job() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    client.batch_execute("ANALYZE rouse.job").await.unwrap();
    // The session keeps these plans.
    run_worker_actions(&mut client).await;
    backlog(&client).await;
    assert_few(&run_worker_actions(&mut client).await, "then full");
}

/// The statistics were taken when no job ran, so an index of running jobs seems to be empty.
#[tokio::test]
async fn the_jobs_of_a_large_claim_are_looked_up_by_id_while_many_jobs_run() {
    const CLAIM: &str = "SELECT unread FROM rouse.claim((SELECT max(incarnation) FROM rouse.worker), sha256('key'), $1, ARRAY(SELECT ROW(id, 0, 60000, NULL, NULL)::rouse.claim_order FROM rouse.lane), $2)";
    const CLAIMED: &str = "SELECT id FROM rouse.claimed((SELECT max(incarnation) FROM rouse.worker), sha256('key'), $1, $2)";
    let db = TestDb::new().await;
    let mut client = db.client().await;
    backlog(&client).await;
    client
        .batch_execute(
            "ANALYZE rouse.job;
             SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')",
        )
        .await
        .unwrap();
    let claim = client.query_one(CLAIM, &[&FENCE, &BACKLOG]).await.unwrap();
    let unread: Vec<i64> = claim.get(0);
    assert_eq!(
        unread.len(),
        usize::try_from(BACKLOG).unwrap(),
        "too many for one response"
    );
    let requested = &unread[..JOBS];
    let (ids, rows) = run(&mut client, CLAIMED, &[&FENCE, &requested]).await;
    assert_eq!(ids, requested);
    assert_few(&[("claimed", rows)], "many jobs run");
}

#[tokio::test]
async fn each_job_is_looked_up_regardless_of_the_statistics() {
    let db = TestDb::new().await;
    let client = db.client().await;
    backlog(&client).await;
    let scheduled = "SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[$1::integer]), run_at => now() + interval '1 hour')";
    client.query(scheduled, &[&BACKLOG]).await.unwrap();
    for (when, sql) in [
        ("all queued", "ANALYZE rouse.job"),
        (
            "all running",
            "UPDATE rouse.job SET state = 'running', fence = 1, worker = 1, attempt = 1, uncounted = 0, claimed_at = now(),
                    lease_until = now() + interval '1 hour';
             ANALYZE rouse.job;
             UPDATE rouse.job SET state = 'queued', fence = NULL, worker = NULL, attempt = 0, uncounted = 0, claimed_at = NULL,
                    lease_until = NULL",
        ),
        (
            "all scheduled",
            "UPDATE rouse.job SET turn = NULL, available_at = now() + interval '1 hour'; ANALYZE rouse.job;
             UPDATE rouse.job SET turn = id, available_at = now()",
        ),
        (
            "all but one gone",
            "DELETE FROM rouse.job WHERE id > (SELECT min(id) FROM rouse.job); ANALYZE rouse.job;
             SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[3000]))",
        ),
    ] {
        client.batch_execute(sql).await.unwrap();
        // A session with new plans.
        let mut fresh = db.client().await;
        assert_few(&run_worker_actions(&mut fresh).await, when);
    }
}

/// The names of functions, which this statement reads from the catalog of Postgres.
async fn function_names(client: &Client, sql: &str) -> Vec<String> {
    let rows = client.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Functions for workers share others, such as `rouse._authenticated_as_limited`: a plan that one of them has made is
/// used by all.
#[tokio::test]
async fn every_function_for_workers_and_producers_reads_through_indexes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Functions in the language SQL are planned at each call. rouse.prepare_partitions reads no table of Rouse.
    let others = function_names(
        &client,
        "SELECT p.proname::text FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
         WHERE p.pronamespace = 'rouse'::regnamespace AND l.lanname = 'plpgsql' AND p.proname <> 'prepare_partitions'
           AND (has_function_privilege('rouse_worker', p.oid, 'EXECUTE') OR has_function_privilege('rouse_producer', p.oid, 'EXECUTE'))
           AND NOT coalesce(p.proconfig, '{}') @> ARRAY['enable_seqscan=off']
         ORDER BY 1",
    )
    .await;
    assert!(others.is_empty(), "{others:?} may read whole tables");
}

/// The number of rows of a table that this statement reads, in a transaction of its own.
async fn rows_read(client: &mut Client, table: &str, sql: &str) -> i64 {
    let read = format!(
        "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
         FROM pg_stat_xact_user_tables WHERE relid = '{table}'::regclass"
    );
    let transaction = client.transaction().await.unwrap();
    let before: i64 = transaction.query_one(&read, &[]).await.unwrap().get(0);
    transaction.batch_execute(sql).await.unwrap();
    let after: i64 = transaction.query_one(&read, &[]).await.unwrap().get(0);
    transaction.commit().await.unwrap();
    after - before
}

/// Comparing each of them with all others would take a minute.
#[tokio::test]
async fn leftovers_are_deleted_in_moments_even_if_there_were_none_when_the_plans_were_made() {
    let db = TestDb::new().await;
    let (client, other) = (db.client().await, db.client().await);
    client
        .batch_execute(
            "ANALYZE rouse.gate_key, rouse.signal, rouse.flow, rouse.job;
             SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')",
        )
        .await
        .unwrap();
    let delete = async |function: &str, after: &str| -> i32 {
        let sql = format!(
            "SELECT deleted FROM rouse.{function}((SELECT max(incarnation) FROM rouse.worker), sha256('key'), {after})"
        );
        client.query_one(&sql, &[]).await.unwrap().get(0)
    };
    let calls = [
        ("maintain_gate_keys", "NULL", 10_000),
        ("maintain_signals", "0", 10_000),
        ("maintain_flows", "0", 1_000),
    ];
    // The session keeps the plans of the last calls.
    for _ in 0..10 {
        for (function, after, _) in calls {
            assert_eq!(delete(function, after).await, 0, "{function}");
        }
    }
    backlog(&other).await;
    other
        .batch_execute(
            "INSERT INTO rouse.gate_key (gate, key, until) SELECT 'rate', 't' || n, '-infinity' FROM generate_series(1, 20000) AS n;
             INSERT INTO rouse.signal (job, name, payload, at)
             SELECT -n, 'go', 'null', now() - interval '1 day' FROM generate_series(1, 20000) AS n;
             INSERT INTO rouse.flow (requested_at, jobs) SELECT now() - interval '1 year', 1 FROM generate_series(1, 20000)",
        )
        .await
        .unwrap();
    for (function, after, deleted) in calls {
        until_quicker_than(Duration::from_secs(10), async || {
            client.batch_execute("BEGIN").await.unwrap();
            assert_eq!(delete(function, after).await, deleted, "{function}");
            client.batch_execute("ROLLBACK").await.unwrap();
        })
        .await;
    }
}

#[tokio::test]
async fn no_statement_of_a_worker_is_jit_compiled() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let compiled = function_names(
        &client,
        "SELECT proname::text FROM pg_proc WHERE pronamespace = 'rouse'::regnamespace
         AND proconfig @> ARRAY['plan_cache_mode=force_generic_plan'] AND NOT proconfig @> ARRAY['jit=off']",
    )
    .await;
    assert!(compiled.is_empty(), "{compiled:?} may be compiled by jit");
}

#[tokio::test]
async fn jobs_of_a_source_are_found_among_many_others() {
    const CLAIM: &str = "SELECT unnest(ids) FROM rouse.claim_bound((SELECT max(incarnation) FROM rouse.worker), sha256('key'), $1,
        ARRAY(SELECT DISTINCT id FROM rouse.lane), '{mine,nobody}', 60000, $2)";
    const REMAINING: &str = "SELECT jobs FROM rouse.remaining_bound('default', '{mine,nobody}')";
    let db = TestDb::new().await;
    let mut client = db.client().await;
    client
        .batch_execute("SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}'); SELECT rouse.enqueue('x', source => 'mine'); ANALYZE rouse.job")
        .await
        .unwrap();
    let wanted = i32::try_from(JOBS).unwrap();
    let ask = async |client: &mut Client, jobs: i64, when: &str| {
        let (left, rows) = run(client, REMAINING, &[]).await;
        let mut read = vec![("remaining_bound", rows)];
        let (ids, rows) = run(client, CLAIM, &[&FENCE, &wanted]).await;
        read.push(("claim_bound", rows));
        assert_eq!(
            (left, i64::try_from(ids.len()).unwrap()),
            (vec![jobs], jobs)
        );
        assert_few(&read, when);
    };
    // The session keeps these plans.
    ask(&mut client, 1, "nearly empty").await;
    backlog(&client).await;
    client
        .batch_execute(
            "SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[3000]), source => 'others');
             SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[3]), source => 'mine')",
        )
        .await
        .unwrap();
    ask(&mut client, 3, "then full").await;
    client
        .batch_execute("SELECT rouse.enqueue('x', source => 'mine'); ANALYZE rouse.job")
        .await
        .unwrap();
    let mut fresh = db.client().await;
    ask(&mut fresh, 1, "with statistics").await;
}
