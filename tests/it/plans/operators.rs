//! Calls of operators among many jobs.

use tokio_postgres::Client;

use crate::support::TestDb;

use super::{BACKLOG, JOBS, assert_few, backlog, run};

/// Counts, reschedules, completes, purges: the admin actions.
async fn run_admin_actions(client: &mut Client) -> Vec<(&'static str, i64)> {
    let wanted = i32::try_from(JOBS).unwrap();
    let mut read = Vec::new();
    let (_, rows) = run(
        client,
        "SELECT rouse.purge_queue('default', $1)::bigint",
        &[&wanted],
    )
    .await;
    read.push(("purge", rows));
    for (call, sql) in [
        (
            "reschedule",
            "SELECT j.id FROM (SELECT max(id) AS id FROM rouse.job) AS j WHERE rouse.reschedule(j.id, now() + interval '1 h')",
        ),
        (
            "priority",
            "SELECT j.id FROM (SELECT max(id) AS id FROM rouse.job) AS j WHERE rouse.set_priority(j.id, 'low')",
        ),
        (
            "payload",
            "SELECT rouse.replace_payload(max(id), '1') FROM rouse.job",
        ),
        (
            "complete",
            "SELECT j.id FROM (SELECT max(id) AS id FROM rouse.job) AS j WHERE rouse.complete(j.id)",
        ),
        ("retry", "SELECT rouse.retry(max(id)) FROM rouse.finished"),
    ] {
        let (_, rows) = run(client, sql, &[]).await;
        read.push((call, rows));
    }
    // Two other lanes with a job each: of the long lane, at most 10,000 rows are counted.
    let (_, rows) = run(
        client,
        "SELECT coalesce(max(ready), 0)::bigint FROM rouse.queues",
        &[],
    )
    .await;
    read.push(("depth", (rows - 2 * i64::from(BACKLOG)).max(0)));
    read
}

#[tokio::test]
async fn admin_actions_look_up_their_jobs_regardless_of_the_statistics() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    enqueue_one(&client).await;
    client.batch_execute("ANALYZE rouse.job").await.unwrap();
    // The session keeps these plans.
    run_admin_actions(&mut client).await;
    for handler in ["a", "b", "c", "d", "e", "f"] {
        client
            .query("SELECT rouse.enqueue($1, queue => 'other')", &[&handler])
            .await
            .unwrap();
    }
    backlog(&client).await;
    assert_few(&run_admin_actions(&mut client).await, "then full");
}

#[tokio::test]
async fn remaining_and_forget_worker_do_not_read_other_jobs() {
    const REMAINING: &str = "SELECT ready FROM rouse.remaining('other', NULL, $1)";
    const FORGET: &str = "SELECT rouse.forget_worker('old')::bigint";
    const LIVE: &str =
        "SELECT rouse.register('old', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}');
         UPDATE rouse.worker SET seen_at = now() - interval '91 s' WHERE worker_id = 'old'";
    let db = TestDb::new().await;
    let mut client = db.client().await;
    enqueue_one(&client).await;
    client
        .batch_execute("SELECT rouse.enqueue('x', queue => 'other'); ANALYZE rouse.job")
        .await
        .unwrap();
    let ask = async |client: &mut Client| {
        let mut read = Vec::new();
        let (_, rows) = run(client, REMAINING, &[&false]).await;
        read.push(("remaining", rows));
        let (_, rows) = run(client, REMAINING, &[&true]).await;
        read.push(("remaining with what runs", rows));
        client.batch_execute(LIVE).await.unwrap();
        let (_, rows) = run(client, FORGET, &[]).await;
        read.push(("forget_worker", rows));
        // From now on the row is old enough to be checked for removal.
        client
            .batch_execute("UPDATE rouse.worker SET forgotten_at = now() - interval '30 days'")
            .await
            .unwrap();
        read
    };
    // The session keeps these plans.
    ask(&mut client).await;
    backlog(&client).await;
    // Ten running jobs, and many of another queue in each waiting state.
    client
        .batch_execute(
            "UPDATE rouse.job SET state = 'running', fence = 1, worker = 1, attempt = 1, claimed_at = now(),
                    lease_until = now() + interval '1 hour'
             WHERE id IN (SELECT id FROM rouse.job ORDER BY id DESC LIMIT 10);
             UPDATE rouse.job SET turn = NULL, available_at = now() + interval '1 hour' WHERE state = 'queued' AND id % 2 = 0",
        )
        .await
        .unwrap();
    assert_few(&ask(&mut client).await, "then full");
    client.batch_execute("ANALYZE rouse.job").await.unwrap();
    let mut fresh = db.client().await;
    assert_few(&ask(&mut fresh).await, "with statistics");
    // Running jobs are read only if requested.
    client
        .batch_execute(
            "UPDATE rouse.job SET state = 'running', fence = 1, worker = 1, attempt = 1, claimed_at = now(),
                    turn = coalesce(turn, id), lease_until = now() + interval '1 hour'
             WHERE lane <> (SELECT id FROM rouse.lane WHERE queue = 'other')",
        )
        .await
        .unwrap();
    let (_, rows) = run(&mut client, REMAINING, &[&false]).await;
    assert_few(&[("remaining", rows)], "all running");
}

async fn enqueue_one(client: &Client) {
    let sql = "SELECT rouse.enqueue('x')";
    for _ in 0..=JOBS + 1 {
        client.query(sql, &[]).await.unwrap();
    }
}
