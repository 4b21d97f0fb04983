//! Jobs that wait for the end of other jobs.

mod chains;
mod crashes;
mod interleavings;
mod page;

use rouse::job::{ErrorKind, JobId, Outcome};
use rouse::store::{Locked, Store};
use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{claim, error, result, settlement};
use crate::support::worker::{
    TestWorker, cancel, ended, enqueue, events, forget, show, until_true,
};

/// Enqueues a job that waits for others.
async fn enqueue_after(client: &Client, handler: &str, after: Value) -> i64 {
    let row = client
        .query_one("SELECT rouse.enqueue($1, after => $2)", &[&handler, &after])
        .await;
    row.unwrap().get(0)
}

/// The chains that a live job waits for; `None` if it does not wait for any.
async fn waits_for(client: &Client, id: i64) -> Option<Vec<i64>> {
    let sql = "SELECT waits_for FROM rouse.jobs WHERE id = $1";
    client.query_one(sql, &[&id]).await.unwrap().get(0)
}

/// Claims the jobs that are ready, and settles them all in one call with these outcomes, in the order of their ids.
/// Returns the ids, and whether some releases are left.
async fn settle_ready(store: &Store, outcomes: &[Outcome]) -> (Vec<i64>, bool) {
    let mut jobs = claim(store, 10_000).await;
    jobs.sort_by_key(|job| job.id.0);
    assert_eq!(jobs.len(), outcomes.len(), "{jobs:?}");
    let batch: Vec<_> = jobs
        .iter()
        .zip(outcomes)
        .map(|(job, outcome)| settlement(job, outcome.clone()))
        .collect();
    let settled = store.settle(&batch, Locked::Wait).await.unwrap();
    assert_eq!(settled.accepted.len(), batch.len());
    let ids = batch.iter().map(|one| one.id.0).collect();
    (ids, settled.has_releases)
}

/// The message of a refused statement, with its hint.
fn refusal(error: &tokio_postgres::Error) -> String {
    let error = error.as_db_error().expect("an error of the database");
    match error.hint() {
        Some(hint) => format!("{}\n{hint}", error.message()),
        None => error.message().into(),
    }
}

fn ok() -> Outcome {
    result("1")
}

fn failed() -> Outcome {
    Outcome::Failed(error(ErrorKind::GuestError))
}

#[tokio::test]
async fn a_job_runs_after_the_last_of_the_jobs_that_it_waits_for() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let first = enqueue(&client, "x", json!(1)).await;
    let second = enqueue(&client, "x", json!(2)).await;
    let child = enqueue_after(&client, "x", json!([first, second])).await;
    assert_eq!(waits_for(&client, child).await, Some(vec![first, second]));

    let jobs = claim(&store, 10).await;
    assert_eq!(jobs.len(), 2, "the third job waits");
    for (job, left) in jobs.iter().zip([Some(vec![second]), None]) {
        let batch = [settlement(job, ok())];
        store.settle(&batch, Locked::Wait).await.unwrap();
        assert_eq!(waits_for(&client, child).await, left);
    }
    assert_eq!(settle_ready(&store, &[ok()]).await, (vec![child], false));
}

#[tokio::test]
async fn parents_that_end_in_one_batch_release_their_child_in_the_same_transaction() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let mut parents = Vec::new();
    for n in 0..5 {
        parents.push(enqueue(&client, "x", json!(n)).await);
    }
    let child = enqueue_after(&client, "x", json!(parents)).await;
    settle_ready(&store, &vec![ok(); 5]).await;
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [child]);
}

/// The time at which it was enqueued then lies in the future, like a `run_at`.
#[tokio::test]
async fn a_job_without_a_run_at_is_ready_when_it_is_released_although_the_clock_has_been_set_back()
{
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let child = enqueue_after(&client, "x", json!([parent])).await;
    let later = "SELECT rouse.enqueue('x', after => $1, run_at => now() + interval '1 minute')";
    client.query_one(later, &[&json!([parent])]).await.unwrap();
    let set_back = "UPDATE rouse.job SET requested_at = requested_at + interval '1 hour', available_at = available_at + interval '1 hour'
                    WHERE blockers > 0";
    assert_eq!(client.execute(set_back, &[]).await.unwrap(), 2);
    settle_ready(&store, &[ok()]).await;
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [child]);
}

/// Dependencies of the jobs of such a batch are searched in another way.
#[tokio::test]
async fn a_batch_of_jobs_whose_ids_are_far_apart_releases_those_that_wait() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    // The second parent is a later job of its chain.
    for is_later in [false, true] {
        let parent = enqueue(&client, "x", json!(1)).await;
        let child = enqueue_after(&client, "x", json!([parent])).await;
        if is_later {
            let later =
                "UPDATE rouse.job SET id = nextval('rouse.turn_seq'), chain = id WHERE id = $1";
            client.execute(later, &[&parent]).await.unwrap();
        }
        let far = "SELECT setval('rouse.turn_seq', last_value + 100000) FROM rouse.turn_seq";
        client.batch_execute(far).await.unwrap();
        enqueue(&client, "x", json!(2)).await;
        let (_, has_releases) = settle_ready(&store, &[ok(), ok()]).await;
        assert!(!has_releases);
        assert_eq!(waits_for(&client, child).await, None);
        assert_eq!(settle_ready(&store, &[ok()]).await.0, [child]);
    }
}

#[tokio::test]
async fn parents_may_be_running_or_have_ended_or_belong_to_the_same_transaction() {
    let db = TestDb::new().await;
    let (mut client, store) = (db.client().await, db.worker().await);
    let done = enqueue(&client, "x", json!(1)).await;
    settle_ready(&store, &[ok()]).await;
    let running = enqueue(&client, "x", json!(2)).await;
    let claimed = claim(&store, 1).await;
    let transaction = client.transaction().await.unwrap();
    let own: i64 = transaction
        .query_one("SELECT rouse.enqueue('x')", &[])
        .await
        .unwrap()
        .get(0);
    let child: i64 = transaction
        .query_one(
            "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint, $2::bigint, $3::bigint))",
            &[&done, &running, &own],
        )
        .await
        .unwrap()
        .get(0);
    transaction.commit().await.unwrap();
    assert_eq!(waits_for(&client, child).await, Some(vec![running, own]));
    store
        .settle(&[settlement(&claimed[0], ok())], Locked::Wait)
        .await
        .unwrap();
    settle_ready(&store, &[ok()]).await;
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [child]);
}

#[tokio::test]
async fn a_released_job_still_waits_for_its_run_at() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let sql = "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint), run_at => now() + interval '1 hour')";
    let child: i64 = client.query_one(sql, &[&parent]).await.unwrap().get(0);
    settle_ready(&store, &[ok()]).await;
    assert_eq!(waits_for(&client, child).await, None);
    assert!(claim(&store, 1).await.is_empty());
    let sql = "SELECT turn IS NULL AND available_at > now() + interval '59 minutes' FROM rouse.job";
    assert!(client.query_one(sql, &[]).await.unwrap().get::<_, bool>(0));
}

#[tokio::test]
async fn a_failed_parent_cancels_releases_or_keeps_its_children_according_to_their_on_failure() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let after = |on_failure: &str| json!({"p": {"job": parent, "on_failure": on_failure}});
    let cancelled = enqueue_after(&client, "x", json!({ "p": parent })).await;
    let runs = enqueue_after(&client, "x", after("run")).await;
    let waits = enqueue_after(&client, "x", after("wait")).await;
    settle_ready(&store, &[failed()]).await;
    assert_eq!(show(&client, cancelled).await.state, "cancelled");
    assert_eq!(events(&client, cancelled).await, ["requested", "cancelled"]);
    assert_eq!(waits_for(&client, waits).await, Some(vec![parent]));
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [runs]);

    let retry: i64 = client
        .query_one("SELECT rouse.retry($1)", &[&parent])
        .await
        .unwrap()
        .get(0);
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [retry]);
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [waits]);
}

#[tokio::test]
async fn a_job_enqueued_after_a_failed_one_is_cancelled_run_or_kept_too() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    settle_ready(&store, &[failed()]).await;
    let after = |on_failure: &str| json!({"p": {"job": parent, "on_failure": on_failure}});
    let cancelled = enqueue_after(&client, "x", json!([parent])).await;
    let runs = enqueue_after(&client, "x", after("run")).await;
    let waits = enqueue_after(&client, "x", after("wait")).await;
    assert_eq!(show(&client, cancelled).await.state, "cancelled");
    assert_eq!(waits_for(&client, waits).await, Some(vec![parent]));
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [runs]);
}

#[tokio::test]
async fn a_failure_cancels_the_whole_graph_behind_it_level_by_level() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let root = enqueue(&client, "x", json!(1)).await;
    let middle = enqueue_after(&client, "x", json!([root])).await;
    let last = enqueue_after(&client, "x", json!([middle])).await;
    let (_, has_releases) = settle_ready(&store, &[failed()]).await;
    assert_eq!(show(&client, middle).await.state, "cancelled");
    assert_eq!(show(&client, last).await.state, "queued");
    assert!(has_releases, "the next level is left");
    assert!(!store.continue_releases().await.unwrap());
    assert_eq!(show(&client, last).await.state, "cancelled");
}

#[tokio::test]
async fn a_worker_finds_the_releases_that_another_has_left() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let root = enqueue(&client, "x.unknown", json!(1)).await;
    let middle = enqueue_after(&client, "x.unknown", json!([root])).await;
    let last = enqueue_after(&client, "x.unknown", json!([middle])).await;
    assert!(cancel(&client, root).await);
    assert_eq!(show(&client, last).await.state, "queued");
    let worker = TestWorker::start(&db, Settings::default()).await;
    assert_eq!(ended(&client, last).await.state, "cancelled");
    worker.drain().await;
}

#[tokio::test]
async fn a_worker_runs_a_fan_out_and_a_fan_in() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = "WITH root AS MATERIALIZED (SELECT rouse.enqueue('test.echo', '{\"text\": \"root\"}') AS id),
               wide AS MATERIALIZED (
                   SELECT rouse.enqueue('test.echo', '{\"text\": \"wide\"}', after => jsonb_build_array(root.id)) AS id
                   FROM root, generate_series(1, 2500))
               SELECT rouse.enqueue('test.echo', '{\"text\": \"last\"}', after => (SELECT jsonb_agg(id) FROM wide))";
    let last: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
    let worker = TestWorker::start(&db, Settings::default()).await;
    assert_eq!(ended(&client, last).await.state, "succeeded");
    let others = "SELECT count(*) = 2502 AND bool_and(state = 'succeeded') FROM rouse.finished";
    until_true(&client, others).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.dependency)").await;
    let order = "SELECT bool_and(child.started_at >= parent.finished_at)
                 FROM rouse.finished AS child, jsonb_each(child.after) AS e
                 JOIN rouse.finished AS parent ON parent.id = (e.value)::bigint";
    assert!(
        client
            .query_one(order, &[])
            .await
            .unwrap()
            .get::<_, bool>(0)
    );
    worker.drain().await;
}

#[tokio::test]
async fn more_dependents_than_one_transaction_releases_are_released_by_the_next_ones() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let root = enqueue(&client, "x", json!(1)).await;
    let wide = "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint)) FROM generate_series(1, 2500)";
    client.execute(wide, &[&root]).await.unwrap();
    assert!(settle_ready(&store, &[ok()]).await.1);
    let ready = "SELECT count(*) FROM rouse.job WHERE turn IS NOT NULL";
    for (more, released) in [(true, 2000), (false, 2500)] {
        assert_eq!(store.continue_releases().await.unwrap(), more);
        let count: i64 = client.query_one(ready, &[]).await.unwrap().get(0);
        assert_eq!(count, released);
    }
    until_true(
        &client,
        "SELECT NOT EXISTS (SELECT FROM rouse.pending_release)",
    )
    .await;
    let order = "SELECT bool_and(turn > before) FROM (SELECT turn, lag(turn) OVER (ORDER BY id) AS before FROM rouse.job) AS j";
    assert!(
        client
            .query_one(order, &[])
            .await
            .unwrap()
            .get::<_, bool>(0),
        "turns follow the ids"
    );
}

#[tokio::test]
async fn a_waiting_job_can_be_cancelled_completed_deleted_and_rescheduled() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let mut waiting = Vec::new();
    for _ in 0..4 {
        waiting.push(enqueue_after(&client, "x", json!([parent])).await);
    }
    let after_second = enqueue_after(&client, "x", json!([waiting[1]])).await;
    client
        .execute(
            "SELECT rouse.cancel($1), rouse.complete($2), rouse.delete($3), rouse.reschedule($4)",
            &[&waiting[0], &waiting[1], &waiting[2], &waiting[3]],
        )
        .await
        .unwrap();
    assert_eq!(
        waits_for(&client, after_second).await,
        None,
        "a completed job releases its children"
    );
    assert_eq!(
        waits_for(&client, waiting[3]).await,
        Some(vec![parent]),
        "rescheduling does not release"
    );
    let states: Vec<String> = vec![
        show(&client, waiting[0]).await.state,
        show(&client, waiting[1]).await.state,
        show(&client, waiting[2]).await.state,
    ];
    assert_eq!(states, ["cancelled", "succeeded", "cancelled"]);
    let left: i64 = client
        .query_one("SELECT count(*) FROM rouse.dependency", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(left, 1, "only the rescheduled job still waits");
    assert_eq!(
        settle_ready(&store, &[ok(), ok()]).await.0,
        [parent, after_second]
    );
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [waiting[3]]);
}

#[tokio::test]
async fn a_retry_of_a_job_that_never_ran_waits_again_and_is_refused_while_its_parent_has_failed() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let child = enqueue_after(&client, "x", json!({ "p": parent })).await;
    settle_ready(&store, &[failed()]).await;
    let error = client
        .query_one("SELECT rouse.retry($1)", &[&child])
        .await
        .unwrap_err();
    assert_eq!(
        refusal(&error),
        format!(
            "rouse: job {child} cannot be retried: it waits for job {parent}, which has failed\nRetry that job first."
        )
    );
    let row = client
        .query_one(
            "SELECT rouse.retry($1), rouse.retry($2)",
            &[&parent, &child],
        )
        .await
        .unwrap();
    let (parent_again, child_again): (i64, i64) = (row.get(0), row.get(1));
    assert_eq!(waits_for(&client, child_again).await, Some(vec![parent]));
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [parent_again]);
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [child_again]);
}

#[tokio::test]
async fn a_unique_key_adds_dependencies_only_with_a_new_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let parent = enqueue(&client, "x", json!(1)).await;
    let sql = "SELECT id, created, differs FROM rouse.enqueue_unique('x', 'k', after => $1)";
    let row = client.query_one(sql, &[&json!([parent])]).await.unwrap();
    let child: i64 = row.get(0);
    assert!(row.get::<_, bool>(1));
    let row = client.query_one(sql, &[&None::<Value>]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), child);
    assert_eq!(row.get::<_, Vec<String>>(2), ["after"]);
    let row = client.query_one(sql, &[&json!([parent])]).await.unwrap();
    assert_eq!(row.get::<_, Vec<String>>(2), Vec::<String>::new());
    assert_eq!(waits_for(&client, child).await, Some(vec![parent]));
}

#[tokio::test]
async fn invalid_dependencies_are_refused_with_their_name_and_nothing_is_enqueued() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!(1)).await;
    let hint = "A name has 1 to 200 characters. Its job is an id, or {\"job\": id, \"on_failure\": \"cancel\"}, or \"run\" or \"wait\" instead of \"cancel\".";
    let cases = [
        (json!(7), "rouse.enqueue: after must be an array of job ids, or an object with a job id for each name, not 7\nFor instance [17, 18], or {\"charge\": 17, \"notify\": {\"job\": 18, \"on_failure\": \"run\"}}.".into()),
        (json!([null]), format!("rouse.enqueue: entry 'null' of after must be a job id, not null\n{hint}")),
        (json!([1.5]), format!("rouse.enqueue: entry '1.5' of after must be a job id, not 1.5\n{hint}")),
        (json!({"": 1}), format!("rouse.enqueue: entry '' of after must be a job id, not 1\n{hint}")),
        (json!({"a": {"job": id, "on_failure": "stop"}}), format!("rouse.enqueue: entry 'a' of after must be a job id, not {{\"job\": {id}, \"on_failure\": \"stop\"}}\n{hint}")),
        (json!({"a": {"job": id, "on_failure": null}}), format!("rouse.enqueue: entry 'a' of after must be a job id, not {{\"job\": {id}, \"on_failure\": null}}\n{hint}")),
        (json!({"a": {"job": id, "or": 1}}), format!("rouse.enqueue: entry 'a' of after must be a job id, not {{\"or\": 1, \"job\": {id}}}\n{hint}")),
        (json!({"a": "99999999"}), "rouse.enqueue: after names job 99999999 (as 'a'), which does not exist or is no longer kept\nOnly the transaction that enqueues a job can name it before it commits.".into()),
        (json!({"a": id, "b": id.to_string()}), "rouse.enqueue: 'a' and 'b' of after name the same chain\nA job waits for the end of a chain, whichever of its jobs is named.".into()),
    ];
    for (after, message) in cases {
        let error = client
            .query_one("SELECT rouse.enqueue('x', after => $1)", &[&after])
            .await
            .unwrap_err();
        assert_eq!(refusal(&error), message);
    }
    let many: Vec<i64> = (1..=10_001).collect();
    let error = client
        .query_one("SELECT rouse.enqueue('x', after => $1)", &[&json!(many)])
        .await
        .unwrap_err();
    assert_eq!(
        refusal(&error),
        "rouse.enqueue: after names 10001 jobs; at most 10000 are allowed\nLet the job wait for others that each wait for up to 10000 jobs."
    );
    let jobs: i64 = client
        .query_one("SELECT count(*) FROM rouse.job", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(jobs, 1);
}

#[tokio::test]
async fn an_accepted_settlement_names_its_job_even_if_releases_are_left() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let wide = "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint)) FROM generate_series(1, 1001)";
    client.execute(wide, &[&parent]).await.unwrap();
    let jobs = claim(&store, 1).await;
    let settled = store
        .settle(&[settlement(&jobs[0], ok())], Locked::Skip)
        .await
        .unwrap();
    assert!(settled.has_releases);
    assert!(settled.accepted.contains(&JobId(parent)));
    let refused = "SELECT refused FROM rouse.worker WHERE worker_id = 'w-1'";
    let row = client.query_one(refused, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 0);
}

#[tokio::test]
async fn maintenance_finds_dependencies_on_chains_that_have_ended_or_are_no_longer_kept() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let child = enqueue_after(&client, "x", json!([parent])).await;
    let gone = enqueue(&client, "x", json!(2)).await;
    let after = json!({"p": {"job": gone, "on_failure": "wait"}});
    let orphan = enqueue_after(&client, "x", after).await;
    // As if a release had been lost, and the history of a failed chain had been dropped.
    let lose = "INSERT INTO rouse.finished (id, lane, requested_at, available_at, finished_at, attempt, uncounted, state, payload, result)
                SELECT id, lane, requested_at, available_at, clock_timestamp(), 1, 0, 'succeeded', payload, '1' FROM rouse.job WHERE id = $1";
    client.execute(lose, &[&parent]).await.unwrap();
    let delete = "DELETE FROM rouse.job WHERE id = ANY ($1)";
    client
        .execute(delete, &[&vec![parent, gone]])
        .await
        .unwrap();
    assert_eq!(store.maintain_dependencies().await.unwrap(), (1, 1));
    assert!(!store.continue_releases().await.unwrap());
    assert_eq!(show(&client, orphan).await.state, "cancelled");
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [child]);
    assert_eq!(store.maintain_dependencies().await.unwrap(), (0, 0));
}

#[tokio::test]
async fn jobs_that_a_failure_has_not_cancelled_yet_wait_for_the_retry() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let wide = "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint)) FROM generate_series(1, 1200)";
    client.execute(wide, &[&parent]).await.unwrap();
    assert!(settle_ready(&store, &[failed()]).await.1);
    client
        .execute("SELECT rouse.retry($1)", &[&parent])
        .await
        .unwrap();
    assert!(!store.continue_releases().await.unwrap());
    let waiting = "SELECT count(*) FROM rouse.job WHERE blockers IS NOT NULL";
    let count = async || -> i64 { client.query_one(waiting, &[]).await.unwrap().get(0) };
    assert_eq!(count().await, 200);
    settle_ready(&store, &[ok()]).await;
    assert_eq!(count().await, 0);
    assert_eq!(claim(&store, 1_000).await.len(), 200);
}

#[tokio::test]
async fn a_thousand_locked_jobs_do_not_hold_up_the_release_of_others() {
    let db = TestDb::new().await;
    let (mut other, client, store) = (db.client().await, db.client().await, db.worker().await);
    for outcome in [ok(), failed()] {
        let parent = enqueue(&client, "x", json!(1)).await;
        let wide = "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint)) FROM generate_series(1, 1500)";
        client.execute(wide, &[&parent]).await.unwrap();
        let transaction = other.transaction().await.unwrap();
        let lock =
            "SELECT FROM rouse.job WHERE blockers IS NOT NULL ORDER BY id LIMIT 1200 FOR UPDATE";
        transaction.execute(lock, &[]).await.unwrap();
        assert!(settle_ready(&store, &[outcome]).await.1);
        let waiting = "SELECT count(*) FROM rouse.job WHERE blockers IS NOT NULL";
        let count: i64 = client.query_one(waiting, &[]).await.unwrap().get(0);
        assert_eq!(count, 1_200);
        transaction.rollback().await.unwrap();
        while store.continue_releases().await.unwrap() {}
        client
            .execute("SELECT rouse.purge_queue('default', 10000)", &[])
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_retry_does_not_need_chains_that_are_no_longer_kept() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    let child = enqueue_after(&client, "x", json!([parent])).await;
    settle_ready(&store, &[ok()]).await;
    assert!(cancel(&client, child).await);
    forget(&client, parent).await;
    let again: i64 = client
        .query_one("SELECT rouse.retry($1)", &[&child])
        .await
        .unwrap()
        .get(0);
    assert_eq!(settle_ready(&store, &[ok()]).await.0, [again]);
}

#[tokio::test]
async fn only_a_read_committed_transaction_can_wait_for_a_retry() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let parent = enqueue(&client, "x", json!(1)).await;
    settle_ready(&store, &[failed()]).await;
    client
        .batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        .await
        .unwrap();
    let after = json!({"p": {"job": parent, "on_failure": "wait"}});
    let error = client
        .query_one("SELECT rouse.enqueue('x', after => $1)", &[&after])
        .await
        .unwrap_err();
    assert_eq!(
        refusal(&error),
        format!(
            "rouse.enqueue: job {parent} has failed, and only a transaction with isolation level READ COMMITTED can wait for its retry\nEnqueue the new job in a transaction with that level, which is the default, or with on_failure cancel or run."
        )
    );
}
