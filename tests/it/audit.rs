//! The history of ended jobs is immutable and can be audited.

use std::collections::HashSet;
use std::time::Duration;

use rouse::store::Store;
use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::claims::claim;
use crate::support::database::refusal;
use crate::support::worker::{TestWorker, cancel, ended, enqueue, enqueue_sql, retries};
use crate::support::{TestDb, run_rouse};

/// Runs jobs that leave a row in each of the four tables of the history.
async fn history(db: &TestDb) -> Client {
    let client = db.client().await;
    let overrides = retries("test.*", 2, Duration::from_millis(1));
    let settings = Settings {
        overrides,
        ..Settings::default()
    };
    let worker = TestWorker::start(db, settings).await;
    let flaky = json!({"fail_until": 1});
    ended(&client, enqueue(&client, "test.flaky", flaky).await).await;
    ended(
        &client,
        enqueue(&client, "test.fail", json!({"as": "permanent"})).await,
    )
    .await;
    ended(
        &client,
        enqueue(&client, "test.steps", json!({"between": "nothing"})).await,
    )
    .await;
    worker.drain().await;
    cancel(&client, enqueue(&client, "noop", json!({})).await).await;
    for table in ["finished", "attempt", "step", "record"] {
        let exists = format!("SELECT count(*) > 0 FROM rouse.{table}");
        let exists: bool = client.query_one(&exists, &[]).await.unwrap().get(0);
        assert!(exists, "{table}");
    }
    client
}

#[tokio::test]
async fn ended_jobs_cannot_be_changed_even_by_the_owner() {
    let db = TestDb::new().await;
    let client = history(&db).await;
    let day: String = client
        .query_one("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')", &[])
        .await
        .unwrap()
        .get(0);
    for table in ["finished", "attempt", "step", "record"] {
        let column = match table {
            "finished" => "attempt = 7",
            "attempt" => "lost = true",
            "step" => "name = 'x'",
            _ => "event = 'x'",
        };
        let before =
            format!("SELECT jsonb_agg(to_jsonb(t) ORDER BY to_jsonb(t)) FROM rouse.{table} AS t");
        let was: Value = client.query_one(&before, &[]).await.unwrap().get(0);
        for name in [table.to_owned(), format!("{table}_{day}")] {
            for sql in [
                format!("UPDATE rouse.{name} SET {column}"),
                format!("DELETE FROM rouse.{name}"),
                format!("TRUNCATE rouse.{name}"),
            ] {
                let why = refusal(&client, &sql).await;
                assert!(why.contains("is not allowed"), "{sql}: {why}");
            }
        }
        let current: Value = client.query_one(&before, &[]).await.unwrap().get(0);
        assert_eq!(was, current, "{table}");
    }
    let why = refusal(&client, "DELETE FROM rouse.finished").await;
    assert!(why.contains("rouse.unlock_history('why')"), "{why}");
    // Partitions of later days are also protected, and old partitions can still be dropped.
    client
        .batch_execute("SELECT rouse.prepare_partitions(9)")
        .await
        .unwrap();
    let later = "SELECT relname::text FROM pg_class WHERE relname LIKE 'step\\_2%' AND relkind = 'r' ORDER BY 1 DESC LIMIT 1";
    let later: String = client.query_one(later, &[]).await.unwrap().get(0);
    let why = refusal(&client, &format!("TRUNCATE rouse.{later}")).await;
    assert!(why.contains("is not allowed"), "{why}");
    client
        .batch_execute(
            "CREATE TABLE rouse.finished_20200101 PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-01') TO ('2020-01-02');
             SELECT rouse.drop_partitions('7 days')",
        )
        .await
        .unwrap();
    let gone = "SELECT to_regclass('rouse.finished_20200101') IS NULL";
    assert!(client.query_one(gone, &[]).await.unwrap().get::<_, bool>(0));
    // A migration enables triggers again that someone has disabled.
    client
        .batch_execute(&format!(
            "ALTER TABLE rouse.finished DISABLE TRIGGER keep_rows; ALTER TABLE rouse.finished_{day} DISABLE TRIGGER keep_table"
        ))
        .await
        .unwrap();
    run_rouse(&db, &["migrate"]).await.exits(0);
    for sql in [
        "DELETE FROM rouse.finished".to_owned(),
        format!("TRUNCATE rouse.finished_{day}"),
    ] {
        let why = refusal(&client, &sql).await;
        assert!(why.contains("is not allowed"), "{sql}: {why}");
    }
}

#[tokio::test]
async fn unlocking_the_history_lasts_one_transaction_and_leaves_a_permanent_record() {
    let db = TestDb::new().await;
    let client = history(&db).await;
    let why = refusal(&client, "SELECT rouse.unlock_history(' ')").await;
    assert!(why.contains("reason must have"), "{why}");
    client
        .batch_execute(
            "BEGIN; SELECT rouse.unlock_history('a payload had a password');
             UPDATE rouse.finished SET payload = '{}'; DELETE FROM rouse.attempt; COMMIT",
        )
        .await
        .unwrap();
    let why = refusal(&client, "UPDATE rouse.finished SET payload = '1'").await;
    assert!(
        why.contains("is not allowed"),
        "after the transaction: {why}"
    );
    for sql in [
        "BEGIN; SELECT rouse.unlock_history('x'); DELETE FROM rouse.record",
        "BEGIN; SELECT rouse.unlock_history('x'); UPDATE rouse.record SET who = 'nobody'",
        "BEGIN; SELECT rouse.unlock_history('x'); TRUNCATE rouse.record",
    ] {
        let why = refusal(&client, sql).await;
        assert!(
            why.contains("the record of rouse.unlock_history must remain"),
            "{sql}: {why}"
        );
        client.batch_execute("ROLLBACK").await.unwrap();
    }
    let row = client
        .query_one(
            "SELECT who = session_user, detail ->> 'reason' FROM rouse.record WHERE event = 'history_unlocked'",
            &[],
        )
        .await
        .unwrap();
    let (is_own_login, reason): (bool, &str) = (row.get(0), row.get(1));
    assert!(is_own_login);
    assert_eq!(reason, "a payload had a password");
}

#[tokio::test]
async fn a_released_claim_keeps_its_time_and_a_purge_records_its_login_for_each_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.worker().await;
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    store.unregister().await.unwrap();
    let back = db.worker().await;
    // This is how a host releases jobs that it has claimed but not started.
    crate::support::worker::until_true(
        &client,
        "SELECT lease_until < clock_timestamp() FROM rouse.job",
    )
    .await;
    let mine = {
        let orders = crate::support::claims::orders(&back, 60_000).await;
        let fence = rouse::job::Fence(crate::support::claims::rand());
        let adopted = crate::support::claims::adopt(&back, fence, &orders, 1, 3, None)
            .await
            .unwrap();
        adopted.claimed.into_iter().next().unwrap()
    };
    let released = crate::support::claims::settlement(&mine, rouse::job::Outcome::Released);
    back.settle(&[released], rouse::store::Locked::Wait)
        .await
        .unwrap();
    let kept =
        "SELECT (detail ->> 'claimed_at')::timestamptz FROM rouse.record WHERE event = 'released'";
    let kept: std::time::SystemTime = client.query_one(kept, &[]).await.unwrap().get(0);
    assert_eq!(kept, mine.claimed_at);
    assert_ne!(kept, job.claimed_at);

    let purged = "SELECT rouse.purge_queue('default')";
    assert_eq!(
        client
            .query_one(purged, &[])
            .await
            .unwrap()
            .get::<_, i32>(0),
        1
    );
    let shown = run_rouse(&db, &["audit", &id.to_string(), "--json"]).await;
    let rows = shown.json()["audit"].clone();
    let login: String = client
        .query_one("SELECT session_user::text", &[])
        .await
        .unwrap()
        .get(0);
    let end = rows.as_array().unwrap().last().unwrap();
    assert_eq!(
        (&end["event"], &end["by"]),
        (&json!("cancelled"), &json!(login))
    );
    // A host logs the purge once, not once per job.
    let logged = "SELECT count(*) FROM rouse.audit_outbox WHERE event = 'purged'";
    assert_eq!(
        client
            .query_one(logged, &[])
            .await
            .unwrap()
            .get::<_, i64>(0),
        1
    );
}

#[tokio::test]
async fn an_admin_action_stays_in_the_outbox_until_a_host_has_logged_it() {
    let db = TestDb::new().await;
    let (client, one, other) = (db.client().await, db.worker().await, db.worker().await);
    client
        .batch_execute("SELECT rouse.pause_queue('mail')")
        .await
        .unwrap();
    let take = async |store: &Store, logged: &[i64]| -> Vec<i64> {
        let actions = store.take_audit_outbox(logged, 10).await.unwrap();
        actions.iter().map(|action| action.id).collect()
    };
    let taken = take(&one, &[]).await;
    assert_eq!(taken.len(), 1);
    assert_eq!(take(&one, &[]).await, taken, "the response was lost");
    assert!(take(&other, &[]).await.is_empty(), "the first one logs it");
    client
        .batch_execute("UPDATE rouse.audit_outbox SET taken_at = taken_at - interval '2 minutes'")
        .await
        .unwrap();
    assert_eq!(take(&other, &[]).await, taken, "the first one has died");
    assert!(take(&other, &taken).await.is_empty());
    // This call is repeated if its response is lost.
    assert!(take(&other, &taken).await.is_empty());
    let left = "SELECT count(*) FROM rouse.audit_outbox";
    let left: i64 = client.query_one(left, &[]).await.unwrap().get(0);
    assert_eq!(left, 0);
}

#[tokio::test]
async fn the_history_records_the_handler_that_ran_a_bound_source() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let settings = Settings {
        sources: [
            ("cron".to_owned(), "test.flaky".to_owned()),
            ("ping".to_owned(), "noop".to_owned()),
        ]
        .into(),
        overrides: retries("test.*", 2, Duration::from_millis(1)),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    let bound = enqueue_sql(
        &client,
        "'text.stats', '{\"fail_until\": 9}', source => 'cron'",
    )
    .await;
    let own = enqueue_sql(&client, "'noop', source => 'ping'").await;
    let shown = ended(&client, bound).await;
    assert_eq!(shown.state, "failed");
    assert_eq!(shown.error.unwrap()["kind"], "guest_error");
    ended(&client, own).await;
    worker.drain().await;
    let ran = async |id: i64| -> (Option<String>, Vec<Option<String>>) {
        let job = client
            .query_one("SELECT ran FROM rouse.job($1)", &[&id])
            .await
            .unwrap();
        let started = "SELECT detail ->> 'handler' FROM rouse.history($1) WHERE event = 'started'";
        let started = client.query(started, &[&id]).await.unwrap();
        (job.get(0), started.iter().map(|row| row.get(0)).collect())
    };
    let fail = || Some("test.flaky".to_owned());
    assert_eq!(ran(bound).await, (fail(), vec![fail(), fail()]));
    assert_eq!(
        ran(own).await,
        (None, vec![None]),
        "the handler that the job names"
    );
}

#[tokio::test]
async fn an_audit_lists_events_and_their_logins_page_by_page() {
    let db = TestDb::new().await;
    let client = history(&db).await;
    let other = enqueue_sql(&client, "'noop', queue => 'other'").await;
    client
        .execute("SELECT rouse.delete($1)", &[&other])
        .await
        .unwrap();
    let audit = async |args: &[&str]| -> Vec<Value> {
        let ran = run_rouse(&db, &[&["audit", "--json"], args].concat()).await;
        ran.exits(0);
        ran.json()["audit"].as_array().unwrap().clone()
    };
    let all = audit(&[]).await;
    let events: Vec<&str> = all.iter().filter_map(|row| row["event"].as_str()).collect();
    for event in [
        "failed",
        "attempt_failed",
        "succeeded",
        "cancelled",
        "deleted",
    ] {
        assert!(events.contains(&event), "{event}: {events:?}");
    }
    let times: Vec<&str> = all.iter().filter_map(|row| row["at"].as_str()).collect();
    assert!(times.is_sorted_by(|one, next| one >= next), "{times:?}");
    // Reading page by page gives the same result.
    let mut paged: Vec<Value> = Vec::new();
    loop {
        let mut args = vec!["--limit", "2"];
        if let Some(last) = paged.last() {
            args.extend(["--before", last["at"].as_str().unwrap()]);
            args.extend(["--before-key", last["key"].as_str().unwrap()]);
        }
        let page = audit(&args).await;
        if page.is_empty() {
            break;
        }
        assert!(page.len() <= 2, "{page:?}");
        paged.extend(page);
    }
    assert_eq!(paged, all);
    let of_other = audit(&["--queue", "other"]).await;
    assert!(
        of_other.iter().all(|row| row["job"] == other) && of_other.len() == 2,
        "{of_other:?}"
    );
    let of_handler = audit(&["--handler", "test.flaky"]).await;
    // A claim may have waited in line until it was released, and a lease that was taken before the listener had
    // received its own test notification is renewed at once.
    let ends: Vec<&str> = of_handler
        .iter()
        .filter_map(|row| row["event"].as_str())
        .filter(|event| !["released", "renewed"].contains(event))
        .collect();
    assert_eq!(ends, ["succeeded", "attempt_failed"]);
    let login: String = client
        .query_one("SELECT session_user::text", &[])
        .await
        .unwrap()
        .get(0);
    let mine = audit(&["--who", &login]).await;
    assert!(
        mine.iter().all(|row| row["by"] == json!(login)) && mine.len() == 2,
        "{mine:?}"
    );
    assert!(audit(&["--who", "nobody"]).await.is_empty());
    run_rouse(&db, &["audit", "999999"])
        .await
        .exits(3)
        .prints("no job 999999");
    run_rouse(&db, &["audit", "--since", "soon"]).await.exits(2);
    run_rouse(&db, &["audit"]).await.exits(0).prints("deleted");
}

#[tokio::test]
async fn a_page_of_an_audit_has_no_more_rows_than_requested_even_if_many_have_the_same_time() {
    const MANY: usize = 300;
    let db = TestDb::new().await;
    let client = db.client().await;
    let enqueue = format!("SELECT rouse.enqueue('x') FROM generate_series(1, {MANY})");
    client.batch_execute(&enqueue).await.unwrap();
    // The ends of all jobs and their records have the same time.
    let purge = "SELECT rouse.purge_queue('default')";
    client.query_one(purge, &[]).await.unwrap();
    let sql = "SELECT a.at::text, a.key FROM rouse.audit('-infinity', $1::text::timestamptz, max => 100, before_key => $2) AS a";
    let mut keys: Vec<String> = Vec::new();
    let mut last: (Option<String>, Option<String>) = (None, None);
    loop {
        let page = client.query(sql, &[&last.0, &last.1]).await.unwrap();
        let Some(row) = page.last() else { break };
        last = (row.get(0), row.get(1));
        assert!(page.len() <= 100, "{} rows", page.len());
        keys.extend(page.iter().map(|row| row.get::<_, String>(1)));
    }
    // And the record of the purge.
    assert_eq!(keys.len(), 2 * MANY + 1);
    let distinct: HashSet<&String> = keys.iter().collect();
    assert_eq!(distinct.len(), keys.len());

    let listed = run_rouse(&db, &["audit", "--limit", "100"]).await;
    listed.exits(0).prints("there may be more; --before 2");
    let next = keys[99].as_str();
    listed.prints(&format!("--before-key {next} continues from there"));
    let invalid = "SELECT FROM rouse.audit('-infinity', before_key => 'x')";
    let why = refusal(&client, invalid).await;
    assert!(why.contains("must be the key of an event"), "{why}");
}

#[tokio::test]
async fn a_page_of_admin_actions_has_no_more_rows_than_requested_and_examines_a_limited_number() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.store();
    // Older than those of others, which all have the same time.
    client
        .batch_execute(
            "SELECT rouse._ensure_partitions(now());
             INSERT INTO rouse.record (at, queue, event, who) VALUES (now() - interval '1 ms', 'q', 'paused', 'bob');
             INSERT INTO rouse.record (at, queue, event, who) SELECT now(), 'q', 'paused', 'ada' FROM generate_series(1, 120)",
        )
        .await
        .unwrap();
    let since = Duration::from_secs(3600);
    let pages = async |who: Option<&str>| {
        let (mut pages, mut next) = (Vec::new(), None::<(String, i64)>);
        loop {
            let start = next
                .as_ref()
                .map_or((None, None), |(at, id)| (Some(at.as_str()), Some(*id)));
            let page = store.admin_records(since, start, (who, None), 50).await;
            let page = page.unwrap().expect("the login may read them");
            let ids = page.actions.iter().map(|row| row["id"].as_i64().unwrap());
            pages.push(ids.collect::<Vec<i64>>());
            match page.next {
                None => return pages,
                some => next = some,
            }
        }
    };
    let all = pages(None).await;
    let lengths: Vec<usize> = all.iter().map(Vec::len).collect();
    assert_eq!(lengths, [50, 50, 21]);
    let distinct: HashSet<i64> = all.concat().into_iter().collect();
    assert_eq!(distinct.len(), 121);
    let bob = *all.concat().last().unwrap();
    assert_eq!(pages(Some("bob")).await, [vec![bob]]);

    // With many newer actions of others, a page ends before it has found that of bob.
    client
        .batch_execute(
            "INSERT INTO rouse.record (at, queue, event, who) SELECT now(), 'q', 'paused', 'ada' FROM generate_series(1, 10000)",
        )
        .await
        .unwrap();
    assert_eq!(pages(Some("bob")).await, [vec![], vec![bob]]);
}

#[tokio::test]
async fn a_page_of_an_audit_reads_only_rows_near_its_time() {
    const MANY: i64 = 100_000;
    let db = TestDb::new().await;
    let mut client = history(&db).await;
    // A day long ago with evenly spread rows; VACUUM builds the summaries of its index.
    client
        .batch_execute(&format!(
            "CREATE TABLE rouse.finished_20200101 PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-01') TO ('2020-01-02');
             INSERT INTO rouse.finished (id, lane, requested_at, available_at, finished_at, attempt, uncounted, state, payload, result)
             SELECT nextval('rouse.turn_seq'), f.lane, at, at, at, 1, 0, 'succeeded', '{{}}', '{{}}'
             FROM (SELECT lane FROM rouse.finished LIMIT 1) AS f, generate_series(0, {MANY} - 1) AS n,
                  LATERAL (SELECT timestamptz '2020-01-01' + n * interval '1 day' / {MANY} AS at) AS t"
        ))
        .await
        .unwrap();
    client
        .batch_execute("VACUUM ANALYZE rouse.finished_20200101")
        .await
        .unwrap();
    const READ: &str = "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
         FROM pg_stat_xact_user_tables WHERE relid = 'rouse.finished_20200101'::regclass";
    let transaction = client.transaction().await.unwrap();
    let before: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    let sql = "SELECT count(*) FROM rouse.audit('-infinity', '2020-01-01 12:00', max => 20)";
    let row = transaction.query_one(sql, &[]).await.unwrap();
    let after: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    assert_eq!(row.get::<_, i64>(0), 20);
    let read = after - before;
    assert!((20..MANY / 2).contains(&read), "{read} rows were read");
    // Rows that do not match are skipped as far back as the caller requested.
    let all = "SELECT count(*) FROM rouse.audit('-infinity', '2020-01-02', max => 100000)";
    assert_eq!(
        transaction
            .query_one(all, &[])
            .await
            .unwrap()
            .get::<_, i64>(0),
        MANY
    );
}
