//! Producers that commit long after their enqueue, when their turns are behind every cursor.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, ensure};
use rouse_workbench::database;
use serde_json::json;
use tokio_postgres::Client;
use tokio_postgres::types::Json;

use super::Scale;
use crate::host::{Host, HostOptions};
use crate::report::Unit;
use crate::server::Server;

const ENQUEUE: &str = "SELECT rouse.enqueue('noop', $1)";
/// Time between the commits, so that they reach the host in different states.
const APART: Duration = Duration::from_millis(330);
/// Time between two jobs of the producer that keeps the worker busy.
const BUSY_EVERY: Duration = Duration::from_millis(10);
/// The restart of the cursors finds every job; see ARCHITECTURE.md.
const FIND_TIMEOUT: Duration = Duration::from_secs(60);

/// Other load in the lane.
#[derive(Clone, Copy)]
enum Meanwhile {
    /// None
    Idle,
    /// Other jobs during the whole measurement
    Busy,
    /// Other jobs until the commits, which follow each other without a pause
    BusyUntil,
}

pub(super) async fn measure(scale: &mut Scale<'_>) -> Result<()> {
    for (key, meanwhile, label) in [
        ("idle", Meanwhile::Idle, "the worker was idle"),
        ("busy", Meanwhile::Busy, "the lane is busy"),
        (
            "until",
            Meanwhile::BusyUntil,
            "the lane was busy until then",
        ),
    ] {
        let worst = worst_delay_ms(scale, meanwhile, label).await?;
        let label = format!(
            "commit to start, {} s after the enqueue: {label}",
            scale.options.late
        );
        scale.figure(
            &format!("late_{key}.worst"),
            &label,
            worst,
            Unit::Milliseconds,
        );
    }
    Ok(())
}

async fn worst_delay_ms(scale: &Scale<'_>, meanwhile: Meanwhile, label: &str) -> Result<f64> {
    let (bench, server) = (scale.bench, scale.server);
    let options = HostOptions::new(&scale.handlers);
    let mut host = Host::start(bench, server, &options).await?;
    host.asleep(server).await?;
    let length = Duration::from_secs(scale.options.late.into());
    let commits = async {
        let mut producers = Vec::new();
        for _ in 0..scale.options.producers {
            producers.push(Producer::enqueue(server).await?);
        }
        let title = format!("letting {} transactions wait: {label}", producers.len());
        let wait = bench
            .progress
            .during(&title, length, tokio::time::sleep(length));
        match meanwhile {
            Meanwhile::Idle => {
                wait.await;
                commit_apart(&producers).await
            }
            Meanwhile::Busy => tokio::select! {
                done = async { wait.await; commit_apart(&producers).await } => done,
                failed = keep_busy(server) => failed,
            },
            Meanwhile::BusyUntil => {
                tokio::select! {
                    () = wait => {}
                    failed = keep_busy(server) => { failed?; }
                }
                let mut commits = Vec::new();
                for producer in &producers {
                    commits.push(producer.commit().await?);
                }
                Ok(commits)
            }
        }
    };
    let commits = host.during(Box::pin(commits)).await?;
    let mut worst = 0.0_f64;
    for (id, acknowledged_at) in commits {
        let started_at = host.during(started_at(&server.client, id)).await?;
        let delay = started_at
            .duration_since(acknowledged_at)
            .unwrap_or_default();
        worst = worst.max(delay.as_secs_f64() * 1e3);
    }
    host.stop().await?;
    Ok(worst)
}

/// A transaction that has enqueued one job.
struct Producer {
    client: Client,
    id: i64,
}

impl Producer {
    async fn enqueue(server: &Server) -> Result<Self> {
        let client = database::connect(&server.url).await?;
        client.batch_execute("BEGIN").await?;
        let id = client
            .query_one(ENQUEUE, &[&Json(json!({"n": 1}))])
            .await?
            .get(0);
        Ok(Self { client, id })
    }

    /// Commits, and returns the job and the time of the acknowledgement.
    async fn commit(&self) -> Result<(i64, SystemTime)> {
        self.client.batch_execute("COMMIT").await?;
        Ok((self.id, SystemTime::now()))
    }
}

async fn commit_apart(producers: &[Producer]) -> Result<Vec<(i64, SystemTime)>> {
    let mut commits = Vec::new();
    for producer in producers {
        commits.push(producer.commit().await?);
        tokio::time::sleep(APART).await;
    }
    Ok(commits)
}

/// Enqueues other jobs into the same lane. Returns only on an error.
async fn keep_busy<T>(server: &Server) -> Result<T> {
    let client = database::connect(&server.url).await?;
    let statement = client.prepare(ENQUEUE).await?;
    let mut clock = tokio::time::interval(BUSY_EVERY);
    loop {
        clock.tick().await;
        client
            .execute(&statement, &[&Json(json!({"n": 2}))])
            .await?;
    }
}

async fn started_at(client: &Client, id: i64) -> Result<SystemTime> {
    let started = Instant::now();
    loop {
        let row = client
            .query_opt(
                "SELECT started_at FROM rouse.finished WHERE id = $1",
                &[&id],
            )
            .await?;
        if let Some(row) = row {
            return Ok(row.get(0));
        }
        ensure!(
            started.elapsed() < FIND_TIMEOUT,
            "job {id}, committed late, had not finished after {FIND_TIMEOUT:?}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
