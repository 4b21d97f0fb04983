//! How operators set a fair share, and what they can see of it.

use serde_json::{Value, json};

use crate::support::worker::{TIMEOUT, guests_dir, prompt_heartbeats, until_true};
use crate::support::{Host, TestDb, free_port, run_rouse, scratch, set_mail};

use super::enqueue;

#[tokio::test]
async fn the_command_line_sets_how_a_queue_is_shared() {
    let db = TestDb::new().await;
    let client = db.client().await;
    enqueue(&client, "mail", "a", "greet", 1, 1).await;
    let set = async |options: &[&str]| set_mail(&db, options).await;
    set(&["--policy", "drr"]).await.exits(0).prints(
        "queue mail is shared: by tenant (drr), quantum 1, weight 1; after 5m the oldest first\n",
    );
    set(&[
        "--key", "tenant-and-handler", "--weight", "a/b=c=3", "--weight", "x=0.5", "--default-weight", "2", "--quantum", "4",
        "--starvation", "0s", "--max-in-flight", "7",
    ])
    .await
    .exits(0)
    .prints("queue mail is shared: by tenant and handler (drr), quantum 4, weights a/b=c 3, x 0.5, others 2; at most 7 running for each key\n");
    let all = set(&["--no-weights", "--json"]).await.json();
    let expected = json!({"queue": "mail", "fair_share": {
        "policy": "drr", "key": "tenant-and-handler", "quantum": 4, "weights": {}, "default_weight": 2,
        "starvation_ms": 0, "max_in_flight": 7, "charge": "jobs"}});
    assert_eq!(all, expected);
    set(&["--policy", "fifo"])
        .await
        .exits(0)
        .prints("queue mail is shared: first in, first out (fifo)\n");
    set(&[])
        .await
        .exits(2)
        .prints("required arguments were not provided");
    set(&["--keep-days", "3", "--quantum", "2"])
        .await
        .exits(2)
        .prints("cannot be used with");
    set(&["--weight", "=3"])
        .await
        .exits(2)
        .prints("expected a key and a number, for instance acme=3");
    set(&["--weight", "a=1", "--no-weights"])
        .await
        .exits(2)
        .prints("cannot be used with");
    set(&["--weight", "a=0"])
        .await
        .exits(1)
        .prints("a number from 0.001 to 1000 for each key");
    set(&["--quantum", "0"])
        .await
        .exits(1)
        .prints("quantum must be 1 to 1000, not 0");
}

/// Statistics as a worker sends them.
fn stats(selected: u64, deficit: f64) -> Value {
    let key = |key: Option<&str>, deficit: Option<f64>| json!({"key": key, "selected": selected, "deferred": 2, "promotions": 1, "deficit": deficit});
    json!({"fair": [{"queue": "mail", "rounds": 5, "promotions": 3,
                     "keys": [key(None, None), key(Some("a"), Some(deficit)), key(Some("gone"), Some(0.0))]}]})
}

#[tokio::test]
async fn the_list_of_queues_has_the_keys_of_fair_ones_and_the_counts_of_live_workers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(r#"SELECT rouse.set_fair_share('mail', policy => 'drr', weights => '{"a": 3}', max_in_flight => 2)"#)
        .await
        .unwrap();
    for tenant in 0..25 {
        enqueue(&client, "mail", &format!("t{tenant}"), "greet", 1, 1).await;
    }
    enqueue(&client, "mail", "a", "greet", 1, 4).await;
    enqueue(&client, "plain", "a", "greet", 1, 1).await;
    client
        .batch_execute("SELECT rouse.enqueue('greet', queue => 'mail')")
        .await
        .unwrap();
    let stores = [db.worker().await, db.worker().await, db.worker().await];
    let report = "UPDATE rouse.worker SET stats = $1, stats_at = now() - $2 * interval '1 s'
                  WHERE incarnation = (SELECT min(incarnation) + $3 FROM rouse.worker)";
    for (nth, (stats, age)) in [
        (stats(10, -1.5), 0.0),
        (stats(4, 0.5), 0.0),
        (stats(100, 9.0), 130.0),
    ]
    .into_iter()
    .enumerate()
    {
        let nth = i64::try_from(nth).unwrap();
        client.execute(report, &[&stats, &age, &nth]).await.unwrap();
    }
    crate::support::claims::claim(&stores[0], 1).await;

    let all = run_rouse(&db, &["queue", "ls", "--json"]).await.json();
    let queue = |name: &str| {
        let queues = all["queues"].as_array().unwrap();
        queues
            .iter()
            .find(|queue| queue["name"] == name)
            .unwrap()
            .clone()
    };
    assert_eq!(queue("plain")["scheduler"], json!({"policy": "fifo"}));
    let mut scheduler = queue("mail")["scheduler"].clone();
    let keys = scheduler.as_object_mut().unwrap().remove("keys").unwrap();
    assert_eq!(
        scheduler,
        json!({"policy": "drr", "key": "tenant", "quantum": 1, "weights": {"a": 3}, "default_weight": 1,
               "starvation_ms": 300_000, "max_in_flight": 2, "charge": "jobs", "rounds": 10, "promotions": 6}),
        "the third report has expired"
    );
    let key = |name: Value| {
        let mut key = keys
            .as_array()
            .unwrap()
            .iter()
            .find(|key| key["key"] == name)
            .unwrap()
            .clone();
        let age = key.as_object_mut().unwrap().remove("oldest_age_s").unwrap();
        (key, age.as_f64())
    };
    let (a, age) = key("a".into());
    assert_eq!(
        a,
        json!({"key": "a", "weight": 3, "ready": 4, "at_least": false, "in_flight": 0,
               "deficit": -1, "selected": 14, "deferred": 4, "promotions": 2})
    );
    assert!(age.is_some_and(|age| (0.0..60.0).contains(&age)));
    let (gone, age) = key("gone".into());
    assert_eq!(
        (&gone["selected"], &gone["ready"], age),
        (&json!(14), &json!(0), None)
    );
    assert_eq!(key(Value::Null).0["selected"], 14, "all other keys");
    let (none, _) = key("".into());
    let jobs = none["ready"].as_u64().unwrap() + none["in_flight"].as_u64().unwrap();
    assert_eq!(jobs, 1, "jobs without a tenant");
    let in_flight = keys
        .as_array()
        .unwrap()
        .iter()
        .map(|key| key["in_flight"].as_u64().unwrap());
    assert_eq!(in_flight.sum::<u64>(), 1);

    let list = run_rouse(&db, &["queue", "ls"]).await;
    list.exits(0)
        .prints("mail: by tenant (drr), quantum 1, weights a 3, others 1; after 5m the oldest first; at most 2 running for each key\n")
        .prints("and 7 more keys (--json shows all)\n");
    assert!(!list.text().contains("gone"), "{}", list.text());
}

#[tokio::test]
async fn a_host_sets_the_fair_share_of_its_settings_and_reports_what_it_did() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = scratch("fair-settings");
    let file = "[fair_share.mail]\npolicy = \"drr\"\nweights = { a = 2 }\n[fair_share.bulk]\npolicy = \"drr\"\n";
    std::fs::write(folder.join("rouse.toml"), file).unwrap();
    let address = format!("127.0.0.1:{}", free_port());
    let (file, guests) = (folder.join("rouse.toml"), guests_dir());
    let args = [
        "serve",
        "--http",
        &address,
        "--slots",
        "2",
        "--config",
        file.to_str().unwrap(),
        "--handlers",
        guests.to_str().unwrap(),
    ];
    let variable = r#"{"bulk": {"policy": "drr", "key": "source", "starvation": "1m"}}"#;
    let host = Host::rouse(
        &args,
        &[("DATABASE_URL", &db.url()), ("ROUSE_FAIR_SHARE", variable)],
    );
    host.line(TIMEOUT, |line| line.contains("worker started"));
    let settings = "SELECT jsonb_object_agg(name, jsonb_build_array(policy, fair_key, weights, starvation_s)) FROM rouse.queue WHERE policy = 'drr'";
    let set: Value = client.query_one(settings, &[]).await.unwrap().get(0);
    assert_eq!(
        set,
        json!({"mail": ["drr", "tenant", {"a": 2.0}, 300], "bulk": ["drr", "source", {}, 60]})
    );

    // All tenants have jobs at the first claim, which does not take any jobs from most of them: there are more tenants
    // than slots.
    client
        .batch_execute("SELECT rouse.pause_queue('mail')")
        .await
        .unwrap();
    enqueue(&client, "mail", "a", "test.sleep", 1, 300).await;
    for tenant in 0..60 {
        enqueue(&client, "mail", &format!("t{tenant}"), "test.sleep", 1, 5).await;
    }
    client
        .batch_execute("SELECT rouse.resume_queue('mail')")
        .await
        .unwrap();
    until_true(&client, "SELECT count(*) = 600 FROM rouse.finished").await;
    client
        .batch_execute("SELECT rouse.pause_queue('bulk')")
        .await
        .unwrap();
    enqueue(&client, "bulk", "a", "test.sleep", 1, 1).await;
    // The second read of the page shows what the first one has requested, and the sweep comes within a second.
    let labels = "{queue=\"mail\",dimension=\"tenant\",key=\"a\"}";
    let wanted = [
        &format!("rouse_fair_selections_total{labels} 300"),
        &format!("rouse_fair_deficit{labels} "),
        "rouse_fair_oldest_ready_seconds",
        "rouse_fair_deferrals_total{queue=\"mail\"",
    ];
    crate::http::metrics_with(address.parse().unwrap(), &wanted).await;
    // A host that has nothing to wait for may stop before its next heartbeat.
    prompt_heartbeats(&client).await;
    let sent = "SELECT EXISTS (SELECT FROM rouse.worker AS w, jsonb_array_elements(w.stats -> 'fair') AS f, jsonb_array_elements(f -> 'keys') AS k
                WHERE f ->> 'queue' = 'mail' AND k ->> 'key' = 'a' AND k ->> 'selected' = '300')";
    until_true(&client, sent).await;
    host.signal(libc::SIGTERM);
    host.exit(TIMEOUT);

    // A setting that the database refuses prevents the start.
    let invalid = r#"{"bulk": {"max_in_flight": -1}}"#;
    let host = Host::rouse(
        &args,
        &[("DATABASE_URL", &db.url()), ("ROUSE_FAIR_SHARE", invalid)],
    );
    let (status, output) = host.exit(TIMEOUT);
    assert!(!status.success());
    assert!(
        output.contains(
            "set the fair share of queue bulk (fair_share in rouse.toml, or ROUSE_FAIR_SHARE)"
        ) && output.contains("max_in_flight must be 0 to 1000000, not -1"),
        "{output}"
    );
    // Otherwise the next start would fail for 90 s, because the id is taken.
    let registered =
        "SELECT count(*) FROM rouse.worker WHERE stopped_at IS NULL AND dead_at IS NULL";
    let registered = client.query_one(registered, &[]).await.unwrap();
    assert_eq!(registered.get::<_, i64>(0), 0, "{output}");
}

#[tokio::test]
async fn a_limited_worker_sets_the_share_of_its_own_queues_only() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.worker().await;
    let share = rouse::store::NewFairShare {
        policy: Some(rouse::job::FairPolicy::Drr),
        ..Default::default()
    };
    client
        .batch_execute(
            "UPDATE rouse.worker SET limited = true;
             INSERT INTO rouse.worker_login (login, worker_ids, queues, handlers)
             VALUES (session_user::regrole, '{*}', '{mail*}', '{*}')",
        )
        .await
        .unwrap();
    store.declare_fair_share("mail.x", &share).await.unwrap();
    let why = store.declare_fair_share("other", &share).await.unwrap_err();
    assert!(
        why.to_string().contains("may not serve queue 'other'"),
        "{why}"
    );
}
