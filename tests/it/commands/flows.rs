//! `rouse enqueue --after` and `rouse flow`.

use serde_json::json;

use crate::support::{TestDb, rouse_in, scratch};

const JOBS: &str = r#"[
    {"name": "charge", "handler": "shop.charge"},
    {"name": "reserve", "handler": "shop.reserve"},
    {"name": "ship", "handler": "shop.ship", "after": ["charge", "reserve"]},
    {"name": "release", "handler": "shop.release", "after": {"s": {"job": "ship", "on_failure": "run"}}}
]"#;

async fn enqueue_flow(db: &TestDb) -> i64 {
    let client = db.client().await;
    let sql = "SELECT rouse.enqueue_flow($1::text::jsonb, name => 'order 17')";
    client.query_one(sql, &[&JOBS]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_job_is_enqueued_after_others_and_shows_what_it_waits_for() {
    let (db, folder) = (TestDb::new().await, scratch("after"));
    for expected in ["1\n", "2\n"] {
        let ran = rouse_in(&db, &["enqueue", "x"], &folder).await;
        assert_eq!(ran.exits(0).stdout, expected);
    }
    let args = ["enqueue", "x", "--after", "charge=1:run", "--after", "2"];
    rouse_in(&db, &args, &folder).await.exits(0);
    let shown = rouse_in(&db, &["job", "3", "--json"], &folder).await.json();
    assert_eq!(shown["waits_for"], json!([1, 2]));
    assert_eq!(
        shown["after"],
        json!({"2": 2, "charge": {"job": 1, "on_failure": "run"}})
    );
    rouse_in(&db, &["job", "3"], &folder)
        .await
        .prints("waits_for");
    rouse_in(&db, &["enqueue", "x", "--after", "99"], &folder)
        .await
        .exits(1)
        .prints("after names job 99 (as '99'), which does not exist");
    rouse_in(
        &db,
        &["enqueue", "x", "--after", "a=1", "--after", "a=2"],
        &folder,
    )
    .await
    .exits(1)
    .prints("--after has two jobs with the name a");
    rouse_in(&db, &["enqueue", "x", "--after", "1:stop"], &folder)
        .await
        .exits(2)
        .prints("\"stop\" is not cancel, run or wait");
}

#[tokio::test]
async fn a_flow_is_listed_and_drawn() {
    let (db, folder) = (TestDb::new().await, scratch("flow"));
    rouse_in(&db, &["flow"], &folder)
        .await
        .exits(0)
        .prints("no flows");
    let flow = enqueue_flow(&db).await.to_string();
    let drawn = rouse_in(&db, &["flow", &flow], &folder).await;
    let lines: Vec<String> = drawn
        .exits(0)
        .stdout
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    assert_eq!(
        lines,
        [
            "flow 1, order 17: 0 of 4 jobs have ended",
            "",
            "charge queued shop.charge 2",
            "reserve queued shop.reserve 3",
            "└─ ship waiting shop.ship 4 after charge, reserve",
            "└─ release waiting shop.release 5 after ship (run)",
        ]
    );
    let listed = rouse_in(&db, &["flow", "ls", "--json"], &folder)
        .await
        .json();
    assert_eq!(listed["flows"][0]["waiting"], 2);
    assert_eq!(listed["more"], false);
    rouse_in(&db, &["flow", "ls"], &folder)
        .await
        .prints("order 17");
    let shown = rouse_in(&db, &["flow", "show", &flow, "--json"], &folder)
        .await
        .json();
    assert_eq!(shown["jobs"][2]["name"], "ship");
    enqueue_flow(&db).await;
    rouse_in(&db, &["flow", "ls", "--limit", "1"], &folder)
        .await
        .prints("there are more");
    let older = rouse_in(&db, &["flow", "ls", "--before", "6", "--json"], &folder).await;
    assert_eq!(older.json()["flows"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_flow_is_cancelled_retried_and_deleted() {
    let (db, folder) = (TestDb::new().await, scratch("flow"));
    let client = db.client().await;
    let flow = enqueue_flow(&db).await.to_string();
    let run = async |verb: &str| rouse_in(&db, &["flow", verb, &flow], &folder).await;
    assert_eq!(
        run("cancel").await.exits(0).stdout,
        "4 jobs of flow 1 are cancelled\n"
    );
    assert_eq!(
        run("cancel").await.exits(0).stdout,
        "0 jobs of flow 1 are cancelled\n"
    );
    assert_eq!(
        run("retry").await.exits(0).stdout,
        "4 jobs of flow 1 are retried\n"
    );
    let outside = "SELECT rouse.enqueue('x', after => (SELECT jsonb_agg(job) FROM rouse.flow(1) WHERE name = 'ship'))";
    let outside: i64 = client.query_one(outside, &[]).await.unwrap().get(0);
    let refused = run("delete").await;
    refused.exits(6);
    // The prefix `rouse: ` is printed once.
    let why = format!("rouse: flow 1 cannot be deleted: job {outside} waits for it");
    assert!(refused.stderr.starts_with(&why), "{}", refused.stderr);
    client
        .execute("SELECT rouse.cancel($1)", &[&outside])
        .await
        .unwrap();
    let deleted = rouse_in(&db, &["flow", "delete", &flow, "--json"], &folder).await;
    assert_eq!(deleted.json(), json!({"flow": 1, "deleted": 4}));
    for verb in ["show", "cancel", "retry", "delete"] {
        rouse_in(&db, &["flow", verb, "99"], &folder)
            .await
            .exits(3)
            .prints("no flow 99");
    }
}

#[tokio::test]
async fn a_page_of_flows_is_short_if_they_have_many_jobs_and_the_listing_reads_several() {
    let (db, folder) = (TestDb::new().await, scratch("flow-pages"));
    let mut flows = Vec::new();
    for _ in 0..5 {
        flows.insert(0, enqueue_flow(&db).await);
    }
    let client = db.client().await;
    let many = "UPDATE rouse.flow SET jobs = 15000 WHERE jobs = 4";
    assert_eq!(client.execute(many, &[]).await.unwrap(), 5);
    let store = db.store();
    let mut pages = Vec::new();
    let mut next_before = Some(i64::MAX);
    while let Some(before) = next_before {
        let page = store.flows(before, 50).await.unwrap();
        let ids: Vec<i64> = page
            .flows
            .iter()
            .map(|flow| flow["id"].as_i64().unwrap())
            .collect();
        pages.push(ids);
        next_before = page.next_before;
    }
    assert_eq!(pages, [&flows[..2], &flows[2..4], &flows[4..]]);
    for (limit, count, more) in [("4", 4, true), ("5", 5, false), ("50", 5, false)] {
        let args = ["flow", "ls", "--limit", limit, "--json"];
        let listed = rouse_in(&db, &args, &folder).await.json();
        let listed_flows = listed["flows"].as_array().unwrap().len();
        assert_eq!((listed_flows, &listed["more"]), (count, &json!(more)));
    }
}
