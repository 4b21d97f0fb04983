//! Calls about one job among thousands of others.

use tokio_postgres::Client;

use crate::support::TestDb;

use super::{FENCE, JOBS, rows_read};

/// Thousands of rows in each table, none of which a call about another job has to read: jobs in each state, with all
/// that belongs to them, ended jobs, workers, lanes, schedules.
pub(super) const CROWD: &str = "
    SET session_replication_role = replica;
    CREATE TEMPORARY TABLE other AS SELECT nextval('rouse.turn_seq') AS id, n FROM generate_series(1, 12000) AS n;
    INSERT INTO rouse.worker (incarnation, worker_id, hostname, version, handlers, key_hash, stopped_at) OVERRIDING SYSTEM VALUE
        SELECT -n, 'other-' || n, '', '', '{}', sha256('other'), CASE WHEN n > 300 THEN now() END FROM generate_series(1, 3000) AS n;
    INSERT INTO rouse.live_worker (worker, worker_id, key_hash, draining, handlers, parked, queues, tags, login, limited)
        SELECT w.incarnation, w.worker_id, w.key_hash, false, w.handlers, w.parked, w.queues, w.tags, w.login, w.limited
        FROM rouse.worker AS w WHERE w.incarnation < 0 AND w.stopped_at IS NULL;
    INSERT INTO rouse.lane (id, queue, handler, priority, tags, key, worker)
        SELECT -n, 'others', 'other', 'normal'::rouse.priority, '{}'::text[], 'worker ' || n, -n FROM generate_series(1, 3000) AS n
        UNION ALL SELECT -n, 'others-' || n, 'other', 'normal', '{}', '', NULL FROM generate_series(3001, 6000) AS n;
    INSERT INTO rouse.job (id, lane, turn, requested_at, available_at, bytes, payload, blockers, flow, flow_name,
                           state, fence, worker, claimed_at, lease_until, attempt)
        SELECT o.id, l.id, CASE WHEN o.n > 6000 THEN o.id END, now(), now() + CASE WHEN o.n <= 3000 THEN interval '1 day' ELSE '0' END, 2, '{}',
               CASE WHEN o.n BETWEEN 3001 AND 6000 THEN 1 END, -o.n, '', r.state, r.fence, -r.fence, r.claimed_at, r.lease_until, coalesce(r.fence, 0)
        FROM other AS o CROSS JOIN (SELECT min(l.id) AS id FROM rouse.lane AS l WHERE l.handler = 'x') AS l
        CROSS JOIN LATERAL (
            SELECT 'queued'::rouse.state AS state, NULL::integer AS fence, NULL::timestamptz AS claimed_at, NULL::timestamptz AS lease_until WHERE o.n <= 9000
            UNION ALL SELECT 'running', 1, now(), now() + interval '1 day' WHERE o.n > 9000) AS r;
    INSERT INTO rouse.dependency (chain, on_failure, job) SELECT o.id + 3000, 'cancel', o.id FROM other AS o WHERE o.n BETWEEN 3001 AND 6000;
    INSERT INTO rouse.deadline (job, deadline_at, try_at, timeout_ms)
        SELECT o.id, now() + interval '1 day', now() + interval '1 day', 1 FROM other AS o WHERE o.n <= 3000;
    INSERT INTO rouse.signal (job, name, payload, at) SELECT o.id, 'go', '1', now() - interval '1 day' FROM other AS o WHERE o.n > 9000;
    INSERT INTO rouse.progress (job, fence, percent, step, at) SELECT o.id, 1, 1, '', now() - interval '1 day' FROM other AS o WHERE o.n > 9000;
    INSERT INTO rouse.running (job, fence, worker, cpu_us, memory_bytes, host_calls, bytes_in, bytes_out, at)
        SELECT o.id, 1, -1, 1, 1, 1, 1, 1, now() - interval '1 day' FROM other AS o WHERE o.n > 9000;
    INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at) SELECT o.id, 'step', '1', 1, -1, now(), now() FROM other AS o WHERE o.n > 9000;
    INSERT INTO rouse.log (job, attempt, line, worker, at, level, text) SELECT o.id, 1, 1, -1, now(), 'info', '' FROM other AS o WHERE o.n > 9000;
    INSERT INTO rouse.attempt (job, attempt, lost, worker, claimed_at, ended_at, error)
        SELECT -o.n, 1, false, -1, now(), now(), '{}' FROM other AS o WHERE o.n <= 3000;
    INSERT INTO rouse.record (at, job, event, attempt, worker) SELECT now(), -o.n, 'released', 1, -1 FROM other AS o WHERE o.n <= 3000;
    INSERT INTO rouse.record (at, job, event, who) SELECT now(), -o.n, 'purged', 'ada' FROM other AS o WHERE o.n <= 3000;
    INSERT INTO rouse.finished (id, lane, requested_at, available_at, finished_at, attempt, uncounted, state, payload, result, worker, chain, flow, flow_name)
        SELECT -o.n, -1, now(), now(), now(), 1, 0, 'succeeded', '{}', '1', -1, -o.n - 100000, -o.n, '' FROM other AS o WHERE o.n <= 3000;
    INSERT INTO rouse.flow (id, requested_at, jobs) SELECT -o.n, now() - interval '1 year', 1 FROM other AS o WHERE o.n <= 3000;
    INSERT INTO rouse.pending_release (chain, succeeded, noted_at, try_at) SELECT -o.n, true, now(), now() + interval '1 day' FROM other AS o WHERE o.n <= 3000;
    INSERT INTO rouse.kept_end (chain, job, state, result) SELECT -o.n - 100000, -o.n, 'succeeded', '1' FROM other AS o WHERE o.n <= 3000;
    INSERT INTO rouse.gate_key (gate, key, until, job) SELECT 'g', o.n::text, now() - interval '1 day', o.id FROM other AS o WHERE o.n <= 3000;
    INSERT INTO rouse.handler_state (handler, tenant, key, value, version, set_at) SELECT 'other', '', o.n::text, '', 1, now() FROM other AS o WHERE o.n <= 3000;
    INSERT INTO rouse.schedule (name, handler, payload, queue, priority, tags, cron, time_zone, overlap, catch_up, jitter,
                                created_at, changed_at, handled_until, revision, login, next_at, upcoming)
        SELECT 'other-' || o.n, 'other', '{}', 'others', 'normal', '{}', '0 3 * * *', 'UTC', 'skip', 'one', '0',
               now(), now(), now(), o.id, 'nobody', now() + interval '1 day', '{}' FROM other AS o WHERE o.n <= 3000;
    INSERT INTO rouse.schedule_run (schedule, due_at, at, outcome, job) SELECT 'other-' || o.n, now(), now(), 'enqueued', o.id FROM other AS o WHERE o.n <= 3000;
    DROP TABLE other;
    SET session_replication_role = origin";

/// Statistics of the tables: when they were taken, and the statements that take them.
pub(super) const STATISTICS: [(&str, &str); 4] = [
    ("never analysed", "SELECT"),
    ("vacuumed", "VACUUM"),
    (
        "analysed while all jobs ran",
        "CREATE TEMPORARY TABLE was AS SELECT * FROM rouse.job;
         UPDATE rouse.job SET state = 'running', fence = coalesce(fence, 1), worker = coalesce(worker, 1), claimed_at = now(),
                lease_until = now() + interval '1 hour', blockers = NULL;
         ANALYZE rouse.job;
         UPDATE rouse.job AS j SET state = w.state, fence = w.fence, worker = w.worker, claimed_at = w.claimed_at,
                lease_until = w.lease_until, blockers = w.blockers
         FROM was AS w WHERE w.id = j.id",
    ),
    ("analysed", "ANALYZE"),
];

/// A worker, and jobs: one that it runs under [`FENCE`], one whose attempts end in each call, one that waits for a
/// signal, and one that is ready.
pub(super) struct Known {
    pub(super) worker: i64,
    pub(super) running: i64,
    pub(super) ending: i64,
    pub(super) waiting: i64,
    pub(super) ready: i64,
}

pub(super) async fn few_jobs(client: &Client) -> Known {
    let register = "SELECT incarnation FROM rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
    let worker: i64 = client.query_one(register, &[]).await.unwrap().get(0);
    let mut ids = Vec::new();
    for _ in 0..4 {
        let id: i64 = client
            .query_one("SELECT rouse.enqueue('x')", &[])
            .await
            .unwrap()
            .get(0);
        ids.push(id);
    }
    let known = Known {
        worker,
        running: ids[0],
        ending: ids[1],
        waiting: ids[2],
        ready: ids[3],
    };
    let waiting = known.waiting;
    client
        .batch_execute(&run_again(&known, known.running))
        .await
        .unwrap();
    client
        .batch_execute(&format!(
            r#"UPDATE rouse.job SET turn = NULL, available_at = now() + interval '1 day', attempt = 1, uncounted = 1,
                      wait = '{{"kind": "signal", "name": "go"}}' WHERE id = {waiting};
               SELECT rouse.schedule('nightly', 'x', cron => '0 3 * * *');
               UPDATE rouse.schedule SET next_at = now() + interval '1 day', last_job = {waiting}, handled_until = now() - interval '1 day'"#
        ))
        .await
        .unwrap();
    known
}

/// A statement that lets the worker run a job.
fn run_again(known: &Known, job: i64) -> String {
    let worker = known.worker;
    format!(
        "UPDATE rouse.job SET state = 'running', fence = {FENCE}, worker = {worker}, attempt = 1, uncounted = 0, claimed_at = now(),
                lease_until = now() + interval '1 hour', blockers = NULL WHERE id = {job}"
    )
}

/// Enqueues two jobs, one of which waits for the other.
const NEW_FLOW: &str = r#"rouse.enqueue_flow('[{"name": "a", "handler": "x"}, {"name": "b", "handler": "x", "after": ["a"]}]')"#;

/// Calls of workers and producers about one job, one flow or one schedule, which can be repeated.
fn calls_about_one_job(known: &Known) -> Vec<(&'static str, String)> {
    let Known {
        worker,
        running,
        ending,
        waiting,
        ready,
    } = known;
    let who = format!("{worker}, sha256('key')");
    let attempt = format!("{who}, {running}, {FENCE}");
    let run = run_again(known, *ending);
    let settle = |result: &str, error: &str| {
        format!(
            "{run};
             SELECT rouse.settle({who}, ARRAY[ROW({ending}, {FENCE}, 'queued', 1, {result}, {error}, 0, NULL, NULL, NULL, NULL, NULL, NULL,
                                                  NULL, NULL, NULL)::rouse.settlement], '{{}}', true)"
        )
    };
    let fire = |action: &str| {
        format!(
            "SELECT rouse.fire_schedules({who},
                 ARRAY[ROW('nightly', (SELECT revision FROM rouse.schedule WHERE name = 'nightly'), clock_timestamp(),
                           now() + interval '1 day', '{{}}', NULL)::rouse.schedule_change],
                 ARRAY[ROW('nightly', clock_timestamp() - interval '1 microsecond', '{action}', NULL, NULL)::rouse.schedule_firing])"
        )
    };
    let log = |again: bool| {
        format!(
            "SELECT rouse.append_log({who}, ARRAY[ROW({running}, 1, 1, 0, 'info', '')::rouse.log_line], {again})"
        )
    };
    // A producer decides about a notification when it commits.
    let enqueue = |arguments: &str| {
        format!("SELECT rouse.enqueue('x'{arguments}); SET CONSTRAINTS ALL IMMEDIATE")
    };
    vec![
        (
            "sleep",
            format!("SELECT rouse.sleep({who}, '{{*}}', 3600000)"),
        ),
        (
            "peek",
            "SELECT rouse.peek('{1}', '{0}', 1000000, 0, NULL, NULL, '{}')".into(),
        ),
        ("promote", format!("SELECT rouse.promote({who}, 10, NULL)")),
        (
            "renew",
            format!("SELECT rouse.renew({who}, '{{{running}}}', '{{{FENCE}}}', '{{60000}}')"),
        ),
        (
            "report",
            format!(
                "SELECT rouse.report({who}, ARRAY[ROW({running}, {FENCE}, 1, '')::rouse.progress_report], '{{1}}', '{{1}}')"
            ),
        ),
        (
            "report_usage",
            format!(
                "SELECT rouse.report_usage({who}, ARRAY[ROW({running}, {FENCE}, 1, 1, 1, 1, 1)::rouse.attempt_usage])"
            ),
        ),
        ("append_log", log(false)),
        ("append_log, repeated", log(true)),
        (
            "record_step",
            format!("SELECT rouse.record_step({attempt}, 'step', '1')"),
        ),
        (
            "recorded_steps",
            format!(
                "SELECT rouse.recorded_steps({who}, '{{{running}}}', '{{{FENCE}}}', '{{NULL}}')"
            ),
        ),
        (
            "recorded_results",
            format!("SELECT rouse.recorded_results({attempt}, '{{step}}')"),
        ),
        (
            "take_signal",
            format!("SELECT rouse.take_signal({attempt}, 'wait', 'go', 'infinity')"),
        ),
        (
            "returned_calls",
            format!("SELECT rouse.returned_calls({attempt}, '{{step}}', 100)"),
        ),
        (
            "parent_ends",
            format!("SELECT rouse.parent_ends({attempt}, NULL, '{{}}')"),
        ),
        (
            "read_state",
            format!("SELECT rouse.read_state({attempt}, 'x', 'k')"),
        ),
        (
            "write_state",
            format!("SELECT rouse.write_state({attempt}, 'x', 'k', '', 1, NULL, 10, 10)"),
        ),
        (
            "state_keys",
            format!("SELECT rouse.state_keys({attempt}, 'x', '', NULL, 10)"),
        ),
        (
            "erase_state",
            format!("SELECT rouse.erase_state({attempt}, 'x', 'k')"),
        ),
        ("confirm", format!("SELECT rouse.confirm({attempt}, 1)")),
        ("settle, with a retry", settle("NULL", "'{}'")),
        ("settle, with a release", settle("NULL", "NULL")),
        (
            "settle, with a sleep",
            settle(r#"'{"kind": "sleep", "step": "s"}'"#, "NULL"),
        ),
        (
            "settle, with a wait for a signal",
            settle(r#"'{"kind": "signal", "step": "s", "name": "go"}'"#, "NULL"),
        ),
        (
            "settle, with a call",
            settle(r#"'{"kind": "call", "step": "s"}'"#, "NULL"),
        ),
        (
            "orphans",
            format!(
                "{run};
                 UPDATE rouse.job SET worker = -1, lease_until = now() - interval '1 second' WHERE id = {ending};
                 SELECT rouse.orphans({who}, ARRAY(SELECT lane FROM rouse.job WHERE id = {ending}), NULL, 10, NULL, 3, 10000)"
            ),
        ),
        (
            "adopt",
            format!(
                "SELECT rouse.adopt({who}, {FENCE}, ARRAY[ROW({ending}, {FENCE}, 'queued', 0, 0, 0)::rouse.adoption])"
            ),
        ),
        (
            "continue_releases",
            format!("SELECT rouse.continue_releases({who}, 10)"),
        ),
        (
            "enforce_deadlines",
            format!("SELECT rouse.enforce_deadlines({who}, 10)"),
        ),
        (
            "due_schedules",
            format!("SELECT rouse.due_schedules({who}, 10, NULL)"),
        ),
        ("fire_schedules, which skips", fire("skip")),
        ("fire_schedules, which enqueues", fire("enqueue")),
        (
            "lease_shards",
            format!("SELECT rouse.lease_shards({who}, '{{default}}', 1)"),
        ),
        ("challenges", format!("SELECT rouse.challenges({who})")),
        (
            "take_audit_outbox",
            format!("SELECT rouse.take_audit_outbox({who}, ARRAY(SELECT id FROM rouse.audit_outbox), 10)"),
        ),
        ("signal", format!("SELECT rouse.signal({waiting}, 'stop')")),
        ("enqueue", enqueue("")),
        ("enqueue with a key", enqueue(", unique_key => 'one'")),
        (
            "enqueue after a job",
            enqueue(&format!(", after => '[{ready}]'")),
        ),
        (
            "enqueue_many",
            "SELECT rouse.enqueue_many('x', '{1,2}'::jsonb[], job_timeout => '1 day')".into(),
        ),
        (
            "run_schedule",
            "SELECT rouse.run_schedule('nightly')".into(),
        ),
        (
            "outcomes",
            format!("SELECT rouse.outcomes('{{{ready},1}}')"),
        ),
        ("cancel", "SELECT rouse.cancel(rouse.enqueue('x'))".into()),
        ("flow", format!("SELECT rouse.flow({NEW_FLOW})")),
        (
            "cancel_flow",
            format!("SELECT rouse.cancel_flow({NEW_FLOW})"),
        ),
        (
            "delete_flow",
            format!("SELECT rouse.delete_flow({NEW_FLOW})"),
        ),
    ]
}

/// Maintenance, with the number of rows of `rouse.job` that each call may read among [`CROWD`].
fn maintenance_calls(known: &Known) -> Vec<(&'static str, String, i64)> {
    let who = format!("{}, sha256('key')", known.worker);
    vec![
        // Progress and usage of 3,000 attempts: a job for each.
        (
            "maintain_partitions",
            format!("SELECT rouse.maintain_partitions({who})"),
            6_100,
        ),
        // All 3,000 running jobs.
        (
            "maintain_lanes",
            format!("SELECT rouse.maintain_lanes({who})"),
            3_200,
        ),
        (
            "recover_direct",
            format!("SELECT rouse.recover_direct({who}, 10, NULL, NULL)"),
            100,
        ),
    ]
}

async fn assert_few_read_among_others(client: &mut Client, known: &Known, when: &str) {
    let mut read_more = Vec::new();
    for (call, sql) in calls_about_one_job(known) {
        let read = rows_read_of_all_tables(client, &sql).await;
        if read > 12 * i64::try_from(JOBS).unwrap() {
            read_more.push((call, read));
        }
    }
    for (call, sql, most) in maintenance_calls(known) {
        let read = rows_read(client, "rouse.job", &sql).await;
        if read > most {
            read_more.push((call, read));
        }
    }
    assert!(read_more.is_empty(), "{when}: {read_more:?}");
}

#[tokio::test]
async fn calls_about_one_job_do_not_read_others_with_plans_made_for_few() {
    for statistics in ["SELECT", "ANALYZE"] {
        let db = TestDb::new().await;
        let mut client = db.client().await;
        let known = few_jobs(&client).await;
        client.batch_execute(statistics).await.unwrap();
        // The session keeps the plans of the sixth call: those of the first five are made for their arguments.
        for _ in 0..7 {
            for (_, sql) in calls_about_one_job(&known) {
                client.batch_execute(&sql).await.unwrap();
            }
            for (_, sql, _) in maintenance_calls(&known) {
                client.batch_execute(&sql).await.unwrap();
            }
        }
        db.client().await.batch_execute(CROWD).await.unwrap();
        assert_few_read_among_others(&mut client, &known, statistics).await;
    }
}

#[tokio::test]
async fn calls_about_one_job_do_not_read_others_regardless_of_the_statistics() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let known = few_jobs(&client).await;
    client.batch_execute(CROWD).await.unwrap();
    for (when, sql) in STATISTICS {
        client.batch_execute(sql).await.unwrap();
        // A session with new plans.
        let mut fresh = db.client().await;
        assert_few_read_among_others(&mut fresh, &known, when).await;
    }
}

/// The number of rows that this statement reads in all tables, in a transaction of its own.
pub(super) async fn rows_read_of_all_tables(client: &mut Client, sql: &str) -> i64 {
    const READ: &str =
        "SELECT coalesce(sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)), 0)::bigint
         FROM pg_stat_xact_user_tables WHERE schemaname = 'rouse'";
    let transaction = client.transaction().await.unwrap();
    let before: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    transaction.batch_execute(sql).await.unwrap();
    let after: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    transaction.commit().await.unwrap();
    after - before
}
