//! Delivers webhooks: sends JSON to a URL, signed according to Standard Webhooks, until the receiver accepts it.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rouse_sdk::http::{self, Request, Response};
use rouse_sdk::{Ctx, Error, export, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// The payload of `http.deliver`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// The URL of the receiver: `https://…`.
    pub url: String,
    /// The method; POST by default.
    #[serde(default)]
    pub method: Method,
    /// Headers in addition to those of the delivery itself.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// Any JSON, including `null`. Its numbers keep every digit. Without it, the request has no body.
    #[serde(default, deserialize_with = "as_it_is")]
    #[schemars(with = "Option<Value>", skip_serializing_if = "Option::is_none")]
    pub body: Option<Box<RawValue>>,
    /// The name of the signing key; without one the delivery is not signed.
    pub secret: Option<String>,
    /// Identifies the delivery for the receiver, up to 64 letters, digits, `-` and `_`; by default derived from the
    /// job's id. All attempts of a job have the same id.
    pub id: Option<String>,
    /// The time limit of the request, in milliseconds.
    #[serde(default = "default_timeout_ms")]
    pub timeout_ms: u64,
}

/// With an `Option` alone, `null` would be the same as a missing value.
fn as_it_is<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(input).map(Some)
}

/// The HTTP method.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum Method {
    /// The default.
    #[default]
    Post,
    /// For receivers that require it.
    Put,
    /// For receivers that require it.
    Patch,
    /// For receivers that require it.
    Delete,
    /// For receivers that require it.
    Get,
}

/// Receivers are expected to respond at once and to do their work later.
fn default_timeout_ms() -> u64 {
    30_000
}

/// Less than the timeout of the attempt, so that the error names the receiver.
const TIMEOUT_MS_MAX: u64 = 240_000;

/// The maximum length of an id, which is sent in a header and stored by the receiver.
const ID_CHARS_MAX: usize = 64;

/// The stored length of a response, enough to see how the receiver reacted.
const RESPONSE_BYTES_MAX: usize = 4 << 10;

/// The maximum delay from `retry-after`: a server that asks for a year does not want the request.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Headers of the delivery itself, lower case.
const OWN_HEADERS: [&str; 4] = [
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
    "idempotency-key",
];

/// The result of `http.deliver`.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Delivered {
    /// The status of the receiver's response: 200 to 299.
    pub status: u16,
    /// The id that was sent to the receiver.
    pub id: String,
    /// The start of its response, at most 4 KiB.
    pub response: String,
    /// True if the response is longer.
    pub response_is_truncated: bool,
}

/// Delivers a webhook, signed according to Standard Webhooks.
#[handler(
    name = "http.deliver",
    max_attempts = 14,
    retry_initial = "10s",
    retry_max = "6h",
    timeout = "5m",
    capabilities = ["http", "sign"]
)]
pub async fn deliver(ctx: &Ctx, input: Input) -> Result<Delivered, Error> {
    let id = check(ctx, &input)?;
    let request = request(ctx, input, &id)?;
    let response = request.send(ctx).await?;
    let details = json!({"status": response.status, "id": id});
    let response = accepted(response).map_err(|error| error.details(details))?;
    ctx.info(format_args!("delivered as {id}: {}", response.status));
    Ok(Delivered {
        status: response.status,
        id,
        // Postgres cannot store NUL.
        response: String::from_utf8_lossy(&response.body).replace('\0', "\u{fffd}"),
        response_is_truncated: response.is_truncated,
    })
}

/// Checks rules that the types do not enforce; returns the id.
fn check(ctx: &Ctx, input: &Input) -> Result<String, Error> {
    let refuse = |why: String| Err(Error::permanent(why).kind("invalid_payload"));
    if !(1..=TIMEOUT_MS_MAX).contains(&input.timeout_ms) {
        return refuse(format!("timeout_ms must be from 1 to {TIMEOUT_MS_MAX}"));
    }
    for name in input.headers.keys() {
        if OWN_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
            return refuse(format!(
                "the header {name} is set by http.deliver itself; the payload can only set the id, with `id`"
            ));
        }
    }
    let job = ctx.job();
    let Some(id) = &input.id else {
        // The time distinguishes jobs of different databases.
        return Ok(format!("msg_{}_{}", job.requested_at_ms, job.id));
    };
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    match (1..=ID_CHARS_MAX).contains(&id.len()) && id.bytes().all(fits) {
        true => Ok(id.clone()),
        false => refuse(format!(
            "id must have 1 to {ID_CHARS_MAX} letters, digits, - and _"
        )),
    }
}

fn request(ctx: &Ctx, input: Input, id: &str) -> Result<Request, Error> {
    let method = match input.method {
        Method::Post => "POST",
        Method::Put => "PUT",
        Method::Patch => "PATCH",
        Method::Delete => "DELETE",
        Method::Get => "GET",
    };
    let body = input.body.map(|body| body.get().as_bytes().to_vec());
    let body = body.unwrap_or_default();
    let has = |name: &str| {
        input
            .headers
            .keys()
            .any(|own| own.eq_ignore_ascii_case(name))
    };
    let mut request = Request::new(method, input.url)
        .timeout(Duration::from_millis(input.timeout_ms))
        .truncate_response(RESPONSE_BYTES_MAX);
    if !body.is_empty() && !has("content-type") {
        request = request.header("content-type", "application/json");
    }
    if !has("user-agent") {
        let own = concat!("rouse-http-deliver/", env!("CARGO_PKG_VERSION"));
        request = request.header("user-agent", own);
    }
    for (name, value) in input.headers {
        request = request.header(name, value);
    }
    // The time of the attempt, not of the job: receivers reject requests that are older than a few minutes.
    let timestamp = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)?
        .as_secs()
        .to_string();
    if let Some(secret) = input.secret {
        let signed = [format!("{id}.{timestamp}.").as_bytes(), &body].concat();
        let tag = STANDARD.encode(ctx.hmac_sha256(secret, signed)?);
        request = request.header("webhook-signature", format!("v1,{tag}"));
    }
    Ok(request
        .header("webhook-id", id)
        .header("webhook-timestamp", timestamp)
        .header("idempotency-key", id)
        .body(body))
}

/// The response, if the delivery was accepted.
fn accepted(response: Response) -> Result<Response, Error> {
    let (url, status) = (&response.url, response.status);
    match (status, response.header("location")) {
        (301 | 302 | 303 | 307 | 308, Some(to)) => {
            let to = http::without_user(to);
            return Err(Error::permanent(format_args!(
                "{url} redirects with status {status} to {to}, which is not followed: enqueue the delivery for the new \
                 address, if it belongs to the receiver"
            ))
            .kind("redirected"));
        }
        (300..=399, _) => {
            return Err(Error::permanent(format_args!(
                "{url} responded with status {status}, which neither accepts the delivery nor names another address"
            ))
            .kind(format!("http_{status}")));
        }
        _ => {}
    }
    let response = response.error_for_status();
    response.map_err(|error| error.retry_within(RETRY_AFTER_MAX))
}

export!(deliver);

#[cfg(test)]
mod tests;
