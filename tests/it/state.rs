//! What handlers keep between their jobs: for whom, how much, and who may.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rouse::job::{AbortReason, Fence, JobId, RunEnd};
use rouse::sandbox::{
    AbortHandle, Catalog, Journal, Keep, Kept, Sandbox, Settings as SandboxSettings, StateKeeper,
    StateQuota, Waiting, Wrote,
};
use rouse::store::{ClaimedJob, Locked, NotMine, StateOf, StateSet, StateWrite, Store};
use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio::sync::{Notify, OnceCell};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use crate::http_out::guest_folder;
use crate::support::claims::{claim, orders, rand, result, settlement};
use crate::support::worker::{
    PATIENCE, TestWorker, cancel, ended, enqueue, lease, put, until_true,
};
use crate::support::{TestDb, code_cache, folder, rouse_binary, rouse_in};

/// Small enough to be used up.
const SMALL: StateQuota = StateQuota {
    keys_max: 3,
    bytes_max: 100,
    value_bytes_max: 60,
};

const LARGE: StateQuota = StateQuota {
    keys_max: 1_000,
    bytes_max: 1 << 20,
    value_bytes_max: 64 << 10,
};

fn sandbox() -> Arc<Sandbox> {
    static SANDBOX: OnceLock<Arc<Sandbox>> = OnceLock::new();
    let sandbox = SANDBOX.get_or_init(|| {
        Sandbox::start(SandboxSettings {
            attempts_max: 16,
            state: [
                ("test.state.one".into(), LARGE),
                ("test.state.other".into(), SMALL),
            ]
            .into(),
            compiler: Some(rouse_binary()),
            cache_dir: Some(code_cache()),
            ..SandboxSettings::default()
        })
        .expect("a sandbox")
    });
    sandbox.clone()
}

async fn catalog() -> Arc<Catalog> {
    static CATALOG: OnceCell<Arc<Catalog>> = OnceCell::const_new();
    let catalog = CATALOG.get_or_init(|| async {
        let catalog = Catalog::open(sandbox(), guest_folder()).await;
        Arc::new(catalog.expect("the guests load"))
    });
    catalog.await.clone()
}

async fn worker(db: &TestDb) -> TestWorker {
    TestWorker::start_in(db, Settings::default(), sandbox(), catalog().await)
}

/// Has the handler make these calls, whatever fails, for jobs of this tenant (SQL); returns the answers.
async fn answers(client: &Client, handler: &str, tenant: &str, calls: Value) -> Vec<Value> {
    let payload = json!({"calls": calls, "regardless": true});
    let id = put(
        client,
        &format!("'{handler}', '{payload}', tenant => {tenant}"),
    )
    .await;
    let job = ended(client, id).await;
    let result = job.result.unwrap_or_else(|| panic!("{:?}", job.error));
    result.as_array().expect("a list").clone()
}

/// All that is kept: handler, tenant, key, value as text.
async fn kept(client: &Client) -> Vec<(String, String, String, String)> {
    let sql = "SELECT handler, tenant, key, convert_from(value, 'UTF8') FROM rouse.handler_state ORDER BY 1, 2, 3";
    let rows = client.query(sql, &[]).await.unwrap();
    rows.iter()
        .map(|row| (row.get(0), row.get(1), row.get(2), row.get(3)))
        .collect()
}

fn entry(handler: &str, tenant: &str, key: &str, value: &str) -> (String, String, String, String) {
    (handler.into(), tenant.into(), key.into(), value.into())
}

#[tokio::test]
async fn what_a_handler_keeps_is_there_for_its_next_job_also_where_the_attempt_failed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let calls = json!({"calls": [{"set": ["cursor", {"at": 7}]}, "fail"]});
    let failed = ended(&client, enqueue(&client, "test.state.one", calls).await).await;
    assert_eq!(failed.state, "failed");
    let found = answers(
        &client,
        "test.state.one",
        "NULL",
        json!([
            {"get": "cursor"}, {"bytes": "cursor"}, {"delete": "cursor"}, {"delete": "cursor"}, {"get": "cursor"},
            {"set": ["n", "text"]}, {"add": ["n", 1]}, {"keys": ""}
        ]),
    )
    .await;
    assert_eq!(found[0], json!({"at": 7}), "it is not undone");
    assert_eq!(found[1], json!(b"{\"at\":7}"));
    assert_eq!(found[2..5], [json!(true), json!(false), json!(null)]);
    assert_eq!(found[6]["kind"], "state-changed", "{}", found[6]);
    assert_eq!(found[7], json!(["n"]));
    let calls: i32 = client
        .query_one("SELECT max(host_calls) FROM rouse.finished", &[])
        .await
        .unwrap()
        .get(0);
    assert!(calls >= 9, "each is counted, and keys take two: {calls}");
    worker.drain().await;
}

#[tokio::test]
async fn each_handler_has_a_state_of_its_own_for_each_tenant() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let tenants = ["NULL", "'acme'", "'acme/x'", "'NULL'"];
    let handlers = ["test.state.one", "test.state.other"];
    for handler in handlers {
        for tenant in tenants {
            let mine = format!("{handler} {tenant}");
            let calls = json!([{"get": "k"}, {"keys": ""}, {"set": ["k", mine.replace('\'', "")]}]);
            let found = answers(&client, handler, tenant, calls).await;
            assert_eq!(found[..2], [json!(null), json!([])], "{mine}");
        }
    }
    for handler in handlers {
        for tenant in tenants {
            let found = answers(&client, handler, tenant, json!([{"get": "k"}])).await;
            let mine = format!("{handler} {tenant}").replace('\'', "");
            assert_eq!(found, [json!(mine)]);
        }
    }
    worker.drain().await;
}

#[tokio::test]
async fn a_handler_keeps_no_more_than_its_quota_of_keys_bytes_and_bytes_of_a_value() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let text = |chars: usize| "x".repeat(chars);
    // In JSON, each text has two bytes more, and each key one.
    let found = answers(
        &client,
        "test.state.other",
        "NULL",
        json!([
            {"set": ["a", text(59)]}, {"set": ["a", text(58)]}, {"set": ["b", text(37)]}, {"set": ["b", text(36)]},
            {"set": ["b", 1]}, {"set": ["c", 1]}, {"set": ["d", 1]}, {"delete": "c"}, {"set": ["d", 1]}, {"keys": ""}
        ]),
    )
    .await;
    let refused = |at: usize, parts: &[&str]| {
        assert_eq!(found[at]["kind"], "state-refused", "{at}: {}", found[at]);
        let message = found[at]["message"].as_str().unwrap();
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    };
    refused(
        0,
        &["key a has 61 bytes; 60 are allowed", "value_bytes_max"],
    );
    assert_eq!(found[1], json!(null));
    refused(
        2,
        &[
            "has 40 bytes",
            "the others have 61",
            "at most 100",
            "bytes_max of the state of test.state.other",
        ],
    );
    assert_eq!(found[3..6], [json!(null), json!(null), json!(null)]);
    refused(6, &["the key d", "at most 3 (keys_max"]);
    assert_eq!(found[7..9], [json!(true), json!(null)]);
    assert_eq!(found[9], json!(["a", "b", "d"]));
    worker.drain().await;
}

/// A job that was claimed by this worker, `x`, without a tenant.
async fn claimed(client: &Client, store: &Store) -> ClaimedJob {
    enqueue(client, "x", json!({})).await;
    claim(store, 1).await.remove(0)
}

fn of(job: &ClaimedJob) -> StateOf<'static> {
    StateOf {
        id: job.id,
        fence: job.fence,
        handler: "x",
    }
}

fn one(key: &'static str, value: &'static [u8]) -> StateSet<'static> {
    StateSet {
        key,
        value,
        version: (rand() & i64::MAX) | 1,
        expected: None,
        keys_max: 100,
        bytes_max: 1_000,
    }
}

/// Writes as a worker does, which asks again where it had to wait for too long.
fn write(
    store: &Store,
    job: &ClaimedJob,
    set: StateSet<'static>,
) -> tokio::task::JoinHandle<StateWrite> {
    let (store, of) = (store.clone(), of(job));
    tokio::spawn(async move {
        loop {
            match store.set_state(of, set).await {
                Ok(said) => return said.expect("it is this worker's"),
                Err(error) => {
                    assert_eq!(error.code(), Some(&SqlState::LOCK_NOT_AVAILABLE), "{error}")
                }
            }
        }
    })
}

/// Until so many writes wait for a lock.
async fn until_they_wait(client: &Client, writes: usize) {
    let sql = format!(
        "SELECT count(*) = {writes} FROM pg_stat_activity
         WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%rouse.set_state%'"
    );
    until_true(client, &sql).await;
}

/// Holds back all who make the state of `x` larger.
const GROWING: &str = "SELECT pg_advisory_xact_lock(hashtextextended('rouse.state x/', 0))";

#[tokio::test]
async fn of_two_that_write_at_once_where_one_fits_one_is_refused() {
    let db = TestDb::new().await;
    let (mut holder, client) = (db.client().await, db.client().await);
    let (mine, other) = (db.worker().await, db.worker().await);
    let jobs = [
        (claimed(&client, &mine).await, &mine),
        (claimed(&client, &other).await, &other),
    ];
    let few_keys = |key| StateSet {
        keys_max: 1,
        ..one(key, b"1")
    };
    let few_bytes = |key| StateSet {
        bytes_max: 15,
        ..one(key, b"123456789")
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
        open.batch_execute(GROWING).await.unwrap();
        let [a, b] = [0, 1].map(|at| write(jobs[at].1, &jobs[at].0, sets[at]));
        until_they_wait(&client, 2).await;
        open.rollback().await.unwrap();
        let said = [a.await.unwrap(), b.await.unwrap()];
        assert!(
            said.contains(&StateWrite::Set) && said.contains(&refusal),
            "{said:?}"
        );
        assert_eq!(kept(&client).await.len(), 1);
    }
}

#[tokio::test]
async fn a_write_that_makes_the_state_no_larger_needs_no_room_and_waits_for_nobody() {
    let db = TestDb::new().await;
    let (mut holder, client, store) = (db.client().await, db.client().await, db.worker().await);
    let job = claimed(&client, &store).await;
    write(&store, &job, one("k", b"123")).await.unwrap();
    let open = holder.transaction().await.unwrap();
    open.batch_execute(GROWING).await.unwrap();
    let no_room = StateSet {
        bytes_max: 1,
        keys_max: 0,
        ..one("k", b"456")
    };
    let said = store.set_state(of(&job), no_room).await.unwrap();
    assert_eq!(said, Ok(StateWrite::Set));
    open.rollback().await.unwrap();
    assert_eq!(kept(&client).await, [entry("x", "", "k", "456")]);
}

#[tokio::test]
async fn of_two_that_replace_the_same_version_at_once_one_is_told_of_the_other() {
    let db = TestDb::new().await;
    let (mut holder, client) = (db.client().await, db.client().await);
    let (mine, other) = (db.worker().await, db.worker().await);
    let jobs = [
        claimed(&client, &mine).await,
        claimed(&client, &other).await,
    ];
    let both = |sets: [StateSet<'static>; 2]| {
        let writes = [
            write(&mine, &jobs[0], sets[0]),
            write(&other, &jobs[1], sets[1]),
        ];
        (writes, sets)
    };
    let expecting = |expected, value| StateSet {
        expected: Some(expected),
        ..one("k", value)
    };

    // Neither finds anything, and both would make it larger.
    let open = holder.transaction().await.unwrap();
    open.batch_execute(GROWING).await.unwrap();
    let (writes, sets) = both([expecting(0, b"1"), expecting(0, b"2")]);
    until_they_wait(&client, 2).await;
    open.rollback().await.unwrap();
    let winner = the_only_one(writes, sets).await;

    // Both find that one, and replace it by as many bytes.
    let open = holder.transaction().await.unwrap();
    open.query("SELECT FROM rouse.handler_state FOR UPDATE", &[])
        .await
        .unwrap();
    let (writes, sets) = both([
        expecting(winner.version, b"3"),
        expecting(winner.version, b"4"),
    ]);
    until_they_wait(&client, 2).await;
    open.rollback().await.unwrap();
    let winner = the_only_one(writes, sets).await;
    let found = mine.get_state(of(&jobs[0]), "k").await.unwrap();
    assert_eq!(found, Ok(Some((winner.value.to_vec(), winner.version))));

    // The answer to it was lost.
    assert_eq!(
        write(&mine, &jobs[0], winner).await.unwrap(),
        StateWrite::Set
    );
    // What was deleted and is there again is not the same.
    assert_eq!(
        mine.delete_state(of(&jobs[0]), "k").await.unwrap(),
        Ok(true)
    );
    write(&mine, &jobs[0], one("k", winner.value))
        .await
        .unwrap();
    let late = expecting(winner.version, b"5");
    assert_eq!(
        write(&mine, &jobs[0], late).await.unwrap(),
        StateWrite::Conflict
    );
}

/// The write of the two that was made; the other one was told that something else is there.
async fn the_only_one(
    writes: [tokio::task::JoinHandle<StateWrite>; 2],
    sets: [StateSet<'static>; 2],
) -> StateSet<'static> {
    let mut winners = Vec::new();
    for (write, set) in writes.into_iter().zip(sets) {
        match write.await.unwrap() {
            StateWrite::Set => winners.push(set),
            said => assert_eq!(said, StateWrite::Conflict),
        }
    }
    assert_eq!(winners.len(), 1);
    winners.remove(0)
}

#[tokio::test]
async fn a_write_that_would_fit_into_what_was_made_smaller_meanwhile_is_made_again() {
    let db = TestDb::new().await;
    let (mut holder, client, store) = (db.client().await, db.client().await, db.worker().await);
    let job = claimed(&client, &store).await;
    write(&store, &job, one("k", b"123456789")).await.unwrap();
    let open = holder.transaction().await.unwrap();
    open.batch_execute("UPDATE rouse.handler_state SET value = '1'")
        .await
        .unwrap();
    let asked = StateSet {
        bytes_max: 5,
        ..one("k", b"987654321")
    };
    let writing = write(&store, &job, asked);
    until_they_wait(&client, 1).await;
    open.commit().await.unwrap();
    let said = writing.await.unwrap();
    // Where it waited for too long, it was asked for again already.
    assert!(
        matches!(said, StateWrite::Again | StateWrite::TooManyBytes(0)),
        "{said:?}"
    );
    assert_eq!(
        write(&store, &job, asked).await.unwrap(),
        StateWrite::TooManyBytes(0)
    );
    assert_eq!(kept(&client).await, [entry("x", "", "k", "1")]);
}

#[tokio::test]
async fn updates_of_attempts_that_run_at_once_are_all_counted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let calls = json!({"calls": [{"add": ["n", 25]}]});
    let mut ids = Vec::new();
    for _ in 0..6 {
        ids.push(enqueue(&client, "test.state.one", calls.clone()).await);
    }
    for id in ids {
        let job = ended(&client, id).await;
        assert_eq!(job.state, "succeeded", "{:?}", job.error);
    }
    assert_eq!(
        kept(&client).await,
        [entry("test.state.one", "", "n", "150")]
    );
    worker.drain().await;
}

#[tokio::test]
async fn only_the_worker_that_has_the_job_reads_and_writes_the_state() {
    let db = TestDb::new().await;
    let (client, mine, other) = (db.client().await, db.worker().await, db.worker().await);
    let job = claimed(&client, &mine).await;
    let here = of(&job);
    assert_eq!(
        mine.set_state(here, one("k", b"1")).await.unwrap(),
        Ok(StateWrite::Set)
    );

    let all_say = async |store: &Store, of: StateOf<'_>, reason| {
        let no = NotMine(reason);
        assert_eq!(store.get_state(of, "k").await.unwrap(), Err(no));
        assert_eq!(store.state_keys(of, "", None, 9).await.unwrap(), Err(no));
        assert_eq!(store.set_state(of, one("k", b"2")).await.unwrap(), Err(no));
        assert_eq!(store.delete_state(of, "k").await.unwrap(), Err(no));
    };
    let wrong = StateOf {
        fence: Fence(job.fence.0 ^ 1),
        ..here
    };
    let taken = AbortReason::TakenByAnotherWorker;
    all_say(&other, here, taken).await;
    all_say(&mine, wrong, taken).await;
    let none = StateOf {
        id: JobId(-1),
        ..here
    };
    all_say(&mine, none, AbortReason::NotFound).await;
    let refused: i64 = client
        .query_one("SELECT sum(refused)::bigint FROM rouse.workers", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(refused, 4, "each time by the other worker");

    let settled = settlement(&job, result("1"));
    mine.settle(&[settled], Locked::Wait).await.unwrap();
    all_say(&mine, here, AbortReason::AlreadyCompleted).await;
    let job = claimed(&client, &mine).await;
    cancel(&client, job.id.0).await;
    all_say(&mine, of(&job), AbortReason::Cancelled).await;
    assert_eq!(kept(&client).await, [entry("x", "", "k", "1")]);
}

#[tokio::test]
async fn while_a_value_is_being_written_nobody_takes_the_job_over_and_after_that_the_old_attempt_writes_nothing()
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
    let lanes = "SELECT array_agg(id) FROM rouse.lane";
    let sql = format!(
        "SELECT id FROM rouse.claim({worker}, sha256('key'), 7, ({lanes}), '{{-1}}', '{{60000}}', 1)"
    );
    client.query_one(&sql, &[]).await.unwrap();
    client
        .batch_execute("UPDATE rouse.job SET lease_until = now() - interval '1 s'")
        .await
        .unwrap();
    let orders = orders(&other, 60_000).await;
    let adopted = async || {
        let adopted = other.adopt(Fence(rand()), &orders, 1, 3, None).await;
        adopted.unwrap().claimed.len()
    };
    let set = format!(
        "SELECT refusal, outcome FROM rouse.set_state({worker}, sha256('key'), {id}, 7, 'x', 'k', $1, $2, NULL, 9, 99)"
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

/// Counts what it is asked for.
#[derive(Default)]
struct Counting {
    waits: Notify,
    calls: AtomicUsize,
}

impl Counting {
    fn called<T: Send + 'static>(&self, answer: T) -> Waiting<'_, Result<T, String>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { Ok(answer) })
    }
}

impl StateKeeper for Counting {
    fn get<'a>(&'a self, _: &'a str) -> Waiting<'a, Result<Option<Kept>, String>> {
        self.called(None)
    }

    fn keys<'a>(
        &'a self,
        _: &'a str,
        _: Option<&'a str>,
        _: u32,
    ) -> Waiting<'a, Result<Vec<String>, String>> {
        self.called(Vec::new())
    }

    fn set<'a>(&'a self, _: Keep<'a>) -> Waiting<'a, Result<Wrote, String>> {
        self.called(Wrote::Done)
    }

    fn delete<'a>(&'a self, _: &'a str) -> Waiting<'a, Result<bool, String>> {
        self.called(true)
    }
}

impl Journal for Counting {
    fn recorded(&self) -> Waiting<'_, HashMap<String, usize>> {
        Box::pin(async { HashMap::new() })
    }

    fn result<'a>(&'a self, _: &'a str) -> Waiting<'a, Result<Vec<u8>, String>> {
        Box::pin(async { Err("no steps".into()) })
    }

    fn record<'a>(&'a self, _: &'a str, _: &'a [u8]) -> Waiting<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    fn progress(&self, _: u8, _: &str) {
        self.waits.notify_one();
    }

    fn state(&self) -> Option<&dyn StateKeeper> {
        Some(self)
    }
}

#[tokio::test]
async fn from_the_abort_on_nothing_is_read_or_written() {
    let catalog = catalog().await;
    let set = catalog.current();
    let handler = set.get("test.state.one").expect("the guest");
    let (abort, journal) = (AbortHandle::new(), Arc::new(Counting::default()));
    let one_of_each =
        json!([{"get": "k"}, {"set": ["k", 1]}, {"delete": "k"}, {"keys": ""}, {"add": ["k", 1]}]);
    let mut calls = one_of_each.as_array().unwrap().clone();
    calls.push(json!("wait"));
    calls.extend(one_of_each.as_array().unwrap().iter().cloned());
    let payload = json!({"calls": calls, "regardless": true}).to_string();
    let running = sandbox().run(
        handler,
        crate::sandbox_guest::job(&payload),
        abort.clone(),
        Some(journal.clone() as Arc<dyn Journal>),
    );
    let running = sandbox().guests().spawn(running);
    journal.waits.notified().await;
    // `add` reads and writes.
    assert_eq!(journal.calls.load(Ordering::Relaxed), 6);
    abort.abort(AbortReason::Cancelled, PATIENCE);
    let run = tokio::time::timeout(PATIENCE, running)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(run.end, RunEnd::Aborted(AbortReason::Cancelled));
    assert_eq!(journal.calls.load(Ordering::Relaxed), 6);
    let calls = run.used.expect("a guest ran").host_calls;
    assert!(calls >= 11, "it did ask: {calls}");
}

#[tokio::test]
async fn an_attempt_that_has_lost_its_job_hears_of_it_by_its_next_write() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // No renewal will tell it.
    let settings = Settings {
        overrides: lease("test.state.one", 86_400),
        ..Settings::default()
    };
    let worker = TestWorker::start_in(&db, settings, sandbox(), catalog().await);
    let calls = json!({"calls": [{"set": ["first", 1]}, {"add": ["n", 1_000_000]}]});
    enqueue(&client, "test.state.one", calls).await;
    until_true(&client, "SELECT count(*) = 2 FROM rouse.handler_state").await;
    // As if another worker had it; nobody is told.
    client
        .batch_execute("UPDATE rouse.job SET fence = fence # 1")
        .await
        .unwrap();
    let before = kept(&client).await;
    worker.drain().await;
    assert_eq!(kept(&client).await, before);
}

#[tokio::test]
async fn without_a_grant_a_handler_is_denied_and_the_lines_that_are_printed_allow_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let payload = json!({"calls": [{"set": ["k", 1]}]});
    let id = enqueue(&client, "test.state.none", payload.clone()).await;
    let job = ended(&client, id).await;
    worker.drain().await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 1));
    let error = job.error.unwrap();
    assert_eq!(error["kind"], "denied");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("the handler test.state.none asked for its state"),
        "{message}"
    );
    let (_, lines) = message.split_once(":\n").expect("lines to copy");
    let lines = lines.split("\n\n").next().expect("there are some");

    enqueue(&client, "test.state.none", payload).await;
    let folder = folder(lines, &["test_guests.wasm"]);
    rouse_in(&db, &["queue", "drain", "default"], &folder)
        .await
        .exits(0);
    assert_eq!(
        kept(&client).await,
        [entry("test.state.none", "", "k", "1")]
    );
}

#[tokio::test]
async fn hostile_keys_are_refused_and_hostile_values_are_bytes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let found = answers(
        &client,
        "test.state.one",
        "NULL",
        json!([
            {"set": ["", 1]}, {"set": ["\u{1b}[2J", 1]}, {"set": ["a\nb", 1]}, {"set": ["a\u{9b}", 1]}, {"set-long": 201},
            {"set-long": 1_048_576}, {"get": "\u{7f}"}, {"keys": "\u{1}"},
            {"set-long": 200}, {"set": ["%_''; --", "x"]}, {"set": ["ключ", 1]}, {"keys": "%"}, {"keys": "к"}, {"keys": "_"}
        ]),
    )
    .await;
    for refused in &found[..8] {
        assert_eq!(refused["kind"], "state-refused", "{refused}");
        assert!(
            refused["message"].as_str().unwrap().contains("printable"),
            "{refused}"
        );
    }
    assert_eq!(found[8..11], [json!(null), json!(null), json!(null)]);
    assert_eq!(
        found[11..],
        [json!(["%_'; --"]), json!(["ключ"]), json!([])]
    );
    worker.drain().await;
}

#[tokio::test]
async fn keys_are_listed_page_by_page_in_their_order() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    // Pages have 200.
    let calls =
        json!([{"fill": ["a/", 450, 1]}, {"fill": ["b/", 1, 1]}, {"keys": "a/"}, {"keys": ""}]);
    let found = answers(&client, "test.state.one", "'acme'", calls).await;
    let all: Vec<String> = (0..450).map(|n| format!("a/{n:05}")).collect();
    assert_eq!(found[2], json!(all));
    assert_eq!(found[3].as_array().unwrap().len(), 451);
    worker.drain().await;
}

#[tokio::test]
async fn without_the_queue_there_is_no_state_and_the_handler_is_told() {
    let granted = crate::invoke::folder("[handlers.\"test.state.*\".state]\n");
    let mut command = crate::support::rouse();
    command
        .args([
            "invoke",
            "test.state.one",
            r#"{"calls": [{"get": "k"}]}"#,
            "--handlers",
            "handlers",
        ])
        .current_dir(&granted)
        .env_remove("DATABASE_URL")
        .env_remove("ROUSE_LOG");
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .unwrap()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.contains("invoked without the queue has no state"),
        "{stderr}"
    );
}

#[tokio::test]
async fn operators_list_read_put_and_remove_what_handlers_keep() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let here = crate::support::scratch("state-commands");
    let rouse = async |args: &[&str]| {
        let args: Vec<&str> = [&["state"], args].concat();
        rouse_in(&db, &args, &here).await
    };
    // Of a handler that is gone, with a key that no guest could have made.
    client
        .batch_execute(
            "INSERT INTO rouse.handler_state (handler, tenant, key, value, version, set_at)
             VALUES ('gone.by', 'acme', E'\\x1b[2J', '\\xff00', 7, now())",
        )
        .await
        .unwrap();
    rouse(&["set", "gone.by", "n", "{\"a\": 1}"])
        .await
        .exits(0)
        .says("set key n of handler gone.by");
    rouse(&["set", "gone.by", "n", "{"])
        .await
        .exits(1)
        .says("the value is no JSON");
    rouse(&["set", "gone.by", "raw", "{", "--raw", "--json"])
        .await
        .exits(0)
        .says("\"set\":true");
    rouse(&["set", "no/name", "n", "1"])
        .await
        .exits(1)
        .says("'no/name' is no handler name");
    rouse(&["set", "gone.by", "", "1"])
        .await
        .exits(1)
        .says("1 to 200 characters");

    let listed = rouse(&["ls", "--json"]).await.json();
    let spaces = json!([
        {"handler": "gone.by", "tenant": null, "keys": 2, "bytes": 13},
        {"handler": "gone.by", "tenant": "acme", "keys": 1, "bytes": 6},
    ]);
    assert_eq!(listed["states"], spaces);
    rouse(&["ls", "gone.by", "--tenant", "acme"])
        .await
        .exits(0)
        .says("\\u{1b}[2J");
    let entries = rouse(&["ls", "gone.by", "--json"]).await.json();
    assert_eq!(entries["entries"][0]["key"], "n");
    assert_eq!(
        rouse(&["get", "gone.by", "n"]).await.exits(0).stdout,
        "{\"a\": 1}"
    );
    let read = rouse(&["get", "gone.by", "n", "--json"]).await.json();
    assert_eq!(
        (&read["value"]["a"], &read["bytes"]),
        (&json!(1), &json!(9))
    );
    let read = rouse(&["get", "gone.by", "\x1b[2J", "--tenant", "acme", "--json"])
        .await
        .json();
    assert_eq!(read["base64"], "/wA=");
    rouse(&["get", "gone.by", "nothing"])
        .await
        .exits(3)
        .says("nothing is kept there");

    rouse(&["rm", "gone.by", "n"])
        .await
        .exits(2)
        .says("--confirm");
    rouse(&["rm", "gone.by"]).await.exits(2).says("all keys");
    rouse(&["rm", "gone.by", "n", "--confirm"])
        .await
        .exits(0)
        .says("1 keys");
    rouse(&["rm", "gone.by", "n", "--confirm"]).await.exits(3);
    let removed = rouse(&["rm", "gone.by", "--tenant", "acme", "--confirm", "--json"])
        .await
        .json();
    assert_eq!(removed["removed"], 1);
    assert_eq!(kept(&client).await, [entry("gone.by", "", "raw", "{")]);

    let records = client
        .query("SELECT event, who, detail ->> 'handler' FROM rouse.record WHERE event LIKE 'state_%' ORDER BY at", &[])
        .await
        .unwrap();
    let records: Vec<(&str, &str, &str)> = records
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(2)))
        .collect();
    let (put, removed) = (
        ("state_put", "rouse", "gone.by"),
        ("state_removed", "rouse", "gone.by"),
    );
    assert_eq!(records, [put, put, removed, removed]);
}

#[tokio::test]
async fn from_outside_nothing_is_put_that_no_handler_could_ask_for_and_no_tenant_is_an_empty_text()
{
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT rouse.put_state('x', NULL, 'kept', '1')")
        .await
        .unwrap();
    for (call, says) in [
        (
            "rouse.remove_state('x', '', NULL)",
            "no tenant is an empty text",
        ),
        ("rouse.put_state('x', '', 'k', '1')", "1 to 200 characters"),
        (
            "rouse.put_state('x', NULL, E'a\\x1b', '1')",
            "control characters",
        ),
        ("rouse.put_state('x', NULL, 'k', NULL)", "is not null"),
    ] {
        let error = client
            .batch_execute(&format!("SELECT {call}"))
            .await
            .expect_err(call);
        let told = error.as_db_error().expect("Postgres says so").message();
        assert!(told.contains(says), "{call}: {told}");
    }
    let kept = client
        .query_one("SELECT count(*) FROM rouse.handler_state", &[])
        .await
        .unwrap();
    assert_eq!(kept.get::<_, i64>(0), 1);
}
