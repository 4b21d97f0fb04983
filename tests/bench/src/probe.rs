//! The throughput of the server without Rouse: rows of a plain table, claimed and deleted in batches.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use rouse_workbench::database;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::Bench;
use super::server::Server;

/// The number of connections with which the fastest queues reach their best figures.
const CONNECTIONS: usize = 4;
/// The number of runs. A run lasts a second; a single run would be too noisy.
const RUNS: usize = 3;

const FILL: &str = "\
    DROP TABLE IF EXISTS public.probe;
    CREATE TABLE public.probe (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, claimed_at timestamptz, payload jsonb NOT NULL);
    CREATE INDEX ON public.probe (id) WHERE claimed_at IS NULL;";

/// Claims 100 unclaimed rows, and sends their payloads to the client. One commit.
const CLAIM: &str = "\
    UPDATE public.probe SET claimed_at = now() WHERE id = ANY (ARRAY(
        SELECT id FROM public.probe WHERE claimed_at IS NULL ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED))
    RETURNING id, payload";

/// Deletes the claimed rows in another commit: a queue that claims and settles in one transaction would hold
/// it open while its jobs run.
const DELETE: &str = "DELETE FROM public.probe WHERE id = ANY ($1)";

/// Rows per second of [`RUNS`] runs. Each run fills a table with `rows` payloads and drains it.
/// `payload` is SQL over `n`.
pub(super) async fn run(
    bench: &Bench,
    server: &Server,
    rows: i64,
    payload: &str,
) -> Result<Vec<f64>> {
    let client = &server.client;
    bench
        .progress
        .count("probing: plain SQL claims and deletes", RUNS as u64);
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        client
            .batch_execute(FILL)
            .await
            .context("create the probe's table")?;
        client
            .execute(
                &format!("INSERT INTO public.probe (payload) SELECT {payload} FROM generate_series(1, $1::bigint) AS n"),
                &[&rows],
            )
            .await
            .context("fill the probe's table")?;
        client.batch_execute("VACUUM ANALYZE public.probe").await?;
        runs.push(drain(&server.url, rows).await?);
        bench.progress.at(runs.len() as u64);
    }
    client.batch_execute("DROP TABLE public.probe").await?;
    Ok(runs)
}

async fn drain(url: &str, rows: i64) -> Result<f64> {
    let start = Arc::new(Barrier::new(CONNECTIONS + 1));
    let mut workers = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let client = database::connect(url).await?;
        let claim = client.prepare(CLAIM).await.context("prepare the probe")?;
        let delete = client.prepare(DELETE).await.context("prepare the probe")?;
        let start = start.clone();
        workers.spawn(async move {
            start.wait().await;
            let mut taken = 0;
            loop {
                let claimed = client.query(&claim, &[]).await?;
                if claimed.is_empty() {
                    return Ok::<_, tokio_postgres::Error>(taken);
                }
                let ids: Vec<i64> = claimed.iter().map(|row| row.get(0)).collect();
                client.execute(&delete, &[&ids]).await?;
                taken += claimed.len();
            }
        });
    }
    start.wait().await;
    let started = Instant::now();
    let mut taken = 0;
    while let Some(worker) = workers.join_next().await {
        taken += worker?.context("drain the probe's table")?;
    }
    let elapsed = started.elapsed();
    ensure!(
        i64::try_from(taken)? == rows,
        "the probe took {taken} of {rows} rows"
    );
    Ok(rows as f64 / elapsed.as_secs_f64())
}
