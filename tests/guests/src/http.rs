//! Guests that send requests, well-behaved and otherwise.

use std::collections::BTreeMap;
use std::time::Duration;

use rouse_sdk::{Ctx, Error, Result, handler, http};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

/// Requests that are sent one after the other. `{NAME}` in a header, a URL or a body is the placeholder of a secret
/// that `secrets` lists.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct Requests {
    #[serde(default)]
    secrets: Vec<String>,
    requests: Vec<Request>,
    /// Continue after a failed request.
    #[serde(default)]
    continue_after_errors: bool,
    /// Log, report and record the responses, and fail with them.
    #[serde(default)]
    report: bool,
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Request {
    #[serde(default = "get")]
    method: String,
    url: String,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default)]
    body: String,
    /// A body of this many bytes instead.
    #[serde(default)]
    body_bytes: usize,
    #[serde(default)]
    redirects: u32,
    timeout_ms: Option<u64>,
}

fn get() -> String {
    "GET".to_owned()
}

async fn send(ctx: &Ctx, payload: Requests) -> Result<Value> {
    let mut words = BTreeMap::new();
    for name in &payload.secrets {
        words.insert(name.clone(), ctx.secret(name)?);
    }
    let filled = |text: &str| {
        words.iter().fold(text.to_owned(), |text, (name, word)| {
            text.replace(&format!("{{{name}}}"), word)
        })
    };
    let mut responses = Vec::new();
    for request in payload.requests {
        let body = match request.body_bytes {
            0 => filled(&request.body).into_bytes(),
            bytes => vec![b'x'; bytes],
        };
        let mut sent = http::Request::new(request.method, filled(&request.url))
            .body(body)
            .redirects(request.redirects);
        sent.timeout = request.timeout_ms.map(Duration::from_millis);
        for (name, value) in &request.headers {
            sent = sent.header(name, filled(value));
        }
        ctx.progress(1, "sending");
        let response = match sent.send(ctx).await {
            Ok(response) => {
                let body = String::from_utf8_lossy(&response.body).into_owned();
                if payload.report {
                    ctx.info(&body);
                    println!("{body}");
                    ctx.progress(50, &body);
                    ctx.step("reported", || Ok(body.clone()))?;
                }
                let headers: BTreeMap<_, _> = response.headers.into_iter().collect();
                json!({"status": response.status, "headers": headers, "body": body, "url": response.url})
            }
            Err(error) if payload.continue_after_errors => {
                json!({"error": error.message, "kind": error.kind})
            }
            Err(error) => return Err(error),
        };
        responses.push(response);
    }
    if payload.report {
        let error = Error::retryable(serde_json::to_string(&responses)?);
        return Err(error.details(json!(responses)));
    }
    Ok(json!({"responses": responses, "words": words}))
}

/// Sends requests to public servers only.
#[handler(name = "test.http.public", max_attempts = 3, capabilities = ["http"])]
pub(crate) async fn public(ctx: &Ctx, payload: Requests) -> Result<Value> {
    send(ctx, payload).await
}

/// Sends requests to servers on this machine.
#[handler(name = "test.http.private", max_attempts = 3, capabilities = ["http"])]
pub(crate) async fn private(ctx: &Ctx, payload: Requests) -> Result<Value> {
    send(ctx, payload).await
}

/// Sends requests with a grant of its own.
#[handler(name = "test.http.other", max_attempts = 3, capabilities = ["http"])]
pub(crate) async fn other(ctx: &Ctx, payload: Requests) -> Result<Value> {
    send(ctx, payload).await
}

/// Sends requests with secrets in them.
#[handler(name = "test.http.secret", max_attempts = 2, retry_initial = "10ms", capabilities = ["http", "secrets"])]
pub(crate) async fn secret(ctx: &Ctx, payload: Requests) -> Result<Value> {
    send(ctx, payload).await
}

/// Has no grants.
#[handler(name = "test.http.none", max_attempts = 3, capabilities = ["http"])]
pub(crate) async fn none(ctx: &Ctx, payload: Requests) -> Result<Value> {
    send(ctx, payload).await
}

/// Sends a request with thousands of fields.
#[handler(name = "test.http.fields", max_attempts = 1)]
pub(crate) async fn fields(ctx: &Ctx, count: usize) -> Result<u16> {
    let mut request = http::get("https://a.example/");
    for n in 0..count {
        request = request.header(format!("x-{n}"), "value");
    }
    Ok(request.send(ctx).await?.status)
}
