//! Jobs are found by filters, and retried, cancelled and deleted in batches.

mod cancels;
mod retries;

use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::commands::run;
use crate::support::worker::{SESSION_WAITS, enqueue_sql, until_true};
use crate::support::{Host, TestDb};

const SEARCH: &str = "SELECT ids, examined_count, next_before, examined_back_to FROM rouse.search_jobs($1, $2, $3, $4)";
const RETRY: &str =
    "SELECT retried, made, refused, next_before FROM rouse.retry_jobs($1, $2, $3, $4)";

/// The ids of the matching jobs.
async fn find(client: &Client, filter: &Value) -> Vec<i64> {
    let row = client
        .query_one(SEARCH, &[filter, &None::<i64>, &100, &1000])
        .await
        .unwrap_or_else(|error| panic!("{filter}: {error:?}"));
    row.get(0)
}

/// Starts a command on the database at this URL.
fn start(url: &str, args: &[&str]) -> Host {
    Host::rouse(args, &[("DATABASE_URL", url), ("ROUSE_LOG", "off")])
}

/// Starts a command, and waits until it waits for a lock.
async fn start_behind_lock(db: &TestDb, watcher: &Client, args: &[&str]) -> Host {
    let host = start(&db.url(), args);
    until_true(watcher, SESSION_WAITS).await;
    host
}

/// Enqueues a job and fails it.
async fn failed(client: &Client, arguments: &str, message: &str) -> i64 {
    let id = enqueue_sql(client, arguments).await;
    let fail = "SELECT rouse.fail($1, $2)";
    client.query(fail, &[&id, &message]).await.unwrap();
    id
}

/// Inserts history that is this many days old: jobs of handler x in this state, with these ids.
async fn kept(client: &Client, days_ago: i32, state: &str, ids: std::ops::RangeInclusive<i64>) {
    let (result, error) = match state {
        "succeeded" => ("'1'", "NULL"),
        "failed" => (
            "NULL",
            r#"'{"kind": "guest_error", "guest_kind": "empty_order", "message": "no lines"}'"#,
        ),
        _ => ("NULL", r#"'{"kind": "timed_out", "message": "late"}'"#),
    };
    client
        .batch_execute(&format!(
            "DO $$
             DECLARE
                 lane_id bigint := rouse._lane('x', 'default', NULL, NULL, 'normal', NULL, NULL, '{{}}', '{{}}');
                 day     timestamptz := (date_trunc('day', now() AT TIME ZONE 'UTC') - interval '{days_ago} days') AT TIME ZONE 'UTC';
             BEGIN
                 IF to_regclass('rouse.finished_ago_{days_ago}') IS NULL AND {days_ago} > 0 THEN
                     EXECUTE format('CREATE TABLE rouse.finished_ago_{days_ago} PARTITION OF rouse.finished_default FOR VALUES FROM (%L) TO (%L)',
                                    day, day + interval '1 day');
                 END IF;
                 INSERT INTO rouse.finished (id, lane, requested_at, available_at, finished_at, attempt, uncounted, state, payload, result, error)
                 SELECT n, lane_id, day, day, day, 0, 0, '{state}', '{{}}', {result}, {error}
                 FROM generate_series({}, {}) AS n;
             END $$",
            ids.start(),
            ids.end()
        ))
        .await
        .unwrap();
}

#[tokio::test]
async fn each_key_of_a_filter_restricts_a_search() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let deep = r#"'{"customer": {"id": 42}, "lines": ["a", {"b/c": null}]}'"#;
    let a = failed(
        &client,
        &format!("'mail.send', {deep}, queue => 'q', tenant => 't'"),
        "Connection REFUSED by 'host'",
    )
    .await;
    let b = failed(
        &client,
        r#"'mail.send', '{"customer": {"id": "42"}}'"#,
        "other",
    )
    .await;
    let c = enqueue_sql(&client, r#"'x', '{"customer": {"id": 42.0}}'"#).await;
    client
        .query("SELECT rouse.complete($1)", &[&c])
        .await
        .unwrap();
    let d = enqueue_sql(
        &client,
        "'x', source => 's', queue => 'q', tags => '{gpu,big}', unique_key => 'k/1', tenant => 'a/b'",
    )
    .await;
    let sql = "SELECT nextval('rouse.turn_seq')";
    let row = client.query_one(sql, &[]).await.unwrap();
    let e: i64 = row.get(0);
    kept(&client, 3, "timed_out", e..=e).await;
    let again: i64 = client
        .query_one("SELECT rouse.retry($1)", &[&b])
        .await
        .unwrap()
        .get(0);

    for (filter, ids) in [
        (json!({"state": "failed"}), vec![b, a]),
        (json!({"state": ["timed_out", "failed"]}), vec![e, b, a]),
        (json!({"state": "queued"}), vec![again, d]),
        (json!({"handler": "mail.send"}), vec![again, b, a]),
        (json!({"handler": "mail.send", "queue": "q"}), vec![a]),
        (json!({"handler": "no.such"}), vec![]),
        (json!({"queue": "q"}), vec![d, a]),
        (json!({"tenant": "t"}), vec![a]),
        (json!({"source": "s"}), vec![d]),
        (json!({"tag": "gpu"}), vec![d]),
        (json!({"tag": "gpu", "queue": "other"}), vec![]),
        (json!({"unique_key": "k/1"}), vec![d]),
        (json!({"unique_key": "k"}), vec![]),
        (json!({"error": "refused by 'H"}), vec![a]),
        (json!({"error": "%"}), vec![]),
        (json!({"kind": "timed_out"}), vec![e]),
        (json!({"payload": {"/customer/id": 42}}), vec![c, a]),
        (json!({"payload": {"/customer/id": "42"}}), vec![again, b]),
        (
            json!({"payload": {"/lines/1/b~1c": null, "/lines/0": "a"}}),
            vec![a],
        ),
        (json!({"payload": {"/customer": {"id": 42}}}), vec![c, a]),
        (
            json!({"since": "1 hour", "state": ["failed", "timed_out"]}),
            vec![b, a],
        ),
        (
            json!({"until": "1 day", "state": ["failed", "timed_out"]}),
            vec![e],
        ),
        (json!({"since": "30 days", "until": "1 day"}), vec![e]),
        (
            json!({"since": "2020-01-01", "handler": "mail.send"}),
            vec![again, b, a],
        ),
        (json!({}), vec![again, e, d, c, b, a]),
        (json!({"retried": true}), vec![b]),
        (json!({"retried": false, "state": "failed"}), vec![a]),
    ] {
        let found = find(&client, &filter).await;
        assert_eq!(found, ids, "{filter}");
    }
    let rows = client
        .query(
            r#"SELECT id, handler FROM rouse.find_jobs('{"tenant": "t"}')"#,
            &[],
        )
        .await
        .unwrap();
    assert_eq!(
        (rows.len(), rows[0].get(0), rows[0].get(1)),
        (1, a, "mail.send")
    );
}

#[tokio::test]
async fn failed_jobs_are_found_by_the_error_kinds_of_the_host_and_of_the_handler() {
    let db = TestDb::new().await;
    let client = db.client().await;
    kept(&client, 0, "failed", 1_000_001..=1_000_001).await;
    kept(&client, 0, "timed_out", 1_000_002..=1_000_002).await;
    for (kind, ids) in [
        ("empty_order", vec![1_000_001]),
        ("guest_error", vec![1_000_001]),
        ("timed_out", vec![1_000_002]),
        ("empty", vec![]),
    ] {
        assert_eq!(find(&client, &json!({ "kind": kind })).await, ids, "{kind}");
        let (code, output) = run(&db, &["job", "ls", "--kind", kind, "--json"]);
        assert_eq!(code, 0, "{kind}: {output}");
        let output: Value = serde_json::from_str(&output).unwrap();
        let listed = output["jobs"].as_array().unwrap().iter();
        let listed: Vec<i64> = listed.map(|job| job["id"].as_i64().unwrap()).collect();
        assert_eq!(listed, ids, "{kind}");
    }
}

#[tokio::test]
async fn an_invalid_filter_is_refused_with_the_accepted_values() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (filter, expected) in [
        ("null", "filter must be an object, not null"),
        ("[]", "filter must be an object, not []"),
        (r#"{"stat": "failed"}"#, "'stat' is not a key of filters"),
        (
            r#"{"state": "broken"}"#,
            "state of the filter must be queued, running, succeeded",
        ),
        (r#"{"state": []}"#, "state of the filter must be"),
        (
            r#"{"handler": 7}"#,
            "handler of the filter must be a non-empty string, not 7",
        ),
        (
            r#"{"tenant": ""}"#,
            r#"tenant of the filter must be a non-empty string, not """#,
        ),
        (
            r#"{"payload": "x"}"#,
            "payload of the filter must be an object of JSON pointers",
        ),
        (
            r#"{"payload": {"a": 1}}"#,
            "payload of the filter has 'a', which is not a JSON pointer",
        ),
        (
            r#"{"since": "soon"}"#,
            "since of the filter must be a time or an age, not \"soon\"",
        ),
        // Postgres would read these as 2026 years and 11 months, and as half a minute.
        (
            r#"{"since": "2026-11"}"#,
            "since of the filter must be a time or an age",
        ),
        (
            r#"{"since": "30"}"#,
            "since of the filter must be a time or an age",
        ),
        (
            r#"{"until": "infinity"}"#,
            "until of the filter must be a time",
        ),
        (
            r#"{"retried": 1}"#,
            "retried of the filter must be true or false",
        ),
    ] {
        let filter: Value = serde_json::from_str(filter).unwrap();
        for sql in [SEARCH, RETRY] {
            let error = client
                .query(sql, &[&filter, &None::<i64>, &10, &10])
                .await
                .expect_err(expected);
            let error = error.as_db_error().expect("an error from the database");
            assert!(error.message().contains(expected), "{filter}: {error}");
            assert_eq!(error.code().code(), "22023", "{filter}");
        }
    }
    for (filter, expected) in [
        (json!({"handler": "x"}), "must name states"),
        (json!({"state": ["failed", "queued"]}), "must name states"),
        (json!({"state": "failed", "retried": true}), "never retried"),
    ] {
        let error = client
            .query(RETRY, &[&filter, &None::<i64>, &10, &10])
            .await
            .expect_err(expected);
        let error = error.as_db_error().expect("an error from the database");
        assert!(error.message().contains(expected), "{filter}: {error}");
    }
}

#[tokio::test]
async fn a_search_reads_a_bounded_number_of_jobs_and_returns_where_to_continue() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    kept(&client, 3, "timed_out", 1_000_001..=1_000_005).await;
    kept(&client, 0, "succeeded", 2_000_001..=2_005_000).await;
    kept(&client, 0, "timed_out", 2_005_001..=2_005_003).await;
    let search =
        async |client: &Client, filter: Value, before: Option<i64>, max: i32, max_examined: i32| {
            let row = client
                .query_one(SEARCH, &[&filter, &before, &max, &max_examined])
                .await;
            let row = row.unwrap();
            (
                row.get::<_, Vec<i64>>(0),
                row.get::<_, i32>(1),
                row.get::<_, Option<i64>>(2),
                row.get::<_, Option<i64>>(3),
            )
        };
    // Succeeded jobs are not read.
    let late = json!({"state": "timed_out"});
    let found = search(&client, late.clone(), None, 100, 4).await;
    let at = Some(1_000_005);
    assert_eq!(
        found,
        (vec![2_005_003, 2_005_002, 2_005_001, 1_000_005], 4, at, at)
    );
    let found = search(&client, late.clone(), at, 100, 100).await;
    assert_eq!(
        found,
        ((1_000_001..=1_000_004).rev().collect(), 4, None, None)
    );
    // With as many matches as requested, the search stops.
    let found = search(&client, late.clone(), None, 2, 100).await;
    assert_eq!(
        found,
        (vec![2_005_003, 2_005_002], 2, Some(2_005_002), None)
    );
    // Earlier days are not read.
    let since = json!({"state": "timed_out", "since": "2 days"});
    let found = search(&client, since, None, 100, 100).await;
    assert_eq!((found.0.len(), found.1, found.2), (3, 3, None));
    let rare = json!({"handler": "x", "state": "succeeded", "payload": {"/no": 1}});
    let found = search(&client, rare, None, 100, 50).await;
    assert_eq!(found, (vec![], 50, Some(2_004_954), Some(2_004_954)));

    // Live jobs also count, including jobs that were enqueued earlier.
    client
        .batch_execute(
            "SELECT rouse.enqueue_many('x', array_fill('1'::jsonb, ARRAY[5]));
             UPDATE rouse.job SET requested_at = now() - interval '3 days'",
        )
        .await
        .unwrap();
    let since = json!({"state": "queued", "since": "1 hour"});
    let found = search(&client, since, None, 100, 3).await;
    assert_eq!((found.0.len(), found.1), (0, 3));
    assert!(found.3.is_some());

    // The statement reads exactly these rows, with the statistics of empty tables.
    const READ: &str =
        "SELECT coalesce(sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)), 0)::bigint
         FROM pg_stat_xact_user_tables WHERE relname LIKE 'finished_%'";
    for (filter, max) in [
        (&late, 100),
        (&json!({}), 10),
        (&json!({"since": "2 days"}), 10),
    ] {
        let transaction = client.transaction().await.unwrap();
        let before: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
        transaction
            .query(SEARCH, &[filter, &None::<i64>, &max, &1000])
            .await
            .unwrap();
        let after: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
        transaction.commit().await.unwrap();
        assert!(
            after - before <= 100,
            "{filter} has read {} rows",
            after - before
        );
    }
}

#[tokio::test]
async fn the_command_line_finds_counts_and_retries_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let wanted = failed(&client, r#"'x', '{"n": 1}'"#, "connection refused").await;
    let other = failed(&client, r#"'x', '{"n": 2}'"#, "something else").await;
    let filter = [
        "--error",
        "REFUSED",
        "--payload",
        "/n=1",
        "--since",
        "2h",
        "--handler",
        "x",
    ];
    let (code, output) = run(&db, &[&["job", "ls", "--json"][..], &filter].concat());
    assert_eq!(code, 0, "{output}");
    let output: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(output["jobs"].as_array().map(Vec::len), Some(1));
    assert_eq!(output["jobs"][0]["id"], wanted);

    let retry = [
        &["job", "retry", "--state", "failed,timed_out"][..],
        &filter,
    ]
    .concat();
    let (code, output) = run(&db, &retry);
    assert_eq!(code, 2, "{output}");
    assert!(
        output.contains("found 1 of the 2 jobs that were examined") && output.contains("--confirm"),
        "{output}"
    );
    let live = "SELECT count(*) = 1 FROM rouse.job WHERE retried_from = ";
    let row = client
        .query_one("SELECT count(*) FROM rouse.job", &[])
        .await;
    assert_eq!(row.unwrap().get::<_, i64>(0), 0, "nothing was done");
    let (code, output) = run(&db, &[&retry[..], &["--confirm", "--json"]].concat());
    assert_eq!(code, 0, "{output}");
    let output: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(
        (&output["retried"], &output["complete"]),
        (&json!(1), &json!(true))
    );
    until_true(&client, &format!("{live}{wanted}")).await;
    let (code, output) = run(&db, &retry);
    assert_eq!(code, 0, "there is nothing left: {output}");
    let (code, output) = run(&db, &["job", "retry", &other.to_string()]);
    assert_eq!(code, 0, "by its id, as before: {output}");

    for (args, expected) in [
        (
            &["retry"][..],
            "no job ids were given: pass ids, or filters",
        ),
        (&["retry", "1", "--state", "failed"], "not both"),
        (&["retry", "--handler", "x"], "give the states"),
        (
            &["retry", "--state", "queued"],
            "only ended jobs can be retried",
        ),
        (&["ls", "--payload", "n=1"], "such as /customer/id=42"),
        (
            &["ls", "--since", "soon"],
            "since of the filter must be a time",
        ),
        (&["ls", "--colour", "red"], "unexpected argument '--colour'"),
    ] {
        let (code, output) = run(&db, &[&["job"][..], args].concat());
        assert_ne!(code, 0, "{args:?}: {output}");
        assert!(output.contains(expected), "{args:?}: {output}");
    }
}
