//! Gates in enqueues: `singleton` and `debounce`.

use rouse::job::{JsonText, NewJob, NewJobKind};
use rouse::store::{Leftover, Locked, Store};
use tokio_postgres::Client;

use crate::support::claims::{claim, claim_one, result, settlement, settlement_with};
use crate::support::database::refusal;
use crate::support::worker::{SESSION_WAITS, TIMEOUT, until_true};
use crate::support::{Host, command, folder};

use super::{enqueue, gate, number, set_gate};

/// Deletes keys that have no effect any more. Returns their number.
async fn maintain_keys(store: &Store) -> i32 {
    let (mut after, mut deleted) = (None, 0);
    loop {
        let deletion = store.delete_leftovers(Leftover::GateKeys, after.as_deref());
        let deletion = deletion.await.unwrap();
        deleted += deletion.deleted;
        after = deletion.reached;
        if after.is_none() {
            return deleted;
        }
    }
}

#[tokio::test]
async fn a_singleton_keeps_the_earlier_job_while_it_is_closed() {
    for (during, while_running, after) in [
        ("queued", false, false),
        ("running", true, false),
        ("period", true, true),
    ] {
        let period = if during == "period" {
            ", period => '1 hour'"
        } else {
            ""
        };
        let (db, client) = gate(&format!(
            "'one', 'singleton', handler => 'a', key => '{{$.doc}}', during => '{during}'{period}"
        ))
        .await;
        let store = db.worker().await;
        let first = enqueue(&client, "a", r#", '{"doc": 1, "n": 1}'"#).await;
        let other = enqueue(&client, "a", r#", '{"doc": 2}'"#).await;
        assert_ne!(first, other, "another key");
        let again = async || enqueue(&client, "a", r#", '{"doc": 1, "n": 2}'"#).await;
        assert_eq!(again().await, first, "{during}: it is queued");
        let jobs = claim(&store, 10).await;
        assert_eq!(jobs.len(), 2);
        let first_job = jobs.iter().find(|job| job.id.0 == first).unwrap();
        assert_eq!(
            first_job.payload.0, r#"{"n": 1, "doc": 1}"#,
            "its payload is kept"
        );
        let newer = again().await;
        assert_eq!(newer == first, while_running, "{during}: it is running");
        let done = settlement(first_job, result("1"));
        store.settle(&[&done], Locked::Wait).await.unwrap();
        if while_running {
            assert_eq!(again().await == first, after, "{during}: it has ended");
        }
    }
}

#[tokio::test]
async fn a_new_job_may_replace_the_waiting_one_or_be_refused() {
    let (db, client) = gate("'last', 'singleton', handler => 'a', on_conflict => 'replace'").await;
    let store = db.worker().await;
    let first = enqueue(
        &client,
        "a",
        r#", '{"n": 1}', max_attempts => 3, run_at => now() + interval '1 day'"#,
    )
    .await;
    assert_ne!(
        enqueue(&client, "a", ", tenant => 't'").await,
        first,
        "as with unique keys"
    );
    client
        .batch_execute("SELECT rouse.cancel(id) FROM rouse.job WHERE tenant = 't'")
        .await
        .unwrap();
    let large = format!(
        r#", '{{"n": "{}"}}', priority => 'high'"#,
        "x".repeat(10_000)
    );
    assert_eq!(enqueue(&client, "a", &large).await, first);
    assert_eq!(
        enqueue(&client, "a", &large.replace("xx", "xy")).await,
        first
    );
    let job = claim_one(&store).await;
    assert_eq!((job.id.0, job.max_attempts), (first, None));
    assert!(
        job.payload.0.contains("xyxyxy"),
        "the last one, which is stored apart"
    );
    let high = "SELECT count(*) FROM rouse.job AS j JOIN rouse.lane AS l ON l.id = j.lane WHERE l.priority = 'high'";
    assert_eq!(
        number(&client, high).await,
        1,
        "it has the lane of the newer one"
    );
    // The job has started, so the next enqueue adds a separate job; the same applies if the earlier job is retried.
    let second = enqueue(&client, "a", "").await;
    assert_ne!(second, first);
    client
        .batch_execute("UPDATE rouse.job SET attempt = 1 WHERE state = 'queued'")
        .await
        .unwrap();
    assert_ne!(enqueue(&client, "a", "").await, second);

    set_gate(
        &client,
        "'last', 'singleton', handler => 'a', during => 'running', on_conflict => 'refuse'",
    )
    .await;
    let why = refusal(&client, "SELECT rouse.enqueue('a')").await;
    let expected = "rouse.enqueue: gate last is closed: it has let job";
    assert!(
        why.contains(expected) && why.contains("It opens when that job has ended."),
        "{why}"
    );
    client
        .batch_execute("SELECT rouse.delete_gate('last')")
        .await
        .unwrap();
    enqueue(&client, "a", "").await;
}

#[tokio::test]
async fn a_refusal_says_when_the_gate_opens_and_a_cancelled_job_opens_it() {
    let (_db, client) = gate("'one', 'singleton', handler => 'a', on_conflict => 'refuse'").await;
    let first = enqueue(&client, "a", "").await;
    let why = refusal(&client, "SELECT rouse.enqueue('a')").await;
    assert!(
        why.contains("It opens when that job starts or ends."),
        "{why}"
    );
    client
        .batch_execute(&format!("SELECT rouse.cancel({first})"))
        .await
        .unwrap();
    assert_ne!(enqueue(&client, "a", "").await, first);
}

/// A job that a schedule would enqueue gives way without an error, and a chain continues in any case.
#[tokio::test]
async fn schedules_and_chains_are_never_refused() {
    let (db, client) = gate("'one', 'singleton', handler => 'a', on_conflict => 'refuse'").await;
    let first = enqueue(&client, "a", "").await;
    client
        .batch_execute("SELECT rouse.schedule('s', 'a', cron => '0 3 * * *')")
        .await
        .unwrap();
    assert_eq!(
        number(&client, "SELECT rouse.run_schedule('s')").await,
        first
    );
    assert_eq!(
        number(&client, "SELECT job FROM rouse.schedule_run").await,
        first
    );
    enqueue(&client, "b", "").await;
    let store = db.worker().await;
    let jobs = claim(&store, 10).await;
    let parent = jobs.iter().find(|job| job.id.0 != first).unwrap();
    enqueue(&client, "a", "").await;
    let job = |kind| NewJob {
        kind,
        handler: "a".into(),
        payload: JsonText("1".into()),
        options: None,
    };
    let children = vec![job(NewJobKind::Child), job(NewJobKind::Next)];
    let done = settlement_with(parent, result("1"), children);
    store.settle(&[&done], Locked::Wait).await.unwrap();
    let waiting = "SELECT count(*) FROM rouse.job AS j JOIN rouse.lane AS l ON l.id = j.lane WHERE l.handler = 'a' AND j.state = 'queued'";
    assert_eq!(
        number(&client, waiting).await,
        2,
        "one that was enqueued, and the next of the chain"
    );
}

#[tokio::test]
async fn a_producer_waits_for_another_that_enqueues_the_same_key() {
    let (db, client) = gate("'one', 'singleton', handler => 'a', key => '{tenant}'").await;
    for commits in [true, false] {
        let tenant = if commits { "x" } else { "y" };
        let sql = format!("SELECT rouse.enqueue('a', tenant => '{tenant}')");
        client.batch_execute("BEGIN").await.unwrap();
        let first = number(&client, &sql).await;
        let second = db.client().await;
        let pid = number(&second, "SELECT pg_backend_pid()::bigint").await;
        let task = tokio::spawn(async move { number(&second, &sql).await });
        let observer = db.client().await;
        until_true(
            &observer,
            &format!("SELECT cardinality(pg_blocking_pids({pid})) > 0"),
        )
        .await;
        client
            .batch_execute(if commits { "COMMIT" } else { "ROLLBACK" })
            .await
            .unwrap();
        assert_eq!(task.await.unwrap() == first, commits);
        let jobs = format!("SELECT count(*) FROM rouse.job WHERE tenant = '{tenant}'");
        assert_eq!(number(&client, &jobs).await, 1);
    }
}

#[tokio::test]
async fn the_last_job_of_a_burst_runs_when_no_more_come() {
    let (db, client) = gate("'calm', 'debounce', handler => 'a', key => '{tenant}', period => '10 s', max_wait => '25 s'").await;
    let store = db.worker().await;
    // The duration of the job's burst, from the first enqueue on: whole seconds, plus the time that the test takes.
    let lasts = async |id: i64| {
        let lasts = format!(
            "SELECT floor(extract(epoch FROM k.until - k.since))::bigint FROM rouse.gate_key AS k
             JOIN rouse.job AS j ON j.id = k.job AND j.available_at = k.until WHERE j.id = {id} AND j.turn IS NULL"
        );
        number(&client, &lasts).await
    };
    // Has the same effect as if this time had passed.
    let passes = async |seconds: i32| {
        let later = format!(
            "UPDATE rouse.gate_key SET since = since - interval '{seconds} s', until = until - interval '{seconds} s';
             UPDATE rouse.job SET available_at = available_at - interval '{seconds} s'");
        client.batch_execute(&later).await.unwrap();
    };
    let first = enqueue(&client, "a", r#", '{"n": 1}', tenant => 't'"#).await;
    assert_eq!(lasts(first).await, 10);
    for (n, expected) in [(2, 18..22), (3, 25..26), (4, 25..26)] {
        passes(8).await;
        assert_eq!(
            enqueue(&client, "a", &format!(r#", '{{"n": {n}}}', tenant => 't'"#)).await,
            first
        );
        let lasts = lasts(first).await;
        assert!(expected.contains(&lasts), "job {n}: {lasts} s");
    }
    let other = enqueue(&client, "a", ", tenant => 'u'").await;
    assert_ne!(other, first);
    client
        .batch_execute(&format!("SELECT rouse.reschedule({first})"))
        .await
        .unwrap();
    let job = claim_one(&store).await;
    assert_eq!((job.id.0, job.payload.0.as_str()), (first, r#"{"n": 4}"#));
    let next = enqueue(&client, "a", ", tenant => 't'").await;
    assert!(next > other, "a new burst");
    assert_eq!(lasts(next).await, 10);
}

#[tokio::test]
async fn the_first_job_of_a_burst_runs_at_once_if_the_edge_is_leading() {
    let (_db, client) = gate("'first', 'debounce', handler => 'a', period => '10 s', max_wait => '1 hour', edge => 'leading'").await;
    let first = enqueue(&client, "a", "").await;
    assert_eq!(
        number(
            &client,
            "SELECT count(*) FROM rouse.job WHERE turn IS NOT NULL"
        )
        .await,
        1
    );
    for _ in 0..3 {
        client.batch_execute("UPDATE rouse.gate_key SET since = since - interval '6 s', until = until - interval '6 s'").await.unwrap();
        assert_eq!(
            enqueue(&client, "a", "").await,
            first,
            "each one makes the burst last"
        );
    }
    client
        .batch_execute("UPDATE rouse.gate_key SET until = until - interval '11 s'")
        .await
        .unwrap();
    let second = enqueue(&client, "a", "").await;
    assert_ne!(second, first);
    client
        .batch_execute("UPDATE rouse.gate_key SET since = since - interval '1 hour'")
        .await
        .unwrap();
    assert_ne!(
        enqueue(&client, "a", "").await,
        second,
        "a burst has an end"
    );
}

/// A transaction that is open all day would keep an old version of the row for each of them.
#[tokio::test]
async fn an_enqueue_that_gives_way_does_not_write_the_key_of_the_gate() {
    for during in ["queued", "running"] {
        let settings = format!("'one', 'singleton', handler => 'a', during => '{during}'");
        let (_db, client) = gate(&settings).await;
        let first = enqueue(&client, "a", "").await;
        let versions =
            "SELECT array_agg(k.ctid::text || ' ' || k.xmin::text) FROM rouse.gate_key AS k";
        let before: Vec<String> = client.query_one(versions, &[]).await.unwrap().get(0);
        for _ in 0..3 {
            assert_eq!(enqueue(&client, "a", "").await, first);
        }
        let after: Vec<String> = client.query_one(versions, &[]).await.unwrap().get(0);
        assert_eq!(before, after, "{during}");
    }
}

/// Makes the last enqueues lie this much later, as if the clock had been set back since.
async fn set_back(client: &Client, by: &str) {
    let sql = format!(
        "UPDATE rouse.gate_key SET since = since + interval '{by}', until = until + interval '{by}'"
    );
    client.batch_execute(&sql).await.unwrap();
}

/// Without a limit, an enqueue that lies in the future would close the gate until the clock has caught up.
#[tokio::test]
async fn an_enqueue_closes_a_gate_for_two_periods_at_most_if_the_clock_is_set_back() {
    for kind in [
        "'singleton', during => 'period'",
        "'debounce', edge => 'leading'",
    ] {
        let (_db, client) = gate(&format!(
            "'one', {kind}, handler => 'a', period => '10 minutes'"
        ))
        .await;
        let first = enqueue(&client, "a", "").await;
        let shown = "SELECT count(*) FROM rouse.gate_keys('one')";
        set_back(&client, "9 minutes").await;
        assert_eq!(number(&client, shown).await, 1);
        assert_eq!(enqueue(&client, "a", "").await, first, "{kind}");
        set_back(&client, "1 hour").await;
        assert_eq!(number(&client, shown).await, 0, "it is open");
        let second = enqueue(&client, "a", "").await;
        assert_ne!(second, first, "{kind}");
        assert_eq!(enqueue(&client, "a", "").await, second, "it counts: {kind}");
    }
}

/// Otherwise, the burst could last longer by the time by which the clock was set back.
#[tokio::test]
async fn a_burst_that_began_in_the_future_counts_from_now_on() {
    for edge in ["trailing", "leading"] {
        let (_db, client) = gate(&format!(
            "'calm', 'debounce', handler => 'a', period => '1 minute', max_wait => '1 hour', edge => '{edge}'"
        ))
        .await;
        let first = enqueue(&client, "a", "").await;
        set_back(&client, "30 seconds").await;
        assert_eq!(enqueue(&client, "a", "").await, first);
        let ahead = "SELECT count(*) FROM rouse.gate_key WHERE since > clock_timestamp()";
        assert_eq!(number(&client, ahead).await, 0, "{edge}");
    }
}

#[tokio::test]
async fn a_shorter_period_does_not_end_a_burst_at_once() {
    let options = |period: &str| {
        format!("'calm', 'debounce', handler => 'a', period => '{period}', edge => 'leading'")
    };
    let (_db, client) = gate(&options("10 minutes")).await;
    let first = enqueue(&client, "a", "").await;
    set_gate(&client, &options("1 minute")).await;
    assert_eq!(enqueue(&client, "a", "").await, first);
}

/// A longer period closes a key again; a shorter one opens it.
#[tokio::test]
async fn a_new_period_of_a_singleton_counts_from_the_last_enqueue() {
    let options = |period: &str| {
        format!("'one', 'singleton', handler => 'a', during => 'period', period => '{period}'")
    };
    let (_db, client) = gate(&options("1 day")).await;
    let first = enqueue(&client, "a", "").await;
    let earlier = "UPDATE rouse.gate_key SET since = since - interval '1 hour', until = until - interval '1 hour'";
    client.batch_execute(earlier).await.unwrap();
    let shown = "SELECT count(*) FROM rouse.gate_keys('one')";
    set_gate(&client, &options("30 minutes")).await;
    assert_eq!(number(&client, shown).await, 0, "it is open");
    set_gate(&client, &options("2 hours")).await;
    assert_eq!(number(&client, shown).await, 1);
    assert_eq!(enqueue(&client, "a", "").await, first);
    set_gate(&client, &options("1 second")).await;
    assert_ne!(enqueue(&client, "a", "").await, first);
}

#[tokio::test]
async fn many_jobs_in_one_call_give_way_to_each_other() {
    let (_db, client) = gate("'one', 'singleton', handler => 'a', key => '{$.doc}'").await;
    let many = r#"SELECT array_agg(e) FROM rouse.enqueue_many('a', ARRAY['{"doc": 1}', '{"doc": 2}', '{"doc": 1}']::jsonb[]) AS e"#;
    let ids: Vec<i64> = client.query_one(many, &[]).await.unwrap().get(0);
    assert_eq!(ids[0], ids[2]);
    assert_ne!(ids[0], ids[1]);
    assert_eq!(number(&client, "SELECT count(*) FROM rouse.job").await, 2);
}

#[tokio::test]
async fn the_rows_of_keys_are_deleted_when_they_have_no_effect() {
    let (db, client) = gate("'one', 'singleton', handler => 'a', key => '{tenant}'").await;
    set_gate(
        &client,
        "'rate', 'throttle', key => '{tenant}', max => 1, period => '1 hour'",
    )
    .await;
    let store = db.worker().await;
    for tenant in ["x", "y"] {
        enqueue(&client, "a", &format!(", tenant => '{tenant}'")).await;
    }
    let job = claim_one(&store).await;
    let done = settlement(&job, result("1"));
    store.settle(&[&done], Locked::Wait).await.unwrap();
    assert_eq!(maintain_keys(&store).await, 1, "the job has ended");
    let rows = "SELECT count(*) FROM rouse.gate_key";
    assert_eq!(
        number(&client, rows).await,
        2,
        "a queued job, and a start of this hour"
    );
    client
        .batch_execute("UPDATE rouse.gate_key SET until = until - interval '1 hour'")
        .await
        .unwrap();
    assert_eq!(maintain_keys(&store).await, 1);
    assert_eq!(number(&client, rows).await, 1);
    client
        .batch_execute("SELECT rouse.delete_gate('one')")
        .await
        .unwrap();
    assert_eq!(number(&client, rows).await, 0);
}

/// However many keys there are, each call examines some of them.
#[tokio::test]
async fn keys_are_examined_in_batches_beyond_those_that_still_have_an_effect() {
    let (db, client) = gate("'one', 'singleton', handler => 'a', key => '{$.doc}'").await;
    // The first 10,000 have an effect.
    let many = "INSERT INTO rouse.gate_key (gate, key, until)
                SELECT 'one', 'a' || n, 'infinity'::timestamptz FROM generate_series(1, 9999) AS n
                UNION ALL SELECT 'one', 'a~ \"{,\\', 'infinity'
                UNION ALL SELECT 'one', 'z' || n, '-infinity' FROM generate_series(1, 10001) AS n
                UNION ALL SELECT 'two', 'z', '-infinity'";
    client.batch_execute(many).await.unwrap();
    let store = db.worker().await;
    let deletion = store.delete_leftovers(Leftover::GateKeys, None);
    let first = deletion.await.unwrap();
    assert_eq!((first.deleted, first.reached.is_some()), (0, true));
    let deletion = store.delete_leftovers(Leftover::GateKeys, first.reached.as_deref());
    let second = deletion.await.unwrap();
    assert_eq!((second.deleted, second.reached.is_some()), (10_000, true));
    assert_eq!(maintain_keys(&store).await, 2);
    let left = "SELECT count(*) FROM rouse.gate_key WHERE until = 'infinity'";
    assert_eq!(number(&client, left).await, 10_000);
    assert_eq!(
        number(&client, "SELECT count(*) FROM rouse.gate_key").await,
        10_000
    );
}

#[tokio::test]
async fn maintenance_logs_only_what_it_has_deleted() {
    let (db, client) = gate("'one', 'singleton', handler => 'a', key => '{$.doc}'").await;
    client
        .batch_execute(
            "INSERT INTO rouse.gate_key (gate, key, until) VALUES ('one', 'z', '-infinity')",
        )
        .await
        .unwrap();
    let folder = folder("", &["noop.wasm"]);
    let mut serve = command(&db.url(), &["serve", "--http", "off"], &folder);
    serve.env("ROUSE_LOG", "info,rouse::worker::maintenance=debug");
    let host = Host::spawn(serve);
    // Maintenance looks for signals and flows before it looks for keys, and finds none.
    let line = host.line(TIMEOUT, |line| {
        line.contains("deleted what ended jobs have left behind")
    });
    assert!(
        line.contains("GateKeys") && line.contains("deleted=1"),
        "{line}"
    );
}

/// When maintenance starts to lock the rows of the keys that it has found, it waits at the first key, `!`, for a lock
/// that the test holds.
const PAUSE: &str = "
    CREATE FUNCTION public.pause(p_key text) RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        IF p_key = '!' AND EXISTS (
            SELECT FROM pg_locks AS l
            WHERE l.pid = pg_backend_pid() AND l.relation = 'rouse.gate_key'::regclass AND l.mode = 'RowShareLock') THEN
            PERFORM set_config('lock_timeout', '60s', true);
            PERFORM pg_advisory_xact_lock(1);
        END IF;
        RETURN true;
    END
    $$;
    ALTER TABLE rouse.gate_key ENABLE ROW LEVEL SECURITY;
    ALTER TABLE rouse.gate_key FORCE ROW LEVEL SECURITY;
    CREATE POLICY pause ON rouse.gate_key USING (public.pause(key))";

/// An enqueue that commits while maintenance searches the keys: the snapshot of the search does not contain its job.
#[tokio::test]
async fn a_key_that_is_renewed_during_maintenance_stays() {
    let (db, client) =
        gate("'one', 'singleton', handler => 'a', key => '{$.doc}', during => 'queued'").await;
    let store = db.worker().await;
    let newest = r#", '{"doc": "z"}'"#;
    enqueue(&client, "a", newest).await;
    let job = claim_one(&store).await;
    let done = settlement(&job, result("1"));
    store.settle(&[&done], Locked::Wait).await.unwrap();
    let first = "INSERT INTO rouse.gate_key (gate, key, until) VALUES ('one', '!', '-infinity')";
    client.batch_execute(first).await.unwrap();
    client.batch_execute(PAUSE).await.unwrap();
    let producer = db.client().await;
    producer
        .batch_execute("BEGIN; SELECT pg_advisory_xact_lock(1)")
        .await
        .unwrap();
    let renewed = enqueue(&producer, "a", newest).await;
    let maintenance = {
        let store = store.clone();
        tokio::spawn(async move { maintain_keys(&store).await })
    };
    until_true(&client, SESSION_WAITS).await;
    producer.batch_execute("COMMIT").await.unwrap();
    assert_eq!(maintenance.await.unwrap(), 1);
    assert_eq!(
        number(&client, "SELECT count(*) FROM rouse.gate_key").await,
        1
    );
    assert_eq!(enqueue(&client, "a", newest).await, renewed, "it waits");
}

/// A settlement holds the row of its job, and may enqueue another job of the same key.
#[tokio::test]
async fn a_producer_does_not_wait_for_the_row_of_a_running_job() {
    let (db, client) = gate("'last', 'singleton', handler => 'a', on_conflict => 'replace'").await;
    let first = enqueue(&client, "a", "").await;
    claim_one(&db.worker().await).await;
    let mut other = db.client().await;
    let settling = other.transaction().await.unwrap();
    crate::support::claims::lock_job(&settling, first).await;
    client
        .batch_execute("SET lock_timeout = '5s'")
        .await
        .unwrap();
    assert_ne!(enqueue(&client, "a", "").await, first);
    settling.rollback().await.unwrap();
}

#[tokio::test]
async fn maintenance_does_not_wait_for_a_producer_that_holds_a_key() {
    let (db, client) = gate("'calm', 'debounce', handler => 'a', period => '1 s'").await;
    enqueue(&client, "a", "").await;
    client
        .batch_execute(
            "UPDATE rouse.gate_key SET until = until - interval '1 hour'; DELETE FROM rouse.job",
        )
        .await
        .unwrap();
    let mut other = db.client().await;
    let open = other.transaction().await.unwrap();
    open.batch_execute("SELECT FROM rouse.gate_key FOR UPDATE")
        .await
        .unwrap();
    assert_eq!(maintain_keys(&db.worker().await).await, 0);
    open.rollback().await.unwrap();
}
