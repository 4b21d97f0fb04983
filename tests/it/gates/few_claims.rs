//! How many claims the jobs behind gates cost: a worker leaves out lanes that it knows to be closed.

use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::worker::until_true;

use super::waiting::{WAITS, worker_without_sweeps};
use super::{number, set_gate};

/// A database with these gates, in which the tenants of the default queue share claims, and a client. From now on,
/// `public.claim` has a row for each claim, with the number of its lanes.
async fn counting_claims(gates: &[&str]) -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    for gate in gates {
        set_gate(&client, gate).await;
    }
    let count = "
        SELECT rouse.set_fair_share('default', policy => 'drr');
        CREATE TABLE public.claim (lanes integer NOT NULL);
        DO $do$
        DECLARE
            arguments text := pg_get_function_arguments('rouse.claim'::regproc);
            result    text := pg_get_function_result('rouse.claim'::regproc);
        BEGIN
            ALTER FUNCTION rouse.claim RENAME TO uncounted_claim;
            EXECUTE format($create$
                CREATE FUNCTION rouse.claim(%s) RETURNS %s LANGUAGE plpgsql AS $claim$
                BEGIN
                    INSERT INTO public.claim VALUES (cardinality($4));
                    RETURN QUERY SELECT * FROM rouse.uncounted_claim($1, $2, $3, $4, $5, $6, $7);
                END $claim$ $create$, arguments, result);
        END $do$";
    client.batch_execute(count).await.unwrap();
    (db, client)
}

/// The number of claims so far, and that of all their lanes.
async fn claims(client: &Client) -> (i64, i64) {
    let sql = "SELECT count(*), coalesce(sum(c.lanes), 0) FROM public.claim AS c";
    let row = client.query_one(sql, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

/// Enqueues this number of short jobs for each of these tenants.
async fn enqueue_for(client: &Client, tenants: i32, jobs: i32) {
    let sql = r#"SELECT rouse.enqueue('test.sleep', '{"ms": 1}', tenant => 't' || t.n)
        FROM generate_series(1, $1::integer) AS t(n), generate_series(1, $2::integer)"#;
    client.execute(sql, &[&tenants, &jobs]).await.unwrap();
}

/// Each job ends before the rate permits the next start. If the end opened lanes, another claim would find them closed.
#[tokio::test]
async fn a_job_behind_a_gate_and_a_rate_costs_one_claim() {
    let gates = [
        "'one', 'max_concurrent', max => 1",
        "'rate', 'throttle', max => 1, period => '200 ms'",
    ];
    let (db, client) = counting_claims(&gates).await;
    enqueue_for(&client, 5, 4).await;
    let worker = worker_without_sweeps(&db).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    let (claims, _) = claims(&client).await;
    worker.drain().await;
    assert!((20..30).contains(&claims), "{claims} claims for 20 jobs");
}

/// The lanes of the other tenants have no jobs, and are closed with the lane of this one. If they opened like a lane
/// that has jobs, they would go first, because they have used nothing of the limit.
#[tokio::test]
async fn tenants_without_jobs_cost_no_claims_behind_a_limit_that_another_one_uses_up() {
    let (db, client) = counting_claims(&["'one', 'max_concurrent', max => 1"]).await;
    enqueue_for(&client, 200, 1).await;
    let worker = worker_without_sweeps(&db).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    client
        .batch_execute("DELETE FROM rouse.sleeper")
        .await
        .unwrap();
    until_true(&client, WAITS).await;
    let (before, _) = claims(&client).await;
    enqueue_for(&client, 1, 50).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    let (after, _) = claims(&client).await;
    worker.drain().await;
    let claims = after - before;
    assert!((50..90).contains(&claims), "{claims} claims for 50 jobs");
}

/// Otherwise each start would open all lanes, and the claims would read them again.
#[tokio::test]
async fn a_job_behind_two_rates_costs_a_claim_of_a_few_lanes() {
    let gates = [
        "'rate', 'throttle', max => 1, period => '50 ms'",
        "'slow', 'throttle', max => 1, period => '100 ms'",
    ];
    let (db, client) = counting_claims(&gates).await;
    enqueue_for(&client, 300, 1).await;
    let worker = worker_without_sweeps(&db).await;
    until_true(&client, "SELECT count(*) >= 20 FROM rouse.finished").await;
    let (claims, lanes) = claims(&client).await;
    // The worker has continued in the meantime.
    let jobs = number(&client, "SELECT count(*) FROM rouse.finished").await;
    worker.drain().await;
    assert!(claims < 5 + 2 * jobs, "{claims} claims for {jobs} jobs");
    assert!(
        lanes < 50 * jobs,
        "{claims} claims of {lanes} lanes for {jobs} jobs"
    );
}
