//! The privileges of each role.

use serde_json::json;
use tokio_postgres::error::SqlState;

use crate::support::TestDb;
use crate::support::worker::enqueue;

/// Whether the role may make this call.
async fn may_call(db: &TestDb, role: &str, call: &str) -> bool {
    let mut client = db.client().await;
    let transaction = client.transaction().await.unwrap();
    transaction
        .batch_execute(&format!("SET LOCAL ROLE {role}"))
        .await
        .unwrap();
    match transaction.query(call, &[]).await {
        Ok(_) => true,
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => false,
        // The role may call it, but is not a registered worker.
        Err(error) if error.code().is_some_and(|code| code.code() == "RW004") => true,
        // The role may call it, but the job or worker does not exist.
        Err(error) if error.code() == Some(&SqlState::NO_DATA_FOUND) => true,
        Err(error) => panic!("{role}: {call}: {error:?}"),
    }
}

const ENQUEUE: &str = "SELECT rouse.enqueue('x')";
const ENQUEUE_MANY: &str = "SELECT rouse.enqueue_many('x', '{1}'::jsonb[])";
const CANCEL: &str = "SELECT rouse.cancel(1)";
const JOB: &str = "SELECT * FROM rouse.job(1)";
const HISTORY: &str = "SELECT * FROM rouse.history(1)";
const CLAIM: &str = "SELECT * FROM rouse.claim(1, NULL, 1, '{}', 1)";
const CLAIM_BOUND: &str = "SELECT * FROM rouse.claim_bound(1, NULL, 1, '{}', '{}', 1, 1)";
const TAKE_AUDIT_OUTBOX: &str = "SELECT * FROM rouse.take_audit_outbox(1, NULL, '{}', 1)";
const SETTLE: &str = "SELECT * FROM rouse.settle(1, NULL, '{}', '{}', false)";
const RENEW: &str = "SELECT * FROM rouse.renew(1, NULL, '{}', '{}', '{}')";
const REGISTER: &str =
    "SELECT rouse.register('w', sha256('key'), 'h', 'p', 'v', '{}', 1, '{}', '{}')";
const READ_KEYS: &str = "SELECT key_hash FROM rouse.worker";
const READ_LIVE_KEYS: &str = "SELECT key_hash FROM rouse.live_worker";
const WORKERS: &str = "SELECT * FROM rouse.workers";
const READ_TABLE: &str = "SELECT id, payload FROM rouse.job";
const READ_FENCES: &str = "SELECT fence FROM rouse.job";
const READ_VIEW: &str = "SELECT * FROM rouse.jobs";
const DELETE_JOBS: &str = "DELETE FROM rouse.job";
const UPDATE_FINISHED: &str = "UPDATE rouse.finished SET result = NULL";
const DELETE_ATTEMPTS: &str = "DELETE FROM rouse.attempt";
const MAINTAIN_PARTITIONS: &str = "SELECT rouse.maintain_partitions(1, NULL)";
const DROP_PARTITIONS: &str = "SELECT rouse.drop_partitions('7 days')";
const INTERNAL_SETTLE: &str = "SELECT rouse._settle(NULL, '{}')";
const COMPLETE: &str = "SELECT rouse.complete((SELECT rouse.enqueue('x')))";
const PAUSE: &str = "SELECT rouse.pause_queue('roles')";
const RETENTION: &str = "SELECT rouse.set_retention('roles', 1)";
const PAYLOAD_LIMIT: &str = "SELECT rouse.set_payload_limit('roles', 2000)";
const DEFAULT_RETENTION: &str = "SELECT rouse.set_default_retention(8)";
const PURGE: &str = "SELECT rouse.purge_queue('roles')";
const QUEUES: &str = "SELECT * FROM rouse.queues";
const BACKLOG: &str = "SELECT * FROM rouse.backlog";
const INTERNAL_END: &str = "SELECT rouse._end(1, 'cancelled', NULL, NULL, 'x')";
const INTERNAL_EXPIRE: &str = "SELECT rouse._expire_worker(1)";
const READ_STATE: &str = "SELECT * FROM rouse.read_state(1, NULL, 1, 1, 'x', 'k')";
const STATE_KEYS: &str = "SELECT * FROM rouse.state_keys(1, NULL, 1, 1, 'x', '', NULL, 1)";
const WRITE_STATE: &str =
    "SELECT * FROM rouse.write_state(1, NULL, 1, 1, 'x', 'k', '', 1, NULL, 1, 1)";
const ERASE_STATE: &str = "SELECT * FROM rouse.erase_state(1, NULL, 1, 1, 'x', 'k')";
const SET_STATE: &str = "SELECT rouse.set_state('x', NULL, 'k', '')";
const DELETE_STATE: &str = "SELECT rouse.delete_state('x', NULL, 'k')";
const READ_STATE_ROWS: &str = "SELECT * FROM rouse.handler_state";
const DELETE_STATE_ROWS: &str = "DELETE FROM rouse.handler_state";
const RECEIPT: &str = "SELECT * FROM rouse.receipt(1)";
const RESULT: &str = "SELECT rouse.result(1)";
const OUTCOMES: &str = "SELECT * FROM rouse.outcomes('{1}')";
const WAIT: &str = "SELECT * FROM rouse.wait('{}')";
const WHY: &str = "SELECT * FROM rouse.why(1)";
const SIGNAL: &str = "SELECT rouse.signal((SELECT rouse.enqueue('x')), 'go')";
const TAKE_SIGNAL: &str = "SELECT rouse.take_signal(1, NULL, 1, 1, 's', 'go', NULL)";
const RETURNED_CALLS: &str = "SELECT rouse.returned_calls(1, NULL, 1, 1, '{}', 1)";
const PARENT_ENDS: &str = "SELECT rouse.parent_ends(1, NULL, 1, 1, NULL, NULL)";
const JOB_LOG: &str = "SELECT * FROM rouse.job_log(1)";
const FAIL: &str = "SELECT rouse.fail((SELECT rouse.enqueue('x')), 'why')";
const DELETE: &str = "SELECT rouse.delete((SELECT rouse.enqueue('x')))";
const RESCHEDULE: &str = "SELECT rouse.reschedule((SELECT rouse.enqueue('x')))";
const SET_PRIORITY: &str = "SELECT rouse.set_priority((SELECT rouse.enqueue('x')), 'high')";
const REPLACE_PAYLOAD: &str = "SELECT rouse.replace_payload((SELECT rouse.enqueue('x')), '1')";
const RETRY: &str = "SELECT rouse.retry(1)";
const SEARCH: &str = "SELECT rouse.search_jobs()";
const FIND: &str = "SELECT * FROM rouse.find_jobs()";
const RETRY_JOBS: &str = "SELECT rouse.retry_jobs('{\"state\": \"failed\"}')";
const RESUME: &str = "SELECT rouse.resume_queue('roles')";
const CHALLENGE: &str = "SELECT rouse.challenge('nobody', 'x')";
const ANSWER: &str = "SELECT rouse.challenge_answer(gen_random_uuid())";
const FORGET_WORKER: &str = "SELECT rouse.forget_worker('nobody')";
const SCHEDULE: &str = "SELECT rouse.schedule('roles', 'x', cron => '0 0 1 1 *')";
const UNSCHEDULE: &str = "SELECT rouse.unschedule('nobody')";
const PAUSE_SCHEDULE: &str = "SELECT rouse.pause_schedule('nobody')";
const RESUME_SCHEDULE: &str = "SELECT rouse.resume_schedule('nobody')";
const RUN_SCHEDULE: &str = "SELECT rouse.run_schedule('nobody')";
const BACKFILL: &str = "SELECT rouse.backfill_schedule('nobody', now(), now())";
const SCHEDULES: &str = "SELECT * FROM rouse.schedules";
const CHANGE_SCHEDULES: &str = "UPDATE rouse.schedule SET next_at = NULL";
const DUE_SCHEDULES: &str = "SELECT rouse.due_schedules(1, NULL, 1, NULL)";
const FIRE_SCHEDULES: &str = "SELECT rouse.fire_schedules(1, NULL, '{}', '{}')";
const FIRE_BACKFILL: &str = "SELECT rouse.fire_backfill(1, NULL, 1, NULL, '{}', true, NULL)";
const MAINTAIN_SCHEDULES: &str = "SELECT rouse.maintain_schedules(1, NULL)";
const MODULE_SCHEDULES: &str = "SELECT rouse.module_schedules(1, NULL)";
const PUT_MODULE_SCHEDULE: &str =
    "SELECT rouse.put_module_schedule(1, NULL, 'x', '1', '* * * * *', 'UTC')";
const DELETE_MODULE_SCHEDULE: &str = "SELECT rouse.delete_module_schedule(1, NULL, 'x')";
const DECLARE_GATES: &str = "SELECT rouse.declare_gates(1, NULL, 'x', '[]')";
const READ_LIMITS: &str = "SELECT * FROM rouse.worker_login";
const DELETE_LIMITS: &str = "DELETE FROM rouse.worker_login";

#[tokio::test]
async fn each_role_has_exactly_its_own_privileges() {
    let db = TestDb::new().await;
    let enqueuer = &[ENQUEUE, ENQUEUE_MANY, RECEIPT][..];
    let producer = &[
        CANCEL,
        JOB,
        RESULT,
        OUTCOMES,
        WAIT,
        WHY,
        HISTORY,
        JOB_LOG,
        SIGNAL,
        SCHEDULE,
        UNSCHEDULE,
        PAUSE_SCHEDULE,
        RESUME_SCHEDULE,
        RUN_SCHEDULE,
        BACKFILL,
    ][..];
    let observer = &[
        READ_TABLE,
        READ_VIEW,
        JOB,
        RESULT,
        OUTCOMES,
        WAIT,
        WHY,
        HISTORY,
        JOB_LOG,
        WORKERS,
        QUEUES,
        BACKLOG,
        READ_STATE_ROWS,
        READ_LIMITS,
        SEARCH,
        FIND,
        SCHEDULES,
    ][..];
    let operator = &[
        COMPLETE,
        FAIL,
        DELETE,
        RETRY,
        RETRY_JOBS,
        RESCHEDULE,
        SET_PRIORITY,
        REPLACE_PAYLOAD,
        PAUSE,
        RESUME,
        PURGE,
        RETENTION,
        PAYLOAD_LIMIT,
        DEFAULT_RETENTION,
        CHALLENGE,
        ANSWER,
        FORGET_WORKER,
        SET_STATE,
        DELETE_STATE,
    ][..];
    let worker = &[
        CLAIM,
        CLAIM_BOUND,
        TAKE_AUDIT_OUTBOX,
        SETTLE,
        TAKE_SIGNAL,
        RETURNED_CALLS,
        PARENT_ENDS,
        RENEW,
        REGISTER,
        MAINTAIN_PARTITIONS,
        WORKERS,
        BACKLOG,
        READ_STATE,
        STATE_KEYS,
        WRITE_STATE,
        ERASE_STATE,
        DUE_SCHEDULES,
        FIRE_SCHEDULES,
        FIRE_BACKFILL,
        MAINTAIN_SCHEDULES,
        MODULE_SCHEDULES,
        PUT_MODULE_SCHEDULE,
        DELETE_MODULE_SCHEDULE,
        DECLARE_GATES,
    ][..];
    for (role, allowed) in [
        ("rouse_enqueuer", enqueuer.to_vec()),
        ("rouse_producer", [enqueuer, producer].concat()),
        (
            "rouse_operator",
            [enqueuer, producer, observer, operator].concat(),
        ),
        ("rouse_worker", worker.to_vec()),
        ("rouse_observer", observer.to_vec()),
    ] {
        for call in [
            ENQUEUE,
            ENQUEUE_MANY,
            CANCEL,
            JOB,
            HISTORY,
            CLAIM,
            CLAIM_BOUND,
            TAKE_AUDIT_OUTBOX,
            SETTLE,
            TAKE_SIGNAL,
            RETURNED_CALLS,
            PARENT_ENDS,
            SIGNAL,
            RENEW,
            REGISTER,
            READ_TABLE,
            READ_FENCES,
            READ_VIEW,
            DELETE_JOBS,
            UPDATE_FINISHED,
            DELETE_ATTEMPTS,
            MAINTAIN_PARTITIONS,
            INTERNAL_SETTLE,
            READ_KEYS,
            READ_LIVE_KEYS,
            WORKERS,
            DROP_PARTITIONS,
            INTERNAL_EXPIRE,
            COMPLETE,
            PAUSE,
            PAYLOAD_LIMIT,
            DEFAULT_RETENTION,
            PURGE,
            QUEUES,
            BACKLOG,
            INTERNAL_END,
            READ_STATE,
            STATE_KEYS,
            WRITE_STATE,
            ERASE_STATE,
            SET_STATE,
            DELETE_STATE,
            READ_STATE_ROWS,
            DELETE_STATE_ROWS,
            RECEIPT,
            RESULT,
            OUTCOMES,
            WAIT,
            WHY,
            JOB_LOG,
            FAIL,
            DELETE,
            RESCHEDULE,
            SET_PRIORITY,
            REPLACE_PAYLOAD,
            RETRY,
            RETRY_JOBS,
            SEARCH,
            FIND,
            RESUME,
            CHALLENGE,
            ANSWER,
            FORGET_WORKER,
            READ_LIMITS,
            DELETE_LIMITS,
            SCHEDULE,
            UNSCHEDULE,
            PAUSE_SCHEDULE,
            RESUME_SCHEDULE,
            RUN_SCHEDULE,
            BACKFILL,
            SCHEDULES,
            CHANGE_SCHEDULES,
            DUE_SCHEDULES,
            FIRE_SCHEDULES,
            FIRE_BACKFILL,
            MAINTAIN_SCHEDULES,
            MODULE_SCHEDULES,
            PUT_MODULE_SCHEDULE,
            DELETE_MODULE_SCHEDULE,
            DECLARE_GATES,
        ] {
            assert_eq!(
                may_call(&db, role, call).await,
                allowed.contains(&call),
                "{role}: {call}"
            );
        }
    }
}

#[tokio::test]
async fn observers_and_operators_read_all_columns_of_live_jobs_except_fences() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let unexpected = "SELECT array_agg(format('%s: %s.%s', r.role, a.attrelid::regclass, a.attname))
                 FROM pg_attribute AS a, unnest('{rouse_observer,rouse_operator}'::name[]) AS r(role)
                 WHERE a.attrelid = ANY ('{rouse.job,rouse.progress,rouse.running}'::regclass[])
                   AND a.attnum > 0 AND NOT a.attisdropped
                   AND has_column_privilege(r.role, a.attrelid, a.attnum, 'SELECT') <> (a.attname <> 'fence')";
    let unexpected: Option<Vec<String>> = client.query_one(unexpected, &[]).await.unwrap().get(0);
    assert_eq!(unexpected, None);
}

#[tokio::test]
async fn an_enqueuer_reads_only_the_state_of_a_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!({"card": 4711})).await;
    let read_receipt = async || {
        let row = client
            .query_one(
                "SELECT state::text, finished_at IS NOT NULL, to_jsonb(r) FROM rouse.receipt($1) AS r",
                &[&id],
            )
            .await
            .unwrap();
        let whole: serde_json::Value = row.get(2);
        let keys: Vec<String> = whole.as_object().unwrap().keys().cloned().collect();
        assert_eq!(keys.len(), 3, "{keys:?}");
        (row.get::<_, String>(0), row.get::<_, bool>(1))
    };
    assert_eq!(read_receipt().await, ("queued".into(), false));
    client
        .query("SELECT rouse.complete($1, '{\"secret\": 1}')", &[&id])
        .await
        .unwrap();
    assert_eq!(read_receipt().await, ("succeeded".into(), true));
}

#[tokio::test]
async fn a_login_without_roles_has_no_privileges() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Roles belong to the whole server, which other tests share.
    client
        .batch_execute("DO $$ BEGIN CREATE ROLE roles_nobody; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
        .await
        .unwrap();
    for call in [ENQUEUE, CANCEL, JOB, CLAIM, SETTLE, READ_TABLE] {
        assert!(!may_call(&db, "roles_nobody", call).await, "{call}");
    }
}

#[tokio::test]
async fn a_producers_objects_cannot_replace_those_that_the_functions_use() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // A function in a schema of the caller's own, first in the search path.
    client
        .batch_execute(
            "CREATE SCHEMA evil;
             CREATE FUNCTION evil.length(text) RETURNS integer LANGUAGE plpgsql AS $$ BEGIN RAISE 'trapped'; END $$;
             CREATE FUNCTION evil.nextval(regclass) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE 'trapped'; END $$;
             SET search_path = evil, pg_catalog",
        )
        .await
        .unwrap();
    enqueue(&client, "x", json!({})).await;
    let pinned = client
        .query_one(
            "SELECT count(*) FROM pg_catalog.pg_proc WHERE pronamespace = 'rouse'::regnamespace AND prosecdef
             AND NOT coalesce(proconfig @> ARRAY['search_path=pg_catalog, pg_temp'], false)",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(
        pinned.get::<_, i64>(0),
        0,
        "every SECURITY DEFINER function pins its search_path"
    );
}
