//! Connections that enqueue jobs, or insert plain rows, as fast as the database accepts them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rouse_workbench::database;
use serde_json::{Value, json};
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio_postgres::types::Json;
use tokio_postgres::{Client, Statement};

use super::plain::Plain;
use super::server::Server;

const ENQUEUE: &str = "SELECT rouse.enqueue('noop', $1)";
const ENQUEUE_MANY: &str = "SELECT rouse.enqueue_many('noop', $1)";
/// Payloads in one call of `rouse.enqueue_many`.
const MANY: usize = 1_000;

/// Connections with all statements prepared.
pub(super) struct Producers(Vec<Arc<Producer>>);

struct Producer {
    client: Client,
    enqueue: Statement,
    insert: Statement,
    enqueue_many: Statement,
    insert_many: Statement,
}

/// The kind of statement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `rouse.enqueue`
    Rouse,
    /// INSERT into a table of the same shape
    Plain,
}

impl Producers {
    pub(super) async fn connect(server: &Server, plain: &Plain, count: usize) -> Result<Self> {
        let mut producers = Vec::new();
        for _ in 0..count {
            let client = database::connect(&server.url).await?;
            producers.push(Arc::new(Producer {
                enqueue: client.prepare(ENQUEUE).await?,
                insert: client.prepare(&plain.insert).await?,
                enqueue_many: client.prepare(ENQUEUE_MANY).await?,
                insert_many: client.prepare(&plain.insert_many).await?,
                client,
            }));
        }
        Ok(Self(producers))
    }

    /// Commits over this many connections, one row in each: their number and rate.
    pub(super) async fn commits(
        &self,
        kind: Kind,
        connections: usize,
        seconds: u32,
    ) -> Result<Rate> {
        let start = Arc::new(Barrier::new(connections));
        let length = Duration::from_secs(seconds.into());
        let mut running = JoinSet::new();
        for producer in self.0.iter().take(connections) {
            let (producer, start) = (producer.clone(), start.clone());
            running.spawn(async move {
                let statement = match kind {
                    Kind::Rouse => &producer.enqueue,
                    Kind::Plain => &producer.insert,
                };
                let payload = Json(payload(1));
                start.wait().await;
                let started = Instant::now();
                let mut commits = 0_u32;
                while started.elapsed() < length {
                    producer.client.query_one(statement, &[&payload]).await?;
                    commits += 1;
                }
                Ok::<_, tokio_postgres::Error>((commits, started.elapsed()))
            });
        }
        let mut rate = Rate::default();
        while let Some(done) = running.join_next().await {
            let (commits, elapsed) = done?.context("enqueue")?;
            rate.rows += f64::from(commits);
            rate.per_s += f64::from(commits) / elapsed.as_secs_f64();
        }
        Ok(rate)
    }

    /// Rows per second of one connection that sends a thousand per statement.
    pub(super) async fn many(&self, kind: Kind, seconds: u32) -> Result<Rate> {
        let producer = self.0.first().context("there is no connection")?;
        let statement = match kind {
            Kind::Rouse => &producer.enqueue_many,
            Kind::Plain => &producer.insert_many,
        };
        let payloads: Vec<_> = (0..MANY).map(|n| Json(payload(n))).collect();
        let started = Instant::now();
        let mut rows = 0.0;
        while started.elapsed() < Duration::from_secs(seconds.into()) {
            let ids = producer.client.query(statement, &[&payloads]).await?;
            ensure!(
                ids.len() == MANY,
                "{} rows were inserted, not {MANY}",
                ids.len()
            );
            rows += ids.len() as f64;
        }
        Ok(Rate {
            rows,
            per_s: rows / started.elapsed().as_secs_f64(),
        })
    }
}

/// The result of a measurement.
#[derive(Clone, Copy, Default)]
pub(super) struct Rate {
    pub(super) rows: f64,
    pub(super) per_s: f64,
}

fn payload(n: usize) -> Value {
    json!({"n": n, "pad": "x".repeat(80)})
}
