//! Summarises the columns of a CSV.

mod column;

use std::fs::File;
use std::io::{self, Read};

use csv::{ErrorKind, ReaderBuilder, StringRecord};
use rouse_sdk::{Ctx, Error, export, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use column::{Column, Kind, Scalar};

/// The number of rows between two checks of the abort signal.
const ROWS_PER_CHECK: u64 = 10_000;

/// The payload of `csv.summary`: `csv` or `path`. The first row names the columns.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// The CSV itself.
    pub csv: Option<String>,
    /// A file in a granted directory.
    pub path: Option<String>,
    /// The delimiter; a comma by default.
    pub delimiter: Option<char>,
}

/// The result of `csv.summary`.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
pub struct Summary {
    /// Rows without the header.
    pub rows: u64,
    /// The columns, from left to right.
    pub columns: Vec<Column>,
}

/// Summarises each column of a CSV: its kind, its range, its mean.
#[handler(name = "csv.summary", timeout = "10m", capabilities = ["dirs"])]
pub fn summary(ctx: &Ctx, input: Input) -> Result<Summary, Error> {
    let delimiter = match input.delimiter {
        None => b',',
        Some(delimiter) if delimiter.is_ascii() && !"\"\r\n".contains(delimiter) => delimiter as u8,
        Some(other) => {
            return Err(Error::permanent(format_args!(
                "invalid delimiter {other:?}: it must be one ASCII character, and not a quote or \
                 line break"
            ))
            .kind("invalid_payload"));
        }
    };
    match (input.csv, input.path) {
        (Some(csv), None) => summarise(ctx, csv.as_bytes(), delimiter),
        (None, Some(path)) => {
            let file = File::open(&path).map_err(|error| unreadable(&path, &error))?;
            summarise(ctx, file, delimiter)
        }
        (Some(_), Some(_)) | (None, None) => {
            Err(Error::permanent("the payload needs either `csv` or `path`")
                .kind("invalid_payload"))
        }
    }
}

fn summarise(ctx: &Ctx, csv: impl Read, delimiter: u8) -> Result<Summary, Error> {
    let mut reader = ReaderBuilder::new().delimiter(delimiter).from_reader(csv);
    let mut columns: Vec<column::Tally> = reader
        .headers()
        .map_err(broken)?
        .iter()
        .map(column::Tally::new)
        .collect();
    if columns.is_empty() {
        return Err(Error::permanent("the CSV is empty: it has no header").kind("invalid_csv"));
    }

    let mut rows = 0;
    let mut record = StringRecord::new();
    while reader.read_record(&mut record).map_err(broken)? {
        rows += 1;
        for (column, field) in columns.iter_mut().zip(&record) {
            column.add(field);
        }
        if rows % ROWS_PER_CHECK == 0
            && let Some(reason) = ctx.abort().reason()
        {
            return Err(Error::retryable(format_args!(
                "stopped after {rows} rows: {reason}"
            )));
        }
    }
    ctx.info(format_args!("{rows} rows of {} columns", columns.len()));
    Ok(Summary {
        rows,
        columns: columns.into_iter().map(column::Tally::finish).collect(),
    })
}

fn unreadable(path: &str, error: &io::Error) -> Error {
    let message = format!(
        "cannot read {path}: {error}. Check that it exists, that rouse.toml grants its directory to \
         csv.summary, and that the grants of the job include that directory"
    );
    Error::permanent(message).kind("unreadable_file")
}

/// An invalid CSV stays invalid; a read that failed half-way may work the next time.
fn broken(error: csv::Error) -> Error {
    let message = error.to_string();
    match error.into_kind() {
        ErrorKind::Io(error) => error.into(),
        _ => Error::permanent(format_args!("the CSV is invalid: {message}")).kind("invalid_csv"),
    }
}

export!(summary);

#[cfg(test)]
mod tests;
