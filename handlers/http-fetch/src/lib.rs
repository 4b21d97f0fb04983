//! Fetches a URL, into the result or into a file.

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

/// The payload of `http.fetch`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// The URL: `https://…`.
    pub url: String,
    /// Headers of the request.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// The etag of an earlier result: if it is unchanged, nothing is fetched.
    pub etag: Option<String>,
    /// The target file, in a directory granted for writing. Missing folders are created; an existing file is replaced.
    /// Without a file the content is in the result.
    pub to: Option<String>,
    /// The maximum size of the body, in bytes: 1 MiB by default, with `to` 16 MiB.
    pub bytes_max: Option<usize>,
    /// The maximum number of redirects.
    #[serde(default = "default_redirects")]
    pub redirects: u32,
    /// The time limit of the request, in milliseconds.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
}

fn default_redirects() -> u32 {
    5
}

fn default_timeout_ms() -> u64 {
    60_000
}

/// Used unless the payload sets a user agent, because some servers reject requests without one.
const USER_AGENT: &str = concat!("rouse-http-fetch/", env!("CARGO_PKG_VERSION"));

/// Browsers give up after 20.
const REDIRECTS_MAX: u32 = 20;

/// Less than the timeout of the attempt, so that the error names the server.
const TIMEOUT_MS_MAX: u64 = 540_000;

/// The maximum delay from `retry-after`: a server that asks for a year does not want the request.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The result is stored with the job; base64 and escapes make it larger, and a host's limit is 4 MiB.
const RESULT_BYTES: usize = 1 << 20;
const RESULT_BYTES_MAX: usize = 2 << 20;

/// The body is held in memory until it is written, and its buffer can take three times its size while it grows; an
/// attempt may use 128 MiB.
const FILE_BYTES: usize = 16 << 20;
const FILE_BYTES_MAX: usize = 32 << 20;

/// The result of `http.fetch`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Fetched {
    /// The status of the server's response: 200 to 299, or 304 if the etag is unchanged.
    pub status: u16,
    /// The URL after all redirects.
    pub url: String,
    /// The content type that the server declares.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// The etag from the server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    /// True if the etag is unchanged; then the other fields are missing.
    pub not_modified: bool,
    /// The size of the body, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<usize>,
    /// The SHA-256 of the body, in hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The file that the body was written to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The content, unless it is in a file: one of three forms.
    #[serde(flatten)]
    pub content: Option<Content>,
}

/// Fetches a URL, into the result or into a file.
#[handler(
    name = "http.fetch",
    max_attempts = 8,
    retry_initial = "10s",
    retry_max = "1h",
    timeout = "10m",
    capabilities = ["http", "dirs"]
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
        ctx.info("not modified");
        return Ok(fetched);
    }
    let body = successful_body(response)?;
    ctx.info(format_args!("{} bytes", body.len()));
    fetched.bytes = Some(body.len());
    fetched.sha256 = Some(hexadecimal(&Sha256::digest(&body)));
    match input.to {
        None => fetched.content = Some(Content::from_bytes(body, fetched.content_type.as_deref())),
        Some(to) => {
            write_atomically(ctx, &to, &body).map_err(|error| unwritable(&to, &error))?;
            fetched.path = Some(to);
        }
    }
    Ok(fetched)
}

/// Checks rules that the types do not enforce; returns the size limit.
fn check(input: &Input) -> Result<usize, Error> {
    let refuse = |why: String| Err(Error::permanent(why).kind("invalid_payload"));
    if !(1..=TIMEOUT_MS_MAX).contains(&input.timeout_ms) {
        return refuse(format!("timeout_ms must be from 1 to {TIMEOUT_MS_MAX}"));
    }
    if input.redirects > REDIRECTS_MAX {
        return refuse(format!("redirects must be at most {REDIRECTS_MAX}"));
    }
    let (default, max) = match input.to {
        None => (RESULT_BYTES, RESULT_BYTES_MAX),
        Some(_) => (FILE_BYTES, FILE_BYTES_MAX),
    };
    let bytes_max = input.bytes_max.unwrap_or(default);
    if !(1..=max).contains(&bytes_max) {
        return refuse(format!(
            "bytes_max must be from 1 to {RESULT_BYTES_MAX}, with `to` up to {FILE_BYTES_MAX}"
        ));
    }
    Ok(bytes_max)
}

/// The body of a successful response.
fn successful_body(response: Response) -> Result<Vec<u8>, Error> {
    let (url, status) = (&response.url, response.status);
    let refuse = |why: &str| Error::permanent(format!("{url} responded with status {status}{why}"));
    match (status, response.header("location")) {
        (301 | 302 | 303 | 307 | 308, Some(to)) => {
            let to = http::without_user(to);
            let why =
                format!(", a redirect to {to}, which exceeds the limit `redirects` of the payload");
            return Err(refuse(&why).kind("redirected"));
        }
        (304, _) => {
            let why = " (not modified), but the payload has no `etag`: use `etag` instead of a condition in `headers`";
            return Err(refuse(why).kind(format!("http_{status}")));
        }
        (300..=399, _) => {
            let why = ", which has neither content nor a redirect that can be followed";
            return Err(refuse(why).kind(format!("http_{status}")));
        }
        _ => {}
    }
    let response = response.error_for_status();
    Ok(response
        .map_err(|error| error.retry_within(RETRY_AFTER_MAX))?
        .body)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The temporary file of an attempt. Each attempt has its own, so that an attempt that was wrongly declared lost never
/// writes to another attempt's file.
fn part(ctx: &Ctx, to: &str, attempt: u32) -> String {
    format!("{to}.{}-{attempt}.part", ctx.job().id)
}

/// Removes the temporary files of earlier attempts that were stopped while they wrote: an attempt cannot remove a file
/// after its abort.
fn remove_parts(ctx: &Ctx, to: &str) {
    for attempt in 1..ctx.job().attempt {
        // Most attempts have left none. A file that cannot be removed does no harm, and must not fail the job.
        let _ = fs::remove_file(part(ctx, to, attempt));
    }
}

/// Writes a file atomically: until the new content is complete, there is the old file or none, however often the job
/// runs.
fn write_atomically(ctx: &Ctx, to: &str, bytes: &[u8]) -> io::Result<()> {
    let part = part(ctx, to, ctx.job().attempt);
    if let Some(folder) = Path::new(to).parent().filter(|folder| *folder != "") {
        // A granted directory already exists, and cannot be created from inside the sandbox.
        if !folder.is_dir() {
            fs::create_dir_all(folder)?;
        }
    }
    let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, to));
    if written.is_err() {
        // If the temporary file cannot be removed either, the first error is still the one to report.
        let _ = fs::remove_file(&part);
    }
    written
}

/// The error of a write. A full disk, or a file in use, may be available at the next attempt; a directory that is not
/// granted will not.
fn unwritable(to: &str, error: &io::Error) -> Error {
    let message = format!("cannot write {to}: {error}");
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::Interrupted | ErrorKind::ResourceBusy => {
            Error::retryable(message)
        }
        _ => Error::permanent(format_args!(
            "{message}. Check that rouse.toml grants its directory to http.fetch, with mode = \"read-write\", and that the grants of the job include it"
        ))
        .kind("file_denied"),
    }
}

export!(fetch);

#[cfg(test)]
mod tests;
