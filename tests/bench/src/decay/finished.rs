//! Fills the history with jobs that never ran.
//!
//! Running five million jobs takes many minutes, so the owner writes their rows: copies of the row of a
//! job that has run, each with its own id, times, payload and result. One half is from yesterday and one
//! half from today, like the history of a queue in use since yesterday.

use anyhow::{Context as _, Result};

use crate::Bench;
use crate::backlog::PAYLOAD;
use crate::server::Server;

const BATCH: i64 = 100_000;

/// Creates yesterday's partition like `rouse.prepare_partitions`, which only creates those of today and later.
const YESTERDAY: &str = "\
    SET timezone = 'UTC';
    DO $$
    DECLARE
        today timestamptz := date_trunc('day', now());
        name  text := 'finished_' || to_char(today - interval '1 day', 'YYYYMMDD');
    BEGIN
        IF to_regclass('rouse.' || name) IS NULL THEN
            EXECUTE format('CREATE TABLE rouse.%I (LIKE rouse.finished INCLUDING CONSTRAINTS)', name);
            EXECUTE format('ALTER TABLE rouse.finished_default ATTACH PARTITION rouse.%I FOR VALUES FROM (%L) TO (%L)',
                name, today - interval '1 day', today);
        END IF;
    END $$;
    RESET timezone";

const COLUMNS: &str = "\
    SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute
    WHERE attrelid = 'rouse.finished'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum";

pub(super) async fn fill(bench: &Bench, server: &Server, count: i64) -> Result<()> {
    let client = &server.client;
    client
        .batch_execute(YESTERDAY)
        .await
        .context("create yesterday's partition")?;
    let (mut columns, mut values) = (Vec::new(), Vec::new());
    for row in client.query(COLUMNS, &[]).await? {
        let [name, kind]: [String; 2] = [row.get(0), row.get(1)];
        values.push(match (name.as_str(), kind.as_str()) {
            ("id", _) => "nextval('rouse.turn_seq')".to_owned(),
            ("payload", _) => PAYLOAD.to_owned(),
            ("payload_at", _) => "NULL".to_owned(),
            ("result", _) => "jsonb_build_object('n', n)".to_owned(),
            ("finished_at", _) => "at.moment".to_owned(),
            (_, "timestamp with time zone") => "at.moment - interval '50 ms'".to_owned(),
            _ => format!("template.\"{name}\""),
        });
        columns.push(format!("\"{name}\""));
    }
    // The times of the $3 rows are distributed evenly over yesterday and today up to now.
    let statement = client
        .prepare(&format!(
            "WITH template AS MATERIALIZED (
                 SELECT * FROM rouse.finished WHERE state::text = 'succeeded' LIMIT 1),
             today AS (SELECT date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS started)
             INSERT INTO rouse.finished ({})
             SELECT {} FROM template, today, generate_series($1::bigint, $2::bigint) AS n,
             LATERAL (SELECT CASE WHEN 2 * n <= $3::bigint
                 THEN today.started - interval '1 day' + interval '1 day' * ((2 * n - 1)::float8 / $3::bigint)
                 ELSE today.started + (now() - today.started) * ((2 * n - 1)::float8 / $3::bigint - 1) END AS moment) AS at",
            columns.join(", "),
            values.join(", ")
        ))
        .await
        .context("prepare the rows of finished jobs")?;
    let title = format!("writing {count} finished jobs");
    bench.progress.count(&title, count.unsigned_abs());
    let mut from = 1;
    while from <= count {
        let to = count.min(from + BATCH - 1);
        client
            .execute(&statement, &[&from, &to, &count])
            .await
            .context("write finished jobs")?;
        bench.progress.at(to.unsigned_abs());
        from = to + 1;
    }
    client
        .batch_execute("VACUUM ANALYZE rouse.finished")
        .await?;
    Ok(())
}
