//! Fetches what is at a URL, into the result or into a file.

mod content;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use rouse_sdk::http::{self, Response};
use rouse_sdk::{Ctx, Error, export, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub use content::Content;

/// What `http.fetch` takes.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// Where it is: `https://…`.
    pub url: String,
    /// Headers of the request.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// The etag of an earlier result: where it is still the same, nothing is fetched.
    pub etag: Option<String>,
    /// The file it is written to, in a directory granted for writing. Its folders are made; a file that is there is
    /// replaced. Without one it is in the result.
    pub to: Option<String>,
    /// How large it may be, bytes: 1 MiB where it is left out, with `to` 16 MiB.
    pub bytes_max: Option<usize>,
    /// How many redirects are followed.
    #[serde(default = "default_redirects")]
    pub redirects: u32,
    /// How long it may take, in milliseconds.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
}

fn default_redirects() -> u32 {
    5
}

fn default_timeout_ms() -> u64 {
    60_000
}

/// Where the payload has none: some servers refuse whoever does not say who it is.
const USER_AGENT: &str = concat!("rouse-http-fetch/", env!("CARGO_PKG_VERSION"));

/// Browsers give up after 20.
const REDIRECTS_MAX: u32 = 20;

/// Less than the timeout of the attempt, so that it is the server that is named.
const TIMEOUT_MS_MAX: u64 = 540_000;

/// How far `retry-after` may put a job off: whoever asks for a year means no.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// What is in the result is kept with the job; base64 and escapes make it larger, and 4 MiB is a host's limit.
const RESULT_BYTES: usize = 1 << 20;
const RESULT_BYTES_MAX: usize = 2 << 20;

/// A file is in memory as a whole before it is written, while it grows up to three times, and an attempt has 128 MiB.
const FILE_BYTES: usize = 16 << 20;
const FILE_BYTES_MAX: usize = 32 << 20;

/// What `http.fetch` gives back.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Fetched {
    /// What the server answered: 200 to 299, or 304 where the etag is still the same.
    pub status: u16,
    /// Where it was found, after all redirects.
    pub url: String,
    /// What the server says it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// What the server calls this version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// True where the etag is still the same; then there is nothing of the rest.
    pub not_modified: bool,
    /// Its size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<usize>,
    /// Its sha256, hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The file it was written to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// What it is, where it is not in a file: one of the three.
    #[serde(flatten)]
    pub content: Option<Content>,
}

/// Fetches what is at a URL, into the result or into a file.
#[handler(
    name = "http.fetch",
    max_attempts = 8,
    initial_backoff = "10s",
    max_backoff = "1h",
    timeout = "10m",
    capabilities = ["http", "dir"]
)]
pub async fn fetch(ctx: &Ctx, input: Input) -> Result<Fetched, Error> {
    let bytes_max = check(&input)?;
    if let Some(to) = &input.to {
        remove_parts(ctx, to);
    }
    let mut request = http::get(&input.url)
        .timeout(Duration::from_millis(input.timeout_ms))
        .redirects(input.redirects)
        .response_bytes_max(bytes_max);
    let mut names = input.headers.keys();
    if !names.any(|name| name.eq_ignore_ascii_case("user-agent")) {
        request = request.header("user-agent", USER_AGENT);
    }
    for (name, value) in &input.headers {
        request = request.header(name, value);
    }
    if let Some(etag) = &input.etag {
        request = request.header("if-none-match", etag);
    }
    let response = request.send(ctx).await?;
    let header = |name: &str| response.header(name).map(str::to_owned);
    let mut fetched = Fetched {
        status: response.status,
        url: response.url.clone(),
        content_type: header("content-type"),
        etag: header("etag"),
        not_modified: response.status == 304 && input.etag.is_some(),
        bytes: None,
        sha256: None,
        path: None,
        content: None,
    };
    if fetched.not_modified {
        ctx.info("it is still the same");
        return Ok(fetched);
    }
    let body = found(response)?;
    ctx.info(format_args!("{} bytes", body.len()));
    fetched.bytes = Some(body.len());
    fetched.sha256 = Some(hexadecimal(&Sha256::digest(&body)));
    match input.to {
        None => fetched.content = Some(Content::of(body, fetched.content_type.as_deref())),
        Some(to) => {
            write_whole(ctx, &to, &body).map_err(|error| unwritable(&to, &error))?;
            fetched.path = Some(to);
        }
    }
    Ok(fetched)
}

/// Checks what the types cannot say; gives how large it may be.
fn check(input: &Input) -> Result<usize, Error> {
    let refuse = |why: String| Err(Error::permanent(why).kind("bad-payload"));
    if !(1..=TIMEOUT_MS_MAX).contains(&input.timeout_ms) {
        return refuse(format!("timeout_ms is from 1 to {TIMEOUT_MS_MAX}"));
    }
    if input.redirects > REDIRECTS_MAX {
        return refuse(format!("redirects is at most {REDIRECTS_MAX}"));
    }
    let (usual, most) = match input.to {
        None => (RESULT_BYTES, RESULT_BYTES_MAX),
        Some(_) => (FILE_BYTES, FILE_BYTES_MAX),
    };
    let bytes_max = input.bytes_max.unwrap_or(usual);
    if !(1..=most).contains(&bytes_max) {
        return refuse(format!(
            "bytes_max is from 1 to {RESULT_BYTES_MAX}, with `to` up to {FILE_BYTES_MAX}"
        ));
    }
    Ok(bytes_max)
}

/// The body of a response that has it.
fn found(response: Response) -> Result<Vec<u8>, Error> {
    if (300..400).contains(&response.status) {
        let (url, status) = (&response.url, response.status);
        let to = http::without_user(response.header("location").unwrap_or("nowhere"));
        return Err(Error::permanent(format_args!(
            "{url} answered {status} to {to}, after as many redirects as `redirects` in the payload allows"
        ))
        .kind("redirected"));
    }
    let response = response.error_for_status();
    Ok(response
        .map_err(|error| error.retry_within(RETRY_AFTER_MAX))?
        .body)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where an attempt writes before the file has its name. Each has a place of its own: one that was taken to be dead, and is not, writes
/// into nobody else's.
fn part(ctx: &Ctx, to: &str, attempt: u32) -> String {
    format!("{to}.{}-{attempt}.part", ctx.job().id)
}

/// Removes what earlier attempts have left that were stopped while they wrote: from the abort on they could change nothing.
fn remove_parts(ctx: &Ctx, to: &str) {
    for attempt in 1..ctx.job().attempt {
        // Most have left none. One that cannot be removed is in nobody's way, and the job has other work to do.
        let _ = fs::remove_file(part(ctx, to, attempt));
    }
}

/// Writes a file so that it is there whole or not at all, however often the job runs.
fn write_whole(ctx: &Ctx, to: &str, bytes: &[u8]) -> io::Result<()> {
    let part = part(ctx, to, ctx.job().attempt);
    if let Some(folder) = Path::new(to).parent().filter(|folder| *folder != "") {
        // A granted directory cannot be made from within, and is there already.
        if !folder.is_dir() {
            fs::create_dir_all(folder)?;
        }
    }
    let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, to));
    if written.is_err() {
        // Nothing more can be done about a part that cannot be removed; the first error counts.
        let _ = fs::remove_file(&part);
    }
    written
}

/// A directory that is not granted will still be so at the next attempt; a full disk may not.
fn unwritable(to: &str, error: &io::Error) -> Error {
    let message = format!("cannot write {to}: {error}");
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::Interrupted | ErrorKind::ResourceBusy => {
            Error::retryable(message)
        }
        _ => Error::permanent(format_args!(
            "{message}. Does rouse.toml grant its directory to http.fetch, with mode = \"read-write\", and do the grants of the job leave it?"
        ))
        .kind("file-denied"),
    }
}

export!(fetch);

#[cfg(test)]
mod tests;
