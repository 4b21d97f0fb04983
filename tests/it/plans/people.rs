//! Reads of pages that people look at.

use rouse::job::JobId;
use rouse::store::Store;
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::worker::until_true;

use super::one_job::{CROWD, Known, STATISTICS, few_jobs, rows_read_of_all_tables};
use super::{function_names, rows_read};

/// A statement as the host sends it: planned for its arguments, with the settings of reads.
fn page(sql: &str, types: &str, values: &str) -> String {
    format!(
        "SET LOCAL enable_seqscan = off; SET LOCAL jit = off;
         PREPARE page ({types}) AS {sql};
         EXECUTE page ({values}); DEALLOCATE page"
    )
}

/// The reads of pages that people look at, each with the number of rows of all tables that it may read in [`CROWD`].
fn reads_of_people(known: &Known) -> Vec<(&'static str, String, i64)> {
    let Known {
        running,
        ending,
        waiting,
        ready,
        ..
    } = known;
    vec![
        (
            "jobs",
            page(
                include_str!("../../../host/src/store/jobs.sql"),
                "bigint[]",
                &format!("'{{{running},{ending},{waiting},{ready},-1,-2}}'"),
            ),
            60,
        ),
        (
            "read",
            page(
                include_str!("../../../host/src/store/read.sql"),
                "bigint",
                &waiting.to_string(),
            ),
            60,
        ),
        (
            "read, of an ended job",
            page(
                include_str!("../../../host/src/store/read.sql"),
                "bigint",
                "-1",
            ),
            60,
        ),
        (
            "read_merged",
            page(
                include_str!("../../../host/src/store/read_merged.sql"),
                "bigint",
                &waiting.to_string(),
            ),
            60,
        ),
        (
            "read_page",
            page(
                include_str!("../../../host/src/store/read_page.sql"),
                "bigint, integer",
                &format!("{waiting}, 1000"),
            ),
            60,
        ),
        (
            "audit_job",
            page(
                include_str!("../../../host/src/store/audit_job.sql"),
                "bigint",
                "-1",
            ),
            60,
        ),
        (
            "chain",
            page(
                include_str!("../../../host/src/store/chain.sql"),
                "bigint",
                &waiting.to_string(),
            ),
            60,
        ),
        (
            "newest_log",
            page(
                include_str!("../../../host/src/store/newest_log.sql"),
                "bigint, integer",
                &format!("{running}, 100"),
            ),
            60,
        ),
        (
            "admin_records",
            page(
                include_str!("../../../host/src/store/admin_records.sql"),
                "bigint, text, text, integer, text, integer, bigint",
                "604800000, NULL, NULL, 100, NULL, 10000, NULL",
            ),
            60,
        ),
        (
            "failing",
            page(
                include_str!("../../../host/src/store/failing.sql"),
                "integer",
                "2000",
            ),
            60,
        ),
        (
            "recent",
            page(
                include_str!("../../../host/src/store/recent.sql"),
                "text, integer",
                "NULL, 100",
            ),
            120,
        ),
        // As many of the 3,000 running jobs as a call may examine.
        (
            "running_on",
            page(
                include_str!("../../../host/src/store/running_on.sql"),
                "text, bigint, bigint",
                "'w', 101, 1000",
            ),
            1_100,
        ),
        (
            "flow",
            page(
                include_str!("../../../host/src/store/flow.sql"),
                "bigint",
                "-1",
            ),
            60,
        ),
        (
            "flow_page",
            page(
                include_str!("../../../host/src/store/flow_page.sql"),
                "bigint, bigint, integer",
                "-1, NULL, 200",
            ),
            80,
        ),
        // Each flow, with its jobs, which are looked up as live and as ended ones.
        (
            "flows",
            page(
                include_str!("../../../host/src/store/flows.sql"),
                "bigint, integer, bigint",
                "9223372036854775807, 50, 10000",
            ),
            800,
        ),
        (
            "schedules",
            page(
                include_str!("../../../host/src/store/schedules.sql"),
                "text",
                "'nightly'",
            ),
            60,
        ),
        (
            "state_entries",
            page(
                include_str!("../../../host/src/store/state_entries.sql"),
                "text, text",
                "'x', NULL",
            ),
            60,
        ),
        // The 100 newest jobs.
        ("search_jobs", "SELECT rouse.search_jobs('{}')".into(), 240),
        // The 300 live workers in two tables, twice, and the catalog of 6,000 lanes.
        ("why", format!("SELECT rouse.why({ready})"), 7_400),
        // The live workers in two tables.
        (
            "why, of a job that waits",
            format!("SELECT rouse.why({waiting})"),
            700,
        ),
    ]
}

#[tokio::test]
async fn pages_for_people_read_few_rows_regardless_of_the_statistics() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let known = few_jobs(&client).await;
    client.batch_execute(CROWD).await.unwrap();
    for (when, sql) in STATISTICS {
        client.batch_execute(sql).await.unwrap();
        let mut fresh = db.client().await;
        let mut read_more = Vec::new();
        for (call, sql, most) in reads_of_people(&known) {
            let read = rows_read_of_all_tables(&mut fresh, &sql).await;
            if read > most {
                read_more.push((call, read));
            }
        }
        assert!(read_more.is_empty(), "{when}: {read_more:?}");
    }
}

/// `rouse.why` and `rouse.clear_timeouts` are replaced by functions that return the settings of their caller.
#[tokio::test]
async fn statements_for_people_have_settings_that_end_with_them() {
    let db = TestDb::new().await;
    db.client()
        .await
        .batch_execute(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET jit = on', current_database()); END $$;
             CREATE OR REPLACE FUNCTION rouse.why(id bigint)
             RETURNS TABLE (reason text, sentence text, remedy text, since timestamptz, until timestamptz)
             LANGUAGE plpgsql AS $$
             BEGIN
                 IF id < 0 THEN
                     RAISE EXCEPTION 'a failure';
                 ELSIF id = 0 THEN
                     PERFORM pg_advisory_xact_lock(1);
                 END IF;
                 RETURN QUERY SELECT current_setting('enable_seqscan'), current_setting('jit'), NULL, NULL::timestamptz, NULL::timestamptz;
             END $$;
             CREATE OR REPLACE FUNCTION rouse.clear_timeouts(worker_id text) RETURNS integer LANGUAGE plpgsql AS $$
             BEGIN
                 RETURN (current_setting('enable_seqscan') = 'off')::integer + (current_setting('jit') = 'off')::integer;
             END $$",
        )
        .await
        .unwrap();
    // Each store has one session.
    let store = Store::new(&db.connector(), 1);
    let reads = Store::new(&db.connector(), 1).cancelling();
    for each in [&store, &reads] {
        let rows = each.why(JobId(1)).await.unwrap().unwrap();
        assert_eq!(
            (&rows[0]["reason"], &rows[0]["sentence"]),
            (&json!("off"), &json!("off"))
        );
        each.why(JobId(-1)).await.unwrap_err();
        let changed = each.clear_timeouts("w").await.unwrap();
        assert_eq!(changed, 0, "the settings have ended with the transactions");
    }

    // The settings also end if the caller gives up during the read.
    let other = db.client().await;
    other
        .batch_execute("SELECT pg_advisory_lock(1)")
        .await
        .unwrap();
    let is_waiting = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory')";
    tokio::select! {
        read = store.why(JobId(0)) => panic!("not waiting: {read:?}"),
        () = until_true(&other, is_waiting) => {}
    }
    other
        .batch_execute("SELECT pg_advisory_unlock(1)")
        .await
        .unwrap();
    let changed = store.clear_timeouts("w").await.unwrap();
    assert_eq!(changed, 0, "its transaction has ended");

    let changed = store.on_behalf_of("ada").clear_timeouts("w").await.unwrap();
    assert_eq!(changed, 2);
    let changed = store.clear_timeouts("w").await.unwrap();
    assert_eq!(changed, 0);
}

/// Without `jit = off`, a plan that has to read a table as a whole would be compiled, because of its estimated cost.
#[tokio::test]
async fn every_function_for_observers_reads_through_indexes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let others = function_names(
        &client,
        "SELECT p.proname::text FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
         WHERE p.pronamespace = 'rouse'::regnamespace AND l.lanname = 'plpgsql' AND p.provolatile = 's' AND NOT starts_with(p.proname, '_')
           AND has_function_privilege('rouse_observer', p.oid, 'EXECUTE')
           AND NOT coalesce(p.proconfig, '{}') @> ARRAY['enable_seqscan=off', 'jit=off']
         ORDER BY 1",
    )
    .await;
    assert!(others.is_empty(), "{others:?} may read whole tables");
}

/// Comparing each worker with each row of the backlog took 3 s for 2,000 incarnations and 6,000 rows.
#[tokio::test]
async fn the_backlog_reads_each_worker_once() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.enqueue('x', queue => 'q' || n) FROM generate_series(1, 50) AS n;
             INSERT INTO rouse.worker (worker_id, hostname, version, handlers, queues, slots, seen_at, draining_at, stopped_at, forgotten_at)
             SELECT 'w' || n, '', '', CASE WHEN n % 2 = 0 THEN '{x}' ELSE '{y}' END::text[], CASE WHEN n > 50 THEN '{q1}' ELSE '{}' END::text[], n,
                    now(), CASE WHEN n IN (2, 4) THEN now() END, CASE WHEN n BETWEEN 6 AND 200 THEN now() - n * interval '1 hour' END,
                    CASE WHEN n = 8 THEN now() END
             FROM generate_series(1, 300) AS n",
        )
        .await
        .unwrap();
    let backlog = "SELECT b.workers, b.slots, b.known FROM rouse.backlog AS b WHERE b.queue = $1";
    let row = async |client: &Client, queue: &str| -> (i64, i64, bool) {
        let row = client.query_one(backlog, &[&queue]).await.unwrap();
        (row.get(0), row.get(1), row.get(2))
    };
    // The workers that are alive serve only q1, and every second one has the handler. Others were alive within the last
    // week.
    assert_eq!(row(&client, "q1").await, (50, 12_550, true));
    assert_eq!(row(&client, "q2").await, (0, 0, true));
    let read = rows_read(&mut client, "rouse.worker", "SELECT FROM rouse.backlog").await;
    assert!(read <= 300, "{read} workers were read");
    // Of those that are kept, w8 is forgotten, and w180 has been gone for more than a week.
    for (kept, known) in [("'w8', 'w100', 'w180'", true), ("'w8', 'w180'", false)] {
        client
            .batch_execute(&format!(
                "DELETE FROM rouse.worker WHERE worker_id NOT IN ({kept})"
            ))
            .await
            .unwrap();
        assert_eq!(row(&client, "q1").await, (0, 0, known));
    }
}

/// Comparing the handlers of all workers with each handler took half a minute.
#[tokio::test]
async fn the_schedules_of_two_thousand_handlers_on_a_hundred_workers_take_moments() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            r#"INSERT INTO rouse.worker (worker_id, hostname, version, handlers, key_hash, capabilities)
               SELECT 'other-' || n, '', '', '{}', sha256('other'), c.capabilities
               FROM generate_series(1, 100) AS n,
                    (SELECT jsonb_object_agg('h' || n, '{"version": "1", "schedule": {"cron": "0 3 * * *", "time_zone": "UTC"}}'::jsonb) AS capabilities
                     FROM generate_series(1, 2000) AS n) AS c;
               SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}');
               SET statement_timeout = '10s'"#,
        )
        .await
        .unwrap();
    let sql = "SELECT count(*), min(jsonb_array_length(s.workers)), count(s.current)
        FROM rouse.module_schedules((SELECT max(incarnation) FROM rouse.worker), sha256('key')) AS s";
    let row = client.query_one(sql, &[]).await.unwrap();
    let (handlers, workers, current): (i64, i32, i64) = (row.get(0), row.get(1), row.get(2));
    assert_eq!((handlers, workers, current), (2_000, 100, 0));
}

/// The capabilities of a worker may have megabytes.
#[tokio::test]
async fn declared_schedules_are_found_without_reading_all_capabilities() {
    // Too large for the row itself.
    const LARGE: &str = "'large', jsonb_build_object('parked', (SELECT string_agg(md5(m::text), '') FROM generate_series(1, 120) AS m))";
    const LIST: &str = "SELECT handler, jsonb_array_length(workers), (SELECT max(w.value ->> 'version') FROM jsonb_array_elements(workers) AS w)
         FROM rouse.module_schedules((SELECT max(incarnation) FROM rouse.worker), sha256('key'))";
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let register = |id: &str, handler: &str| {
        format!(
            "SELECT rouse.register('{id}', sha256('key'), 'here', 'linux', '0',
                                   jsonb_build_object('report', '{handler}'::jsonb, {LARGE}), 1, '{{}}', '{{}}')"
        )
    };
    // Without any schedule, nothing is read.
    for id in ["w-1", "w-2"] {
        let sql = register(id, r#"{"version": "1"}"#);
        client.batch_execute(&sql).await.unwrap();
    }
    assert_eq!(parts_read(&mut client, LIST).await, 0);
    assert!(client.query(LIST, &[]).await.unwrap().is_empty());

    client
        .batch_execute("UPDATE rouse.worker SET stopped_at = now()")
        .await
        .unwrap();
    for id in ["w-3", "w-4", "w-5"] {
        let sql = register(id, r#"{"version": "1", "schedule": {"cron": "0 3 * * *"}}"#);
        client.batch_execute(&sql).await.unwrap();
    }
    let listed = async |client: &Client| -> (String, i32, String) {
        let row = client.query_one(LIST, &[]).await.unwrap();
        (row.get(0), row.get(1), row.get(2))
    };
    let expected: (String, i32, String) = ("report".into(), 3, "1".into());
    assert_eq!(parts_read(&mut client, LIST).await, 0);
    assert_eq!(listed(&client).await, expected);
    // Nor does a heartbeat without changes.
    let beat = "SELECT rouse.heartbeat(max(incarnation), sha256('key'), NULL, '{}', false) FROM rouse.worker";
    assert_eq!(parts_read(&mut client, beat).await, 0);

    // A newer version without a schedule has to be found.
    let newer = register("w-6", r#"{"version": "2"}"#);
    client.batch_execute(&newer).await.unwrap();
    assert!(parts_read(&mut client, LIST).await > 0);
    let expected: (String, i32, String) = ("report".into(), 4, "2".into());
    assert_eq!(listed(&client).await, expected);
}

/// The number of parts of large columns of `rouse.worker` that this statement reads.
async fn parts_read(client: &mut Client, sql: &str) -> i64 {
    const READ: &str = "SELECT coalesce(sum(idx_tup_fetch), 0)::bigint FROM pg_stat_xact_all_tables
         WHERE relid = (SELECT c.reltoastrelid FROM pg_class AS c WHERE c.oid = 'rouse.worker'::regclass)";
    let transaction = client.transaction().await.unwrap();
    let before: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    transaction.query(sql, &[]).await.unwrap();
    let after: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    transaction.commit().await.unwrap();
    after - before
}

/// Comparing each lane with each lane that has running jobs would take 20 s, and decompressing all weights for each key
/// even longer.
#[tokio::test]
async fn the_jobs_of_twenty_thousand_lanes_are_counted_in_moments_with_plans_made_for_few() {
    const COUNTS: [(&str, i64); 6] = [
        (
            "SELECT count(*) FROM rouse.depth() WHERE running > 0",
            20_000,
        ),
        ("SELECT count(*) FROM rouse.fair_keys()", 20_001),
        (
            "SELECT count(*) FROM rouse.fair_keys() WHERE weight = 2",
            10_000,
        ),
        ("SELECT count(*) FROM rouse.gate_keys()", 20_001),
        (
            "SELECT count(*) FROM rouse.remaining('mail', NULL, true)",
            1,
        ),
        (
            "SELECT count(*) FROM rouse.remaining_bound('mail', '{here}')",
            1,
        ),
    ];
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.set_fair_share('mail', policy => 'drr');
             SELECT rouse.set_gate('few', 'max_concurrent', key => '{tenant}', max => 5, queue => 'mail');
             SELECT rouse.enqueue('x', queue => 'mail', tenant => 'first');
             SET statement_timeout = '10s'",
        )
        .await
        .unwrap();
    client.batch_execute("VACUUM").await.unwrap();
    // The session keeps these plans.
    for (count, _) in COUNTS {
        client.query_one(count, &[]).await.unwrap();
    }
    db.client()
        .await
        .batch_execute(
            r#"SET session_replication_role = replica;
               INSERT INTO rouse.lane (id, queue, handler, priority, tags, key)
               SELECT -n, 'mail', 'x', 'normal', '{}', format('{"tenant": "t%s"}', n) FROM generate_series(1, 20000) AS n;
               INSERT INTO rouse.job (id, lane, turn, requested_at, available_at, bytes, payload, source,
                                      state, fence, worker, claimed_at, lease_until, attempt)
               SELECT -n, -n, n, now(), now(), 2, '{}', 'here', 'running', 1, -1, now(), now() - interval '1 hour', 1
               FROM generate_series(1, 20000) AS n;
               UPDATE rouse.queue SET weights = (SELECT jsonb_object_agg('t' || n, 1 + n % 2) FROM generate_series(1, 20000) AS n)
               WHERE name = 'mail'"#,
        )
        .await
        .unwrap();
    for (count, rows) in COUNTS {
        let counted: i64 = client.query_one(count, &[]).await.unwrap().get(0);
        assert_eq!(counted, rows, "{count}");
    }
}

/// Counts a thousand jobs in all instead of a million.
const A_THOUSAND: &str =
    "CREATE OR REPLACE FUNCTION rouse._counted_per_lane(p_lanes bigint) RETURNS bigint
     LANGUAGE sql IMMUTABLE AS 'SELECT 1000 / greatest(p_lanes, 1)'";

/// Otherwise, 10,000 lanes with 10,000 jobs each would take a minute.
#[tokio::test]
async fn the_more_lanes_have_many_jobs_the_fewer_are_counted_in_each() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let counted = "SELECT rouse._counted_per_lane($1)";
    for (lanes, jobs) in [
        (0_i64, 10_000_i64),
        (100, 10_000),
        (1_000, 1_000),
        (10_000, 100),
        (100_000, 100),
    ] {
        let row = client.query_one(counted, &[&lanes]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), jobs, "{lanes} lanes");
    }
    client.batch_execute(A_THOUSAND).await.unwrap();
    let enqueue = async |queues: &str, jobs: i64, more: &str| {
        let sql = format!(
            "SELECT rouse.enqueue('x', queue => q{more}) FROM unnest('{{{queues}}}'::text[]) AS q, generate_series(1, {jobs})"
        );
        client.batch_execute(&sql).await.unwrap();
    };
    let depth = async || -> Vec<(String, i64, i64, bool)> {
        let sql = "SELECT queue, ready, scheduled, at_least FROM rouse.depth() ORDER BY queue";
        let rows = client.query(sql, &[]).await.unwrap();
        rows.iter()
            .map(|row| (row.get(0), row.get(1), row.get(2), row.get(3)))
            .collect()
    };
    enqueue("a", 300, "").await;
    enqueue("few", 50, "").await;
    let of = |queue: &str, ready: i64, scheduled: i64, at_least: bool| {
        (queue.to_owned(), ready, scheduled, at_least)
    };
    let few = of("few", 50, 0, false);
    assert_eq!(depth().await, [of("a", 300, 0, false), few.clone()]);
    enqueue("b,c,d", 300, "").await;
    enqueue("e", 300, ", run_at => now() + interval '1 day'").await;
    let deep = ["a", "b", "c", "d"].map(|queue| of(queue, 200, 0, true));
    let expected = [&deep[..], &[of("e", 0, 200, true), few]].concat();
    assert_eq!(depth().await, expected);
}

/// Otherwise, an alert about the backlog of a queue would depend on the lanes of others.
#[tokio::test]
async fn a_queue_with_many_lanes_does_not_hide_the_backlog_of_another() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(A_THOUSAND).await.unwrap();
    client
        .batch_execute(
            "SELECT rouse.enqueue('h' || h, queue => 'wide') FROM generate_series(1, 8) AS h, generate_series(1, 150);
             SELECT rouse.enqueue('x', queue => 'deep') FROM generate_series(1, 450);
             SELECT rouse.enqueue('x', queue => 'few') FROM generate_series(1, 50)",
        )
        .await
        .unwrap();
    let sql = "SELECT queue, sum(ready)::bigint, bool_or(at_least) FROM rouse.depth() GROUP BY queue ORDER BY queue";
    let rows = client.query(sql, &[]).await.unwrap();
    let counted: Vec<(String, i64, bool)> = rows
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(2)))
        .collect();
    // Each of the two large ones is counted up to 500.
    let of = |queue: &str, ready: i64, at_least: bool| (queue.to_owned(), ready, at_least);
    let expected = [
        of("deep", 450, false),
        of("few", 50, false),
        of("wide", 8 * 62, true),
    ];
    assert_eq!(counted, expected);
}

#[tokio::test]
async fn a_queue_with_many_keys_does_not_hide_the_backlog_of_the_keys_of_another() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(A_THOUSAND).await.unwrap();
    // A lane for each tenant.
    client
        .batch_execute(
            "SELECT rouse.set_fair_share(q, policy => 'drr'),
                    rouse.set_gate(q, 'max_concurrent', key => '{tenant}', max => 5, queue => q)
             FROM unnest('{deep,wide}'::text[]) AS q",
        )
        .await
        .unwrap();
    client
        .batch_execute(
            "SELECT rouse.enqueue('x', queue => 'wide', tenant => 't' || t) FROM generate_series(1, 8) AS t, generate_series(1, 150);
             SELECT rouse.enqueue('x', queue => 'deep', tenant => 't1') FROM generate_series(1, 450)",
        )
        .await
        .unwrap();
    for sql in [
        "SELECT queue, sum(ready)::bigint, bool_or(at_least) FROM rouse.fair_keys() GROUP BY queue ORDER BY queue",
        "SELECT gate, sum(waiting)::bigint, bool_or(at_least) FROM rouse.gate_keys() GROUP BY gate ORDER BY gate",
    ] {
        let rows = client.query(sql, &[]).await.unwrap();
        let counted: Vec<(String, i64, bool)> = rows
            .iter()
            .map(|row| (row.get(0), row.get(1), row.get(2)))
            .collect();
        // Each of the two queues is counted up to 500.
        let of = |name: &str, jobs: i64, at_least: bool| (name.to_owned(), jobs, at_least);
        assert_eq!(
            counted,
            [of("deep", 450, false), of("wide", 8 * 62, true)],
            "{sql}"
        );
    }
}

#[tokio::test]
async fn keys_and_remaining_jobs_are_counted_no_further_than_queues() {
    const FAIR_KEYS: &str = "SELECT key, ready, at_least FROM rouse.fair_keys() ORDER BY key";
    const GATE_KEYS: &str =
        "SELECT key[1], waiting, at_least FROM rouse.gate_keys('few') ORDER BY key";
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(A_THOUSAND).await.unwrap();
    // A lane for each tenant.
    client
        .batch_execute(
            "SELECT rouse.set_fair_share('mail', policy => 'drr');
             SELECT rouse.set_gate('few', 'max_concurrent', key => '{tenant}', max => 5, queue => 'mail')",
        )
        .await
        .unwrap();
    let enqueue = async |tenants: &str, jobs: i64, more: &str| {
        let sql = format!(
            "SELECT rouse.enqueue('x', queue => 'mail', tenant => t{more})
             FROM unnest('{{{tenants}}}'::text[]) AS t, generate_series(1, {jobs})"
        );
        client.batch_execute(&sql).await.unwrap();
    };
    let keys = async |sql: &str| -> Vec<(String, i64, bool)> {
        let rows = client.query(sql, &[]).await.unwrap();
        rows.iter()
            .map(|row| (row.get(0), row.get(1), row.get(2)))
            .collect()
    };
    let remaining = async || -> (i64, i64, bool) {
        let sql =
            "SELECT ready, scheduled, at_least FROM rouse.remaining('mail', NULL::bigint, false)";
        let row = client.query_one(sql, &[]).await.unwrap();
        (row.get(0), row.get(1), row.get(2))
    };
    let of = |tenant: &str, jobs: i64, at_least: bool| (tenant.to_owned(), jobs, at_least);
    enqueue("a", 300, "").await;
    enqueue("few", 50, "").await;
    let all = [of("a", 300, false), of("few", 50, false)];
    assert_eq!(keys(FAIR_KEYS).await, all);
    assert_eq!(keys(GATE_KEYS).await, all);
    assert_eq!(remaining().await, (350, 0, false));

    enqueue("b,c,d", 300, "").await;
    enqueue("few", 300, ", run_at => now() + interval '1 day'").await;
    let deep = ["a", "b", "c", "d"].map(|tenant| of(tenant, 250, true));
    let all = [&deep[..], &[of("few", 50, false)]].concat();
    assert_eq!(keys(FAIR_KEYS).await, all);
    assert_eq!(keys(GATE_KEYS).await, all);
    // Five numbers exceed 100: the ready jobs of four tenants, and the scheduled ones of another.
    assert_eq!(remaining().await, (850, 200, true));
}
