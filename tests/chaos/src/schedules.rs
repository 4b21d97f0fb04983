//! Schedules that are due every second of a run. Their jobs are never run: no host has their handler.

use anyhow::{Context as _, Result};
use tokio_postgres::Client;

/// The source of their jobs, which the other rules leave out.
pub(super) const SOURCE: &str = "chaos-schedule";
const COUNT: i32 = 3;

/// Creates the schedules.
pub(super) async fn create(client: &Client) -> Result<()> {
    let sql = "SELECT count(rouse.schedule('chaos-' || n, 'chaos.nothing', cron => '* * * * * *', overlap => 'allow', catch_up => 'all',
                                           queue => 'schedules', source => $2))
               FROM generate_series(1, $1::integer) AS n";
    let created = client.execute(sql, &[&COUNT, &SOURCE]).await;
    created.context("create the schedules")?;
    Ok(())
}

/// Pauses the schedules at the end of the load.
pub(super) async fn pause(client: &Client) -> Result<()> {
    let paused = client
        .execute("SELECT rouse.pause_schedule(name) FROM rouse.schedule", &[])
        .await;
    paused.context("pause the schedules")?;
    Ok(())
}
