//! The latency of a start without Rouse: one connection inserts and notifies, another receives the notification and
//! updates.

use std::future::poll_fn;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rouse_workbench::database;
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, NoTls};

use super::Bench;
use super::server::Server;

const TABLE: &str = "\
    CREATE TABLE IF NOT EXISTS public.round_trip (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, claimed_at timestamptz, payload text NOT NULL)";

const SEND: &str = "\
    WITH sent AS (INSERT INTO public.round_trip (payload) VALUES (repeat('x', 100)) RETURNING id)
    SELECT pg_notify('round_trip', id::text) FROM sent";

const TAKE: &str =
    "UPDATE public.round_trip SET claimed_at = now() WHERE id = $1 RETURNING id, payload";

/// Milliseconds from the call that inserts and notifies until the other connection has updated the row.
pub(super) async fn run(
    bench: &Bench,
    server: &Server,
    every: Duration,
    rounds: u32,
) -> Result<Vec<f64>> {
    bench
        .progress
        .count("probing: NOTIFY and UPDATE", rounds.into());
    let sender = database::connect(&server.url).await?;
    sender.batch_execute(TABLE).await?;
    let send = sender.prepare(SEND).await?;
    let taker = database::connect(&server.url).await?;
    // Like a claim, which a crash may lose.
    taker.batch_execute("SET synchronous_commit = off").await?;
    let take = taker.prepare(TAKE).await?;

    let (listener, mut connection) = tokio_postgres::connect(&server.url, NoTls).await?;
    let (notify, mut notified) = mpsc::channel(16);
    let listening = tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(notification) = message {
                let id: i64 = notification.payload().parse().unwrap_or_default();
                // The receiver is dropped when the probe has ended.
                let _ = notify.send(id).await;
            }
        }
    });
    listener.batch_execute("LISTEN round_trip").await?;

    let mut clock = tokio::time::interval(every);
    let mut times = Vec::new();
    for round in 0..rounds {
        clock.tick().await;
        let called = Instant::now();
        let taken = async {
            let id = notified
                .recv()
                .await
                .context("the listening connection has ended")?;
            taker.query_one(&take, &[&id]).await?;
            Ok::<_, anyhow::Error>(called.elapsed())
        };
        let sent = async { Ok(sender.execute(&send, &[]).await?) };
        let (taken, _) =
            tokio::try_join!(taken, sent).context("probe the latency of a notification")?;
        times.push(taken.as_secs_f64() * 1e3);
        bench.progress.at(u64::from(round) + 1);
    }
    drop(listener);
    listening.abort();
    Ok(times)
}
