//! The jobs of the demo: real input for three handlers.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tokio_postgres::Client;

/// Pages of the clone. Each of their sentences becomes a `text.stats` job.
const PROSE: [&str; 6] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "examples/data/README.md",
];
const SENTENCES_MAX: usize = 240;

const PHOTOS: [&str; 4] = [
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
    "hubble_deep_field.jpg",
];
const WIDTHS: [u32; 12] = [32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 400];

const TABLE: &str = "examples/data/elnino.csv";
const YEARS_PER_SLICE: usize = 3;

/// Grants for the two handlers that use files.
pub(crate) fn config(root: &Path, thumbnails: &Path) -> String {
    let data = root.join("examples/data");
    let dir = |dir: &Path, at: &str, mode: &str| {
        // A quoted Rust string is also a TOML string if the path is printable.
        format!("{{ dir = {dir:?}, at = {at:?}, mode = {mode:?} }}")
    };
    format!(
        "[handlers.\"image.thumbnail\"]\ndirs = [{}, {}]\n\n[handlers.\"csv.summary\"]\ndirs = [{}]\n",
        dir(&data, "/data", "read"),
        dir(thumbnails, "/thumbnails", "read-write"),
        dir(&data, "/data", "read"),
    )
}

/// The number of jobs, and of the files that they write.
pub(crate) struct Expected {
    pub(crate) jobs: i64,
    pub(crate) thumbnails: usize,
}

/// Enqueues all jobs.
pub(crate) async fn enqueue(client: &Client, root: &Path) -> Result<Expected> {
    let sentences = sentences(root)?;
    for sentence in &sentences {
        client
            .query_one("SELECT rouse.enqueue('text.stats', $1::jsonb)", &[sentence])
            .await
            .context("enqueue a sentence")?;
    }
    println!(
        "      {} × SELECT rouse.enqueue('text.stats', …): sentences from this project's own pages",
        sentences.len()
    );

    let mut count = sentences.len();
    for (handler, payloads, description) in [
        ("image.thumbnail", thumbnails(), "4 photographs in 12 sizes"),
        (
            "csv.summary",
            slices(root)?,
            "61 years of sea temperature, whole and in slices",
        ),
    ] {
        client
            .query(
                "SELECT rouse.enqueue_many($1, $2::jsonb[])",
                &[&handler, &payloads],
            )
            .await
            .with_context(|| format!("enqueue jobs for {handler}"))?;
        println!(
            "      SELECT rouse.enqueue_many('{handler}', …) with {} payloads: {description}",
            payloads.len()
        );
        count += payloads.len();
    }
    Ok(Expected {
        jobs: i64::try_from(count)?,
        thumbnails: PHOTOS.len() * WIDTHS.len(),
    })
}

fn sentences(root: &Path) -> Result<Vec<Value>> {
    let mut sentences = Vec::new();
    for page in PROSE {
        let text = read(root, page)?;
        for paragraph in text.split("\n\n") {
            let words: Vec<_> = paragraph.split_whitespace().collect();
            sentences.extend(
                words
                    .join(" ")
                    .split_inclusive(". ")
                    .map(|sentence| json!({ "text": sentence.trim() })),
            );
        }
    }
    sentences.truncate(SENTENCES_MAX);
    Ok(sentences)
}

fn thumbnails() -> Vec<Value> {
    PHOTOS
        .iter()
        .flat_map(|photo| WIDTHS.iter().map(move |width| (photo, width)))
        .map(|(photo, width)| {
            let name = photo.split('.').next().unwrap_or(photo);
            json!({
                "path": format!("/data/photos/{photo}"),
                "out": format!("/thumbnails/{name}-{width}.jpg"),
                "width_max": width,
                "height_max": width,
            })
        })
        .collect()
}

/// The whole table by its path, then slices of its rows as text.
fn slices(root: &Path) -> Result<Vec<Value>> {
    let table = read(root, TABLE)?;
    let mut lines = table.lines();
    let head = lines.next().context("the table is empty")?;
    let rows: Vec<_> = lines.collect();
    let mut payloads = vec![json!({ "path": "/data/elnino.csv" })];
    payloads.extend(
        rows.chunks(YEARS_PER_SLICE)
            .map(|years| json!({ "csv": format!("{head}\n{}\n", years.join("\n")) })),
    );
    Ok(payloads)
}

fn read(root: &Path, file: &str) -> Result<String> {
    fs::read_to_string(root.join(file)).with_context(|| format!("read {file}"))
}
