//! Shows the progress of the demo's jobs, then their results from the database.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use tokio_postgres::Client;

const POLL_EVERY: Duration = Duration::from_millis(100);
const SAMPLE_CHARS_MAX: usize = 160;

const COUNTS: &str = "\
    SELECT count(*) FILTER (WHERE finished_at IS NOT NULL),
           count(*) FILTER (WHERE error IS NOT NULL),
           count(*)
    FROM rouse.jobs";

const TABLE: &str = "\
    SELECT handler, count(*),
           count(*) FILTER (WHERE state::text = 'succeeded'),
           count(*) FILTER (WHERE state::text IN ('failed', 'timed_out', 'cancelled')),
           percentile_cont(0.5) WITHIN GROUP (
               ORDER BY (1000 * extract(epoch FROM started_at - requested_at))::float8),
           percentile_cont(0.5) WITHIN GROUP (
               ORDER BY (1000 * extract(epoch FROM finished_at - started_at))::float8)
    FROM rouse.jobs GROUP BY handler ORDER BY handler";

const SAMPLES: &str = "\
    SELECT DISTINCT ON (handler) handler, id, result::text
    FROM rouse.jobs WHERE state::text = 'succeeded' ORDER BY handler, id";

const ERRORS: &str = "\
    SELECT handler, id, error::text FROM rouse.jobs WHERE error IS NOT NULL ORDER BY id LIMIT 3";

/// Waits until all jobs have finished. Shows a bar in a terminal, and prints lines elsewhere.
pub(crate) async fn watch(client: &Client, expected: i64, timeout: Duration) -> Result<()> {
    let terminal = std::io::stderr().is_terminal();
    let bar = ProgressBar::new(expected.unsigned_abs());
    bar.set_style(ProgressStyle::with_template(
        "      {bar:40} {pos}/{len} jobs, {elapsed}",
    )?);
    let started = Instant::now();
    let mut printed = -1;
    loop {
        let row = client
            .query_one(COUNTS, &[])
            .await
            .context("count the jobs")?;
        let (finished, with_error, total): (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
        if total != expected {
            bail!("{expected} jobs were enqueued, but rouse.jobs has {total}");
        }
        if with_error > 0 {
            bail!(
                "all jobs should succeed, but {with_error} have an error:\n{}",
                errors(client).await?
            );
        }
        bar.set_position(finished.unsigned_abs());
        if !terminal && finished != printed {
            println!("      {finished}/{expected} jobs");
            printed = finished;
        }
        if finished == expected {
            bar.finish();
            return Ok(());
        }
        if started.elapsed() > timeout {
            bail!(
                "{} of {expected} jobs have not finished within {timeout:?}",
                expected - finished
            );
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
}

/// Prints a row for each handler, and one of its results.
pub(crate) async fn print(client: &Client, expected: i64) -> Result<()> {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header([
        "handler",
        "jobs",
        "succeeded",
        "failed",
        "p50 wait",
        "p50 run",
    ]);
    let mut succeeded = 0;
    for row in client.query(TABLE, &[]).await.context("read the results")? {
        succeeded += row.get::<_, i64>(2);
        table.add_row([
            row.get::<_, String>(0),
            row.get::<_, i64>(1).to_string(),
            row.get::<_, i64>(2).to_string(),
            row.get::<_, i64>(3).to_string(),
            milliseconds(row.get(4)),
            milliseconds(row.get(5)),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("{table}");
    if succeeded != expected {
        bail!("only {succeeded} of {expected} jobs succeeded");
    }

    for row in client
        .query(SAMPLES, &[])
        .await
        .context("read a result of each handler")?
    {
        let (handler, id): (String, i64) = (row.get(0), row.get(1));
        println!(
            "      rouse.result({id}), {handler}: {}",
            shortened(row.get(2))
        );
    }
    Ok(())
}

async fn errors(client: &Client) -> Result<String> {
    let rows = client.query(ERRORS, &[]).await.context("read the errors")?;
    Ok(rows
        .iter()
        .map(|row| {
            let (handler, id, error): (String, i64, String) = (row.get(0), row.get(1), row.get(2));
            format!("  job {id}, {handler}: {error}\n")
        })
        .collect())
}

fn milliseconds(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.1} ms"))
}

fn shortened(text: Option<String>) -> String {
    let text = text.unwrap_or_else(|| "null".to_owned());
    match text.char_indices().nth(SAMPLE_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
