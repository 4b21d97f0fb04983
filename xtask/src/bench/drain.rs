//! How fast one host empties a queue of jobs that do nothing.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use serde_json::json;
use tokio_postgres::Client;

use super::{Server, probe, start_postgres};
use crate::database;
use crate::host_process::{self, HostProcess};

/// About 100 bytes, as a typical job has; `n` is the number of the job.
const PAYLOAD: &str = "jsonb_build_object('n', n, 'pad', repeat('x', 80))";
const ENQUEUE_BATCH: i64 = 1_000;

/// The host is given up when the queue has not changed for this long.
const STALLED_AFTER: Duration = Duration::from_secs(60);
/// The figures come from the database's clock, so that looking rarely costs no precision.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Args)]
pub(crate) struct Options {
    /// How many jobs are enqueued before the host starts
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(i64).range(1..=10_000_000))]
    jobs: i64,
    /// Print one JSON object on stdout, and nothing else there
    #[arg(long)]
    json: bool,
}

/// From the first claim to the last settlement.
struct Drained {
    jobs: i64,
    seconds: f64,
}

pub(super) async fn run(rouse: &Path, handlers: &Path, options: &Options) -> Result<()> {
    let scratch = host_process::scratch_folder()?;
    eprintln!(
        "starting a private Postgres in {}",
        scratch.path().display()
    );
    let (mut postgres, url) = start_postgres(rouse, &scratch.path().join("pg")).await?;
    let (server, probe, drained) = postgres
        .during(async {
            let client = database::connect(&url).await?;
            let server = Server::read(&client).await?;
            eprintln!(
                "probing: plain SQL takes {} rows out of a table",
                options.jobs
            );
            let probe = probe::run(&url, options.jobs, PAYLOAD).await?;
            eprintln!("enqueueing {} jobs", options.jobs);
            enqueue(&client, options.jobs).await?;
            eprintln!("draining with one host");
            let drained = drain(rouse, handlers, &url, &client, options.jobs).await?;
            Ok((server, probe, drained))
        })
        .await?;
    postgres.stop().await?;
    scratch
        .close()
        .context("remove the data of the benchmark")?;

    let jobs_per_s = drained.jobs as f64 / drained.seconds;
    let ratio = jobs_per_s / probe.median();
    if options.json {
        let report = json!({
            "bench": "drain",
            "jobs": drained.jobs,
            "seconds": rounded(drained.seconds, 3),
            "jobs_per_s": rounded(jobs_per_s, 1),
            "probe_jobs_per_s": rounded(probe.median(), 1),
            "probe_runs": probe.runs.iter().map(|run| rounded(*run, 1)).collect::<Vec<_>>(),
            "ratio": rounded(ratio, 4),
            "postgres": server.version,
            "fsync": server.fsync,
            "synchronous_commit": server.synchronous_commit,
            "cores": std::thread::available_parallelism().map_or(1, usize::from),
        });
        println!("{report}");
    } else {
        println!("jobs                {:>12}", drained.jobs);
        println!(
            "drained in          {:>12.3} s, first claim to last settlement",
            drained.seconds
        );
        println!("jobs/s              {jobs_per_s:>12.0}");
        println!(
            "probe, rows/s       {:>12.0}  median of {}",
            probe.median(),
            probe.runs.len()
        );
        println!("ratio               {ratio:>12.3}");
        println!(
            "Postgres {}, fsync {}, synchronous_commit {}",
            server.version, server.fsync, server.synchronous_commit
        );
    }
    Ok(())
}

async fn enqueue(client: &Client, jobs: i64) -> Result<()> {
    let statement = client
        .prepare(&format!(
            "SELECT count(*) FROM rouse.enqueue_many('noop', ARRAY(
                 SELECT {PAYLOAD} FROM generate_series($1::bigint, $2::bigint) AS n))"
        ))
        .await
        .context("prepare the enqueueing")?;
    let mut first = 1;
    while first <= jobs {
        let last = jobs.min(first + ENQUEUE_BATCH - 1);
        client
            .query_one(&statement, &[&first, &last])
            .await
            .context("enqueue a batch")?;
        first = last + 1;
    }
    Ok(())
}

async fn drain(
    rouse: &Path,
    handlers: &Path,
    url: &str,
    client: &Client,
    jobs: i64,
) -> Result<Drained> {
    let mut command = Command::new(rouse);
    command
        .args(["serve", "--http", "127.0.0.1:0", "--handlers"])
        .arg(handlers)
        .env("DATABASE_URL", url);
    let mut host = HostProcess::start(command)?;
    host.during(until_empty(client)).await?;
    let status = host.stop().await?;
    ensure!(
        status.success(),
        "`rouse serve` ended with {status}\n{}",
        host.end().await
    );
    measure(client, jobs).await
}

/// Waits until no live job is left.
async fn until_empty(client: &Client) -> Result<()> {
    let mut left_before = i64::MAX;
    let mut changed = Instant::now();
    loop {
        let asked = Instant::now();
        let left: i64 = client
            .query_one("SELECT count(*) FROM rouse.job", &[])
            .await
            .context("count the live jobs")?
            .get(0);
        if left == 0 {
            return Ok(());
        }
        if left != left_before {
            left_before = left;
            changed = Instant::now();
        }
        if changed.elapsed() > STALLED_AFTER {
            bail!("{left} jobs are left, and none was settled for {STALLED_AFTER:?}");
        }
        // Counting a long queue costs the server time that the host should have.
        tokio::time::sleep(LOOK_EVERY.max(asked.elapsed() * 20)).await;
    }
}

async fn measure(client: &Client, jobs: i64) -> Result<Drained> {
    let row = client
        .query_one(
            "SELECT count(*) FILTER (WHERE state::text = 'succeeded'),
                    extract(epoch FROM max(finished_at) - min(claimed_at))::float8
             FROM rouse.finished",
            &[],
        )
        .await
        .context("read the times of the jobs")?;
    let succeeded: i64 = row.get(0);
    ensure!(succeeded == jobs, "{succeeded} of {jobs} jobs succeeded");
    Ok(Drained {
        jobs,
        seconds: row.get(1),
    })
}

fn rounded(value: f64, digits: i32) -> f64 {
    let factor = 10_f64.powi(digits);
    (value * factor).round() / factor
}
