//! Schedules: what SQL accepts, the outcomes of due times, and the privileges for changing schedules.

mod backfills;
mod commands;
mod declared;
mod example;
mod firing;
mod interleavings;
mod overlaps;
mod page;

use std::time::Duration;

use rouse::job::cron::DueTimes;
use rouse::job::firing::{Decision, fire};
use rouse::store::{DueSchedule, ScheduleDecision, Store};
use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::{Client, Transaction};

use crate::support::TestDb;
use crate::support::database::{connect, refusal};
use crate::support::worker::{TestWorker, until_true};

/// The time that a host waits for a lock while it fires.
const LOCK_WAIT: Duration = Duration::from_millis(250);

/// A trigger of the operator refuses the jobs of the schedule `bad`, with an error that says nothing about the data.
const REFUSE_JOBS_OF_BAD: &str = "
    CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.source = 'schedule:bad' THEN
            RAISE EXCEPTION 'the stock is closed';
        END IF;
        RETURN NEW;
    END
    $$;
    CREATE TRIGGER refuse BEFORE INSERT ON rouse.job FOR EACH ROW EXECUTE FUNCTION public.refuse()";

/// Calls `rouse.schedule` with `sql` as its arguments.
async fn schedule(client: &Client, sql: &str) -> String {
    let sql = format!("SELECT rouse.schedule({sql})");
    client
        .query_one(&sql, &[])
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error:?}"))
        .get(0)
}

/// Moves a schedule back in time: all due times up to this long ago are handled.
async fn handled_until(client: &Client, name: &str, ago: &str) {
    let sql = format!(
        "UPDATE rouse.schedule SET handled_until = clock_timestamp() - interval '{ago}', next_at = NULL, revision = nextval('rouse.turn_seq')
         WHERE name = '{name}'"
    );
    assert_eq!(client.execute(&sql, &[]).await.unwrap(), 1);
}

/// A cron expression that was due within the last minute, and is not due again for an hour.
async fn this_minute(client: &Client) -> String {
    let minute: i32 = one(
        client,
        "SELECT extract(minute FROM clock_timestamp() AT TIME ZONE 'UTC')::integer",
    )
    .await;
    format!("{minute} * * * *")
}

/// Makes the due times of the last five minutes due, for all schedules.
async fn make_due(client: &Client) {
    client
        .batch_execute(
            "UPDATE rouse.schedule SET handled_until = clock_timestamp() - interval '5 minutes', next_at = NULL, revision = nextval('rouse.turn_seq')",
        )
        .await
        .unwrap();
}

/// A schedule with one due time that is due, and a host for it.
async fn due(overlap: &str) -> (TestDb, Client, Store) {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let cron = this_minute(&client).await;
    schedule(
        &client,
        &format!("'a', 'x', cron => '{cron}', overlap => '{overlap}'"),
    )
    .await;
    make_due(&client).await;
    (db, client, store)
}

/// The decisions of a host about everything that is due.
async fn decided(store: &Store) -> Vec<(DueSchedule, Decision)> {
    let due = store
        .due_schedules(1000, None, &[], &[], None)
        .await
        .unwrap();
    let now = due.now;
    let decide = |listed: DueSchedule| {
        let times = DueTimes::parse(&listed.cron, &listed.time_zone);
        let decision = fire(&listed.schedule, &times, now);
        (listed, decision)
    };
    due.schedules.into_iter().map(decide).collect()
}

/// Writes decisions; returns the names of the schedules for which they apply.
async fn write(store: &Store, decided: &[(DueSchedule, Decision)]) -> Vec<String> {
    let fired: Vec<ScheduleDecision<'_>> = decided
        .iter()
        .map(|(due, decision)| ScheduleDecision {
            due,
            decision,
            refused: None,
        })
        .collect();
    store.fire_schedules(&fired, LOCK_WAIT).await.unwrap()
}

/// Blocks jobs of the handler `gated` until the returned transaction ends: it has enqueued one of them, and all of them
/// have the same key of a gate.
async fn block_gated_jobs<'a>(client: &Client, producer: &'a mut Client) -> Transaction<'a> {
    client
        .batch_execute("SELECT rouse.set_gate('one', 'singleton', handler => 'gated')")
        .await
        .unwrap();
    let open = producer.transaction().await.unwrap();
    open.batch_execute("SELECT rouse.enqueue('gated')")
        .await
        .unwrap();
    open
}

/// Fires everything that is due, as one round of a host does.
async fn fire_due(store: &Store) {
    write(store, &decided(store).await).await;
}

/// The outcomes of the due times of a schedule, oldest first.
async fn outcomes(client: &Client, name: &str) -> Vec<String> {
    let sql = "SELECT outcome FROM rouse.schedule_run WHERE schedule = $1 ORDER BY id";
    let rows = client.query(sql, &[&name]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// The row of a schedule in `rouse.schedules`.
async fn shown(client: &Client, name: &str) -> Value {
    let sql = "SELECT to_jsonb(s) FROM rouse.schedules AS s WHERE name = $1";
    client.query_one(sql, &[&name]).await.unwrap().get(0)
}

async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(client: &Client, sql: &str) -> T {
    client
        .query_one(sql, &[])
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error:?}"))
        .get(0)
}

#[tokio::test]
async fn a_schedule_is_created_replaced_and_left_alone() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let nightly = "'nightly', 'report.make', '{\"kind\": 1}', cron => ' 0  3 * * * ', time_zone => 'Europe/Berlin'";
    assert_eq!(schedule(&client, nightly).await, "created");
    assert_eq!(schedule(&client, nightly).await, "unchanged");
    let row = shown(&client, "nightly").await;
    assert_eq!(row["cron"], "0 3 * * *");
    assert_eq!(
        (
            &row["state"],
            &row["overlap"],
            &row["catch_up"],
            &row["source"]
        ),
        (
            &json!("active"),
            &json!("skip"),
            &json!("one"),
            &json!("schedule:nightly")
        )
    );
    assert_eq!(
        (&row["next_at"], &row["upcoming"]),
        (&json!(null), &json!([]))
    );
    assert_eq!(
        schedule(&client, &format!("{nightly}, queue => 'slow'")).await,
        "replaced"
    );
    let detail: Value = one(
        &client,
        "SELECT detail FROM rouse.record WHERE event = 'schedule_replaced'",
    )
    .await;
    assert_eq!(detail, json!({"schedule": "nightly", "changed": ["queue"]}));
    // A rollback leaves nothing behind.
    client
        .batch_execute("BEGIN; SELECT rouse.schedule('other', 'x', cron => '* * * * *'); ROLLBACK")
        .await
        .unwrap();
    assert_eq!(
        one::<i64>(&client, "SELECT count(*) FROM rouse.schedules").await,
        1
    );
    assert!(one::<bool>(&client, "SELECT rouse.unschedule('nightly')").await);
    assert!(!one::<bool>(&client, "SELECT rouse.unschedule('nightly')").await);
}

#[tokio::test]
async fn arguments_that_no_job_could_have_are_refused_with_the_reason() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (args, why) in [
        ("'', 'x', cron => '* * * * *'", "'' is not a schedule name"),
        (
            "NULL, 'x', cron => '* * * * *'",
            "null is not a schedule name",
        ),
        (
            "repeat('a', 129), 'x', cron => '* * * * *'",
            "is not a schedule name",
        ),
        (
            "'a', 'Not A Handler', cron => '* * * * *'",
            "'Not A Handler' is not a handler name",
        ),
        (
            "'a', 'x'",
            "null is not a cron expression / It has five fields",
        ),
        (
            "'a', 'x', cron => '0 3 * *'",
            "'0 3 * *' is not a cron expression",
        ),
        (
            "'a', 'x', cron => '0 0 3 * * * 2027'",
            "is not a cron expression",
        ),
        ("'a', 'x', cron => '@daily'", "is not a cron expression"),
        (
            "'a', 'x', cron => '* * * * *', time_zone => 'Europe/Atlantis'",
            "'Europe/Atlantis' is not a time zone",
        ),
        (
            "'a', 'x', cron => '* * * * *', overlap => 'wait'",
            "overlap must be skip, queue, allow or cancel, not 'wait'",
        ),
        (
            "'a', 'x', cron => '* * * * *', catch_up => 'some'",
            "catch_up must be none, one or all, not 'some'",
        ),
        (
            "'a', 'x', cron => '* * * * *', catch_up_window => '0'",
            "catch_up_window must be between",
        ),
        (
            "'a', 'x', cron => '* * * * *', jitter => '2 days'",
            "jitter must be between 0 and 1 day, not 2 days",
        ),
        (
            "'a', 'x', cron => '* * * * *', jitter => '-1 s'",
            "jitter must be between 0 and 1 day",
        ),
        (
            "'a', 'x', cron => '* * * * *', priority => 'top'",
            "priority must be high, normal or low, not 'top'",
        ),
        (
            "'a', 'x', cron => '* * * * *', lease => '1 s'",
            "lease must be between",
        ),
        (
            "'a', 'x', cron => '* * * * *', grants => '[]'",
            "grants must be an object",
        ),
        (
            "'a', 'x', cron => '* * * * *', max_attempts => 0",
            "max_attempts must be between",
        ),
        (
            "'a', 'x', '[]', cron => '* * * * *', due_key => 'at'",
            "with due_key, the payload must be an object",
        ),
        (
            "'a', 'x', to_jsonb(repeat('a', 300000)), cron => '* * * * *'",
            "the payload is 300002 bytes long",
        ),
        // The due time makes it too large.
        (
            "'a', 'x', jsonb_build_object('a', repeat('a', 262130)), cron => '* * * * *', due_key => 'at'",
            "the payload is 262169 bytes long",
        ),
    ] {
        let refused = refusal(&client, &format!("SELECT rouse.schedule({args})")).await;
        assert!(refused.contains(why), "{args}: {refused}");
    }
    for call in [
        "pause_schedule('a')",
        "resume_schedule('a')",
        "run_schedule('a')",
        "backfill_schedule('a', now() - interval '1 day', now())",
    ] {
        let refused = refusal(&client, &format!("SELECT rouse.{call}")).await;
        assert!(
            refused.starts_with("rouse: schedule 'a' does not exist"),
            "{refused}"
        );
    }
}

#[tokio::test]
async fn the_number_of_schedules_is_limited() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("UPDATE rouse.limits SET schedules_max = 2")
        .await
        .unwrap();
    for name in ["a", "b"] {
        schedule(&client, &format!("'{name}', 'x', cron => '* * * * *'")).await;
    }
    let refused = refusal(
        &client,
        "SELECT rouse.schedule('c', 'x', cron => '* * * * *')",
    )
    .await;
    assert_eq!(
        refused,
        "rouse.schedule: there are already 2 schedules, the maximum / Delete some, or raise schedules_max in rouse.limits."
    );
    // Existing ones can be changed.
    assert_eq!(
        schedule(&client, "'a', 'y', cron => '* * * * *'").await,
        "replaced"
    );
}

#[tokio::test]
async fn every_action_on_a_schedule_leaves_a_record_with_its_login() {
    let db = TestDb::new().await;
    let client = db.client().await;
    schedule(&client, "'a', 'x', cron => '* * * * *'").await;
    client
        .batch_execute(
            "SELECT rouse.schedule('a', 'x', cron => '0 * * * *');
             SELECT rouse.pause_schedule('a'); SELECT rouse.pause_schedule('a'); SELECT rouse.resume_schedule('a'); SELECT rouse.resume_schedule('a');
             SELECT rouse.run_schedule('a'); SELECT rouse.backfill_schedule('a', now() - interval '1 day', now()); SELECT rouse.unschedule('a')",
        )
        .await
        .unwrap();
    let sql = "SELECT string_agg(replace(event, 'schedule_', ''), ' ' ORDER BY at, event) FROM rouse.audit(now() - interval '1 hour')
               WHERE by = session_user AND detail ->> 'schedule' = 'a'";
    assert_eq!(
        one::<String>(&client, sql).await,
        "created replaced paused resumed run backfilled deleted"
    );
    let finished = "SELECT error FROM rouse.backfill";
    assert_eq!(
        one::<String>(&client, finished).await,
        "the schedule was deleted"
    );
}

#[tokio::test]
async fn a_producer_changes_only_the_schedules_of_its_own_login_and_an_operator_all() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE ROLE schedules_shop LOGIN IN ROLE rouse_producer; CREATE ROLE schedules_mail LOGIN IN ROLE rouse_producer;
             CREATE ROLE schedules_ops LOGIN IN ROLE rouse_operator; CREATE ROLE schedules_enqueuer LOGIN IN ROLE rouse_enqueuer",
        )
        .await
        .unwrap();
    let login = async |name: &str| {
        connect(&db.url().replace("rouse@", &format!("schedules_{name}@"))).await
    };
    let shop = login("shop").await;
    schedule(&shop, "'shop', 'x', cron => '0 0 1 1 *'").await;
    let mail = login("mail").await;
    for call in [
        "schedule('shop', 'y', cron => '* * * * *')",
        "unschedule('shop')",
        "pause_schedule('shop')",
        "resume_schedule('shop')",
        "run_schedule('shop')",
        "backfill_schedule('shop', now() - interval '1 day', now())",
    ] {
        let refused = refusal(&mail, &format!("SELECT rouse.{call}")).await;
        assert!(refused.contains("login schedules_mail may not change schedule shop, which belongs to login schedules_shop"), "{refused}");
        if !call.starts_with("unschedule") {
            shop.batch_execute(&format!("SELECT rouse.{call}"))
                .await
                .unwrap();
        }
    }
    let refused = refusal(&shop, "SELECT FROM rouse.schedules").await;
    assert!(
        refused.contains("permission denied for view schedules"),
        "{refused}"
    );
    let refused = refusal(
        &login("enqueuer").await,
        "SELECT rouse.schedule('e', 'x', cron => '* * * * *')",
    )
    .await;
    assert!(
        refused.contains("permission denied for function schedule"),
        "{refused}"
    );
    let ops = login("ops").await;
    ops.batch_execute("SELECT rouse.pause_schedule('shop'); SELECT FROM rouse.schedules; SELECT rouse.unschedule('shop')").await.unwrap();
}

#[tokio::test]
async fn a_worker_runs_the_jobs_of_a_schedule_when_they_are_due() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    schedule(&client, "'tick', 'noop', '{\"n\": 1}', cron => '* * * * * *', overlap => 'allow', due_key => 'at', tenant => 't', priority => 'high'").await;
    until_true(
        &client,
        "SELECT count(*) >= 2 FROM rouse.finished WHERE state = 'succeeded'",
    )
    .await;
    worker.drain().await;
    let row = shown(&client, "tick").await;
    assert_eq!(row["upcoming"].as_array().map(Vec::len), Some(5));
    assert_eq!(row["upcoming"][0], row["next_at"]);
    // Jobs of the last ones may not have run before the drain.
    let states = "SELECT jsonb_object_agg(id, state) FROM rouse.jobs";
    let states: Value = one(&client, states).await;
    let last_runs = row["last_runs"].as_array().unwrap();
    assert!(last_runs.len() >= 2, "{row}");
    for run in last_runs {
        let state = &states[run["job"].to_string()];
        assert_eq!(
            (&run["outcome"], &run["state"]),
            (&json!("enqueued"), state)
        );
    }
    let sql = "SELECT count(*) FROM rouse.jobs AS j JOIN rouse.schedule_run AS r ON r.job = j.id
               WHERE j.source = 'schedule:tick' AND j.tenant = 't' AND j.priority = 'high' AND r.due_at = date_trunc('second', r.due_at)
                 AND j.payload = jsonb_build_object('n', 1, 'at', to_char(r.due_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'))
                 AND r.at >= r.due_at AND r.at < r.due_at + interval '1 minute'";
    assert_eq!(
        one::<i64>(&client, sql).await,
        one::<i64>(&client, "SELECT count(*) FROM rouse.jobs").await
    );
    // A pause of the machine delays some, but not all of them.
    let sql = "SELECT min(r.at - r.due_at) < interval '5 s' FROM rouse.schedule_run AS r";
    assert!(one::<bool>(&client, sql).await);
}

#[tokio::test]
async fn a_worker_computes_the_due_times_of_a_new_schedule_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    // The worker sleeps, and gets notifications.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    schedule(
        &client,
        "'yearly', 'noop', cron => '0 0 1 1 *', time_zone => 'Asia/Tokyo'",
    )
    .await;
    until_true(&client, "SELECT next_at IS NOT NULL FROM rouse.schedules").await;
    let sql = "SELECT upcoming[5] - upcoming[1] > interval '4 years' AND upcoming[1] AT TIME ZONE 'Asia/Tokyo' = date_trunc('year', upcoming[1] AT TIME ZONE 'Asia/Tokyo')
               FROM rouse.schedules";
    assert!(one::<bool>(&client, sql).await);
    worker.drain().await;
}

#[tokio::test]
async fn old_rows_about_due_times_are_deleted_except_about_the_last_job() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    schedule(&client, "'a', 'x', cron => '0 0 1 1 *'").await;
    client
        .batch_execute("SELECT rouse.run_schedule('a'); SELECT rouse.run_schedule('a')")
        .await
        .unwrap();
    assert_eq!(store.maintain_schedules().await.unwrap(), 0);
    client
        .batch_execute("UPDATE rouse.schedule_run SET at = now() - interval '8 days'")
        .await
        .unwrap();
    assert_eq!(store.maintain_schedules().await.unwrap(), 1);
    assert_eq!(store.maintain_schedules().await.unwrap(), 0);
    assert_eq!(outcomes(&client, "a").await, ["manual"]);
}
