//! What operators can see of the keys of gates.

use serde_json::{Value, json};
use tokio_postgres::Client;

use super::{enqueue, gate, run};
use crate::support::TestDb;
use crate::support::claims::claim;

/// The keys of a gate, or of all, in their order: JSON without the columns that are null.
async fn keys(client: &Client, gate: Option<&str>) -> Vec<Value> {
    let sql = "SELECT jsonb_strip_nulls(to_jsonb(k)) FROM rouse.gate_keys($1) AS k";
    let rows = client.query(sql, &[&gate]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn a_gate_of_running_jobs_shows_each_key_with_running_and_waiting_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.worker().await;
    run(
        &client,
        "SELECT rouse.set_gate('tenants', 'max_concurrent', key => '{tenant,$.region}', max => 2);
         SELECT rouse.set_gate('all', 'max_concurrent', queue => 'default', max => 5);
         SELECT rouse.set_gate('other', 'max_concurrent', queue => 'other', max => 5)",
    )
    .await;
    run(
        &client,
        r#"SELECT rouse.enqueue('mail.send', '{"region": "e:u"}', tenant => 'a:1') FROM generate_series(1, 4);
           SELECT rouse.enqueue('mail.send', '{"region": "us"}', tenant => 'a:1');
           SELECT rouse.enqueue('report.make');
           SELECT rouse.enqueue('report.make', run_at => now() + interval '1 day') FROM generate_series(1, 3)"#,
    )
    .await;
    let tenants = |key: Value, running: i32, left: i32, waiting: i32| json!({"gate": "tenants", "key": key, "running": running, "left": left, "waiting": waiting, "at_least": false});
    assert_eq!(
        keys(&client, Some("tenants")).await,
        [
            tenants(json!(["", ""]), 0, 2, 1),
            tenants(json!(["a:1", "e:u"]), 0, 2, 4),
            tenants(json!(["a:1", "us"]), 0, 2, 1),
        ]
    );
    assert_eq!(claim(&store, 10).await.len(), 4);
    let claimed = [
        tenants(json!(["", ""]), 1, 1, 0),
        tenants(json!(["a:1", "e:u"]), 2, 0, 2),
        tenants(json!(["a:1", "us"]), 1, 1, 0),
    ];
    assert_eq!(keys(&client, Some("tenants")).await, claimed);
    let all =
        json!({"gate": "all", "key": [], "running": 4, "left": 1, "waiting": 2, "at_least": false});
    assert_eq!(
        keys(&client, None).await,
        [&[all][..], &claimed].concat(),
        "the third gate has no keys"
    );

    // The limit is lower than the number of running jobs.
    run(
        &client,
        "SELECT rouse.set_gate('tenants', 'max_concurrent', key => '{tenant,$.region}', max => 1)",
    )
    .await;
    assert_eq!(
        keys(&client, Some("tenants")).await[1],
        tenants(json!(["a:1", "e:u"]), 2, 0, 2)
    );
    let shown = gate(&db, &["show", "tenants", "--json"])
        .await
        .exits(0)
        .json();
    assert_eq!(
        (&shown["name"], &shown["max"], &shown["keys_total"]),
        (&json!("tenants"), &json!(1), &json!(3))
    );
    let busiest = json!({"key": ["a:1", "e:u"], "running": 2, "left": 0, "waiting": 2, "at_least": false, "opens_at": null, "job": null});
    assert_eq!(shown["keys"][0], busiest);
    let shown = gate(&db, &["show", "tenants"]).await;
    shown.exits(0);
    let expected = " kind     max_concurrent
 limit    at most 1 running job of each tenant and $.region
 handler  (all)
 queue    (all)

 key              running  may start  waiting
 a:1 / e:u        2        0          2
 (none) / (none)  1        0          0
 a:1 / us         1        0          0
";
    assert_eq!(shown.stdout, expected);
    gate(&db, &["show", "all"])
        .await
        .exits(0)
        .prints(" (all)  4        1          2\n");
    gate(&db, &["show", "other"])
        .await
        .exits(0)
        .prints("rouse: no key has jobs\n");
    let one = gate(&db, &["show", "tenants", "--limit", "1"]).await;
    one.exits(0).prints("\nand 2 more keys (--limit N)\n");
    assert!(!one.text().contains("(none)"), "{}", one.text());
    let one = gate(&db, &["show", "tenants", "--limit", "1", "--json"])
        .await
        .json();
    assert_eq!(
        (&one["keys"], &one["keys_total"]),
        (&json!([busiest]), &json!(3))
    );
}

#[tokio::test]
async fn a_throttle_shows_how_many_jobs_may_start_and_when_the_next_one_may() {
    let db = TestDb::new().await;
    let client = db.client().await;
    run(
        &client,
        "SELECT rouse.set_gate('mail', 'throttle', handler => 'mail.send', key => '{tenant}', max => 2, period => '1 h');
         SELECT rouse.set_gate('bucket', 'throttle', handler => 'mail.send', max => 1, period => '1 h', burst => 3)",
    )
    .await;
    for (tenant, jobs) in [("a", 2), ("b", 1)] {
        enqueue(&client, "mail.send", tenant, jobs).await;
    }
    // As if jobs had started: two of a, one of c, and one of d longer ago than the period.
    run(
        &client,
        "INSERT INTO rouse.gate_key (gate, key, starts, until) VALUES
             ('mail', 'a', ARRAY[now() - interval '20 min', now() - interval '10 min'], now() + interval '50 min'),
             ('mail', 'c', ARRAY[now()], now() + interval '1 h'),
             ('mail', 'd', ARRAY[now() - interval '2 h'], now() - interval '1 h'),
             ('bucket', '', NULL, now() + interval '3 h')",
    )
    .await;
    let mut found = keys(&client, None).await;
    let opens = "SELECT array_agg(round(extract(epoch FROM k.opens_at - now()) / 60)::integer) FROM rouse.gate_keys() AS k WHERE k.opens_at IS NOT NULL";
    let opens: Vec<i32> = client.query_one(opens, &[]).await.unwrap().get(0);
    assert_eq!(opens, [60, 40], "minutes from now");
    for key in &mut found {
        key.as_object_mut().unwrap().remove("opens_at");
    }
    let key = |gate: &str, key: &[&str], left: i32, waiting: i32| json!({"gate": gate, "key": key, "left": left, "waiting": waiting, "at_least": false});
    assert_eq!(
        found,
        [
            key("bucket", &[], 0, 3),
            key("mail", &["a"], 0, 2),
            key("mail", &["b"], 2, 1),
            key("mail", &["c"], 1, 0),
        ],
        "the start of d no longer counts"
    );
    let shown = gate(&db, &["show", "mail"]).await;
    shown
        .exits(0)
        .prints(" limit    at most 2 jobs of each tenant start in any 1h\n")
        .prints(" handler  mail.send\n");
    let rows: Vec<Vec<&str>> = shown
        .stdout
        .lines()
        .skip(5)
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows[0], ["key", "may", "start", "opens", "waiting"]);
    assert_eq!(
        (rows[1].len(), rows[1][0], rows[1][1], rows[1][3]),
        (4, "a", "0", "2"),
        "{rows:?}"
    );
    assert_eq!(rows[2..], [["b", "2", "1"], ["c", "1", "0"]]);
}

#[tokio::test]
async fn gates_of_enqueues_show_the_jobs_they_have_let_through_while_they_have_an_effect() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.worker().await;
    run(
        &client,
        "SELECT rouse.set_gate('queued', 'singleton', handler => 'a', key => '{tenant}');
         SELECT rouse.set_gate('running', 'singleton', handler => 'b', during => 'running');
         SELECT rouse.set_gate('period', 'singleton', handler => 'c', key => '{tenant}', during => 'period', period => '1 h');
         SELECT rouse.set_gate('trailing', 'debounce', handler => 'd', period => '1 h');
         SELECT rouse.set_gate('leading', 'debounce', handler => 'e', edge => 'leading', period => '1 h', max_wait => '2 h')",
    )
    .await;
    let mut jobs = Vec::new();
    for handler in ["a", "b", "c", "d", "e"] {
        let sql = format!("SELECT rouse.enqueue('{handler}', tenant => 'acme')");
        for _ in 0..2 {
            jobs.push(client.query_one(&sql, &[]).await.unwrap().get::<_, i64>(0));
        }
        assert_eq!(jobs.pop().as_ref(), jobs.last(), "{handler}");
    }
    let shown = async || -> Vec<(String, Value, i64, bool)> {
        let keys = keys(&client, None).await;
        let shown = keys.iter().map(|key| {
            let fields: Vec<&String> = key.as_object().unwrap().keys().collect();
            assert!(
                fields
                    .iter()
                    .all(|field| ["gate", "job", "key", "opens_at"].contains(&field.as_str())),
                "{key}"
            );
            let gate = key["gate"].as_str().unwrap().to_owned();
            (
                gate,
                key["key"].clone(),
                key["job"].as_i64().unwrap(),
                !key["opens_at"].is_null(),
            )
        });
        shown.collect()
    };
    let row =
        |gate: &str, key: Value, job: usize, opens: bool| (gate.to_owned(), key, jobs[job], opens);
    assert_eq!(
        shown().await,
        [
            row("leading", json!(["acme"]), 4, true),
            row("period", json!(["acme"]), 2, true),
            row("queued", json!(["acme"]), 0, false),
            row("running", json!(["acme"]), 1, false),
            row("trailing", json!(["acme"]), 3, true),
        ]
    );
    gate(&db, &["show", "queued"])
        .await
        .exits(0)
        .prints(&format!(" acme  {}    when the job starts\n", jobs[0]));
    gate(&db, &["show", "running"])
        .await
        .exits(0)
        .prints(&format!(" acme  {}    when the job ends\n", jobs[1]));
    gate(&db, &["show", "period"])
        .await
        .exits(0)
        .prints("one job of each tenant in 1h; later ones are not enqueued");

    run(
        &client,
        "SELECT rouse.reschedule(id) FROM rouse.job WHERE available_at > now()",
    )
    .await;
    let due = shown().await;
    assert_eq!(
        due[4],
        row("trailing", json!(["acme"]), 3, false),
        "it opens when the job starts"
    );
    assert_eq!(claim(&store, 10).await.len(), 5);
    assert_eq!(
        shown().await,
        [
            row("leading", json!(["acme"]), 4, true),
            row("period", json!(["acme"]), 2, true),
            row("running", json!(["acme"]), 1, false),
        ],
        "the others open when their jobs start"
    );
    run(&client, "SELECT rouse.complete(id) FROM rouse.job").await;
    let left = shown().await;
    assert_eq!(
        left,
        [
            row("leading", json!(["acme"]), 4, true),
            row("period", json!(["acme"]), 2, true)
        ]
    );
    run(&client, "UPDATE rouse.gate_key SET since = since - interval '3 h', until = CASE gate WHEN 'period' THEN now() ELSE until END").await;
    assert_eq!(shown().await, [], "max_wait and the period are over");
}

#[tokio::test]
async fn waiting_jobs_are_counted_up_to_ten_thousand_for_each_lane() {
    let db = TestDb::new().await;
    let client = db.client().await;
    run(
        &client,
        "SELECT rouse.set_gate('all', 'max_concurrent', max => 1);
         SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[10001]));
         SELECT rouse.enqueue('x', priority => 'high')",
    )
    .await;
    let key = json!({"gate": "all", "key": [], "running": 0, "left": 1, "waiting": 10_001, "at_least": true});
    assert_eq!(keys(&client, None).await, [key]);
    gate(&db, &["show", "all"])
        .await
        .exits(0)
        .prints(" 10001+\n");
}
