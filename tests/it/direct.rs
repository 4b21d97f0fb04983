//! Direct dispatch: a worker is chosen for each job of a queue when it is enqueued.

mod operators;
mod recovery;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rouse::store::{Listener, Notification, Registration, Stats, Store, Wakeup, WorkerKey};
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::claim;
use crate::support::database::registration;
use crate::support::worker::{backdate_heartbeat, enqueue_sql};

/// A database in which queue `q` has this dispatch, and a client.
async fn direct(settings: &str) -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    let set = format!("SELECT rouse.set_dispatch('q', {settings})");
    client.batch_execute(&set).await.unwrap();
    (db, client)
}

/// The capability that a worker registers for a handler.
fn capability() -> Value {
    json!({"sha256": "0".repeat(64), "grants": []})
}

/// The registration of a worker with the handlers `greet` and `test.sleep`.
fn with_handlers(worker_id: &str) -> Registration {
    Registration {
        capabilities: json!({"greet": capability(), "test.sleep": capability()}),
        ..registration(worker_id, WorkerKey::random())
    }
}

async fn register(db: &TestDb, registration: &Registration) -> Store {
    let store = db.store();
    store.register(registration).await.expect("the id is free");
    store
}

/// A registered worker with the handlers.
async fn worker(db: &TestDb, worker_id: &str) -> Store {
    register(db, &with_handlers(worker_id)).await
}

async fn workers(db: &TestDb, ids: &[&str]) -> Vec<Store> {
    let mut workers = Vec::new();
    for id in ids {
        workers.push(worker(db, id).await);
    }
    workers
}

/// Declares a worker dead, as the heartbeat of another worker does, but leaves its inboxes to recoveries.
async fn declare_dead(client: &Client, worker: &Store) {
    let dead = "UPDATE rouse.worker SET dead_at = now() WHERE incarnation = $1";
    let incarnation = worker.incarnation().unwrap().0;
    client.execute(dead, &[&incarnation]).await.unwrap();
}

/// Enqueues a job in `q` with these additional arguments, and returns the worker in whose inbox it is; empty for the
/// shared lane.
async fn enqueue(client: &Client, arguments: &str) -> String {
    let id = enqueue_sql(client, &format!("'greet', queue => 'q'{arguments}")).await;
    inbox(client, id).await
}

/// The worker in whose inbox a job is; empty if it is in another lane.
async fn inbox(client: &Client, id: i64) -> String {
    let of = "SELECT coalesce(max(w.worker_id), '') FROM rouse.job AS j JOIN rouse.lane AS l ON l.id = j.lane
              LEFT JOIN rouse.worker AS w ON w.incarnation = l.worker WHERE j.id = $1";
    client.query_one(of, &[&id]).await.unwrap().get(0)
}

/// The number of queued jobs of each lane, by its key.
async fn lanes(client: &Client) -> BTreeMap<String, i64> {
    let lanes = "SELECT l.key, count(DISTINCT j.id) FROM rouse.job AS j JOIN rouse.lane AS l ON l.id = j.lane
                 WHERE j.state = 'queued' GROUP BY l.key";
    let rows = client.query(lanes, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// For each of 200 tenants, the worker to which its jobs go.
async fn tenants(client: &Client) -> Vec<String> {
    let mut workers = Vec::new();
    for tenant in 0..200 {
        workers.push(enqueue(client, &format!(", tenant => 't{tenant}'")).await);
    }
    workers
}

#[tokio::test]
async fn round_robin_gives_each_worker_the_same_number_of_jobs() {
    let (db, client) = direct("'round-robin'").await;
    workers(&db, &["a", "b", "c"]).await;
    let mut chosen = Vec::new();
    for _ in 0..30 {
        chosen.push(enqueue(&client, "").await);
        // Jobs of another lane do not change whose turn it is.
        enqueue_sql(&client, "'test.sleep', queue => 'q'").await;
    }
    let first: BTreeSet<&String> = chosen[..3].iter().collect();
    assert_eq!(first.len(), 3, "{chosen:?}");
    assert!((3..30).all(|n| chosen[n] == chosen[n - 3]), "{chosen:?}");
    // The jobs of one call are also spread.
    let many =
        "SELECT rouse.enqueue_many('greet', array_fill('{}'::jsonb, ARRAY[30]), queue => 'q')";
    client
        .batch_execute(&format!("TRUNCATE rouse.job; {many}"))
        .await
        .unwrap();
    let counts: Vec<i64> = lanes(&client).await.into_values().collect();
    assert_eq!(counts, [10, 10, 10]);
}

/// A session keeps each setting until it ends, and the sessions of a pool see a lane for each tenant.
#[tokio::test]
async fn a_session_has_at_most_a_thousand_counters_of_turns() {
    let (db, client) = direct("'round-robin'").await;
    workers(&db, &["a", "b"]).await;
    client
        .batch_execute(
            "SELECT rouse.set_fair_share('q', policy => 'drr');
             SELECT rouse.enqueue('greet', queue => 'q', tenant => 't' || n) FROM generate_series(1, 300) AS n",
        )
        .await
        .unwrap();
    let counters = "SELECT (SELECT count(*) FROM generate_series(0, 1023) AS n WHERE current_setting('rouse.dispatched_' || n, true) <> ''),
                           (SELECT count(DISTINCT l.id & 1023) FROM rouse.lane AS l WHERE l.key <> '' AND l.worker IS NULL)";
    let row = client.query_one(counters, &[]).await.unwrap();
    let (counters, expected): (i64, i64) = (row.get(0), row.get(1));
    assert_eq!(counters, expected);
    // Of 300 tenants, a few share a counter.
    assert!((200..300).contains(&counters), "{counters} counters");
    let spread: Vec<i64> = lanes(&client)
        .await
        .iter()
        .fold(BTreeMap::new(), |mut jobs, (key, count)| {
            let worker = key.split("worker").nth(1).unwrap_or_default().to_owned();
            *jobs.entry(worker).or_insert(0) += *count;
            jobs
        })
        .into_values()
        .collect();
    assert_eq!(spread.len(), 2);
    assert!(spread.iter().all(|jobs| *jobs > 100), "{spread:?}");
}

#[tokio::test]
async fn a_due_job_that_a_newer_one_replaces_keeps_its_inbox_and_its_turn() {
    let (db, client) = direct("'round-robin'").await;
    workers(&db, &["a", "b", "c"]).await;
    let gate =
        "SELECT rouse.set_gate('last', 'singleton', handler => 'greet', on_conflict => 'replace')";
    client.batch_execute(gate).await.unwrap();
    let turn = async || -> i64 {
        let sql = "SELECT turn FROM rouse.job";
        client.query_one(sql, &[]).await.unwrap().get(0)
    };
    let chosen = enqueue(&client, "").await;
    let first = turn().await;
    for n in 0..3 {
        let newer = enqueue(&client, &format!(", payload => '{n}'")).await;
        assert_eq!((newer, turn().await), (chosen.clone(), first));
    }
    // Another priority has other lanes.
    enqueue(&client, ", priority => 'high'").await;
    assert!(turn().await > first);
}

#[tokio::test]
async fn a_due_job_that_a_newer_one_replaces_is_in_the_inbox_of_its_key() {
    let (db, client) = direct("'hash', '{$.customer}'").await;
    workers(&db, &["a", "b", "c"]).await;
    let payload = |customer: i32| format!(r#", payload => '{{"customer": {customer}}}'"#);
    let mut chosen = Vec::new();
    for customer in 0..20 {
        chosen.push(enqueue(&client, &payload(customer)).await);
    }
    let gate =
        "SELECT rouse.set_gate('last', 'singleton', handler => 'greet', on_conflict => 'replace')";
    client.batch_execute(gate).await.unwrap();
    for (customer, worker) in (0..).zip(&chosen) {
        assert_eq!(&enqueue(&client, &payload(customer)).await, worker);
    }
    let distinct: BTreeSet<&String> = chosen.iter().collect();
    assert!(distinct.len() > 1, "{chosen:?}");
}

#[tokio::test]
async fn sessions_that_take_turns_start_with_different_workers() {
    let (db, client) = direct("'round-robin'").await;
    workers(&db, &["a", "b", "c", "d"]).await;
    let mut first = BTreeSet::new();
    for _ in 0..30 {
        first.insert(enqueue(&db.client().await, "").await);
    }
    assert!(first.len() > 1, "{first:?}");
    drop(client);
}

#[tokio::test]
async fn random_chooses_any_worker() {
    let (db, client) = direct("'random'").await;
    workers(&db, &["a", "b", "c"]).await;
    let mut chosen = BTreeMap::new();
    for _ in 0..150 {
        *chosen.entry(enqueue(&client, "").await).or_insert(0) += 1;
    }
    assert_eq!(chosen.len(), 3);
    assert!(chosen.values().all(|jobs| *jobs > 20), "{chosen:?}");
}

#[tokio::test]
async fn a_hash_keeps_keys_on_their_workers_and_moves_only_those_of_a_worker_that_leaves() {
    let (db, client) = direct("'hash'").await;
    let stores = workers(&db, &["a", "b", "c", "d"]).await;
    let before = tenants(&client).await;
    assert_eq!(tenants(&client).await, before);
    for id in ["a", "b", "c", "d"] {
        let keys = before.iter().filter(|worker| *worker == id).count();
        assert!((20..=90).contains(&keys), "{id} has {keys} of 200 keys");
    }
    stores[1].unregister().await.unwrap();
    let without = tenants(&client).await;
    for (tenant, (old, new)) in before.iter().zip(&without).enumerate() {
        assert_ne!(new, "b");
        assert!(
            old == "b" || old == new,
            "tenant {tenant} moved from {old} to {new}"
        );
    }
    // With the same id, a new incarnation gets the same keys.
    worker(&db, "b").await;
    assert_eq!(tenants(&client).await, before);
    // An additional worker takes keys from the others, and the others do not exchange any.
    worker(&db, "e").await;
    let with = tenants(&client).await;
    let moved = before.iter().zip(&with).filter(|(old, new)| old != new);
    assert!(moved.clone().all(|(_, new)| new == "e"));
    assert!((15..=75).contains(&moved.count()));
}

#[tokio::test]
async fn a_hash_is_computed_from_the_values_that_the_queue_names() {
    let (db, client) = direct("'hash', '{source,$.customer.id}'").await;
    workers(&db, &["a", "b", "c", "d"]).await;
    let payload = |id: i32, other: i32| {
        format!(r#", payload => '{{"customer": {{"id": {id}}}, "other": {other}}}'"#)
    };
    let mut chosen = BTreeSet::new();
    for id in 0..20 {
        let worker = enqueue(&client, &payload(id, 1)).await;
        assert_eq!(enqueue(&client, &payload(id, 2)).await, worker);
        chosen.insert(worker);
    }
    assert_eq!(chosen.len(), 4);
    let mut by_source = BTreeSet::new();
    for source in 0..20 {
        by_source.insert(
            enqueue(
                &client,
                &(payload(1, 1) + &format!(", source => 's{source}'")),
            )
            .await,
        );
    }
    assert_eq!(by_source.len(), 4);
    assert_eq!(
        enqueue(&client, ", tenant => 'acme'").await,
        "",
        "it has none of the values"
    );
    let many = r#"SELECT count(*) FROM rouse.enqueue_many('greet',
                      ARRAY(SELECT jsonb_build_object('customer', jsonb_build_object('id', n)) FROM generate_series(1, 20) AS n), queue => 'q')"#;
    client
        .batch_execute(&format!("TRUNCATE rouse.job; {many}"))
        .await
        .unwrap();
    assert_eq!(lanes(&client).await.len(), 4);
}

#[tokio::test]
async fn only_live_workers_that_take_such_jobs_are_chosen() {
    let (db, client) = direct("'random'").await;
    assert_eq!(enqueue(&client, "").await, "", "there is no worker");
    let dead = worker(&db, "dead").await;
    backdate_heartbeat(&client, &dead, 91).await;
    let stopped = worker(&db, "stopped").await;
    stopped.unregister().await.unwrap();
    let draining = worker(&db, "draining").await;
    draining
        .heartbeat(None, &Stats::default(), true)
        .await
        .unwrap();
    let mut parked = capability();
    parked["parked"] = json!("the database has no such table");
    for (id, capabilities, queues) in [
        ("parked", json!({"greet": parked}), vec![]),
        ("other-handler", json!({"greet.all": capability()}), vec![]),
        (
            "other-queue",
            json!({"greet": capability()}),
            vec!["qq".to_owned()],
        ),
    ] {
        let registration = Registration {
            capabilities,
            queues,
            ..with_handlers(id)
        };
        register(&db, &registration).await;
    }
    for _ in 0..10 {
        assert_eq!(enqueue(&client, "").await, "");
    }
    let tags = vec!["gpu".to_owned()];
    register(
        &db,
        &Registration {
            tags,
            ..with_handlers("gpu")
        },
    )
    .await;
    let plain = worker(&db, "plain").await;
    for _ in 0..10 {
        assert_eq!(enqueue(&client, ", tags => '{gpu}'").await, "gpu");
    }
    let limit = "SET ROLE rouse_owner; DELETE FROM rouse.worker_login;
                 INSERT INTO rouse.worker_login (login, worker_ids, queues, handlers) VALUES (session_user::text::regrole, '{*}', '{*}', '{HANDLERS}');
                 RESET ROLE";
    client
        .batch_execute(&limit.replace("HANDLERS", "mail.*"))
        .await
        .unwrap();
    assert_eq!(enqueue(&client, "").await, "", "their login may not run it");
    client
        .batch_execute(&limit.replace("HANDLERS", "greet"))
        .await
        .unwrap();
    assert_ne!(enqueue(&client, "").await, "");
    assert_eq!(
        enqueue(&client, ", tags => '{gpu}'").await,
        "",
        "their login has no tags"
    );
    // A worker that gets the handler is chosen from its next heartbeat on, and a worker that loses it is not.
    client
        .batch_execute("SET ROLE rouse_owner; DELETE FROM rouse.worker_login; RESET ROLE")
        .await
        .unwrap();
    let gone = json!({"greet": null, "test.sleep": null});
    plain
        .heartbeat(Some(&gone), &Stats::default(), false)
        .await
        .unwrap();
    for _ in 0..10 {
        assert_eq!(enqueue(&client, "").await, "gpu");
    }
}

#[tokio::test]
async fn a_worker_is_chosen_until_another_one_declares_it_dead() {
    let (db, client) = direct("'random'").await;
    let silent = worker(&db, "silent").await;
    backdate_heartbeat(&client, &silent, 91).await;
    assert_eq!(enqueue(&client, "").await, "silent");
    let other = worker(&db, "other").await;
    other
        .heartbeat(None, &Stats::default(), false)
        .await
        .unwrap();
    assert_eq!(lanes(&client).await[""], 1, "its inbox was emptied");
    for _ in 0..10 {
        assert_eq!(enqueue(&client, "").await, "other");
    }
}

/// While a transaction is open, each heartbeat leaves an old version of the row.
#[tokio::test]
async fn an_enqueue_reads_no_old_versions_of_workers() {
    let (db, client) = direct("'round-robin'").await;
    workers(&db, &["a", "b"]).await;
    for _ in 0..2 {
        assert_ne!(enqueue(&client, "").await, "");
    }
    let old = db.client().await;
    old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM rouse.worker")
        .await
        .unwrap();
    for _ in 0..100 {
        // A value as long as the statistics of a host.
        let heartbeats = "UPDATE rouse.worker SET seen_at = clock_timestamp(), stats = jsonb_build_object('text', repeat('x', 1000))";
        client.batch_execute(heartbeats).await.unwrap();
    }
    let entries =
        "SELECT sum(pg_stat_get_xact_tuples_returned(i.indexrelid))::bigint FROM pg_index AS i
                   WHERE i.indrelid IN ('rouse.worker'::regclass, 'rouse.live_worker'::regclass)";
    client.batch_execute("BEGIN").await.unwrap();
    let before: i64 = client.query_one(entries, &[]).await.unwrap().get(0);
    enqueue_sql(&client, "'greet', queue => 'q'").await;
    let after: i64 = client.query_one(entries, &[]).await.unwrap().get(0);
    client.batch_execute("ROLLBACK").await.unwrap();
    let read = after - before;
    assert!(read < 10, "{read} entries");
    old.batch_execute("COMMIT").await.unwrap();
}

/// The functions for producers disable sequential scans, so the plan of a scan would seem so expensive that Postgres
/// would compile it by JIT each time.
#[tokio::test]
async fn an_enqueue_finds_the_workers_by_an_index() {
    let (db, client) = direct("'round-robin'").await;
    workers(&db, &["a", "b"]).await;
    let scans = "SELECT pg_stat_get_xact_numscans('rouse.live_worker'::regclass)";
    client.batch_execute("BEGIN").await.unwrap();
    let before: i64 = client.query_one(scans, &[]).await.unwrap().get(0);
    assert_ne!(enqueue(&client, "").await, "");
    enqueue_sql(&client, "'unknown'").await;
    let after: i64 = client.query_one(scans, &[]).await.unwrap().get(0);
    assert_eq!(after - before, 0);
}

#[tokio::test]
async fn jobs_for_later_and_jobs_without_room_for_an_inbox_are_in_the_shared_lane() {
    let (db, client) = direct("'random'").await;
    worker(&db, "a").await;
    assert_eq!(
        enqueue(&client, ", run_at => now() + interval '1 minute'").await,
        ""
    );
    assert_eq!(
        enqueue(&client, ", run_at => now() - interval '1 minute'").await,
        "a"
    );
    client
        .batch_execute("UPDATE rouse.limits SET keyed_lanes_max = 1")
        .await
        .unwrap();
    worker(&db, "b").await;
    for _ in 0..20 {
        assert_ne!(enqueue(&client, "").await, "b");
    }
    // Another queue, and this queue once it is shared again, work as before.
    let other = enqueue_sql(&client, "'greet'").await;
    assert_eq!(inbox(&client, other).await, "");
    client
        .batch_execute("SELECT rouse.set_dispatch('q', 'shared')")
        .await
        .unwrap();
    assert_eq!(enqueue(&client, "").await, "");
    let divided = "SELECT count(*) FROM rouse.lane WHERE divided_by IS NOT NULL";
    let divided: i64 = client.query_one(divided, &[]).await.unwrap().get(0);
    assert_eq!(divided, 0);
    // Inboxes do not reduce the room for the keys of other queues.
    let fair = "SELECT rouse.set_fair_share('fair', policy => 'drr')";
    client.batch_execute(fair).await.unwrap();
    enqueue_sql(&client, "'greet', queue => 'fair', tenant => 't'").await;
    assert_eq!(lanes(&client).await[r#"{"tenant": "t"}"#], 1);
}

#[tokio::test]
async fn gates_and_fair_shares_apply_to_the_jobs_of_all_inboxes_together() {
    let (db, client) = direct("'round-robin'").await;
    let stores = workers(&db, &["a", "b"]).await;
    client
        .batch_execute("SELECT rouse.set_fair_share('q', policy => 'drr', max_in_flight => 2),
                               rouse.set_gate('sources', 'max_concurrent', queue => 'q', key => '{source}', max => 3)")
        .await
        .unwrap();
    for tenant in ["x", "y"] {
        for _ in 0..6 {
            enqueue(&client, &format!(", tenant => '{tenant}', source => 's'")).await;
        }
    }
    let by_lane = lanes(&client).await;
    assert_eq!(by_lane.len(), 4, "{by_lane:?}");
    assert!(by_lane.values().all(|jobs| *jobs == 3), "{by_lane:?}");
    let mut claimed = BTreeMap::new();
    for store in &stores {
        for job in claim(store, 100).await {
            *claimed.entry(job.tenant.unwrap()).or_insert(0) += 1;
        }
    }
    assert!(
        claimed.values().sum::<i32>() == 3 && claimed.values().all(|jobs| *jobs <= 2),
        "{claimed:?}"
    );
    let keys = "SELECT string_agg(key || ' ' || ready + in_flight, ', ' ORDER BY key) FROM rouse.fair_keys('q')";
    let keys: String = client.query_one(keys, &[]).await.unwrap().get(0);
    assert_eq!(keys, "x 6, y 6", "the inboxes of a key are one key");
}

/// The wakeups that each listener has received since the last call. Notifications arrive in the order of their commits.
async fn received(listeners: &mut [Listener], client: &Client) -> Vec<Vec<Wakeup>> {
    client
        .batch_execute("NOTIFY rouse_wake, 'the-end'")
        .await
        .unwrap();
    let mut all = Vec::new();
    for listener in listeners {
        let mut received = Vec::new();
        loop {
            let next = listener.next().await.expect("the connection is up");
            let Notification::Wakeup(wakeup) = next else {
                panic!("{next:?} is not a wakeup");
            };
            if wakeup.queue == "the-end" {
                break;
            }
            received.push(wakeup);
        }
        all.push(received);
    }
    all
}

#[tokio::test]
async fn only_the_chosen_worker_is_notified_and_only_if_it_sleeps() {
    let (db, client) = direct("'hash'").await;
    let stores = workers(&db, &["a", "b"]).await;
    let mut listeners = Vec::new();
    for store in &stores {
        let incarnation = store.incarnation().unwrap();
        listeners.push(Listener::start(&db.connector(), incarnation).await.unwrap());
    }
    // One tenant of each worker.
    let mut tenants = [String::new(), String::new()];
    for n in 0.. {
        let worker = enqueue(&client, &format!(", tenant => 't{n}'")).await;
        tenants[usize::from(worker == "b")] = format!("t{n}");
        if tenants.iter().all(|tenant| !tenant.is_empty()) {
            break;
        }
    }
    let notified = received(&mut listeners, &client).await;
    assert!(
        notified.iter().all(Vec::is_empty),
        "none of them sleeps: {notified:?}"
    );
    let any = ["*".to_owned()];
    stores[0]
        .sleep(&any, Duration::from_secs(60))
        .await
        .unwrap();
    for (of, tenant) in tenants.iter().enumerate() {
        let id = enqueue_sql(
            &client,
            &format!("'greet', queue => 'q', tenant => '{tenant}'"),
        )
        .await;
        let lane: i64 = client
            .query_one("SELECT lane FROM rouse.job WHERE id = $1", &[&id])
            .await
            .unwrap()
            .get(0);
        let notified = received(&mut listeners, &client).await;
        assert!(
            notified[1].is_empty(),
            "the other one is awake: {notified:?}"
        );
        match of {
            0 => assert!(
                matches!(&*notified[0], [Wakeup { queue, lane: Some(named) }] if queue == "q" && named.0 == lane),
                "{notified:?}"
            ),
            _ => assert!(
                notified[0].is_empty(),
                "it sleeps, and the job is not its own: {notified:?}"
            ),
        }
    }
    // A job in the shared lane wakes all workers.
    enqueue(&client, "").await;
    let notified = received(&mut listeners, &client).await;
    assert_eq!(notified.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1]);
}
