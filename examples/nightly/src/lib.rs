//! A nightly report: reads the orders of a day, and writes their total.

use std::fs;

use rouse_sdk::{Ctx, Error, export, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Deserialize, JsonSchema)]
struct Night {
    /// The due time, which the schedule adds (`due_key`), for instance `2026-03-01T23:30:00Z`.
    due: String,
    /// The folder with the orders of each day; a test reads another one.
    #[serde(default = "orders")]
    orders: String,
    /// The folder for the reports.
    #[serde(default = "reports")]
    reports: String,
}

fn orders() -> String {
    "/orders".into()
}

fn reports() -> String {
    "/reports".into()
}

#[derive(Serialize, JsonSchema)]
struct Report {
    day: String,
    orders: usize,
    cents: u64,
}

/// Adds up the orders of the day on which it is due.
///
/// The day comes from the due time, not from the clock: a job that is caught up or backfilled reports on its own day,
/// and a second attempt writes the same file.
#[handler(
    name = "report.nightly",
    max_attempts = 5,
    timeout = "5m",
    capabilities = ["dirs:/orders", "dirs:/reports:read-write"]
)]
fn report(ctx: &Ctx, night: Night) -> Result<Report, Error> {
    let Some(day) = night.due.get(..10) else {
        return Err(Error::permanent(format!(
            "{:?} is not a due time",
            night.due
        )));
    };
    let path = format!("{}/{day}.csv", night.orders);
    // Not permanent: the file of the day may come late, and the next attempt finds it.
    let text =
        fs::read_to_string(&path).map_err(|why| Error::retryable(format!("{path}: {why}")))?;
    let mut report = Report {
        day: day.to_owned(),
        orders: 0,
        cents: 0,
    };
    for line in text.lines().skip(1) {
        let cents = line
            .split(',')
            .nth(1)
            .and_then(|cents| cents.parse::<u64>().ok());
        let cents =
            cents.ok_or_else(|| Error::permanent(format!("{path}: {line:?} has no amount")))?;
        report.orders += 1;
        report.cents += cents;
    }
    let written = format!("{} orders, {} cents\n", report.orders, report.cents);
    let path = format!("{}/{day}.txt", night.reports);
    fs::write(&path, written).map_err(|why| Error::retryable(format!("{path}: {why}")))?;
    ctx.info(format_args!("reported on {day}"));
    Ok(report)
}

export!(report);

#[cfg(test)]
mod tests {
    use rouse_sdk::TestCtx;
    use serde_json::{Value, json};

    use super::*;

    fn run(orders: &str, due: &str) -> Result<Value, Error> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("2026-03-01.csv"), orders).unwrap();
        TestCtx::new().run::<super::report>(
            json!({"due": due, "orders": folder.path(), "reports": folder.path()}),
        )
    }

    #[test]
    fn the_orders_of_the_due_day_are_added_up() {
        let report = run("order,cents\n1,250\n2,1000\n", "2026-03-01T23:30:00Z").unwrap();
        assert_eq!(
            report,
            json!({"day": "2026-03-01", "orders": 2, "cents": 1250})
        );
    }

    #[test]
    fn a_missing_file_is_tried_again_and_an_invalid_line_is_not() {
        assert!(!run("", "2026-03-02T23:30:00Z").unwrap_err().permanent);
        assert!(
            run("order,cents\n1,x\n", "2026-03-01T23:30:00Z")
                .unwrap_err()
                .permanent
        );
        assert!(run("", "yesterday").unwrap_err().permanent);
    }
}
