//! Limits of a worker's login, set by the owner, and bounds on everything that a worker sends.

use std::time::Duration;

use rouse::job::{AfterLoss, Fence, LaneId, Outcome};
use rouse::store::{Adoption, ClaimedJob, JsonText, Registration, Store, WorkerKey};
use rouse::store::{Heard, Listener, Locked, connect::Connector};
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{claim, orders, rand, settlement};
use crate::support::database::{self, connect, registration};
use crate::support::worker::{enqueue, show};

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

async fn put(client: &Client, call: &str) -> i64 {
    let sql = format!("SELECT rouse.enqueue({call})");
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

/// The ids of the jobs that these calls claim with leases of an hour, in any lane.
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
        put(&client, "'x'").await,
        put(&client, "'x', queue => 'mail'").await,
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
    for (wrong, why) in [
        (
            serving("mai", &["mail"]),
            "may not register worker id mai; Its worker ids are mail-*, post",
        ),
        (
            serving("post-1", &["mail"]),
            "may not register worker id post-1",
        ),
        (
            serving("mail-1", &[]),
            "may not serve all queues; Its queues are mail, sms.*",
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
            "may not register tag eu; Its tags are gpu",
        ),
    ] {
        let said = refused(&store, &wrong).await;
        assert!(said.contains(why), "{said}");
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
    let mine = put(&client, "'x', queue => 'mail', source => 's'").await;
    let mut others = Vec::new();
    for call in [
        "'x', source => 's'",
        "'x', queue => 'sms', source => 's'",
        "'z', queue => 'mail', source => 's'",
        "'x', queue => 'mail', tags => '{gpu}', source => 's'",
        "'x', queue => 'mail', tags => '{eu}', source => 's'",
    ] {
        others.push(put(&client, call).await);
    }
    // It has registered one of its two queues, and no tag.
    let limited = login.worker("w", &["mail"]).await;
    let all = orders(&limited, 60_000).await;
    let lanes: Vec<_> = all.iter().map(|order| order.lane).collect();
    let minute = Duration::from_secs(60);
    let bound = limited
        .claim_bound(Fence(rand()), &lanes, &["s".to_string()], minute, 100)
        .await
        .unwrap();
    assert_eq!(ids(&bound), [mine]);
    assert_eq!(claimed(&limited).await, [0; 0], "what is left is others'");
    // Orphans of a worker without limits.
    let free = db.worker().await;
    assert_eq!(claimed(&free).await, others);
    client
        .batch_execute("UPDATE rouse.job SET lease_until = clock_timestamp()")
        .await
        .unwrap();
    let adopted = crate::support::claims::adopt(&limited, Fence(rand()), &all, 100, 1, None)
        .await
        .unwrap();
    assert_eq!(ids(&adopted.claimed), [mine], "only its own lanes");
    assert!(adopted.lost.is_empty(), "no job of another lane fails");
    // Nor by their ids and fences, which it cannot know.
    let lanes: Vec<LaneId> = all.iter().map(|order| order.lane).collect();
    let orphans = free.orphans(&lanes, None, 100, None).await.unwrap();
    assert_eq!(orphans.len(), others.len());
    for next in [AfterLoss::Claim, AfterLoss::Fail] {
        let forged: Vec<Adoption> = orphans
            .iter()
            .map(|orphan| Adoption {
                orphan: *orphan,
                next,
                lease: minute,
            })
            .collect();
        let adopted = limited.adopt(Fence(rand()), &forged).await.unwrap();
        assert!(adopted.claimed.is_empty() && adopted.lost.is_empty());
    }
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
    let (other, mine) = (
        put(&client, "'x'").await,
        put(&client, "'x', queue => 'mail'").await,
    );
    assert_eq!(claimed(&worker).await, [mine]);
    // The login keeps its limits under another name, too.
    client
        .batch_execute("ALTER ROLE logins_later RENAME TO logins_latest")
        .await
        .unwrap();
    let renamed = Login {
        url: db.url().replace("rouse@", "logins_latest@"),
    };
    let said = refused(&renamed.store(), &serving("v", &["mail"])).await;
    assert!(said.contains("worker id v"), "{said}");
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
        let said = refusal(&hostile, sql).await;
        assert!(said.starts_with("42501"), "{sql}: {said}");
    }
}

#[tokio::test]
async fn leases_of_years_are_capped_at_a_day() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, db.worker().await);
    const YEARS_MS: i64 = i64::MAX;
    const DAYS: &str = "SELECT count(*) FILTER (WHERE lease_until BETWEEN now() + interval '23 hours' AND now() + interval '25 hours'), count(*) \
                        FROM rouse.job";
    let all_of_a_day = async || {
        let row = client.query_one(DAYS, &[]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), row.get::<_, i64>(1));
    };
    enqueue(&client, "x", json!({})).await;
    let years = orders(&worker, YEARS_MS).await;
    let job = worker
        .claim(Fence(7), &years, 1, None)
        .await
        .unwrap()
        .jobs()
        .remove(0);
    all_of_a_day().await;
    client
        .batch_execute("UPDATE rouse.job SET lease_until = now() - interval '1 s'")
        .await
        .unwrap();
    let adopted = crate::support::claims::adopt(&worker, Fence(8), &years, 1, 3, None)
        .await
        .unwrap();
    assert_eq!(ids(&adopted.claimed), [job.id.0]);
    all_of_a_day().await;
    let renewed = format!(
        "SELECT rouse.renew(incarnation, NULL, '{{{}}}', '{{8}}', '{{{YEARS_MS}}}') FROM rouse.worker",
        job.id.0
    );
    client
        .batch_execute("UPDATE rouse.worker SET key_hash = sha256('k'); UPDATE rouse.job SET lease_until = now() + interval '1 min'")
        .await
        .unwrap();
    client
        .query(&renewed.replace("NULL", "'k'"), &[])
        .await
        .unwrap();
    all_of_a_day().await;
    put(&client, "'x', source => 's'").await;
    worker_with(&client, "k").await;
    let bound = format!(
        "SELECT rouse.claim_bound(incarnation, 'k', 9, ARRAY(SELECT id FROM rouse.lane), '{{s}}', {YEARS_MS}, 1) FROM rouse.worker"
    );
    assert_eq!(client.query(&bound, &[]).await.unwrap().len(), 1);
    all_of_a_day().await;
}

/// Gives the registered workers this key.
async fn worker_with(client: &Client, key: &str) {
    let sql = format!("UPDATE rouse.worker SET key_hash = sha256('{key}')");
    client.batch_execute(&sql).await.unwrap();
}

#[tokio::test]
async fn a_worker_that_asks_for_no_orphans_gets_none() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    claim(&worker, 1).await;
    worker_with(&client, "k").await;
    client
        .batch_execute("UPDATE rouse.job SET lease_until = now() - interval '1 s'")
        .await
        .unwrap();
    for wanted in ["-1", "NULL"] {
        let sql = format!(
            "SELECT o.id FROM rouse.worker AS w, rouse.orphans(w.incarnation, 'k', ARRAY(SELECT id FROM rouse.lane), NULL, {wanted}, NULL) AS o"
        );
        let rows = client.query(&sql, &[]).await.unwrap();
        assert_eq!(rows.len(), 0, "{wanted}");
    }
    assert_eq!(show(&client, id).await.state, "running");
}

#[tokio::test]
async fn values_reported_by_a_worker_are_bounded() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_large").await;
    let hostile = login.client().await;
    let register = |hostname: &str,
                    version: &str,
                    capabilities: &str,
                    slots: &str,
                    queues: &str,
                    tags: &str| {
        format!(
            "SELECT rouse.register('w', sha256('k'), {hostname}, 'p', {version}, {capabilities}, {slots}, {queues}, {tags})"
        )
    };
    let many = "array_fill('q'::text, ARRAY[1001])";
    for (sql, why) in [
        (
            register("repeat('x', 50000000)", "'v'", "'{}'", "1", "'{}'", "'{}'"),
            "hostname",
        ),
        (
            register("'h'", "repeat('x', 256)", "'{}'", "1", "'{}'", "'{}'"),
            "version",
        ),
        (
            register(
                "'h'",
                "'v'",
                "jsonb_build_object('x', jsonb_build_object('version', repeat('x', 9000000)))",
                "1",
                "'{}'",
                "'{}'",
            ),
            "bytes",
        ),
        (
            register("'h'", "'v'", "'{}'", "2000000000", "'{}'", "'{}'"),
            "slots",
        ),
        (
            register("'h'", "'v'", "'{}'", "-1", "'{}'", "'{}'"),
            "slots",
        ),
        (register("'h'", "'v'", "'{}'", "1", many, "'{}'"), "queues"),
        (
            register("'h'", "'v'", "'{}'", "1", "ARRAY[repeat('q', 129)]", "'{}'"),
            "queues",
        ),
        (register("'h'", "'v'", "'{}'", "1", "'{}'", many), "tags"),
        (register("'h'", "'v'", "'{}'", "1", "'{}'", "NULL"), "tags"),
    ] {
        let said = refusal(&hostile, &sql).await;
        assert!(
            said.starts_with("22023") || said.starts_with("54000"),
            "{sql}: {said}"
        );
        assert!(said.contains(why), "{sql}: {said}");
    }
    let row = hostile
        .query_one(&register("'h'", "'v'", "'{}'", "1", "'{}'", "'{}'"), &[])
        .await;
    row.unwrap();
    let me: i64 = client
        .query_one("SELECT incarnation FROM rouse.worker", &[])
        .await
        .unwrap()
        .get(0);
    put(&client, "'x'").await;
    hostile
        .query(&format!("SELECT rouse.claim({me}, sha256('k'), 5, ARRAY(SELECT ROW(id, -1, 1000, NULL, NULL)::rouse.claim_order FROM rouse.lane), 1)"), &[])
        .await
        .unwrap();
    let id: i64 = client
        .query_one("SELECT id FROM rouse.job WHERE state = 'running'", &[])
        .await
        .unwrap()
        .get(0);
    for sql in [
        format!(
            "SELECT rouse.heartbeat({me}, sha256('k'), '{{}}', jsonb_build_object('a', repeat('x', 100000)), false)"
        ),
        format!("SELECT rouse.sleep({me}, sha256('k'), {many}, 1000)"),
        format!("SELECT rouse.sleep({me}, sha256('k'), ARRAY[repeat('q', 5000)], 1000)"),
        format!(
            "SELECT rouse.record_step({me}, sha256('k'), {id}, 5, 's', to_json(repeat('x', 9000000)))"
        ),
        format!(
            "SELECT rouse.answer_challenge({me}, sha256('k'), gen_random_uuid(), to_jsonb(repeat('x', 100000)))"
        ),
        format!(
            "SELECT rouse.settle({me}, sha256('k'), \
             ARRAY[ROW({id}, 5, 'succeeded', 0, to_jsonb(repeat('x', 68000000)), NULL, 0, NULL, NULL, 1, 1, 1, 1, 1, NULL, NULL)::rouse.settlement], false)"
        ),
    ] {
        let said = refusal(&hostile, &sql).await;
        assert!(
            said.starts_with("22023") || said.starts_with("54000"),
            "{sql}: {said}"
        );
    }
    // Values with a bound of their own are truncated to it.
    hostile
        .batch_execute(&format!(
            "SELECT rouse.sleep({me}, sha256('k'), '{{*}}', 9223372036854775807);
             SELECT rouse.append_log({me}, sha256('k'), ARRAY[ROW({id}, -1, -1, -9223372036854775807, 'info', repeat('x', 99999))::rouse.log_line]);
             SELECT rouse.report_usage({me}, sha256('k'), ARRAY[ROW({id}, 5, -1, -2, -3, -4, -5)::rouse.attempt_usage]);
             SELECT rouse.settle({me}, sha256('k'), ARRAY[ROW({id}, 5, 'queued', 9223372036854775807, NULL, '{{}}', 9223372036854775807, NULL,
                                 9223372036854775807, -1, -1, -1, -1, -1, NULL, NULL)::rouse.settlement], false)"
        ))
        .await
        .unwrap();
    for fact in [
        "SELECT until < now() + interval '61 min' FROM rouse.sleeper",
        "SELECT length(text) = 16384 AND at <= now() AND attempt = 1 AND line = 1 FROM rouse.log",
        "SELECT least(cpu_us, memory_bytes, host_calls, bytes_in, bytes_out) > 0 FROM rouse.running",
        "SELECT least(cpu_us, memory_peak_bytes, host_calls, bytes_in, bytes_out) > 0 AND started_at <= ended_at FROM rouse.attempt",
        "SELECT available_at < now() + interval '367 days' AND memory_bytes = 1099511627776 FROM rouse.job",
    ] {
        assert!(
            client.query_one(fact, &[]).await.unwrap().get::<_, bool>(0),
            "{fact}"
        );
    }
}

#[tokio::test]
async fn another_login_can_neither_write_as_a_worker_nor_take_its_id_even_with_the_key() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (owner, thief) = (
        Login::create(&db, "logins_owner").await,
        Login::create(&db, "logins_thief").await,
    );
    let key = WorkerKey::new([7; 32]);
    let (mine, theirs) = (owner.store(), thief.store());
    mine.register(&registration("w", key.clone()))
        .await
        .unwrap();
    enqueue(&client, "x", json!({})).await;
    let job = claim(&mine, 1).await.remove(0);
    let error = theirs
        .register(&registration("w", key.clone()))
        .await
        .unwrap_err();
    assert!(error.is_taken(), "{error}");
    let hostile = thief.client().await;
    let me = mine.incarnation().unwrap().0;
    let sql = format!("SELECT rouse.unregister({me}, '\\x{}')", "07".repeat(32));
    let said = refusal(&hostile, &sql).await;
    assert!(said.starts_with("RW004"), "{said}");
    let done = settlement(&job, Outcome::Succeeded(JsonText("1".into())));
    let fates = mine.settle(&[done], Locked::Wait).await.unwrap();
    assert!(fates.accepted.contains(&job.id));
    // The owning login can take the id over at once.
    owner
        .store()
        .register(&registration("w", key))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_limited_login_cannot_read_the_audit_feed_or_the_history_without_maintenance() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (limited, keeper) = (
        Login::create(&db, "logins_deaf").await,
        Login::create(&db, "logins_keeper").await,
    );
    limit(
        &client,
        "login, worker_ids, queues",
        "'logins_deaf', '{deaf}', '{mail}'",
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
    let deaf = limited.worker("deaf", &["mail"]).await;
    assert_eq!(deaf.take_audit_outbox(1000).await.unwrap().len(), 0);
    assert_eq!(deaf.maintain_partitions(7).await.unwrap().0, 0);
    let keeper = keeper.worker("keeper", &["mail"]).await;
    assert_eq!(
        keeper.take_audit_outbox(1000).await.unwrap().len(),
        1,
        "the event was not taken"
    );
    assert_eq!(keeper.maintain_partitions(7).await.unwrap().0, 1);
    // The history still records events that were taken from the feed.
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
        .batch_execute("SELECT rouse.put_state('secrets', NULL, 'k', 'v')")
        .await
        .unwrap();
    put(&client, "'x', queue => 'mail'").await;
    let store = login.worker("w", &["mail"]).await;
    let job = claim(&store, 1).await.remove(0);
    let of = |handler| rouse::store::StateOf {
        id: job.id,
        fence: job.fence,
        handler,
    };
    let error = store.get_state(of("secrets"), "k").await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "RW006", "{error}");
    store.get_state(of("x"), "k").await.unwrap().unwrap();
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

#[tokio::test]
async fn a_workers_login_cannot_read_a_job_by_its_id() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_reader").await;
    let id = put(&client, "'x', '{\"card\": 4711}'").await;
    let hostile = login.client().await;
    for call in ["job", "result", "history", "job_log"] {
        let said = refusal(&hostile, &format!("SELECT * FROM rouse.{call}({id})")).await;
        assert!(said.starts_with("42501"), "{said}");
    }
}

/// The keys of the advisory locks that functions of Rouse once took: any login of the database can hold them.
#[tokio::test]
async fn advisory_locks_held_by_a_login_without_roles_block_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("CREATE ROLE logins_nobody LOGIN")
        .await
        .unwrap();
    let nobody = connect(&db.url().replace("rouse@", "logins_nobody@")).await;
    put(&client, "'x'").await;
    nobody
        .batch_execute(
            "SELECT pg_advisory_lock(hashtextextended(key, 0))
             FROM unnest(ARRAY['rouse.register w', 'rouse.state x/', 'rouse.partitions', 'rouse.migrate']) AS key",
        )
        .await
        .unwrap();
    for table in ["lock", "wake_salt", "worker", "worker_login"] {
        let sql = format!("DO $$ BEGIN LOCK TABLE rouse.{table} IN ACCESS SHARE MODE; END $$");
        let said = refusal(&nobody, &sql).await;
        assert!(said.starts_with("42501"), "{said}");
    }
    client
        .batch_execute("SET lock_timeout = '10s'; SELECT rouse.put_state('x', NULL, 'k', 'v')")
        .await
        .unwrap();
    let store = db.store();
    store
        .register(&registration("w", WorkerKey::random()))
        .await
        .unwrap();
    store.unregister().await.unwrap();
    client
        .batch_execute("SELECT rouse.forget_worker('w')")
        .await
        .unwrap();
    database::migrate(&db.url()).await.unwrap();
}

#[tokio::test]
async fn a_full_notification_queue_stops_notifications_and_nothing_else() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = db.worker().await;
    let sleeper = worker.incarnation().unwrap();
    let mut listener = Listener::start(&db.connector(), sleeper).await.unwrap();
    client
        .batch_execute("CREATE OR REPLACE FUNCTION rouse._may_notify() RETURNS boolean LANGUAGE sql AS 'SELECT false'")
        .await
        .unwrap();
    worker
        .sleep(&["*".to_string()], Duration::from_secs(60))
        .await
        .unwrap();
    let id = put(&client, "'x'").await;
    assert_eq!(claimed(&worker).await, [id]);
    client
        .batch_execute(&format!(
            "SELECT rouse.cancel({id}); SELECT rouse.challenge('w-1', 'x'); SELECT rouse.pause_queue('q'); SELECT rouse.resume_queue('q');
             SELECT pg_notify('rouse_wake', 'the-end')"
        ))
        .await
        .unwrap();
    let Some(Heard::Wakeup(first)) = listener.next().await else {
        panic!("the first notification is the test's own");
    };
    assert_eq!(first.queue, "the-end");
    let usage = worker
        .database_metrics()
        .await
        .unwrap()
        .notification_queue_usage;
    assert!((0.0..0.5).contains(&usage), "{usage}");
}
