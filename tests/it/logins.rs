//! Limits of a worker's login, set by the owner, and bounds on everything that a worker sends.

mod bounds;
mod others;

use std::time::Duration;

use rouse::job::{AfterLoss, Fence, LaneId};
use rouse::store::connect::Connector;
use rouse::store::{
    Adoption, BoundSearch, ClaimResult, ClaimedJob, Registration, Store, WorkerKey,
};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{claim, orders, rand};
use crate::support::database::{connect, registration};
use crate::support::worker::enqueue_sql;

/// A login with the role of workers. Roles belong to the whole server, so each test uses a name of its own.
struct Login {
    url: String,
}

impl Login {
    async fn create(db: &TestDb, name: &str) -> Self {
        db.client()
            .await
            .batch_execute(&format!("CREATE ROLE {name} LOGIN IN ROLE rouse_worker"))
            .await
            .unwrap();
        Self {
            url: db.url().replace("rouse@", &format!("{name}@")),
        }
    }

    async fn client(&self) -> Client {
        connect(&self.url).await
    }

    fn store(&self) -> Store {
        Store::new(&Connector::from_url(&self.url, &|_| None).unwrap(), 2)
    }

    /// A registered worker that serves these queues.
    async fn worker(&self, id: &str, queues: &[&str]) -> Store {
        let store = self.store();
        store.register(&serving(id, queues)).await.unwrap();
        store
    }
}

fn serving(id: &str, queues: &[&str]) -> Registration {
    Registration {
        queues: queues.iter().map(|queue| (*queue).to_string()).collect(),
        ..registration(id, WorkerKey::random())
    }
}

/// Sets the limits of a login, as the owner.
async fn limit(client: &Client, columns: &str, values: &str) {
    let sql = format!(
        "SET ROLE rouse_owner; INSERT INTO rouse.worker_login ({columns}) VALUES ({values}); RESET ROLE"
    );
    client.batch_execute(&sql).await.unwrap();
}

/// Claims jobs from any lane, and returns their ids.
async fn claimed(store: &Store) -> Vec<i64> {
    let mut ids: Vec<i64> = claim(store, 100).await.iter().map(|job| job.id.0).collect();
    ids.sort_unstable();
    ids
}

/// The code of an error with its message and hint.
async fn refusal(client: &Client, sql: &str) -> String {
    let error = client.query(sql, &[]).await.expect_err(sql);
    let db = error.as_db_error().unwrap_or_else(|| panic!("{error:?}"));
    let hint = db.hint().unwrap_or_default();
    format!("{}: {}; {hint}", db.code().code(), db.message())
}

async fn refused(store: &Store, registration: &Registration) -> String {
    let error = store.register(registration).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "RW006", "{error}");
    error.to_string()
}

#[tokio::test]
async fn a_login_without_limits_registers_any_id_and_serves_all_queues() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_free").await;
    let (first, second) = (
        enqueue_sql(&client, "'x'").await,
        enqueue_sql(&client, "'x', queue => 'mail'").await,
    );
    assert_eq!(
        claimed(&login.worker("any", &[]).await).await,
        [first, second]
    );
}

#[tokio::test]
async fn a_limited_login_registers_only_its_ids_queues_and_tags() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_narrow").await;
    limit(
        &client,
        "login, worker_ids, queues, tags",
        "'logins_narrow', '{mail-*,post}', '{mail,sms.*}', '{gpu}'",
    )
    .await;
    let store = login.store();
    for (invalid, why) in [
        (
            serving("mai", &["mail"]),
            "may not register worker id mai. Its worker ids are mail-*, post",
        ),
        (
            serving("post-1", &["mail"]),
            "may not register worker id post-1",
        ),
        (
            serving("mail-1", &[]),
            "may not serve all queues. Its queues are mail, sms.*",
        ),
        (
            serving("mail-1", &["mail", "billing"]),
            "may not serve queue billing",
        ),
        (
            serving("mail-1", &["mailing"]),
            "may not serve queue mailing",
        ),
        (
            Registration {
                tags: vec!["gpu".into(), "eu".into()],
                ..serving("mail-1", &["mail"])
            },
            "may not register tag eu. Its tags are gpu",
        ),
    ] {
        let error = refused(&store, &invalid).await;
        assert!(error.contains(why), "{error}");
    }
    let good = Registration {
        tags: vec!["gpu".into()],
        ..serving("mail-1", &["mail", "sms.eu"])
    };
    store.register(&good).await.unwrap();
    login.worker("post", &["sms."]).await;
}

#[tokio::test]
async fn a_limited_login_claims_and_adopts_only_from_its_lanes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_claims").await;
    limit(
        &client,
        "login, worker_ids, queues, tags, handlers",
        "'logins_claims', '{*}', '{mail,sms}', '{gpu}', '{x,y.*}'",
    )
    .await;
    let allowed = enqueue_sql(&client, "'x', queue => 'mail', source => 's'").await;
    let mut others = Vec::new();
    for call in [
        "'x', source => 's'",
        "'x', queue => 'sms', source => 's'",
        "'z', queue => 'mail', source => 's'",
        "'x', queue => 'mail', tags => '{gpu}', source => 's'",
        "'x', queue => 'mail', tags => '{eu}', source => 's'",
    ] {
        others.push(enqueue_sql(&client, call).await);
    }
    // The worker has registered one of the login's two queues, and no tag.
    let limited = login.worker("w", &["mail"]).await;
    let all = orders(&limited, 60_000).await;
    let lanes: Vec<_> = all.iter().map(|order| order.lane).collect();
    let minute = Duration::from_secs(60);
    let search = BoundSearch {
        lanes: &lanes,
        sources: &["s".to_string()],
        ..BoundSearch::default()
    };
    let bound = limited
        .claim_bound(Fence(rand()), search, minute, 100)
        .await
        .unwrap();
    assert_eq!(ids(&bound.jobs), [allowed]);
    let are_empty = bound.is_empty.iter().filter(|is_empty| **is_empty);
    assert_eq!(are_empty.count(), 0, "lanes that it may not read");
    assert_eq!(
        claimed(&limited).await,
        [0; 0],
        "the other jobs are outside its limits"
    );
    // The other jobs are orphans of a worker without limits.
    let free = db.worker().await;
    assert_eq!(claimed(&free).await, others);
    client
        .batch_execute("UPDATE rouse.job SET lease_until = clock_timestamp()")
        .await
        .unwrap();
    let adopted = crate::support::claims::adopt(&limited, Fence(rand()), &all, 100, 1, None)
        .await
        .unwrap();
    assert_eq!(ids(&adopted.claimed), [allowed], "only its own lanes");
    assert!(adopted.lost.is_empty(), "no job of another lane fails");
    // Nor can it adopt the other jobs by their ids and fences, which it cannot know.
    let lanes: Vec<LaneId> = all.iter().map(|order| order.lane).collect();
    let orphans = free.orphans(&lanes, None, 100, None, 3).await.unwrap();
    assert_eq!(orphans.len(), others.len());
    for next in [AfterLoss::Claim, AfterLoss::Fail] {
        let forged: Vec<Adoption> = orphans
            .iter()
            .map(|orphan| Adoption {
                orphan: orphan.clone(),
                next,
                lease: minute,
            })
            .collect();
        let adopted = limited.adopt(Fence(rand()), &forged).await.unwrap();
        assert!(adopted.claimed.is_empty() && adopted.lost.is_empty());
    }
}

/// Peeks do not check the limits, so they find these lanes again and again.
#[tokio::test]
async fn a_claim_names_the_lanes_that_the_login_may_not_claim_from() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_names").await;
    limit(
        &client,
        "login, worker_ids, queues, handlers",
        "'logins_names', '{*}', '{mail}', '{x}'",
    )
    .await;
    for call in ["'x', queue => 'mail'", "'y', queue => 'mail'", "'x'"] {
        enqueue_sql(&client, call).await;
    }
    let limited = login.worker("w", &["mail"]).await;
    let mut forbidden = Vec::new();
    for lane in limited.catalog_after(i64::MIN, None).await.unwrap().lanes {
        if lane.queue != "mail" || lane.handler != "x" {
            forbidden.push(lane.id);
        }
    }
    let all = orders(&limited, 60_000).await;
    let claimed = limited.claim(Fence(rand()), &all, 100, None).await.unwrap();
    let ClaimResult::Jobs(jobs, closed) = claimed else {
        panic!("there are no orphans");
    };
    assert_eq!(jobs.len(), 1);
    let named: Vec<LaneId> = closed.iter().map(|closed| closed.lane).collect();
    assert_eq!(named, forbidden);
    for closed in &closed {
        let wait = closed.by.iter().map(|limit| limit.wait);
        let wait: Vec<Option<Duration>> = wait.collect();
        assert_eq!(wait, [Some(Duration::from_secs(30))]);
    }
    let free = db.worker().await;
    let claimed = free.claim(Fence(rand()), &all, 100, None).await.unwrap();
    assert!(matches!(claimed, ClaimResult::Jobs(_, closed) if closed.is_empty()));
}

fn ids(jobs: &[ClaimedJob]) -> Vec<i64> {
    jobs.iter().map(|job| job.id.0).collect()
}

#[tokio::test]
async fn limits_apply_at_once_to_live_workers_and_end_with_their_row() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_later").await;
    let worker = login.worker("w", &[]).await;
    limit(
        &client,
        "login, worker_ids, queues",
        "'logins_later', '{w}', '{mail}'",
    )
    .await;
    let (other, allowed) = (
        enqueue_sql(&client, "'x'").await,
        enqueue_sql(&client, "'x', queue => 'mail'").await,
    );
    assert_eq!(claimed(&worker).await, [allowed]);
    // The login also keeps its limits under another name.
    client
        .batch_execute("ALTER ROLE logins_later RENAME TO logins_latest")
        .await
        .unwrap();
    let renamed = Login {
        url: db.url().replace("rouse@", "logins_latest@"),
    };
    let error = refused(&renamed.store(), &serving("v", &["mail"])).await;
    assert!(error.contains("worker id v"), "{error}");
    client
        .batch_execute("DELETE FROM rouse.worker_login")
        .await
        .unwrap();
    assert_eq!(claimed(&renamed.worker("v", &[]).await).await, [other]);
}

#[tokio::test]
async fn limits_that_are_not_valid_patterns_are_refused_when_written() {
    let db = TestDb::new().await;
    let client = db.client().await;
    Login::create(&db, "logins_patterns").await;
    for (values, constraint) in [
        ("'{}', '{mail}', '{}', '{*}'", "worker_ids_are_patterns"),
        ("'{a b}', '{mail}', '{}', '{*}'", "worker_ids_are_patterns"),
        ("'{w}', '{}', '{}', '{*}'", "queues_are_patterns"),
        ("'{w}', '{*mail}', '{}', '{*}'", "queues_are_patterns"),
        ("'{w}', '{NULL}', '{}', '{*}'", "queues_are_patterns"),
        ("'{w}', '{mail}', '{NULL}', '{*}'", "tags_are_patterns"),
        ("'{w}', '{mail}', '{}', '{X}'", "handlers_are_patterns"),
    ] {
        let sql = format!(
            "INSERT INTO rouse.worker_login (login, worker_ids, queues, tags, handlers) VALUES ('logins_patterns', {values})"
        );
        let error = client.query(&sql, &[]).await.expect_err(&sql);
        let at = error.as_db_error().unwrap().constraint();
        assert_eq!(at, Some(constraint), "{values}");
    }
    let unknown = "INSERT INTO rouse.worker_login (login, worker_ids, queues) VALUES ('logins_misspelt', '{w}', '{mail}')";
    assert!(refusal(&client, unknown).await.contains("does not exist"));
}

#[tokio::test]
async fn only_the_owner_can_write_the_limits() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_writer").await;
    limit(
        &client,
        "login, worker_ids, queues",
        "'logins_writer', '{w}', '{mail}'",
    )
    .await;
    let hostile = login.client().await;
    for sql in [
        "DELETE FROM rouse.worker_login",
        "UPDATE rouse.worker_login SET queues = '{*}'",
        "TRUNCATE rouse.worker_login",
        "UPDATE rouse.worker SET limited = false",
        "DO $$ BEGIN LOCK TABLE rouse.worker_login IN ROW EXCLUSIVE MODE; END $$",
    ] {
        let error = refusal(&hostile, sql).await;
        assert!(error.starts_with("42501"), "{sql}: {error}");
    }
}

#[tokio::test]
async fn a_limited_login_takes_no_admin_actions_and_drops_no_history_without_maintenance() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (limited, keeper) = (
        Login::create(&db, "logins_limited").await,
        Login::create(&db, "logins_keeper").await,
    );
    limit(
        &client,
        "login, worker_ids, queues",
        "'logins_limited', '{limited}', '{mail}'",
    )
    .await;
    limit(
        &client,
        "login, worker_ids, queues, maintenance",
        "'logins_keeper', '{keeper}', '{mail}', true",
    )
    .await;
    client
        .batch_execute("SELECT rouse.pause_queue('other')")
        .await
        .unwrap();
    let old = "CREATE TABLE rouse.log_20200101 PARTITION OF rouse.log FOR VALUES FROM ('2020-01-01 00:00Z') TO ('2020-01-02 00:00Z');
               ALTER TABLE rouse.log_20200101 OWNER TO rouse_owner";
    client.batch_execute(old).await.unwrap();
    let limited = limited.worker("limited", &["mail"]).await;
    assert_eq!(limited.take_audit_outbox(&[], 1000).await.unwrap().len(), 0);
    assert_eq!(limited.maintain_partitions().await.unwrap().0, 0);
    let keeper = keeper.worker("keeper", &["mail"]).await;
    assert_eq!(
        keeper.take_audit_outbox(&[], 1000).await.unwrap().len(),
        1,
        "the other login has not taken the admin action"
    );
    assert_eq!(keeper.maintain_partitions().await.unwrap().0, 1);
    // The history still contains what was taken from the outbox.
    let kept = client
        .query_one(
            "SELECT count(*) FROM rouse.record WHERE event = 'paused'",
            &[],
        )
        .await;
    assert_eq!(kept.unwrap().get::<_, i64>(0), 1);
}

#[tokio::test]
async fn a_limited_login_uses_only_the_state_of_its_handlers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_state").await;
    limit(
        &client,
        "login, worker_ids, queues, handlers",
        "'logins_state', '{w}', '{mail}', '{x}'",
    )
    .await;
    client
        .batch_execute("SELECT rouse.set_state('secrets', NULL, 'k', 'v')")
        .await
        .unwrap();
    enqueue_sql(&client, "'x', queue => 'mail'").await;
    let store = login.worker("w", &["mail"]).await;
    let job = claim(&store, 1).await.remove(0);
    let of = |handler| rouse::store::StateScope {
        id: job.id,
        fence: job.fence,
        handler,
    };
    let error = store.read_state(of("secrets"), "k").await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "RW006", "{error}");
    store.read_state(of("x"), "k").await.unwrap().unwrap();
}

#[tokio::test]
async fn jobs_of_a_limited_login_are_limited_even_if_they_commit_with_effects() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_effects").await;
    limit(
        &client,
        "login, worker_ids, queues, handlers",
        "'logins_effects', '{w}', '{mail}', '{x}'",
    )
    .await;
    enqueue_sql(&client, "'x', queue => 'billing', unique_key => 'taken'").await;
    enqueue_sql(
        &client,
        "'x', queue => 'mail', tags => '{gpu}', unique_key => 'tagged'",
    )
    .await;
    enqueue_sql(&client, "'x', queue => 'mail'").await;
    let store = login.worker("w", &["mail"]).await;
    let job = claim(&store, 1).await.remove(0);
    client
        .batch_execute(
            "UPDATE rouse.worker SET key_hash = sha256('k'); CREATE ROLE logins_effects_sql LOGIN IN ROLE rouse_handler",
        )
        .await
        .unwrap();
    let worker = client.query_one("SELECT incarnation FROM rouse.worker", &[]);
    let worker: i64 = worker.await.unwrap().get(0);
    // Effects are committed in a session of the handlers' login, which has no limits.
    let handlers = connect(&db.url().replace("rouse@", "logins_effects_sql@")).await;
    let (id, fence) = (job.id.0, job.fence.0);
    let settle_with = |child: &str| {
        format!(
            r#"SELECT rouse.settle_with_effects({worker}, 'k',
                ARRAY[jsonb_populate_record(NULL::rouse.settlement, '{{"id": {id}, "fence": {fence}, "state": "succeeded", "result": 1}}')],
                ARRAY[jsonb_populate_record(NULL::rouse.new_job, '{{"parent": {id}, "kind": "child", "payload": 1, {child}}}')])"#
        )
    };
    let other = settle_with(r#""handler": "other""#);
    let error = refusal(&handlers, &other).await;
    let why = "22023: rouse: login logins_effects may not enqueue jobs for handler 'other' in queue of their parent";
    assert!(error.starts_with(why), "{error}");
    // The worker keeps its limits even if its role has another name now.
    let rename = "ALTER ROLE logins_effects RENAME TO logins_renamed";
    client.batch_execute(rename).await.unwrap();
    let error = refusal(&handlers, &other).await;
    assert!(error.starts_with(why), "{error}");
    let rename = "ALTER ROLE logins_renamed RENAME TO logins_effects";
    client.batch_execute(rename).await.unwrap();
    // Jobs with these keys are outside its limits: in another queue, or with a tag.
    for key in ["taken", "tagged"] {
        let child = format!(r#""handler": "x", "options": {{"unique_key": "{key}"}}"#);
        let error = refusal(&handlers, &settle_with(&child)).await;
        let why = "22023: rouse: login logins_effects may not use job";
        assert!(error.starts_with(why), "{key}: {error}");
    }
    client
        .batch_execute("GRANT rouse_enqueuer TO logins_effects")
        .await
        .unwrap();
    handlers.query_one(&other, &[]).await.unwrap();
}

#[tokio::test]
async fn a_gate_does_not_let_a_limited_login_replace_jobs_outside_its_limits() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_merged").await;
    limit(
        &client,
        "login, worker_ids, queues, handlers",
        "'logins_merged', '{w}', '{mail}', '{x,last,late,first}'",
    )
    .await;
    client
        .batch_execute(
            "SELECT rouse.set_gate('last', 'singleton', handler => 'last', on_conflict => 'replace');
             SELECT rouse.set_gate('late', 'debounce', handler => 'late', period => '1 hour');
             SELECT rouse.set_gate('first', 'singleton', handler => 'first', during => 'period', period => '1 hour')",
        )
        .await
        .unwrap();
    enqueue_sql(&client, "'x', queue => 'mail'").await;
    let store = login.worker("w", &["mail"]).await;
    let job = claim(&store, 1).await.remove(0);
    client
        .batch_execute("UPDATE rouse.worker SET key_hash = sha256('k')")
        .await
        .unwrap();
    let (worker, id, fence) = (store.incarnation().unwrap().0, job.id.0, job.fence.0);
    let settle_with = |children: &[&str]| {
        let children: Vec<String> = children
            .iter()
            .map(|handler| {
                format!(
                    r#"jsonb_populate_record(NULL::rouse.new_job, '{{"parent": {id}, "kind": "child", "handler": "{handler}", "payload": {{"n": 2}}}}')"#
                )
            })
            .collect();
        let children = children.join(", ");
        format!(
            r#"SELECT id FROM rouse.settle({worker}, 'k',
                ARRAY[jsonb_populate_record(NULL::rouse.settlement, '{{"id": {id}, "fence": {fence}, "state": "succeeded", "result": 1}}')],
                ARRAY[{children}], false)"#
        )
    };
    let rows = async |table: &str| -> Vec<String> {
        let sql = format!("SELECT t::text FROM rouse.{table} AS t ORDER BY 1");
        let rows = client.query(&sql, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    };
    let hostile = login.client().await;
    for handler in ["last", "late", "first"] {
        for (outside, queue) in [
            ("queue => 'billing'", "billing"),
            ("queue => 'mail', tags => '{gpu}'", "mail"),
        ] {
            let other =
                enqueue_sql(&client, &format!("'{handler}', '{{\"n\": 1}}', {outside}")).await;
            let before = (rows("job").await, rows("gate_key").await);
            let error = refusal(&hostile, &settle_with(&[handler])).await;
            let why = format!(
                "22023: rouse: login logins_merged may not use job {other}, with which a gate would merge a job for handler \
                 '{handler}'; it is in queue '{queue}'"
            );
            assert!(error.starts_with(&why), "{error}");
            assert_eq!((rows("job").await, rows("gate_key").await), before);
            client
                .batch_execute(&format!(
                    "SELECT rouse.cancel({other}); DELETE FROM rouse.gate_key"
                ))
                .await
                .unwrap();
        }
    }
    // Jobs that the login enqueues may merge with jobs within its limits, including one that has ended.
    let ended = enqueue_sql(&client, "'first', queue => 'mail'").await;
    client
        .batch_execute(&format!("SELECT rouse.complete({ended})"))
        .await
        .unwrap();
    let earlier = enqueue_sql(&client, "'last', '{\"n\": 1}', queue => 'mail'").await;
    let settled = hostile
        .query_one(&settle_with(&["first", "last"]), &[])
        .await
        .unwrap();
    assert_eq!(settled.get::<_, i64>(0), id);
    let jobs = client
        .query("SELECT id, payload::text FROM rouse.job", &[])
        .await
        .unwrap();
    let jobs: Vec<(i64, String)> = jobs.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(jobs, [(earlier, r#"{"n": 2}"#.to_owned())]);
}

#[tokio::test]
async fn a_limited_login_is_notified_only_of_its_queues() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_sleeper").await;
    limit(
        &client,
        "login, worker_ids, queues",
        "'logins_sleeper', '{w}', '{mail,sms}'",
    )
    .await;
    let store = login.worker("w", &["mail"]).await;
    let minute = Duration::from_secs(60);
    store
        .sleep(&["*".to_string(), "billing".to_string()], minute)
        .await
        .unwrap();
    let rows = client
        .query("SELECT queue FROM rouse.sleeper", &[])
        .await
        .unwrap();
    let queues: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(queues, ["mail"]);
}
