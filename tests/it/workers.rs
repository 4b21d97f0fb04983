//! Workers: registration, heartbeats, and the key that each write must present.

mod cancellations;
mod stats;
mod takeovers;

use std::time::Duration;

use rouse::job::{Fence, Outcome};
use rouse::store::{ClaimOrder, ClaimedJob, JsonText, Locked, Settlement, Stats, Store, WorkerKey};
use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use crate::support::claims::{lock_job, orders, renewal};
use crate::support::database::registration;
use crate::support::worker::{TestWorker, backdate_heartbeat, ended, enqueue, show, until_true};
use crate::support::{TestDb, until_quicker_than};

async fn claim(store: &Store) -> Vec<ClaimedJob> {
    let orders = orders(store, 3_600_000).await;
    store
        .claim(Fence(7), &orders, 10, None)
        .await
        .unwrap()
        .jobs()
}

fn succeeded(job: &ClaimedJob) -> Settlement {
    Settlement {
        id: job.id,
        fence: job.fence,
        started_after: Some(Duration::ZERO),
        guest_run: None,
        handler: None,
        outcome: Outcome::Succeeded(JsonText("1".into())),
        jobs: Vec::new(),
        trace: None,
    }
}

async fn states(client: &Client) -> Vec<(String, String)> {
    let rows = client
        .query(
            "SELECT worker_id, state FROM rouse.workers ORDER BY incarnation",
            &[],
        )
        .await
        .unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

async fn heartbeat(store: &Store) -> Result<i32, rouse::store::StoreError> {
    store
        .heartbeat(Some(&json!({})), &Stats::default(), false)
        .await
        .map(|beat| beat.expired)
}

#[tokio::test]
async fn an_id_is_taken_while_its_holder_is_alive() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (first, second) = (db.store(), db.store());
    let mail = || registration("mail", WorkerKey::random());
    let (_, heartbeat_every) = first.register(&mail()).await.unwrap();
    assert_eq!(heartbeat_every, Duration::from_secs(30));
    let refused = second.register(&mail()).await.unwrap_err();
    assert!(refused.is_taken(), "{refused}");
    assert!(refused.to_string().contains("worker_key_file"), "{refused}");
    backdate_heartbeat(&client, &first, 91).await;
    second.register(&mail()).await.unwrap();
    let dead_and_active = [("mail", "dead"), ("mail", "active")];
    assert_eq!(
        states(&client).await,
        dead_and_active.map(|(id, state)| (id.into(), state.into()))
    );
    // The id of a worker that has stopped is free at once.
    second.unregister().await.unwrap();
    db.store().register(&mail()).await.unwrap();
}

#[tokio::test]
async fn the_holder_of_the_key_takes_the_id_over_and_frees_its_claims() {
    let db = TestDb::new().await;
    let client = db.client().await;
    enqueue(&client, "x", json!({})).await;
    let key = WorkerKey::new([7; 32]);
    let (killed, restarted) = (db.store(), db.store());
    killed
        .register(&registration("mail", key.clone()))
        .await
        .unwrap();
    let job = claim(&killed).await.remove(0);
    restarted
        .register(&registration("mail", key))
        .await
        .unwrap();
    // The lease of a freed claim ends a moment later.
    let ended = "SELECT lease_until < clock_timestamp() FROM rouse.job";
    until_true(&client, ended).await;
    let lanes = [ClaimOrder {
        lane: job.lane,
        after: 0,
        lease_ms: 60_000,
        max: None,
        overdue: None,
    }];
    let adopted = crate::support::claims::adopt(&restarted, Fence(8), &lanes, 10, 3, None)
        .await
        .unwrap();
    assert_eq!(
        adopted.claimed.len(),
        1,
        "although its lease was for an hour"
    );
    // The first worker was not killed after all.
    let refused = killed.settle(&[succeeded(&job)], Locked::Wait).await;
    assert!(refused.unwrap_err().is_superseded());
}

#[tokio::test]
async fn only_the_holder_of_the_key_writes_as_a_worker() {
    let db = TestDb::new().await;
    let client = db.client().await;
    enqueue(&client, "x", json!({})).await;
    let worker = db.worker().await;
    let job = claim(&worker).await.remove(0);
    let me = worker.incarnation().unwrap().0;
    for call in [
        "SELECT rouse.claim($1, sha256('guessed'), 1, '{}', 1)",
        "SELECT rouse.orphans($1, sha256('guessed'), '{}', NULL, 1, NULL, 3, 10000)",
        "SELECT rouse.adopt($1, sha256('guessed'), 1, '{}')",
        "SELECT rouse.settle($1, sha256('guessed'), '{}', '{}', false)",
        "SELECT rouse.renew($1, sha256('guessed'), '{}', '{}', '{}')",
        "SELECT rouse.promote($1, sha256('guessed'), 1, NULL)",
        "SELECT rouse.heartbeat($1, sha256('guessed'), '{}', '{}', false)",
        "SELECT rouse.unregister($1, NULL)",
        "SELECT rouse.sleep($1, NULL, '{*}', 1000)",
        "SELECT rouse.awake($1, NULL)",
        "SELECT rouse.maintain_partitions($1, NULL)",
    ] {
        let error = client.query(call, &[&me]).await.unwrap_err();
        let code = error.code().unwrap_or_else(|| panic!("{call}: {error}"));
        assert_eq!(code.code(), "RW004", "{call}");
    }
    assert_eq!(show(&client, job.id.0).await.state, "running");
    let kept: bool = client
        .query_one(
            "SELECT key_hash IS NOT NULL AND octet_length(key_hash) = 32 FROM rouse.worker",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert!(kept);
    // A store without a registered worker does not even send the request.
    let error = db.store().promote(None, false).await.unwrap_err();
    assert!(!error.is_transient());
    assert_eq!(error.to_string(), "no worker has registered");
}

#[tokio::test]
async fn a_write_to_another_workers_job_is_refused_and_counted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!({})).await;
    let (owner, other) = (db.worker().await, db.worker().await);
    let job = claim(&owner).await.remove(0);
    // This worker has somehow learnt the fence.
    let settled = other
        .settle(&[succeeded(&job)], Locked::Wait)
        .await
        .unwrap();
    assert!(settled.accepted.is_empty());
    let skipping = other
        .settle(&[succeeded(&job)], Locked::Skip)
        .await
        .unwrap();
    assert!(skipping.accepted.is_empty());
    let responses = other.renew(&[renewal(&job, 1)]).await.unwrap();
    assert!(responses[0].1.is_some(), "{responses:?}");
    assert_eq!(show(&client, id).await.state, "running");
    let refused: Vec<i64> = client
        .query("SELECT refused FROM rouse.worker ORDER BY incarnation", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(refused, [0, 2]);
    let settled = owner
        .settle(&[succeeded(&job)], Locked::Wait)
        .await
        .unwrap();
    assert!(settled.accepted.contains(&job.id));
}

#[tokio::test]
async fn a_silent_worker_is_expired_by_the_others_and_its_jobs_are_freed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for _ in 0..3 {
        enqueue(&client, "x", json!({})).await;
    }
    let (dead, live) = (db.worker().await, db.worker().await);
    let jobs = claim(&dead).await;
    assert_eq!(
        heartbeat(&live).await.unwrap(),
        0,
        "the worker sent a heartbeat"
    );
    backdate_heartbeat(&client, &dead, 91).await;
    // Another transaction is changing one of its jobs, and takes a while.
    let mut slow = db.client().await;
    let transaction = slow.transaction().await.unwrap();
    lock_job(&transaction, jobs[0].id.0).await;
    assert_eq!(heartbeat(&live).await.unwrap(), 1);
    assert_eq!(heartbeat(&live).await.unwrap(), 0, "expired only once");
    transaction.rollback().await.unwrap();
    let lanes = [ClaimOrder {
        lane: jobs[0].lane,
        after: 0,
        lease_ms: 60_000,
        max: None,
        overdue: None,
    }];
    // The lease of a freed claim ends a moment later.
    let ended = "SELECT count(*) = 2 FROM rouse.job WHERE lease_until < clock_timestamp()";
    until_true(&client, ended).await;
    let adopted = crate::support::claims::adopt(&live, Fence(8), &lanes, 10, 3, None)
        .await
        .unwrap()
        .claimed;
    let adopted: Vec<_> = adopted.iter().map(|job| job.id).collect();
    assert_eq!(
        adopted,
        [jobs[1].id, jobs[2].id],
        "the locked job can be adopted when its lease ends"
    );
    for refused in [
        heartbeat(&dead).await.unwrap_err(),
        dead.settle(&[succeeded(&jobs[1])], Locked::Wait)
            .await
            .unwrap_err(),
    ] {
        assert!(refused.is_incarnation_ended(), "{refused}");
    }
}

#[tokio::test]
async fn an_invalid_registration_is_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (arguments, expected) in [
        ("'', sha256('k'), 'h', 'p', 'v', '{}'", "is not a worker id"),
        (
            "'a b', sha256('k'), 'h', 'p', 'v', '{}'",
            "is not a worker id",
        ),
        (
            "repeat('a', 65), sha256('k'), 'h', 'p', 'v', '{}'",
            "is not a worker id",
        ),
        (
            "'a', 'short', 'h', 'p', 'v', '{}'",
            "a key is 32 bytes long",
        ),
        ("'a', NULL, 'h', 'p', 'v', '{}'", "a key is 32 bytes long"),
        (
            "'a', sha256('k'), 'h', 'p', 'v', '[]'",
            "capabilities must be an object",
        ),
        (
            "'a', sha256('k'), 'h', 'p', 'v', '{\"No Handler\": {}}'",
            "'No Handler' is not a handler name",
        ),
        (
            "'a', sha256('k'), 'h', 'p', 'v', '{\"x\": 1}'",
            "capabilities must be an object",
        ),
        ("'a', sha256('k'), '', 'p', 'v', '{}'", "hostname must have"),
        (
            "'a', sha256('k'), E'h\\x1b', 'p', 'v', '{}'",
            "hostname must have",
        ),
        (
            "'a', sha256('k'), NULL, 'p', 'v', '{}'",
            "hostname must have",
        ),
        ("'a', sha256('k'), 'h', '', 'v', '{}'", "platform must have"),
        (
            "'a', sha256('k'), 'h', 'p', repeat('v', 256), '{}'",
            "version must have",
        ),
        (
            "'a', sha256('k'), 'h', 'p', 'v', '{\"x\": {\"version\": 1}}'",
            "capabilities of handler x: version must be a string of at most 255 characters",
        ),
        (
            "'a', sha256('k'), 'h', 'p', 'v', '{\"x\": {\"grants\": [1]}}'",
            "capabilities of handler x: grants must be an array of strings",
        ),
        (
            "'a', sha256('k'), 'h', 'p', 'v', '{\"x\": {\"grants\": \"http\"}}'",
            "grants must be an array of strings",
        ),
        (
            "'a', sha256('k'), 'h', 'p', 'v', '{\"x\": {\"sha256\": \"12\"}}'",
            "sha256 must be 64 hexadecimal digits",
        ),
        (
            "'a', sha256('k'), 'h', 'p', 'v', '{\"x\": {\"max_attempts\": \"5\"}}'",
            "max_attempts must be a number",
        ),
        (
            "'a', sha256('k'), 'h', 'p', 'v', '{\"x\": {\"payload_keys\": {}}}'",
            "payload_keys must be an array",
        ),
    ] {
        let call = format!("SELECT rouse.register({arguments}, 1, '{{}}', '{{}}')");
        let error = client.query(&call, &[]).await.unwrap_err();
        let db_error = error
            .as_db_error()
            .unwrap_or_else(|| panic!("{call}: {error}"));
        assert!(db_error.message().contains(expected), "{call}: {db_error}");
    }
    for (arguments, expected) in [
        ("0, '{}', '{}'", "slots must be 1 to 10000, not 0"),
        ("NULL, '{}', '{}'", "slots must be 1 to 10000, not null"),
        ("10001, '{}', '{}'", "slots must be 1 to 10000, not 10001"),
        ("1, '{a b}', '{}'", "queues must be a list of"),
        ("1, '{zone=eu}', '{}'", "queues must be a list of"),
        ("1, '{}', '{a b}'", "tags must be a list of"),
        ("1, '{}', '{=eu}'", "tags must be a list of"),
        ("1, '{}', '{zone=a=b}'", "tags must be a list of"),
        ("1, '{}', NULL", "tags must be a list of"),
        ("1, '{}', '{}', '[]'", "stats must be an object"),
        // The list of queues and the dashboard add these values up.
        (
            "1, '{}', '{}', '{\"failed\": \"many\"}'",
            "failed must be a count",
        ),
        (
            "1, '{}', '{}', '{\"failed\": 1e30}'",
            "failed must be a count",
        ),
        ("1, '{}', '{}', '{\"fair\": null}'", "fair must be an array"),
        (
            "1, '{}', '{}', '{\"fair\": [{\"keys\": {}}]}'",
            "keys must be an array",
        ),
        (
            "1, '{}', '{}', '{\"fair\": [{\"rounds\": 1.5}]}'",
            "rounds and promotions must be counts",
        ),
        (
            "1, '{}', '{}', '{\"fair\": [{\"queue\": \"a\", \"keys\": [{\"selected\": 1}, {\"deferred\": -1}]}]}'",
            "selected, deferred and promotions of a key must be counts",
        ),
        (
            "1, '{}', '{}', '{\"fair\": [{\"queue\": \"a\", \"keys\": [{\"deficit\": 1e-400}]}]}'",
            "deficit must be a number",
        ),
        (
            "1, '{}', '{}', '{\"fair\": [{\"keys\": []}]}'",
            "queue must be a string",
        ),
    ] {
        let call =
            format!("SELECT rouse.register('a', sha256('k'), 'h', 'p', 'v', '{{}}', {arguments})");
        let error = client.query(&call, &[]).await.unwrap_err();
        let message = error.as_db_error().unwrap().message().to_owned();
        assert!(message.contains(expected), "{call}: {message}");
    }
    assert!(states(&client).await.is_empty());
}

/// A tag is a word or key=value, both for workers and for jobs.
#[tokio::test]
async fn a_job_that_requires_a_key_value_tag_runs_on_a_worker_that_has_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let long = format!("zone={}", "x".repeat(123));
    let settings = |tag: &str| Settings {
        tags: vec![tag.into(), long.clone()],
        worker_id: tag.replace('=', "-"),
        ..Settings::default()
    };
    let workers = [
        TestWorker::start(&db, settings("zone=eu")).await,
        TestWorker::start(&db, settings("zone=us")).await,
    ];
    let sql = "SELECT rouse.enqueue('noop', tags => ARRAY['zone=eu', $1])";
    let id: i64 = client.query_one(sql, &[&long]).await.unwrap().get(0);
    ended(&client, id).await;
    let ran = "SELECT w.worker_id FROM rouse.finished AS f JOIN rouse.workers AS w ON w.incarnation = f.worker";
    let ran: String = client.query_one(ran, &[]).await.unwrap().get(0);
    assert_eq!(ran, "zone-eu");
    let too_long = format!("{long}x");
    let refused = client.query_one(sql, &[&too_long]).await.unwrap_err();
    assert!(
        refused
            .as_db_error()
            .unwrap()
            .message()
            .contains("tags must be a list")
    );
    for worker in workers {
        worker.drain().await;
    }
}

#[tokio::test]
async fn a_challenge_whose_answer_is_refused_does_not_delay_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN RAISE EXCEPTION 'no such answer'; END $$;
             CREATE TRIGGER refuse BEFORE UPDATE ON rouse.challenge
                 FOR EACH ROW WHEN (NEW.handler = 'no.such') EXECUTE FUNCTION public.refuse()",
        )
        .await
        .unwrap();
    let settings = Settings {
        worker_id: "w-1".into(),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.workers)").await;
    let store = db.store();
    // The refused challenge is the first to be answered, each time.
    let refused = store.challenge("w-1", "no.such").await.unwrap();
    let nonce = store.challenge("w-1", "noop").await.unwrap();
    let answered = format!("SELECT rouse.challenge_answer('{nonce}') IS NOT NULL");
    until_true(&client, &answered).await;
    assert_eq!(store.challenge_answer(&refused).await.unwrap(), None);
    worker.drain().await;
}

/// Jobs that a worker loses while it does not send heartbeats count as lost in a crash.
#[tokio::test]
async fn a_failed_heartbeat_is_repeated_long_before_the_next_one_is_due() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    client
        .batch_execute(
            "CREATE SEQUENCE rouse.failed;
             GRANT USAGE ON SEQUENCE rouse.failed TO PUBLIC;
             CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN PERFORM nextval('rouse.failed'); RAISE EXCEPTION 'no room'; END $$",
        )
        .await
        .unwrap();
    // Within half of the 30 seconds between heartbeats.
    until_quicker_than(Duration::from_secs(15), async || {
        // A worker that may have been expired finds out with a heartbeat.
        client
            .batch_execute(
                "SELECT setval('rouse.failed', 1, false);
                 CREATE TRIGGER fail BEFORE UPDATE ON rouse.worker FOR EACH ROW EXECUTE FUNCTION fail();
                 SELECT pg_notify('rouse_worker_' || max(incarnation), '') FROM rouse.worker",
            )
            .await
            .unwrap();
        until_true(&client, "SELECT is_called FROM rouse.failed").await;
        let since = "SELECT clock_timestamp()::text";
        let since: String = client.query_one(since, &[]).await.unwrap().get(0);
        let succeed = "DROP TRIGGER fail ON rouse.worker";
        client.batch_execute(succeed).await.unwrap();
        let beat = format!("SELECT seen_at > '{since}' FROM rouse.worker");
        until_true(&client, &beat).await;
    })
    .await;
    worker.drain().await;
}

/// Otherwise, a worker that has died would count as alive longer, by the time by which the clock was set back.
#[tokio::test]
async fn a_heartbeat_that_lies_in_the_future_counts_as_sent_now() {
    let db = TestDb::new().await;
    let (client, live, dead) = (db.client().await, db.worker().await, db.worker().await);
    backdate_heartbeat(&client, &dead, -3600).await;
    let beat = live.heartbeat(None, &Stats::default(), false).await;
    assert_eq!(beat.unwrap().expired, 0, "it may be alive");
    let ahead = "SELECT count(*) FROM rouse.worker WHERE seen_at > clock_timestamp()";
    let ahead: i64 = client.query_one(ahead, &[]).await.unwrap().get(0);
    assert_eq!(ahead, 0);
}

/// A live worker would otherwise lose its id to another host before its next heartbeat. The id of a worker that has
/// died would be taken longer, by the time by which the clock was set back, because there may be no other worker whose
/// heartbeats correct the time.
#[tokio::test]
async fn an_id_is_taken_for_90_seconds_if_the_heartbeat_of_its_holder_lies_in_the_future() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let holder = db.worker().await;
    let register = async |key| db.store().register(&registration("w-1", key)).await;
    backdate_heartbeat(&client, &holder, -3600).await;
    let refused = register(WorkerKey::random()).await.unwrap_err();
    assert!(refused.is_taken(), "{refused}");
    let beat = holder.heartbeat(None, &Stats::default(), false).await;
    beat.expect("it has kept its id");
    backdate_heartbeat(&client, &holder, -3600).await;
    register(WorkerKey::random()).await.unwrap_err();
    // The holder sends no further heartbeat.
    let passes = "UPDATE rouse.worker SET seen_at = seen_at - interval '90 seconds'";
    client.batch_execute(passes).await.unwrap();
    let key = WorkerKey::new([7; 32]);
    register(key.clone()).await.expect("the id is free");
    let set_back = "UPDATE rouse.worker SET seen_at = seen_at + interval '1 hour'";
    client.batch_execute(set_back).await.unwrap();
    register(key).await.expect("it has the key");
}

/// Otherwise, a host that has the key of a live holder could not take over its id until the clock has caught up with
/// that report.
#[tokio::test]
async fn a_report_that_lies_in_the_future_does_not_show_that_two_hosts_share_an_id() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let key = WorkerKey::new([7; 32]);
    let register = async || db.store().register(&registration("w-1", key.clone())).await;
    register().await.unwrap();
    register().await.expect("it has the key");
    let report = async |at: &str| {
        let sql = format!(
            "UPDATE rouse.worker SET outlived_at = clock_timestamp() + interval '{at}' WHERE replaced_at IS NOT NULL"
        );
        client.batch_execute(&sql).await.unwrap();
    };
    for at in ["0", "9 minutes"] {
        report(at).await;
        let refused = register().await.unwrap_err();
        assert!(refused.to_string().contains("two hosts share"), "{refused}");
    }
    report("1 hour").await;
    register().await.expect("it has the key");
}

/// The worker may be alive, and would lose its attempts. If it has died, there may be no other worker that corrects the
/// time.
#[tokio::test]
async fn a_worker_whose_heartbeat_lies_in_the_future_can_be_forgotten_90_seconds_later() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = db.worker().await;
    let forget = async || {
        let row = client
            .query_one("SELECT rouse.forget_worker('w-1')", &[])
            .await?;
        Ok::<Option<i32>, tokio_postgres::Error>(row.get(0))
    };
    // The clocks of a transaction and of a statement may differ by some seconds.
    backdate_heartbeat(&client, &worker, -5).await;
    forget().await.expect_err("it counts as alive");
    backdate_heartbeat(&client, &worker, -3600).await;
    let corrected = forget().await.expect("the heartbeat counts as sent now");
    assert_eq!(corrected, None);
    forget().await.expect_err("it may be alive");
    let beat = worker.heartbeat(None, &Stats::default(), false).await;
    beat.expect("it has not been expired");

    backdate_heartbeat(&client, &worker, -3600).await;
    let refused = db.store().forget_worker("w-1").await.unwrap_err();
    assert!(refused.is_refused_by_state(), "{refused}");
    // The worker sends no further heartbeat.
    let passes = "UPDATE rouse.worker SET seen_at = seen_at - interval '90 seconds'";
    client.batch_execute(passes).await.unwrap();
    assert_eq!(db.store().forget_worker("w-1").await.unwrap(), 1);
}

/// A heartbeat that is less than 10 seconds in the future is not corrected.
#[tokio::test]
async fn messages_say_that_a_heartbeat_slightly_in_the_future_was_sent_0_seconds_ago() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let register = async |key| db.store().register(&registration("w-1", key)).await;
    let key = WorkerKey::new([7; 32]);
    register(key.clone()).await.unwrap();
    register(key.clone()).await.expect("it has the key");
    client
        .batch_execute(
            "UPDATE rouse.worker SET seen_at = clock_timestamp() + interval '9 seconds';
             UPDATE rouse.worker SET outlived_at = clock_timestamp() WHERE replaced_at IS NOT NULL",
        )
        .await
        .unwrap();
    for refused in [
        register(WorkerKey::random()).await.unwrap_err().to_string(),
        register(key).await.unwrap_err().to_string(),
        db.store()
            .forget_worker("w-1")
            .await
            .unwrap_err()
            .to_string(),
    ] {
        assert!(refused.contains("last heartbeat 0 s ago"), "{refused}");
    }
}

#[tokio::test]
async fn a_worker_whose_row_was_deleted_without_the_triggers_of_rows_registers_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mail = registration("mail", WorkerKey::new([7; 32]));
    for (delete, left) in [
        ("TRUNCATE rouse.worker", 0),
        // As some restores do.
        (
            "SET session_replication_role = replica; DELETE FROM rouse.worker; SET session_replication_role = origin",
            1,
        ),
    ] {
        let store = db.store();
        store.register(&mail).await.unwrap();
        client.batch_execute(delete).await.unwrap();
        let live = client.query_one("SELECT count(*) FROM rouse.live_worker", &[]);
        assert_eq!(live.await.unwrap().get::<_, i64>(0), left, "{delete}");
        let refused = heartbeat(&store).await.unwrap_err();
        assert!(refused.is_unknown(), "{delete}: {refused}");
        store.register(&mail).await.expect(delete);
        heartbeat(&store).await.expect(delete);
    }
}
