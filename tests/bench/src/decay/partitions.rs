//! How long settlements wait while partitions of the history are created and dropped.

use std::time::Duration;

use anyhow::{Context as _, Result};
use rouse_workbench::database;
use rouse_workbench::percentiles::median;
use tokio_postgres::Client;

use super::Decay;
use crate::report::Unit;
use crate::server::Server;

/// A host creates and drops partitions once an hour; this benchmark does so ten times a second.
const EVERY: Duration = Duration::from_millis(100);
/// How long a reader keeps its locks before it starts again.
const READS_FOR: Duration = Duration::from_secs(2);
/// Maximum number of further days whose partitions are created, one at a time.
const DAYS_AHEAD_MAX: i32 = 30;

/// Partitions of the day `$1` after 2001-01-01: old enough to be dropped at once.
const MAKE_OLD: &str = "\
    SET timezone = 'UTC';
    DO $$
    DECLARE
        parent text;
        day    date := date '2001-01-01' + :day;
    BEGIN
        FOREACH parent IN ARRAY ARRAY['finished', 'attempt'] LOOP
            EXECUTE format('CREATE TABLE rouse.%I (LIKE rouse.%I INCLUDING CONSTRAINTS)',
                parent || '_' || to_char(day, 'YYYYMMDD'), parent);
            EXECUTE format('ALTER TABLE rouse.%I ATTACH PARTITION rouse.%I FOR VALUES FROM (%L) TO (%L)',
                CASE parent WHEN 'finished' THEN 'finished_default' ELSE parent END, parent || '_' || to_char(day, 'YYYYMMDD'), day::timestamptz, (day + 1)::timestamptz);
        END LOOP;
    END $$";

/// Partitions dropped, and partitions skipped because they were in use.
#[derive(Default)]
struct Churn {
    dropped: i32,
    in_use: i32,
}

pub(super) async fn measure(decay: &mut Decay<'_>) -> Result<()> {
    for (key, reader) in [("partitions", false), ("partitions_read", true)] {
        let mut churn = Churn::default();
        let (mut gaps, mut rates) = (Vec::new(), Vec::new());
        let mut day = 0;
        for _ in 0..decay.options.runs {
            let drained = tokio::select! {
                drained = decay.drain(decay.options.jobs) => drained?,
                ended = churn_forever(decay.server, &mut churn, &mut day) => return ended,
                ended = read_forever(decay.server, reader) => return ended,
            };
            gaps.push(drained.gap_ms);
            rates.push(drained.jobs_per_s());
        }
        // Drops the partitions that were kept because the reader used them.
        drop_old(
            &database::connect(&decay.server.url).await?,
            &mut Churn::default(),
        )
        .await?;
        let label = match reader {
            false => "partitions created and dropped",
            true => "the same, with a reader that holds locks",
        };
        let ratio = median(rates)? / median(decay.fresh.clone())?;
        let worst = gaps.into_iter().fold(0.0, f64::max);
        let label = format!("{label}: longest time without a settlement");
        decay.figure(&format!("{key}.gap"), &label, worst, Unit::Milliseconds);
        decay.figure(
            &format!("{key}.ratio"),
            "ratio to fresh",
            ratio,
            Unit::Ratio,
        );
        let (dropped, in_use) = (f64::from(churn.dropped), f64::from(churn.in_use));
        decay.figure(
            &format!("{key}.dropped"),
            "partitions dropped",
            dropped,
            Unit::Count,
        );
        decay.figure(
            &format!("{key}.in_use"),
            "partitions kept because they were in use",
            in_use,
            Unit::Count,
        );
    }
    Ok(())
}

/// Creates and drops partitions. Returns only on an error.
async fn churn_forever(server: &Server, churn: &mut Churn, day: &mut i32) -> Result<()> {
    let client = database::connect(&server.url).await?;
    let mut clock = tokio::time::interval(EVERY);
    loop {
        clock.tick().await;
        // Incremented before the statement: if the future is dropped during it, the server may still run it.
        *day += 1;
        client
            .batch_execute(&MAKE_OLD.replace(":day", &day.to_string()))
            .await
            .context("create old partitions")?;
        let ahead = 7 + (*day).min(DAYS_AHEAD_MAX);
        client
            .execute("SELECT rouse.prepare_partitions($1)", &[&ahead])
            .await
            .context("create further partitions")?;
        drop_old(&client, churn).await?;
    }
}

async fn drop_old(client: &Client, churn: &mut Churn) -> Result<()> {
    let row = client
        .query_one(
            "SELECT dropped, in_use FROM rouse.drop_partitions('7 days')",
            &[],
        )
        .await
        .context("drop old partitions")?;
    churn.dropped += row.get::<_, i32>(0);
    churn.in_use += row.get::<_, i32>(1);
    Ok(())
}

/// If `reader` is set, holds locks on the history and all its partitions. Returns only on an error.
async fn read_forever(server: &Server, reader: bool) -> Result<()> {
    if !reader {
        return std::future::pending().await;
    }
    let client = database::connect(&server.url).await?;
    loop {
        client
            .batch_execute(
                "BEGIN; SELECT count(*) FROM rouse.finished; SELECT count(*) FROM rouse.attempt",
            )
            .await
            .context("read the history")?;
        tokio::time::sleep(READS_FOR).await;
        client.batch_execute("COMMIT").await?;
    }
}
