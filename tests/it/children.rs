//! Jobs that attempts enqueue: committed with the outcome, or not at all.

use std::time::Duration;

use rouse::job::{ErrorKind, JsonText, NewJob, NewJobKind, Outcome};
use rouse::store::{ClaimedJob, Locked, Settlement, Store};
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{claim, claim_one, error, lock_job, result, settlement_with};
use crate::support::database::refusal;
use crate::support::worker::{cancel, enqueue, enqueue_sql, forget};

fn new(kind: NewJobKind, handler: &str, payload: Value, options: Option<Value>) -> NewJob {
    NewJob {
        kind,
        handler: handler.into(),
        payload: JsonText(payload.to_string()),
        options: options.map(|options| JsonText(options.to_string())),
    }
}

fn child(payload: Value) -> NewJob {
    new(NewJobKind::Child, "child", payload, None)
}

fn next(payload: Value) -> NewJob {
    new(NewJobKind::Next, "x", payload, None)
}

/// Settles the job as succeeded, and enqueues these jobs.
async fn succeed(store: &Store, job: &ClaimedJob, jobs: Vec<NewJob>) -> Result<usize, String> {
    let settlement = settlement_with(job, result("1"), jobs);
    let settled = store.settle(&[settlement], Locked::Wait).await;
    settled
        .map(|settled| settled.accepted.len())
        .map_err(|error| error.to_string())
}

/// The jobs of this parent: handler, payload, queue, priority, tenant, state.
async fn children(client: &Client, parent: i64) -> Vec<Value> {
    let sql = "SELECT json_build_array(handler, payload, queue, priority, tenant, state) FROM rouse.jobs WHERE parent = $1 ORDER BY id";
    let rows = client.query(sql, &[&parent]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn two_settlements_of_one_job_in_one_call_leave_no_jobs() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue_sql(&client, "'x'").await;
    let job = claim_one(&store).await;
    // The previous attempt: its lease has ended, and its outcome has not been refused yet.
    let mut stale = job.clone();
    stale.fence.0 ^= 1;
    let both = [&stale, &job].map(|job| settlement_with(job, result("1"), vec![child(json!(1))]));
    let refused = store
        .settle(&both, Locked::Wait)
        .await
        .unwrap_err()
        .to_string();
    assert!(refused.contains("must be of different jobs"), "{refused}");
    assert_eq!(children(&client, parent).await.len(), 0);
    assert_eq!(succeed(&store, &stale, vec![child(json!(1))]).await, Ok(0));
    assert_eq!(succeed(&store, &job, vec![child(json!(1))]).await, Ok(1));
    assert_eq!(children(&client, parent).await.len(), 1);
}

#[tokio::test]
async fn children_are_committed_with_a_success_and_inherit_queue_priority_and_tenant() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue_sql(
        &client,
        "'x', queue => 'bulk', priority => 'low', tenant => 'acme'",
    )
    .await;
    let job = claim_one(&store).await;
    let other = json!({"queue": "else", "priority": "high", "delay_ms": 3_600_000, "max_attempts": 7, "tags": ["gpu"],
                       "unique_key": "k", "lease": "20 seconds", "timeout": "1 minute"});
    let jobs = vec![
        child(json!(1)),
        new(NewJobKind::Child, "other", json!(2), Some(other)),
        child(json!("x".repeat(5000))),
    ];
    assert_eq!(succeed(&store, &job, jobs).await, Ok(1));
    let found = children(&client, parent).await;
    assert_eq!(
        found[0],
        json!(["child", 1, "bulk", "low", "acme", "queued"])
    );
    assert_eq!(
        found[1],
        json!(["other", 2, "else", "high", "acme", "queued"])
    );
    assert_eq!(found[2][1].as_str().map(str::len), Some(5000));
    let sql = "SELECT max_attempts = 7 AND tags = '{gpu}' AND unique_key = 'k' AND lease_ms = 20000 AND timeout_ms = 60000
                      AND available_at > now() + interval '50 minutes' AND chain = id FROM rouse.jobs WHERE handler = 'other'";
    assert!(client.query_one(sql, &[]).await.unwrap().get::<_, bool>(0));
    // The two that are ready can be claimed at once.
    assert_eq!(claim(&store, 9).await.len(), 2);
}

#[tokio::test]
async fn failed_retried_and_lost_attempts_enqueue_nothing() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let retry = || Outcome::Retry {
        again: Duration::from_secs(60).into(),
        error: error(ErrorKind::GuestError),
    };
    for (outcome, accepted) in [
        (retry(), 1),
        (Outcome::Failed(error(ErrorKind::GuestError)), 1),
    ] {
        let parent = enqueue(&client, "x", json!(1)).await;
        let job = claim_one(&store).await;
        let ended = settlement_with(&job, outcome, vec![child(json!(1)), next(json!(2))]);
        let settled = store.settle(&[ended], Locked::Wait).await.unwrap();
        assert_eq!(settled.accepted.len(), accepted);
        assert!(children(&client, parent).await.is_empty());
    }
    let parent = enqueue(&client, "x", json!(1)).await;
    let mut job = claim_one(&store).await;
    job.fence.0 += 1;
    assert_eq!(succeed(&store, &job, vec![child(json!(1))]).await, Ok(0));
    assert!(children(&client, parent).await.is_empty());
}

#[tokio::test]
async fn a_locked_parent_enqueues_its_children_when_it_is_settled_and_not_before() {
    let db = TestDb::new().await;
    let (mut client, store) = (db.client().await, db.worker().await);
    let parents = [
        enqueue(&client, "x", json!(1)).await,
        enqueue(&client, "x", json!(2)).await,
    ];
    let jobs = claim(&store, 2).await;
    let batch: Vec<Settlement> = jobs
        .iter()
        .map(|job| settlement_with(job, result("1"), vec![child(json!(job.id.0))]))
        .collect();
    let locker = client.transaction().await.unwrap();
    lock_job(&locker, parents[0]).await;
    let settled = store.settle(&batch, Locked::Skip).await.unwrap();
    assert_eq!((settled.accepted.len(), settled.locked.len()), (1, 1));
    locker.rollback().await.unwrap();
    assert_eq!(children(&client, parents[0]).await.len(), 0);
    assert_eq!(children(&client, parents[1]).await.len(), 1);
    let settled = store.settle(&batch, Locked::Skip).await.unwrap();
    assert_eq!(settled.accepted.len(), 1);
    for parent in parents {
        assert_eq!(children(&client, parent).await.len(), 1, "once");
    }
}

#[tokio::test]
async fn children_may_wait_for_earlier_children_of_their_attempt() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let after = json!({"after": {"a": -1, "b": {"job": -2, "on_failure": "run"}}});
    let jobs = vec![
        child(json!(1)),
        child(json!(2)),
        new(NewJobKind::Child, "sum", json!(3), Some(after)),
    ];
    assert_eq!(succeed(&store, &job, jobs).await, Ok(1));
    let sql = "SELECT after, waits_for FROM rouse.jobs WHERE handler = 'sum'";
    let row = client.query_one(sql, &[]).await.unwrap();
    let ids: Vec<i64> = row.get(1);
    assert_eq!(
        row.get::<_, Value>(0),
        json!({"a": ids[0], "b": {"job": ids[1], "on_failure": "run"}})
    );
    for job in claim(&store, 9).await {
        assert_eq!(succeed(&store, &job, Vec::new()).await, Ok(1));
    }
    assert_eq!(claim_one(&store).await.payload.0, "3");
    assert_eq!(children(&client, parent).await.len(), 3);
}

#[tokio::test]
async fn two_children_that_share_a_unique_key_are_waited_for_once() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let keyed = |n: i32| {
        let options = Some(json!({"unique_key": "k"}));
        new(NewJobKind::Child, "child", json!(n), options)
    };
    let after = json!({"after": {"a": -1, "b": -2}});
    let sum = new(NewJobKind::Next, "sum", json!(3), Some(after));
    let jobs = vec![keyed(1), keyed(2), sum];
    assert_eq!(succeed(&store, &job, jobs).await, Ok(1));
    let child = claim_one(&store).await;
    let sql = "SELECT after, waits_for FROM rouse.jobs WHERE handler = 'sum'";
    let row = client.query_one(sql, &[]).await.unwrap();
    let id = child.id.0;
    assert_eq!(row.get::<_, Value>(0), json!({"a": id, "b": id}));
    assert_eq!(row.get::<_, Vec<i64>>(1), [id]);
    let ended = settlement_with(&child, result("7"), Vec::new());
    store.settle(&[ended], Locked::Wait).await.unwrap();
    let sum = claim_one(&store).await;
    assert_eq!(sum.payload.0, "3");
    let ends = store.parent_ends(sum.id, sum.fence, None, &[]).await;
    let ends = ends.unwrap().unwrap().ends;
    let names: Vec<&str> = ends.iter().map(|end| end.name.as_str()).collect();
    assert_eq!(names, ["a", "b"], "each name has its end");
}

#[tokio::test]
async fn the_next_job_continues_the_chain_and_its_end_releases_those_that_wait() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let first = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let waiting = enqueue_sql(&client, &format!("'waiting', after => '[{first}]'")).await;
    assert_eq!(succeed(&store, &job, vec![next(json!(2))]).await, Ok(1));
    // The predecessor has ended, but the chain has not.
    let later = enqueue_sql(&client, &format!("'later', after => '[{first}]'")).await;
    let second = claim_one(&store).await;
    assert_eq!(second.payload.0, "2");
    assert_eq!(claim(&store, 9).await.len(), 0);
    let ended = settlement_with(&second, result(r#"{"last": true}"#), Vec::new());
    store.settle(&[ended], Locked::Wait).await.unwrap();
    let mut released: Vec<i64> = claim(&store, 9).await.iter().map(|job| job.id.0).collect();
    released.sort_unstable();
    assert_eq!(released, [waiting, later]);
    let sql = "SELECT rouse.chain_result($1), (SELECT array_agg(job) FROM rouse.chain($1))";
    let row = client.query_one(sql, &[&first]).await.unwrap();
    assert_eq!(row.get::<_, Value>(0), json!({"last": true}));
    assert_eq!(row.get::<_, Vec<i64>>(1), [first, second.id.0]);
}

#[tokio::test]
async fn a_chain_whose_next_job_fails_has_failed() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let first = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let waiting = enqueue_sql(&client, &format!("'waiting', after => '[{first}]'")).await;
    succeed(&store, &job, vec![next(json!(2))]).await.unwrap();
    let failed = Outcome::Failed(error(ErrorKind::GuestError));
    let second = claim_one(&store).await;
    store
        .settle(
            &[settlement_with(&second, failed, Vec::new())],
            Locked::Wait,
        )
        .await
        .unwrap();
    let sql = "SELECT state::text FROM rouse.jobs WHERE id = $1";
    let state: String = client.query_one(sql, &[&waiting]).await.unwrap().get(0);
    assert_eq!(state, "cancelled");
}

/// The two jobs of the chain may be in queues with different retentions.
#[tokio::test]
async fn a_retry_does_not_take_an_older_job_that_has_succeeded_for_the_end_of_its_chain() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let first = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let waiting = enqueue_sql(&client, &format!("'waiting', after => '[{first}]'")).await;
    succeed(&store, &job, vec![next(json!(2))]).await.unwrap();
    let second = claim_one(&store).await;
    let failed = Outcome::Failed(error(ErrorKind::GuestError));
    let failed = settlement_with(&second, failed, Vec::new());
    store.settle(&[failed], Locked::Wait).await.unwrap();
    forget(&client, second.id.0).await;
    let sql = "SELECT rouse.retry($1)";
    let refused = client.query_one(sql, &[&waiting]).await.unwrap_err();
    let refused = refused.as_db_error().unwrap();
    assert_eq!(
        refused.message(),
        format!(
            "rouse: job {waiting} cannot be retried: it waits for job {first}, which has failed"
        )
    );
    assert!(refused.hint().unwrap().contains("no longer kept"));
    assert!(claim(&store, 9).await.is_empty());
}

#[tokio::test]
async fn an_older_job_that_has_succeeded_is_not_the_end_of_a_chain_whose_last_job_is_no_longer_kept()
 {
    const NO_LONGER_KNOWN: &str = "The chain has ended, but how it has ended is no longer known.";
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let first = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    succeed(&store, &job, vec![next(json!(2))]).await.unwrap();
    let last = async || -> Option<Vec<i64>> {
        let sql = "SELECT array_agg(job) FILTER (WHERE is_last) FROM rouse.chain($1)";
        client.query_one(sql, &[&first]).await.unwrap().get(0)
    };
    let second = claim_one(&store).await;
    assert_eq!(last().await, Some(vec![second.id.0]), "it is live");
    let failed = Outcome::Failed(error(ErrorKind::GuestError));
    let failed = settlement_with(&second, failed, Vec::new());
    store.settle(&[failed], Locked::Wait).await.unwrap();
    assert_eq!(last().await, Some(vec![second.id.0]));
    forget(&client, second.id.0).await;
    assert_eq!(last().await, None);
    let sql = "SELECT rouse.chain_result($1)";
    let row = client.query_one(sql, &[&first]).await.unwrap();
    assert_eq!(row.get::<_, Option<Value>>(0), None);
    let enqueue = format!("SELECT rouse.enqueue('y', after => '[{first}]')");
    assert_eq!(
        refusal(&client, &enqueue).await,
        format!(
            "rouse.enqueue: after names job {first} (as '{first}'), and the last job of its chain is no longer kept / {NO_LONGER_KNOWN}"
        )
    );
    assert_eq!(
        refusal(&client, &format!("SELECT rouse.cancel_chain({first})")).await,
        format!("rouse: the last job of chain {first} is no longer kept / {NO_LONGER_KNOWN}")
    );
}

#[tokio::test]
async fn the_attenuation_of_a_job_applies_to_all_that_it_enqueues() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    enqueue_sql(&client, r#"'x', grants => '{"http": ["a.example"]}'"#).await;
    let job = claim_one(&store).await;
    let own = |grants: Value| Some(json!({ "grants": grants }));
    let jobs = vec![
        child(json!(1)),
        new(
            NewJobKind::Child,
            "child",
            json!(2),
            own(json!({"http": ["*"]})),
        ),
        new(NewJobKind::Next, "x", json!(3), own(json!({"env": []}))),
    ];
    succeed(&store, &job, jobs).await.unwrap();
    let sql = "SELECT payload, grants FROM rouse.jobs WHERE state = 'queued' ORDER BY payload";
    let rows = client.query(sql, &[]).await.unwrap();
    let grants: Vec<Value> = rows.iter().map(|row| row.get(1)).collect();
    let parent = json!({"http": ["a.example"]});
    assert_eq!(
        grants,
        [
            parent.clone(),
            json!([parent, {"http": ["*"]}]),
            json!([parent, {"env": []}])
        ]
    );
    // A part of the attenuation that is repeated changes nothing.
    let third = claim(&store, 9)
        .await
        .into_iter()
        .find(|job| job.payload.0 == "3");
    let jobs = vec![new(
        NewJobKind::Next,
        "x",
        json!(4),
        own(json!({"env": []})),
    )];
    succeed(&store, &third.unwrap(), jobs).await.unwrap();
    let sql = "SELECT jsonb_array_length(grants) FROM rouse.jobs WHERE payload = '4'";
    assert_eq!(
        client.query_one(sql, &[]).await.unwrap().get::<_, i32>(0),
        2
    );
}

#[tokio::test]
async fn a_chain_whose_links_repeat_a_list_of_grants_keeps_each_part_once() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let grants = json!([{"memory_mb": 50}, {"state": false}]);
    enqueue(&client, "x", json!(0)).await;
    for n in 1..40 {
        let job = claim_one(&store).await;
        let options = json!({ "grants": grants });
        let link = new(NewJobKind::Next, "x", json!(n), Some(options));
        assert_eq!(succeed(&store, &job, vec![link]).await, Ok(1));
    }
    let sql = "SELECT grants FROM rouse.jobs WHERE state = 'queued'";
    let kept: Value = client.query_one(sql, &[]).await.unwrap().get(0);
    assert_eq!(kept, grants);
}

#[tokio::test]
async fn calls_belong_to_suspended_attempts_and_other_jobs_to_successes() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let call = NewJobKind::Call { step: "s".into() };
    let misplaced = vec![new(call, "child", json!(1), None)];
    assert_eq!(succeed(&store, &job, misplaced).await, Ok(1));
    assert!(children(&client, parent).await.is_empty());
    let released = enqueue(&client, "x", json!(2)).await;
    let job = claim_one(&store).await;
    let release = settlement_with(
        &job,
        Outcome::Released,
        vec![next(json!(3)), child(json!(4))],
    );
    store.settle(&[release], Locked::Wait).await.unwrap();
    assert!(children(&client, released).await.is_empty());
    let sql = "SELECT count(*) FROM rouse.chain($1)";
    let jobs: i64 = client.query_one(sql, &[&released]).await.unwrap().get(0);
    assert_eq!(jobs, 1);
}

#[tokio::test]
async fn a_tree_of_jobs_is_limited_in_number_and_depth() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let limits = "UPDATE rouse.limits SET descendants_max = 7, depth_max = 2";
    client.batch_execute(limits).await.unwrap();
    enqueue(&client, "x", json!(0)).await;
    let root = claim_one(&store).await;
    let many = |n: i32| (0..n).map(|n| child(json!(n))).collect::<Vec<_>>();
    let refused = succeed(&store, &root, many(8)).await.unwrap_err();
    assert!(refused.contains("at most 7 more descendants"), "{refused}");
    assert_eq!(succeed(&store, &root, many(2)).await, Ok(1));
    // Each of the two may enqueue half of the rest.
    let first = claim_one(&store).await;
    let refused = succeed(&store, &first, many(3)).await.unwrap_err();
    assert!(refused.contains("at most 2 more descendants"), "{refused}");
    // Continuing a chain does not use up the limit, and keeps what is left of it.
    assert_eq!(
        succeed(
            &store,
            &first,
            vec![new(NewJobKind::Next, "child", json!(7), None)]
        )
        .await,
        Ok(1)
    );
    let jobs = claim(&store, 9).await;
    let next = jobs.iter().find(|job| job.payload.0 == "7").unwrap();
    assert_eq!(succeed(&store, next, many(1)).await, Ok(1));
    let deep = claim_one(&store).await;
    let refused = succeed(&store, &deep, many(1)).await.unwrap_err();
    assert!(refused.contains("nested deeper than 2"), "{refused}");
}

#[tokio::test]
async fn values_that_only_the_database_checks_refuse_the_settlement() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    enqueue_sql(&client, "'y', unique_key => 'k'").await;
    let parent = enqueue(&client, "x", json!(1)).await;
    let jobs = claim(&store, 2).await;
    let job = jobs.iter().find(|job| job.id.0 == parent).unwrap();
    let bad = [
        (
            new(NewJobKind::Child, "No Name", json!(1), None),
            "not a handler name",
        ),
        (
            new(
                NewJobKind::Child,
                "y",
                json!(1),
                Some(json!({"run_at": "soon"})),
            ),
            "timestamp",
        ),
        (
            new(
                NewJobKind::Child,
                "y",
                json!(1),
                Some(json!({"grants": {"sockets": []}})),
            ),
            "not a key of grants",
        ),
        (
            new(
                NewJobKind::Child,
                "y",
                json!(1),
                Some(json!({"lease": "1 second"})),
            ),
            "between 2 seconds",
        ),
        (
            new(
                NewJobKind::Next,
                "y",
                json!(1),
                Some(json!({"unique_key": "k"})),
            ),
            "cannot be continued",
        ),
    ];
    for (invalid, why) in bad {
        let refused = succeed(&store, job, vec![child(json!(1)), invalid]).await;
        let refused = refused.expect_err(why);
        assert!(refused.contains(why), "{refused}");
    }
    assert!(children(&client, parent).await.is_empty());
    // If the unique key of a child is taken, the child is the live job with that key.
    let taken = new(
        NewJobKind::Child,
        "y",
        json!(1),
        Some(json!({"unique_key": "k"})),
    );
    assert_eq!(succeed(&store, job, vec![taken]).await, Ok(1));
    assert!(children(&client, parent).await.is_empty());
}

#[tokio::test]
async fn a_retry_of_a_continued_job_keeps_chain_and_parent() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    succeed(&store, &claim_one(&store).await, vec![child(json!(1))])
        .await
        .unwrap();
    let first = claim_one(&store).await;
    let next = new(NewJobKind::Next, "child", json!(2), None);
    succeed(&store, &first, vec![next]).await.unwrap();
    let second = claim_one(&store).await;
    let failed = Outcome::Failed(error(ErrorKind::GuestError));
    store
        .settle(
            &[settlement_with(&second, failed, Vec::new())],
            Locked::Wait,
        )
        .await
        .unwrap();
    let sql = "SELECT rouse.retry($1)";
    let retry: i64 = client.query_one(sql, &[&second.id.0]).await.unwrap().get(0);
    let sql = "SELECT chain, parent FROM rouse.jobs WHERE id = $1";
    let row = client.query_one(sql, &[&retry]).await.unwrap();
    assert_eq!(
        (row.get::<_, i64>(0), row.get::<_, i64>(1)),
        (first.id.0, parent)
    );
}

/// The second job waits for the chain of the first one, which later continues with a job that waits for the second one.
#[tokio::test]
async fn a_retry_is_refused_if_it_would_wait_for_a_job_that_waits_for_it() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let first = enqueue(&client, "x", json!(1)).await;
    let after = json!({"first": {"job": first, "on_failure": "run"}});
    let second = enqueue_sql(
        &client,
        &format!(
            "'child', unique_key => 'k', run_at => now() + interval '1 hour', after => '{after}'"
        ),
    )
    .await;
    // The failure releases the second job, which is not due yet.
    let failed = Outcome::Failed(error(ErrorKind::GuestError));
    let settlement = settlement_with(&claim_one(&store).await, failed, Vec::new());
    store.settle(&[settlement], Locked::Wait).await.unwrap();
    let retry = |id: i64| format!("SELECT rouse.retry({id})");
    client.batch_execute(&retry(first)).await.unwrap();
    let unique = json!({"unique_key": "k"});
    let waits = json!({"after": {"second": {"job": -1, "on_failure": "wait"}}});
    let jobs = vec![
        new(NewJobKind::Child, "child", json!(1), Some(unique)),
        new(NewJobKind::Next, "x", json!(2), Some(waits)),
    ];
    let again = claim_one(&store).await;
    assert_eq!(succeed(&store, &again, jobs).await, Ok(1));
    // The payload of the second job cannot be replaced by a new job either.
    let refused = refusal(
        &client,
        &format!("SELECT rouse.replace_payload({second}, '2')"),
    )
    .await;
    assert_eq!(
        refused,
        format!(
            "rouse: job {second} cannot be given another payload: it waits for job {first}, which waits for it / \
             Let this job run as it is, or cancel it."
        )
    );
    assert!(cancel(&client, second).await);
    assert_eq!(
        refusal(&client, &retry(second)).await,
        format!(
            "rouse: job {second} cannot be retried: it waits for job {first}, which waits for it / \
             SELECT rouse.cancel_chain({first}) makes it possible. Or enqueue a new job with the payload of this one."
        )
    );
    let by_filter = r#"SELECT refused FROM rouse.retry_jobs('{"state": ["cancelled"]}')"#;
    let row = client.query_one(by_filter, &[]).await.unwrap();
    assert_eq!(row.get::<_, Vec<i64>>(0), [second]);
    let cancel_first = format!("SELECT rouse.cancel_chain({first})");
    client.batch_execute(&cancel_first).await.unwrap();
    client.batch_execute(&retry(second)).await.unwrap();
}

#[tokio::test]
async fn a_retry_at_a_time_that_the_handler_chose_is_not_a_wait() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let again = Duration::from_secs(60).into();
    let retry = Outcome::Retry {
        again,
        error: error(ErrorKind::GuestError),
    };
    store
        .settle(&[settlement_with(&job, retry, Vec::new())], Locked::Wait)
        .await
        .unwrap();
    let sql = "SELECT wait IS NULL AND uncounted = 0 FROM rouse.jobs WHERE id = $1";
    assert!(
        client
            .query_one(sql, &[&id])
            .await
            .unwrap()
            .get::<_, bool>(0)
    );
}
