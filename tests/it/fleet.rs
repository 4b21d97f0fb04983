//! The commands that show the fleet and challenge its workers.

mod challenges;
mod jobs;

use std::time::Duration;

use rouse::job::{ErrorKind, Fence, Outcome};
use rouse::store::{Locked, Registration, Stats, Store, WorkerKey};
use rouse::worker::Settings;
use serde_json::{Value, json};

use crate::support::claims::{claim, error, orders, settlement};
use crate::support::database::registration;
use crate::support::worker::{
    SESSION_WAITS, TestWorker, backdate_heartbeat, enqueue, until_true, watched,
};
use crate::support::{TestDb, command, folder, rouse_in, run_rouse};

/// The settings of a worker with this id.
fn named(worker_id: &str) -> Settings {
    Settings {
        worker_id: worker_id.into(),
        ..Settings::default()
    }
}

#[tokio::test]
async fn workers_are_listed_with_their_properties_and_shown_with_their_handlers() {
    let db = TestDb::new().await;
    let settings = Settings {
        hostname: "machine-7".into(),
        queues: vec!["mail".into(), "news".into()],
        tags: vec!["gpu".into()],
        slots: 3,
        ..named("mail-1")
    };
    let worker = TestWorker::start(&db, settings).await;
    let client = db.client().await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.workers)").await;

    let ran = run_rouse(&db, &["workers", "ls"]).await;
    ran.exits(0);
    let row = ran.stdout.lines().nth(1).expect("one worker");
    for part in [
        "mail-1",
        "active",
        "machine-7",
        " 3 ",
        "gpu",
        "mail, news",
        "+00:00",
    ] {
        assert!(row.contains(part), "{part}: {row}");
    }
    let listed = run_rouse(&db, &["workers", "ls", "--json"]).await.json();
    assert_eq!(listed["workers"][0]["worker_id"], "mail-1");
    assert_eq!(listed["workers"][0]["slots"], 3);
    assert!(listed["workers"][0].get("key_hash").is_none());

    let shown = run_rouse(&db, &["workers", "show", "mail-1"]).await;
    shown
        .exits(0)
        .prints("machine-7")
        .prints("test.echo")
        .prints("9.8.7");
    let shown = run_rouse(&db, &["workers", "show", "mail-1", "--json"])
        .await
        .json();
    assert_eq!(
        shown["workers"][0]["capabilities"]["test.echo"]["version"],
        "9.8.7"
    );
    assert_eq!(shown["workers"].as_array().unwrap().len(), 1);
    let unknown = run_rouse(&db, &["workers", "show", "nobody"]).await;
    unknown.exits(3).prints("no worker nobody is listed");

    // A worker that has stopped normally is listed only with `--all`.
    worker.drain().await;
    assert_eq!(
        run_rouse(&db, &["workers", "ls", "--json"]).await.json()["workers"],
        json!([])
    );
    let all = run_rouse(&db, &["workers", "ls", "--all", "--json"])
        .await
        .json();
    assert_eq!(all["workers"][0]["state"], "unregistered");
}

#[tokio::test]
async fn dead_workers_are_listed_until_forgotten_and_their_jobs_still_name_them() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.store();
    let job = enqueue(&client, "x", json!({})).await;
    store
        .register(&registration("mail", WorkerKey::random()))
        .await
        .unwrap();
    let orders = orders(&store, 3_600_000).await;
    let claimed = store.claim(Fence(7), &orders, 1, None).await.unwrap();
    assert_eq!(claimed.jobs().len(), 1);

    let living = run_rouse(&db, &["workers", "forget", "mail"]).await;
    living
        .exits(6)
        .prints("worker mail is alive (here, last heartbeat 0 s ago)");
    backdate_heartbeat(&client, &store, 91).await;
    run_rouse(&db, &["workers", "ls"])
        .await
        .exits(0)
        .prints("dead");
    let forgotten = run_rouse(&db, &["workers", "forget", "mail", "--json"]).await;
    forgotten.exits(0);
    assert_eq!(
        forgotten.json(),
        json!({"worker_id": "mail", "incarnations": 1})
    );
    assert_eq!(
        run_rouse(&db, &["workers", "ls", "--all", "--json"])
            .await
            .json()["workers"],
        json!([])
    );
    run_rouse(&db, &["workers", "forget", "mail"])
        .await
        .exits(3);

    // The worker's claims are freed, and the history still names the worker.
    until_true(
        &client,
        "SELECT lease_until < clock_timestamp() FROM rouse.job",
    )
    .await;
    run_rouse(&db, &["job", &job.to_string()])
        .await
        .exits(0)
        .prints("mail");
    // The worker may be alive after all: in that case, its write is refused as unknown, and it registers again.
    let refused = store
        .heartbeat(Some(&json!({})), &Stats::default(), false)
        .await;
    assert!(refused.unwrap_err().is_incarnation_ended());
    // Nothing that it reported about itself is left.
    let row = client
        .query_one(
            "SELECT hostname || platform || version, slots, key_hash IS NULL AND stats IS NULL AND capabilities = '{}'
             FROM rouse.worker WHERE worker_id = 'mail'",
            &[],
        )
        .await
        .unwrap();
    assert_eq!((row.get(0), row.get(1), row.get(2)), ("", 0, true));
    let row = client
        .query_one(
            "SELECT event, who IS NOT NULL, detail->>'worker_id' FROM rouse.record WHERE event = 'forgotten'",
            &[],
        )
        .await
        .unwrap();
    assert!(row.get::<_, bool>(1) && row.get::<_, String>(2) == "mail");
}

#[tokio::test]
async fn a_forgotten_worker_is_removed_once_no_kept_row_refers_to_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for id in ["old", "busy", "new"] {
        let store = db.store();
        store
            .register(&registration(id, WorkerKey::random()))
            .await
            .unwrap();
        if id == "busy" {
            enqueue(&client, "x", json!({})).await;
            let orders = orders(&store, 3_600_000).await;
            store.claim(Fence(7), &orders, 1, None).await.unwrap();
        }
        backdate_heartbeat(&client, &store, 91).await;
    }
    let forget = "SELECT rouse.forget_worker($1)";
    client.query_one(forget, &[&"old"]).await.unwrap();
    client.query_one(forget, &[&"busy"]).await.unwrap();
    let rows =
        "SELECT coalesce(string_agg(worker_id, ' ' ORDER BY worker_id), '') FROM rouse.worker";
    let left: String = client.query_one(rows, &[]).await.unwrap().get(0);
    assert_eq!(left, "busy new old", "their history is still kept");
    client
        .execute(
            "UPDATE rouse.worker SET forgotten_at = now() - interval '30 days' WHERE forgotten_at IS NOT NULL",
            &[],
        )
        .await
        .unwrap();
    client.query_one(forget, &[&"new"]).await.unwrap();
    let left: String = client.query_one(rows, &[]).await.unwrap().get(0);
    assert_eq!(left, "busy new", "a running job still names one");
}

/// A worker with a fixed id would otherwise leave a row for each start, because it cannot be forgotten while it is
/// alive.
#[tokio::test]
async fn an_earlier_incarnation_of_a_worker_is_removed_once_no_kept_row_refers_to_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    enqueue(&client, "x", json!({})).await;
    let mut incarnations: Vec<Store> = Vec::new();
    for id in ["busy", "busy", "gone", "mail", "mail", "mail"] {
        if let Some(previous) = incarnations.last() {
            previous.unregister().await.unwrap();
        }
        let store = db.store();
        store
            .register(&registration(id, WorkerKey::random()))
            .await
            .unwrap();
        if incarnations.is_empty() {
            assert_eq!(claim(&store, 1).await.len(), 1);
        }
        incarnations.push(store);
    }
    // All incarnations but the last two ended long ago; the last but one has ended today.
    client
        .batch_execute(
            "UPDATE rouse.worker SET stopped_at = now() - interval '30 days'
             WHERE incarnation < (SELECT max(incarnation) - 1 FROM rouse.worker)",
        )
        .await
        .unwrap();
    incarnations[5].maintain_partitions().await.unwrap();
    let rows = "SELECT string_agg(worker_id, ' ' ORDER BY incarnation) FROM rouse.worker";
    let left: String = client.query_one(rows, &[]).await.unwrap().get(0);
    // A running job names the first incarnation. The second and the third are the last ones of their workers.
    assert_eq!(left, "busy busy gone mail mail");
}

#[tokio::test]
async fn an_ended_incarnation_keeps_only_the_names_of_its_handlers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let registered = async |id: &str| {
        let store = db.store();
        let worker = Registration {
            capabilities: json!({"mail.send": {"version": "9.8.7", "sha256": "ab".repeat(32), "grants": []}}),
            ..registration(id, WorkerKey::random())
        };
        store.register(&worker).await.unwrap();
        store
    };
    let (dead, stopped) = (registered("dead").await, registered("stopped").await);
    let live = registered("live").await;
    stopped.unregister().await.unwrap();
    backdate_heartbeat(&client, &dead, 91).await;
    let beat = live.heartbeat(None, &Stats::default(), false).await;
    assert_eq!(beat.unwrap().expired, 1);
    for (id, version) in [("dead", ""), ("live", "9.8.7"), ("stopped", "")] {
        let row = client
            .query_one(
                "SELECT handlers, coalesce(capabilities -> 'mail.send' ->> 'version', ''), capabilities = '{}'
                 FROM rouse.workers WHERE worker_id = $1",
                &[&id],
            )
            .await
            .unwrap();
        assert_eq!(row.get::<_, Vec<String>>(0), ["mail.send"], "{id}");
        let (of_handler, has_none): (&str, bool) = (row.get(1), row.get(2));
        assert_eq!((of_handler, has_none), (version, id != "live"), "{id}");
        let shown = run_rouse(&db, &["workers", "show", id]).await;
        shown.exits(0).prints("mail.send");
        assert_eq!(shown.stdout.contains("9.8.7"), id == "live", "{id}");
    }
}

#[tokio::test]
async fn a_heartbeat_that_waits_for_the_end_of_its_incarnation_is_refused_and_restores_nothing() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    let store = db.worker().await;
    let ending = client.transaction().await.unwrap();
    let expire = "SELECT rouse._expire_worker(incarnation) FROM rouse.worker";
    ending.execute(expire, &[]).await.unwrap();
    let capabilities = json!({"x": {"version": "1", "sha256": "ab".repeat(32), "grants": []}});
    let stats = Stats::default();
    let beat = store.heartbeat(Some(&capabilities), &stats, false);
    let end = async {
        until_true(&watcher, SESSION_WAITS).await;
        ending.commit().await.unwrap();
    };
    let (beat, ()) = tokio::join!(beat, end);
    let refused = beat.expect_err("the incarnation has ended");
    assert!(refused.is_incarnation_ended(), "{refused}");
    let sql = "SELECT capabilities = '{}' AND handlers = '{}' FROM rouse.worker";
    let row = watcher.query_one(sql, &[]).await.unwrap();
    assert!(row.get::<_, bool>(0));
}

#[tokio::test]
async fn each_workers_newest_incarnation_is_listed_unless_it_stopped_normally() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (id, ends) in [("a", false), ("b", false), ("c", true)] {
        for incarnation in 0..2 {
            let store = db.store();
            store
                .register(&registration(id, WorkerKey::random()))
                .await
                .unwrap();
            if incarnation == 0 || id == "b" {
                backdate_heartbeat(&client, &store, 91).await;
            } else if ends {
                store.unregister().await.unwrap();
            }
        }
    }
    let listed = run_rouse(&db, &["workers", "ls", "--json"]).await.json();
    let listed: Vec<_> = listed["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|incarnation| {
            (
                incarnation["worker_id"].clone(),
                incarnation["state"].clone(),
            )
        })
        .collect();
    assert_eq!(
        listed,
        [(json!("a"), json!("active")), (json!("b"), json!("dead"))]
    );
    let all = run_rouse(&db, &["workers", "ls", "--all", "--json"]).await;
    assert_eq!(all.json()["workers"].as_array().unwrap().len(), 6);
    let shown = run_rouse(&db, &["workers", "show", "c", "--json"])
        .await
        .json();
    assert_eq!(shown["workers"][0]["state"], "unregistered");
    assert_eq!(shown["workers"].as_array().unwrap().len(), 2);
    assert_eq!(shown["workers"][1]["worker_id"], "c");
    assert_eq!(shown["incarnations"], 2);
}

/// A host with a fixed id that is restarted in a loop has thousands.
#[tokio::test]
async fn a_worker_is_shown_with_its_newest_incarnations_and_the_number_of_all() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for _ in 0..3 {
        let mail = registration("mail", WorkerKey::new([7; 32]));
        db.store().register(&mail).await.unwrap();
    }
    client
        .batch_execute(
            "INSERT INTO rouse.worker (worker_id, hostname, version, handlers, stopped_at)
             SELECT 'mail', 'old', '0', '{}', now() FROM generate_series(1, 100)",
        )
        .await
        .unwrap();
    let newest: i64 = client
        .query_one("SELECT max(incarnation) FROM rouse.worker", &[])
        .await
        .unwrap()
        .get(0);
    let shown = run_rouse(&db, &["workers", "show", "mail", "--json"])
        .await
        .json();
    let listed: Vec<i64> = shown["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|worker| worker["incarnation"].as_i64().unwrap())
        .collect();
    let expected: Vec<i64> = (newest - 99..=newest).rev().collect();
    assert_eq!(listed, expected);
    assert_eq!(shown["incarnations"], 103);
    let text = run_rouse(&db, &["workers", "show", "mail"]).await;
    let mut rows = text.exits(0).stdout.lines();
    let earlier = rows.find_map(|row| row.trim().strip_prefix("earlier incarnations"));
    assert_eq!(earlier.map(str::trim), Some("102"), "{}", text.stdout);
    let all = run_rouse(&db, &["workers", "ls", "--all", "--json"]).await;
    assert_eq!(all.json()["workers"].as_array().unwrap().len(), 103);
}

#[tokio::test]
async fn the_handlers_of_the_fleet_are_listed_with_their_location_and_unserved_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, _folder) = watched(&["noop.wasm", "text_stats.wasm"]).await;
    let gpu = Settings {
        tags: vec!["gpu".into()],
        queues: vec!["mail".into()],
        ..named("gpu-1")
    };
    let workers = [
        TestWorker::start_on(&db, gpu, catalog.clone()),
        TestWorker::start_on(&db, named("cpu-1"), catalog),
    ];
    until_true(&client, "SELECT count(*) = 2 FROM rouse.workers").await;
    enqueue(&client, "image.crop", json!({})).await;

    let listed = async |filters: &[&str]| {
        let mut args = vec!["handlers", "ls", "--json"];
        for filter in filters {
            args.extend(["--where", filter]);
        }
        let ran = run_rouse(&db, &args).await;
        ran.exits(0);
        let listed = ran.json();
        let rows: Vec<String> = listed["handlers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| {
                format!(
                    "{}@{}",
                    row["handler"].as_str().unwrap(),
                    row["worker_id"].as_str().unwrap()
                )
            })
            .collect();
        (rows.join(" "), listed["waiting"].as_array().unwrap().len())
    };
    let all = "noop@cpu-1 noop@gpu-1 text.stats@cpu-1 text.stats@gpu-1";
    assert_eq!(listed(&[]).await, (all.into(), 1));
    assert_eq!(
        listed(&["handler=text.*", "tag=gpu"]).await,
        ("text.stats@gpu-1".into(), 0)
    );
    assert_eq!(
        listed(&["queue=other", "handler=noop"]).await,
        ("noop@cpu-1".into(), 0)
    );
    assert_eq!(listed(&["version=99"]).await, (String::new(), 0));
    assert_eq!(listed(&["handler=image.*"]).await, (String::new(), 1));

    let table = run_rouse(&db, &["handlers", "ls"]).await;
    table
        .exits(0)
        .prints("cpu-1, gpu-1")
        .prints("no worker can run these:")
        .prints("image.crop");
    let invalid = run_rouse(&db, &["handlers", "ls", "--where", "noop"]).await;
    invalid
        .exits(2)
        .prints("expected a condition such as handler=image.*");

    let shown = run_rouse(&db, &["handlers", "show", "noop", "--json"]).await;
    shown.exits(0);
    assert_eq!(shown.json()["on"].as_array().unwrap().len(), 2);
    assert_eq!(shown.json()["manifest"], Value::Null);
    run_rouse(&db, &["handlers", "show", "image.crop"])
        .await
        .exits(0)
        .prints("no running worker has it")
        .prints("waiting");
    run_rouse(&db, &["handlers", "show", "no.such"])
        .await
        .exits(3)
        .prints("no worker has a handler no.such");
    for worker in workers {
        worker.drain().await;
    }
}

#[test]
fn a_folder_is_shown_without_a_database() {
    let folder = folder("", &["noop.wasm"]);
    let run = |args: &[&str]| {
        let output = command("", args, &folder).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), text + &errors)
    };
    let (code, text) = run(&["handlers", "ls", "--handlers", "handlers-wasm"]);
    assert!(code == 0 && text.contains("noop.wasm"), "{text}");
    let (code, text) = run(&["handlers", "show", "noop", "--handlers", "handlers-wasm"]);
    assert!(code == 0 && text.contains("noop.wasm"), "{text}");
    let (code, text) = run(&["handlers", "show", "noop", "--handlers", "nowhere"]);
    assert_eq!(code, 1);
    assert!(text.contains("name another with --handlers DIR"), "{text}");
    std::fs::write(folder.join("handlers-wasm/broken.wasm"), "no module").unwrap();
    let (code, text) = run(&["handlers", "show", "no.such", "--handlers", "handlers-wasm"]);
    assert_eq!(code, 3);
    assert!(
        text.contains("no handler no.such in handlers-wasm; its handlers are noop")
            && text.contains("refused broken.wasm"),
        "{text}"
    );
}

#[tokio::test]
async fn a_broken_folder_or_settings_file_does_not_hide_the_fleet() {
    let db = TestDb::new().await;
    let client = db.client().await;
    enqueue(&client, "noop", json!({})).await;
    let folder = folder("slots = 0\n", &["noop.wasm"]);
    let ran = rouse_in(&db, &["handlers", "show", "noop"], &folder).await;
    ran.exits(0)
        .prints("waiting")
        .prints("the manifest is not shown, because handlers-wasm cannot be opened: rouse.toml");
}

/// An attempt that is retried after its timeout also flags its worker; an attempt whose outcome is refused does not.
#[tokio::test]
async fn a_worker_keeps_its_timeout_flag_until_it_is_cleared() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.store();
    store
        .register(&registration("mail", WorkerKey::random()))
        .await
        .unwrap();
    for _ in 0..3 {
        enqueue(&client, "video.cut", json!({})).await;
    }
    let jobs = claim(&store, 3).await;
    let timed_out = || error(ErrorKind::TimedOut);
    let retry = Outcome::Retry {
        again: Duration::from_secs(60).into(),
        error: timed_out(),
    };
    let retried = settlement(&jobs[0], retry);
    let ended = settlement(&jobs[1], Outcome::TimedOut(timed_out()));
    let mut refused = settlement(&jobs[2], Outcome::TimedOut(timed_out()));
    refused.fence = Fence(0);
    let settled = store.settle(&[retried, ended, refused], Locked::Wait).await;
    assert_eq!(settled.unwrap().accepted.len(), 2);
    let response = store.heartbeat(None, &Stats::default(), false).await;
    assert_eq!(response.unwrap().timeouts, 2, "for the metrics page");
    store.unregister().await.unwrap();

    let listed = run_rouse(&db, &["workers", "ls", "--all", "--json"]).await;
    let incarnation = &listed.json()["workers"][0];
    assert_eq!(
        (&incarnation["state"], &incarnation["timeouts"]),
        (&json!("unregistered"), &json!(2))
    );
    assert_eq!(incarnation["timed_out_handler"], "video.cut");
    assert_eq!(incarnation["timed_out_job"], jobs[1].id.0);
    assert!(incarnation["timed_out_since"].is_string());
    run_rouse(&db, &["workers", "show", "mail"])
        .await
        .exits(0)
        .prints("2 since")
        .prints(&format!("last job {} (video.cut)", jobs[1].id));

    // The worker is listed although it stopped normally, and its next incarnation has the flag too.
    let flagged = async || {
        let listed = run_rouse(&db, &["workers", "ls", "--json"]).await.json();
        let worker = &listed["workers"][0];
        (worker["state"].clone(), worker["timeouts"].clone())
    };
    assert_eq!(flagged().await, (json!("unregistered"), json!(2)));
    store
        .register(&registration("mail", WorkerKey::random()))
        .await
        .unwrap();
    assert_eq!(flagged().await, (json!("active"), json!(2)));
    let response = store.heartbeat(None, &Stats::default(), false).await;
    assert_eq!(response.unwrap().timeouts, 2);

    let cleared = run_rouse(&db, &["workers", "clear", "mail"]).await;
    cleared
        .exits(0)
        .prints("the timeout flag of worker mail is cleared");
    let again = run_rouse(&db, &["workers", "clear", "mail", "--json"]).await;
    assert_eq!(again.json()["incarnations"], 0);
    run_rouse(&db, &["workers", "clear", "nobody"])
        .await
        .exits(3)
        .prints("no worker nobody is listed");
    let row = client
        .query_one(
            "SELECT r.who, r.detail ->> 'timeouts', sum(w.timeouts)::bigint, bool_and(w.timed_out_since IS NULL)
             FROM rouse.record AS r, rouse.workers AS w WHERE r.event = 'timeouts_cleared' GROUP BY 1, 2",
            &[],
        )
        .await
        .unwrap();
    let login: String = client
        .query_one("SELECT session_user::text", &[])
        .await
        .unwrap()
        .get(0);
    let got: (&str, &str, i64, bool) = (row.get(0), row.get(1), row.get(2), row.get(3));
    assert_eq!(got, (login.as_str(), "2", 0, true));
}
