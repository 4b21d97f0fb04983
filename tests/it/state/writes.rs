//! Concurrent writes of state, and writes of workers that have lost the job.

use rouse::job::{AbortReason, Fence, JobId};
use rouse::store::{ClaimedJob, Locked, LostJob, NewStateValue, StateScope, StateWrite, Store};
use serde_json::json;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::{entry, kept};
use crate::support::TestDb;
use crate::support::claims::{claim, orders, rand, result, settlement};
use crate::support::worker::{cancel, enqueue, until_true};

/// A job of handler `x` without a tenant, claimed by this worker.
async fn claimed(client: &Client, store: &Store) -> ClaimedJob {
    enqueue(client, "x", json!({})).await;
    claim(store, 1).await.remove(0)
}

fn state_of(job: &ClaimedJob) -> StateScope<'static> {
    StateScope {
        id: job.id,
        fence: job.fence,
        handler: "x",
    }
}

fn set_value(key: &'static str, value: &'static [u8]) -> NewStateValue<'static> {
    NewStateValue {
        key,
        value,
        version: (rand() & i64::MAX) | 1,
        expected: None,
        keys_max: 100,
        bytes_max: 1_000,
    }
}

/// Writes as a worker does: it tries again if it had to wait for too long.
fn write(
    store: &Store,
    job: &ClaimedJob,
    set: NewStateValue<'static>,
) -> tokio::task::JoinHandle<StateWrite> {
    let (store, state) = (store.clone(), state_of(job));
    tokio::spawn(async move {
        loop {
            match store.write_state(state, set).await {
                Ok(outcome) => return outcome.expect("the job is this worker's"),
                Err(error) => {
                    assert_eq!(error.code(), Some(&SqlState::LOCK_NOT_AVAILABLE), "{error}")
                }
            }
        }
    })
}

/// Waits until this many writes wait for a lock.
async fn until_writes_wait(client: &Client, writes: usize) {
    let sql = format!(
        "SELECT count(*) = {writes} FROM pg_stat_activity
         WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%rouse.write_state%'"
    );
    until_true(client, &sql).await;
}

/// Blocks all writes that make the state of `x` larger.
const LOCK_GROWTH: &str = "SELECT rouse._lock_state_growth('x', '')";

#[tokio::test]
async fn one_of_two_concurrent_writes_is_refused_if_only_one_fits() {
    let db = TestDb::new().await;
    let (mut holder, client) = (db.client().await, db.client().await);
    let (owner, other) = (db.worker().await, db.worker().await);
    let jobs = [
        (claimed(&client, &owner).await, &owner),
        (claimed(&client, &other).await, &other),
    ];
    let few_keys = |key| NewStateValue {
        keys_max: 1,
        ..set_value(key, b"1")
    };
    let few_bytes = |key| NewStateValue {
        bytes_max: 15,
        ..set_value(key, b"123456789")
    };
    for (sets, refusal) in [
        ([few_keys("a"), few_keys("b")], StateWrite::TooManyKeys),
        (
            [few_bytes("a"), few_bytes("b")],
            StateWrite::TooManyBytes(10),
        ),
    ] {
        client
            .batch_execute("DELETE FROM rouse.handler_state")
            .await
            .unwrap();
        let open = holder.transaction().await.unwrap();
        open.batch_execute(LOCK_GROWTH).await.unwrap();
        let [a, b] = [0, 1].map(|at| write(jobs[at].1, &jobs[at].0, sets[at]));
        until_writes_wait(&client, 2).await;
        open.rollback().await.unwrap();
        let outcomes = [a.await.unwrap(), b.await.unwrap()];
        assert!(
            outcomes.contains(&StateWrite::Set) && outcomes.contains(&refusal),
            "{outcomes:?}"
        );
        assert_eq!(kept(&client).await.len(), 1);
    }
}

#[tokio::test]
async fn a_write_that_does_not_grow_the_state_needs_no_quota_and_does_not_wait() {
    let db = TestDb::new().await;
    let (mut holder, client, store) = (db.client().await, db.client().await, db.worker().await);
    let job = claimed(&client, &store).await;
    write(&store, &job, set_value("k", b"123")).await.unwrap();
    let open = holder.transaction().await.unwrap();
    open.batch_execute(LOCK_GROWTH).await.unwrap();
    let no_room = NewStateValue {
        bytes_max: 1,
        keys_max: 0,
        ..set_value("k", b"456")
    };
    let outcome = store.write_state(state_of(&job), no_room).await.unwrap();
    assert_eq!(outcome, Ok(StateWrite::Set));
    open.rollback().await.unwrap();
    assert_eq!(kept(&client).await, [entry("x", "", "k", "456")]);
}

#[tokio::test]
async fn one_of_two_concurrent_replacements_of_a_version_gets_a_conflict() {
    let db = TestDb::new().await;
    let (mut holder, client) = (db.client().await, db.client().await);
    let (owner, other) = (db.worker().await, db.worker().await);
    let jobs = [
        claimed(&client, &owner).await,
        claimed(&client, &other).await,
    ];
    let both = |sets: [NewStateValue<'static>; 2]| {
        let writes = [
            write(&owner, &jobs[0], sets[0]),
            write(&other, &jobs[1], sets[1]),
        ];
        (writes, sets)
    };
    let expecting = |expected, value| NewStateValue {
        expected: Some(expected),
        ..set_value("k", value)
    };

    // Neither finds a value, and both would make the state larger.
    let open = holder.transaction().await.unwrap();
    open.batch_execute(LOCK_GROWTH).await.unwrap();
    let (writes, sets) = both([expecting(0, b"1"), expecting(0, b"2")]);
    until_writes_wait(&client, 2).await;
    open.rollback().await.unwrap();
    let winner = the_winner(writes, sets).await;

    // Both find the winner's value, and replace it with a value of the same size.
    let open = holder.transaction().await.unwrap();
    open.query("SELECT FROM rouse.handler_state FOR UPDATE", &[])
        .await
        .unwrap();
    let (writes, sets) = both([
        expecting(winner.version, b"3"),
        expecting(winner.version, b"4"),
    ]);
    until_writes_wait(&client, 2).await;
    open.rollback().await.unwrap();
    let winner = the_winner(writes, sets).await;
    let found = owner.read_state(state_of(&jobs[0]), "k").await.unwrap();
    assert_eq!(found, Ok(Some((winner.value.to_vec(), winner.version))));

    // The winner writes again, as if its response had been lost.
    assert_eq!(
        write(&owner, &jobs[0], winner).await.unwrap(),
        StateWrite::Set
    );
    // A deleted and recreated value has another version.
    assert_eq!(
        owner.erase_state(state_of(&jobs[0]), "k").await.unwrap(),
        Ok(true)
    );
    write(&owner, &jobs[0], set_value("k", winner.value))
        .await
        .unwrap();
    let late = expecting(winner.version, b"5");
    assert_eq!(
        write(&owner, &jobs[0], late).await.unwrap(),
        StateWrite::Conflict
    );
}

/// Which of the two writes was made; the other got a conflict.
async fn the_winner(
    writes: [tokio::task::JoinHandle<StateWrite>; 2],
    sets: [NewStateValue<'static>; 2],
) -> NewStateValue<'static> {
    let mut winners = Vec::new();
    for (write, set) in writes.into_iter().zip(sets) {
        match write.await.unwrap() {
            StateWrite::Set => winners.push(set),
            outcome => assert_eq!(outcome, StateWrite::Conflict),
        }
    }
    assert_eq!(winners.len(), 1);
    winners.remove(0)
}

#[tokio::test]
async fn a_write_is_tried_again_if_the_value_shrank_in_the_meantime() {
    let db = TestDb::new().await;
    let (mut holder, client, store) = (db.client().await, db.client().await, db.worker().await);
    let job = claimed(&client, &store).await;
    write(&store, &job, set_value("k", b"123456789"))
        .await
        .unwrap();
    let open = holder.transaction().await.unwrap();
    open.batch_execute("UPDATE rouse.handler_state SET value = '1'")
        .await
        .unwrap();
    let set = NewStateValue {
        bytes_max: 5,
        ..set_value("k", b"987654321")
    };
    let writing = write(&store, &job, set);
    until_writes_wait(&client, 1).await;
    open.commit().await.unwrap();
    let outcome = writing.await.unwrap();
    // A write that waited for too long has already been tried again.
    assert!(
        matches!(outcome, StateWrite::Again | StateWrite::TooManyBytes(0)),
        "{outcome:?}"
    );
    assert_eq!(
        write(&store, &job, set).await.unwrap(),
        StateWrite::TooManyBytes(0)
    );
    assert_eq!(kept(&client).await, [entry("x", "", "k", "1")]);
}

#[tokio::test]
async fn only_the_worker_that_has_the_job_reads_and_writes_the_state() {
    let db = TestDb::new().await;
    let (client, owner, other) = (db.client().await, db.worker().await, db.worker().await);
    let job = claimed(&client, &owner).await;
    let here = state_of(&job);
    assert_eq!(
        owner.write_state(here, set_value("k", b"1")).await.unwrap(),
        Ok(StateWrite::Set)
    );

    let all_refuse = async |store: &Store, state: StateScope<'_>, reason| {
        let no = LostJob(reason);
        assert_eq!(store.read_state(state, "k").await.unwrap(), Err(no));
        assert_eq!(store.state_keys(state, "", None, 9).await.unwrap(), Err(no));
        assert_eq!(
            store
                .write_state(state, set_value("k", b"2"))
                .await
                .unwrap(),
            Err(no)
        );
        assert_eq!(store.erase_state(state, "k").await.unwrap(), Err(no));
    };
    let other_fence = StateScope {
        fence: Fence(job.fence.0 ^ 1),
        ..here
    };
    let taken = AbortReason::TakenByAnotherWorker;
    all_refuse(&other, here, taken).await;
    all_refuse(&owner, other_fence, taken).await;
    let none = StateScope {
        id: JobId(-1),
        ..here
    };
    all_refuse(&owner, none, AbortReason::NotFound).await;
    let refused: i64 = client
        .query_one("SELECT sum(refused)::bigint FROM rouse.workers", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(refused, 4, "taken by the other worker each time");

    let settled = settlement(&job, result("1"));
    owner.settle(&[settled], Locked::Wait).await.unwrap();
    all_refuse(&owner, here, AbortReason::AlreadyCompleted).await;
    let job = claimed(&client, &owner).await;
    cancel(&client, job.id.0).await;
    all_refuse(&owner, state_of(&job), AbortReason::Cancelled).await;
    assert_eq!(kept(&client).await, [entry("x", "", "k", "1")]);
}

#[tokio::test]
async fn a_job_is_not_taken_over_during_a_write_of_state_and_the_old_attempt_cannot_write_afterwards()
 {
    let db = TestDb::new().await;
    let (mut writing, client, other) = (db.client().await, db.client().await, db.worker().await);
    // A worker whose key the test knows.
    let worker: i64 = writing
        .query_one("SELECT (rouse.register('known', sha256('key'), 'h', 'p', 'v', '{}', 1, '{}', '{}')).incarnation", &[])
        .await
        .unwrap()
        .get(0);
    let id = enqueue(&client, "x", json!({})).await;
    let lanes =
        "SELECT array_agg(ROW(id, -1, 60000, NULL, NULL)::rouse.claim_order) FROM rouse.lane";
    let sql = format!("SELECT id FROM rouse.claim({worker}, sha256('key'), 7, ({lanes}), 1)");
    client.query_one(&sql, &[]).await.unwrap();
    client
        .batch_execute("UPDATE rouse.job SET lease_until = now() - interval '1 s'")
        .await
        .unwrap();
    let orders = orders(&other, 60_000).await;
    let adopted = async || {
        let adopted =
            crate::support::claims::adopt(&other, Fence(rand()), &orders, 1, 3, None).await;
        adopted.unwrap().claimed.len()
    };
    let set = format!(
        "SELECT refusal, outcome FROM rouse.write_state({worker}, sha256('key'), {id}, 7, 'x', 'k', $1, $2, NULL, 9, 99)"
    );

    let open = writing.transaction().await.unwrap();
    let row = open
        .query_one(&set, &[&b"1".as_slice(), &1_i64])
        .await
        .unwrap();
    assert_eq!(row.get::<_, Option<&str>>(1), Some("set"));
    assert_eq!(adopted().await, 0);
    open.commit().await.unwrap();
    assert_eq!(adopted().await, 1);
    let row = client
        .query_one(&set, &[&b"2".as_slice(), &2_i64])
        .await
        .unwrap();
    assert_eq!(
        row.get::<_, Option<&str>>(0),
        Some("taken_by_another_worker")
    );
    assert_eq!(row.get::<_, Option<&str>>(1), None);
    assert_eq!(kept(&client).await, [entry("x", "", "k", "1")]);
}
