//! Firings that meet other hosts, changes to the schedule, and crashes.

use std::sync::Arc;
use std::time::Duration;

use rouse::store::connect::Connector;
use rouse::store::{ScheduleDecision, Store};
use rouse::worker::Settings;
use tokio::sync::Barrier;
use tokio_postgres::Client;

use super::{
    LOCK_WAIT, REFUSE_JOBS_OF_BAD, block_gated_jobs, decided, due, fire_due, make_due, one,
    outcomes, schedule, shown, this_minute, write,
};
use crate::support::claims::claim;
use crate::support::worker::{SESSION_WAITS, TestWorker, until_true};
use crate::support::{TestDb, cut_all_others};

/// Makes `free` the last schedule that is fired: the most overdue ones are listed and fired first.
async fn make_free_the_least_overdue(client: &Client) {
    client
        .batch_execute(
            "UPDATE rouse.schedule SET next_at = clock_timestamp() - CASE name WHEN 'free' THEN interval '1 s' ELSE interval '1 minute' END",
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn three_hosts_that_fire_the_same_due_time_at_once_enqueue_one_job() {
    let (db, client, first) = due("allow").await;
    let hosts = [first, db.worker().await, db.worker().await];
    for _ in 0..20 {
        client
            .batch_execute("TRUNCATE rouse.schedule_run")
            .await
            .unwrap();
        make_due(&client).await;
        let barrier = Arc::new(Barrier::new(3));
        let tasks = hosts.clone().map(|store| {
            let barrier = barrier.clone();
            tokio::spawn(async move {
                // All hosts have listed it before any of them fires.
                let decided = decided(&store).await;
                assert_eq!(decided.len(), 1);
                barrier.wait().await;
                write(&store, &decided).await.len()
            })
        });
        let mut applied = 0;
        for task in tasks {
            applied += task.await.unwrap();
        }
        assert_eq!(applied, 1);
        assert_eq!(outcomes(&client, "a").await, ["enqueued"]);
    }
}

#[tokio::test]
async fn three_workers_fire_each_due_time_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut workers = Vec::new();
    for n in 0..3 {
        let settings = Settings {
            worker_id: format!("w-{n}"),
            ..Settings::default()
        };
        workers.push(TestWorker::start(&db, settings).await);
    }
    for n in 0..10 {
        schedule(
            &client,
            &format!("'s{n}', 'noop', cron => '* * * * * *', overlap => 'allow'"),
        )
        .await;
    }
    until_true(
        &client,
        "SELECT count(*) >= 40 FROM rouse.finished WHERE state = 'succeeded'",
    )
    .await;
    for worker in workers {
        worker.drain().await;
    }
    let sql =
        "SELECT count(*) = count(DISTINCT (schedule, due_at)) AND count(*) = count(DISTINCT job)
                  AND (SELECT count(*) FROM rouse.jobs) = count(*)
               FROM rouse.schedule_run";
    assert!(one::<bool>(&client, sql).await, "one job for each due time");
    // No due time was left out in between.
    let sql = "SELECT bool_and(next IS NULL OR next = due_at + interval '1 s')
               FROM (SELECT due_at, lead(due_at) OVER (PARTITION BY schedule ORDER BY due_at) AS next FROM rouse.schedule_run) AS r";
    assert!(one::<bool>(&client, sql).await, "every due time");
}

#[tokio::test]
async fn a_host_that_is_cut_off_between_listing_and_firing_leaves_the_due_time_to_the_others() {
    let (db, client, store) = due("skip").await;
    let listed = decided(&store).await;
    cut_all_others(&client).await;
    let other = db.worker().await;
    fire_due(&other).await;
    assert_eq!(outcomes(&client, "a").await, ["enqueued"]);
    // The host comes back, and still has its decision.
    let fired = ScheduleDecision {
        due: &listed[0].0,
        decision: &listed[0].1,
        refused: None,
    };
    let again = match store.fire_schedules(&[fired], LOCK_WAIT).await {
        Err(error) if error.is_transient() => store.fire_schedules(&[fired], LOCK_WAIT).await,
        response => response,
    };
    assert!(again.unwrap().is_empty());
    assert_eq!(outcomes(&client, "a").await, ["enqueued"]);
}

#[tokio::test]
async fn a_host_that_dies_while_it_fires_leaves_nothing_behind() {
    let (db, mut client, store) = due("cancel").await;
    fire_due(&store).await;
    let previous = claim(&store, 1).await.remove(0);
    client
        .batch_execute("UPDATE rouse.schedule_run SET due_at = due_at - interval '1 day'")
        .await
        .unwrap();
    make_due(&client).await;
    // The firing waits within its transaction, because the previous job is locked.
    let watcher = db.client().await;
    let lock = client.transaction().await.unwrap();
    lock.execute(
        "SELECT FROM rouse.job WHERE id = $1 FOR UPDATE",
        &[&previous.id.0],
    )
    .await
    .unwrap();
    let host = store.clone();
    let firing = tokio::spawn(async move {
        let decided = decided(&host).await;
        let fired = ScheduleDecision {
            due: &decided[0].0,
            decision: &decided[0].1,
            refused: None,
        };
        host.fire_schedules(&[fired], LOCK_WAIT).await
    });
    until_true(&watcher, SESSION_WAITS).await;
    let killed = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    assert_eq!(one::<i64>(&watcher, killed).await, 1);
    assert!(firing.await.unwrap().unwrap_err().is_transient());
    lock.rollback().await.unwrap();
    assert_eq!(outcomes(&client, "a").await, ["enqueued"]);
    fire_due(&db.worker().await).await;
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "replaced"]);
}

#[tokio::test]
async fn a_producer_that_holds_the_key_of_a_gate_does_not_delay_other_schedules() {
    let db = TestDb::new().await;
    let (client, mut producer) = (db.client().await, db.client().await);
    let open = block_gated_jobs(&client, &mut producer).await;
    let cron = this_minute(&client).await;
    for (name, handler) in [("a", "gated"), ("b", "plain"), ("c", "gated")] {
        let sql = format!("'{name}', '{handler}', cron => '{cron}', overlap => 'allow'");
        schedule(&client, &sql).await;
    }
    client
        .batch_execute("SELECT rouse.backfill_schedule('c', now() - interval '3 hours', now() - interval '1 hour')")
        .await
        .unwrap();
    make_due(&client).await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let fired =
        |name| format!("SELECT EXISTS (SELECT FROM rouse.schedule_run WHERE schedule = '{name}')");
    until_true(&client, &fired("b")).await;
    assert!(outcomes(&client, "a").await.is_empty());
    assert!(outcomes(&client, "c").await.is_empty());
    open.rollback().await.unwrap();
    until_true(&client, &fired("a")).await;
    until_true(
        &client,
        "SELECT bool_and(finished_at IS NOT NULL AND error IS NULL) FROM rouse.backfill",
    )
    .await;
    worker.drain().await;
}

/// Each of these schedules would wait for 250 ms.
#[tokio::test]
async fn hundreds_of_schedules_whose_jobs_a_producer_blocks_delay_others_by_one_wait() {
    let db = TestDb::new().await;
    let (client, mut producer) = (db.client().await, db.client().await);
    let open = block_gated_jobs(&client, &mut producer).await;
    let cron = this_minute(&client).await;
    let sql = "SELECT rouse.schedule('gated-' || n, 'gated', cron => $1, overlap => 'allow') FROM generate_series(1, 200) AS n";
    client.execute(sql, &[&cron]).await.unwrap();
    schedule(
        &client,
        &format!("'free', 'plain', cron => '{cron}', overlap => 'allow'"),
    )
    .await;
    make_due(&client).await;
    make_free_the_least_overdue(&client).await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    // 200 waits take at least 50 s.
    let is_fired = "SELECT EXISTS (SELECT FROM rouse.schedule_run WHERE schedule = 'free')";
    let firing = until_true(&client, is_fired);
    tokio::time::timeout(Duration::from_secs(40), firing)
        .await
        .expect("the others do not delay it");
    let fired = "SELECT count(*) FROM rouse.schedule_run";
    assert_eq!(one::<i64>(&client, fired).await, 1);
    open.rollback().await.unwrap();
    until_true(
        &client,
        "SELECT count(DISTINCT schedule) = 201 FROM rouse.schedule_run",
    )
    .await;
    worker.drain().await;
}

/// There are more of these schedules than a host lists at once.
#[tokio::test]
async fn schedules_that_a_transaction_has_locked_do_not_delay_others() {
    let db = TestDb::new().await;
    let (client, mut other) = (db.client().await, db.client().await);
    let cron = this_minute(&client).await;
    let sql = "SELECT rouse.schedule('locked-' || n, 'noop', cron => $1, overlap => 'allow') FROM generate_series(1, 300) AS n";
    client.execute(sql, &[&cron]).await.unwrap();
    schedule(
        &client,
        &format!("'free', 'noop', cron => '{cron}', overlap => 'allow'"),
    )
    .await;
    make_due(&client).await;
    make_free_the_least_overdue(&client).await;
    let open = other.transaction().await.unwrap();
    open.batch_execute("SELECT FROM rouse.schedule WHERE name <> 'free' FOR UPDATE")
        .await
        .unwrap();
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM rouse.schedule_run WHERE schedule = 'free')",
    )
    .await;
    let fired = "SELECT count(*) FROM rouse.schedule_run";
    assert_eq!(one::<i64>(&client, fired).await, 1);
    open.rollback().await.unwrap();
    until_true(
        &client,
        "SELECT count(DISTINCT schedule) = 301 FROM rouse.schedule_run",
    )
    .await;
    worker.drain().await;
}

/// A trigger of the operator raises an error that says nothing about the data.
#[tokio::test]
async fn a_schedule_whose_job_cannot_be_enqueued_for_an_unknown_reason_does_not_delay_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(REFUSE_JOBS_OF_BAD).await.unwrap();
    let cron = this_minute(&client).await;
    for name in ["bad", "good"] {
        let sql = format!("'{name}', 'noop', cron => '{cron}', overlap => 'allow'");
        schedule(&client, &sql).await;
    }
    make_due(&client).await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let fired =
        |name| format!("SELECT EXISTS (SELECT FROM rouse.schedule_run WHERE schedule = '{name}')");
    until_true(&client, &fired("good")).await;
    assert!(outcomes(&client, "bad").await.is_empty());
    client
        .batch_execute("DROP TRIGGER refuse ON rouse.job")
        .await
        .unwrap();
    until_true(&client, &fired("bad")).await;
    assert_eq!(outcomes(&client, "bad").await, ["enqueued"]);
    worker.drain().await;
}

#[tokio::test]
async fn overlap_cancel_cancels_the_job_that_continues_the_previous_one() {
    let (db, mut client, store) = due("cancel").await;
    fire_due(&store).await;
    let first: i64 = one(&client, "SELECT id FROM rouse.job").await;
    client
        .batch_execute("UPDATE rouse.schedule_run SET due_at = due_at - interval '1 day'")
        .await
        .unwrap();
    make_due(&client).await;
    // The previous job is about to be replaced by the next job of its chain.
    let watcher = db.client().await;
    let edit = client.transaction().await.unwrap();
    let next: i64 = edit
        .query_one("SELECT rouse.replace_payload($1, '{}')", &[&first])
        .await
        .unwrap()
        .get(0);
    let host = store.clone();
    let firing = tokio::spawn(async move { write(&host, &decided(&host).await).await });
    until_true(&watcher, SESSION_WAITS).await;
    edit.commit().await.unwrap();
    assert_eq!(firing.await.unwrap(), ["a"]);
    assert_eq!(outcomes(&client, "a").await, ["enqueued", "replaced"]);
    let cancelled = format!("SELECT state = 'cancelled' FROM rouse.job({next})");
    assert!(one::<bool>(&client, &cancelled).await);
}

#[tokio::test]
async fn another_host_skips_a_schedule_that_is_being_fired() {
    let (db, mut client, store) = due("allow").await;
    let decided = decided(&store).await;
    let other = client.transaction().await.unwrap();
    other
        .execute("SELECT FROM rouse.schedule FOR UPDATE", &[])
        .await
        .unwrap();
    assert!(write(&store, &decided).await.is_empty(), "without waiting");
    other.rollback().await.unwrap();
    assert_eq!(write(&store, &decided).await, ["a"]);
    drop(db);
}

#[tokio::test]
async fn a_schedule_that_is_replaced_between_listing_and_firing_fires_as_it_is_now() {
    let (_db, client, store) = due("allow").await;
    let old = decided(&store).await;
    let cron: String = one(&client, "SELECT cron FROM rouse.schedules").await;
    let replaced = format!("'a', 'x', '{{\"new\": true}}', cron => '{cron}', overlap => 'allow'");
    assert_eq!(schedule(&client, &replaced).await, "replaced");
    assert!(write(&store, &old).await.is_empty());
    assert!(outcomes(&client, "a").await.is_empty());
    // The due time is not lost.
    fire_due(&store).await;
    assert_eq!(
        one::<String>(&client, "SELECT payload::text FROM rouse.jobs").await,
        "{\"new\": true}"
    );
    // If the due times of the schedule change, the new ones apply from now on, and past ones are not fired.
    make_due(&client).await;
    let old = decided(&store).await;
    assert_eq!(
        schedule(&client, "'a', 'x', cron => '0 0 1 1 *', overlap => 'allow'").await,
        "replaced"
    );
    assert!(write(&store, &old).await.is_empty());
    fire_due(&store).await;
    assert_eq!(outcomes(&client, "a").await, ["enqueued"]);
    assert!(shown(&client, "a").await["next_at"].is_string());
}

#[tokio::test]
async fn a_schedule_that_is_deleted_and_created_again_does_not_repeat_a_due_time() {
    let (_db, client, store) = due("allow").await;
    let old = decided(&store).await;
    fire_due(&store).await;
    let cron: String = one(&client, "SELECT cron FROM rouse.schedules").await;
    client
        .batch_execute("SELECT rouse.unschedule('a')")
        .await
        .unwrap();
    assert!(write(&store, &old).await.is_empty());
    schedule(
        &client,
        &format!("'a', 'x', cron => '{cron}', overlap => 'allow'"),
    )
    .await;
    assert!(
        write(&store, &old).await.is_empty(),
        "another schedule with this name"
    );
    make_due(&client).await;
    assert_eq!(write(&store, &decided(&store).await).await, ["a"]);
    assert_eq!(outcomes(&client, "a").await, ["enqueued"]);
    assert_eq!(
        one::<i64>(&client, "SELECT count(*) FROM rouse.job").await,
        1
    );
}

#[tokio::test]
async fn a_host_cannot_fire_what_is_not_due() {
    let (_db, _client, store) = due("allow").await;
    let mut decided = decided(&store).await;
    decided[0].1.firings[0].due_at = decided[0].1.upcoming[0];
    let fired = ScheduleDecision {
        due: &decided[0].0,
        decision: &decided[0].1,
        refused: None,
    };
    let error = store
        .fire_schedules(&[fired], LOCK_WAIT)
        .await
        .unwrap_err()
        .to_string();
    assert!(error.contains("a is not due at"), "{error}");
}

#[tokio::test]
async fn a_limited_login_fires_only_schedules_of_its_queues_and_handlers() {
    let (db, client, _store) = due("allow").await;
    client
        .batch_execute(
            "CREATE ROLE schedules_limited LOGIN IN ROLE rouse_worker;
             SET ROLE rouse_owner;
             INSERT INTO rouse.worker_login (login, worker_ids, queues, handlers) VALUES ('schedules_limited', '{*}', '{mail-*}', '{mail.*}');
             RESET ROLE;
             SELECT rouse.schedule('mail', 'mail.send', cron => '* * * * *', queue => 'mail-1');
             SELECT rouse.schedule('handler', 'x', cron => '* * * * *', queue => 'mail-1');
             SELECT rouse.schedule('queue', 'mail.send', cron => '* * * * *')",
        )
        .await
        .unwrap();
    make_due(&client).await;
    let url = db.url().replace("rouse@", "schedules_limited@");
    let store = Store::new(&Connector::from_url(&url, &|_| None).unwrap(), 2);
    let mut registration =
        crate::support::database::registration("limited", rouse::store::WorkerKey::random());
    registration.queues = vec!["mail-1".into()];
    store.register(&registration).await.unwrap();
    fire_due(&store).await;
    let fired: String = one(
        &client,
        "SELECT string_agg(DISTINCT schedule, ' ') FROM rouse.schedule_run",
    )
    .await;
    assert_eq!(fired, "mail");
    assert_eq!(store.maintain_schedules().await.unwrap(), 0);
}
