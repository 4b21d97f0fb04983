//! HTTP requests to servers that the operator has granted.
//!
//! ```
//! use rouse_sdk::{Ctx, Error, TestCtx, handler, http};
//!
//! #[handler(name = "demo.rate", capabilities = ["http"])]
//! async fn rate(ctx: &Ctx, currency: String) -> Result<f64, Error> {
//!     let response = http::get(format!("https://rates.example/{currency}"))
//!         .header("accept", "application/json")
//!         .send(ctx)
//!         .await?;
//!     Ok(response.error_for_status()?.json()?)
//! }
//!
//! let ctx = TestCtx::new();
//! ctx.on_http(|request| {
//!     assert_eq!(request.url, "https://rates.example/chf");
//!     Ok(http::Response::new(200, "1.07"))
//! });
//! assert_eq!(rouse_sdk::block_on(rate(&ctx, "chf".into())).unwrap(), 1.07);
//! ```
//!
//! Requests that `rouse.toml` does not allow are never sent; they fail permanently, and the job's error contains the
//! lines that would allow them.

mod response;
mod url;

use std::time::Duration;

use serde::Serialize;

use crate::{Ctx, Either, Error, Result, race, sleep};

pub use response::Response;
pub(crate) use url::Url;
pub use url::without_user;

/// The default maximum size of a response, in bytes: an attempt may use 128 MiB of memory by default.
const RESPONSE_BYTES_MAX: usize = 16 << 20;

/// Headers that the host refuses, in lower case: it sets them itself, or they apply to one connection only.
const HEADERS_OF_HOST: [&str; 9] = [
    "connection",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "transfer-encoding",
    "upgrade",
];

/// A request to send.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Request {
    /// `GET`, `POST` …
    pub method: String,
    /// The URL, with its scheme: `https://api.example.com/v1?page=2`.
    pub url: String,
    /// Names and values.
    pub headers: Vec<(String, String)>,
    /// The request body.
    pub body: Vec<u8>,
    /// The time limit for the whole request; `None` means the host's limit.
    pub timeout: Option<Duration>,
    /// The maximum number of redirects that are followed. Default: 0; a redirect is returned like any other response.
    pub redirects: u32,
    /// The maximum size of the response body, in bytes. Default: 16 MiB.
    pub response_bytes_max: usize,
    /// True: a larger body is truncated instead of being an error. Default: false.
    pub truncates_response: bool,
}

/// A GET of this URL.
pub fn get(url: impl Into<String>) -> Request {
    Request::new("GET", url)
}

/// A POST to this URL.
pub fn post(url: impl Into<String>) -> Request {
    Request::new("POST", url)
}

/// A PUT to this URL.
pub fn put(url: impl Into<String>) -> Request {
    Request::new("PUT", url)
}

/// A DELETE of this URL.
pub fn delete(url: impl Into<String>) -> Request {
    Request::new("DELETE", url)
}

impl Request {
    /// A request with any method.
    pub fn new(method: impl Into<String>, url: impl Into<String>) -> Self {
        Self {
            method: method.into(),
            url: url.into(),
            headers: Vec::new(),
            body: Vec::new(),
            timeout: None,
            redirects: 0,
            response_bytes_max: RESPONSE_BYTES_MAX,
            truncates_response: false,
        }
    }

    /// Adds a header. The host sets `host` itself, and headers of the connection such as `connection` and
    /// `transfer-encoding`.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Adds the header `authorization: Bearer …`, for instance with the placeholder from [`Ctx::secret`].
    #[must_use]
    pub fn bearer(self, token: impl AsRef<str>) -> Self {
        let value = format!("Bearer {}", token.as_ref());
        self.header("authorization", value)
    }

    /// Sets the body.
    #[must_use]
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// Sets the body to a value as JSON, and its content type.
    ///
    /// # Errors
    /// If the value cannot be represented as JSON.
    pub fn json(self, value: &impl Serialize) -> Result<Self> {
        let body = serde_json::to_vec(value)?;
        Ok(self.header("content-type", "application/json").body(body))
    }

    /// Sets the time limit.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Follows up to `redirects` redirects. Each is a separate request, which has to be granted; credentials
    /// (`authorization`, `cookie`) are not sent to a different server.
    #[must_use]
    pub fn redirects(mut self, redirects: u32) -> Self {
        self.redirects = redirects;
        self
    }

    /// Sets the size limit of responses.
    #[must_use]
    pub fn response_bytes_max(mut self, bytes: usize) -> Self {
        self.response_bytes_max = bytes;
        self
    }

    /// Reads at most this much of a response and drops the rest; then [`Response::is_truncated`] is true.
    #[must_use]
    pub fn truncate_response(mut self, bytes: usize) -> Self {
        self.response_bytes_max = bytes;
        self.truncates_response = true;
        self
    }

    /// Sends the request and waits for the whole response, regardless of its status.
    ///
    /// # Errors
    /// Permanent: if it is not granted (kind `denied`), if the URL, the method or a header is invalid (kind
    /// `invalid_request`), and if the response is too large (kind `too_large`). Retryable: if there is no response
    /// (kind `http`), if it does not arrive in time (kind `http_timeout`), or if the attempt has to stop (kind
    /// `aborted`).
    pub async fn send(self, ctx: &Ctx) -> Result<Response> {
        let timeout = self.timeout;
        let answered = async {
            let Some(timeout) = timeout else {
                return self.follow(ctx).await;
            };
            let label = self.label();
            match race(self.follow(ctx), sleep(timeout)).await {
                Either::First(answered) => answered,
                Either::Second(()) => Err(Error::retryable(format_args!(
                    "{label}: no response within {timeout:?}"
                ))
                .kind("http_timeout")),
            }
        };
        match race(ctx.abort().wait(), answered).await {
            Either::First(reason) => {
                Err(Error::retryable(format_args!("stopped: {reason}")).kind("aborted"))
            }
            Either::Second(answered) => answered,
        }
    }

    /// Method and URL, for messages.
    pub(crate) fn label(&self) -> String {
        format!("{} {}", self.method, without_user(&self.url))
    }

    /// Truncates a body to the size that the request accepts; returns true if part of it was dropped, so that reading
    /// can stop.
    pub(crate) fn fit(&self, body: &mut Vec<u8>) -> Result<bool> {
        let max = self.response_bytes_max;
        if body.len() <= max {
            return Ok(false);
        }
        if !self.truncates_response {
            let label = self.label();
            return Err(Error::permanent(format_args!(
                "{label}: the response is longer than {max} bytes"
            ))
            .kind("too_large"));
        }
        body.truncate(max);
        Ok(true)
    }

    /// Refuses a method or a header that the host would refuse, and names it. The value of a header may be a secret.
    fn check(&self) -> Result<()> {
        let refuse = |why: &str| {
            let error = Error::permanent(format_args!("{}: {why}", self.label()));
            Err(error.kind("invalid_request"))
        };
        if !is_token(&self.method) {
            return refuse("the method is invalid");
        }
        for (name, value) in &self.headers {
            if !is_token(name) {
                return refuse(&format!("{name:?} is not the name of a header"));
            }
            if HEADERS_OF_HOST.contains(&&*name.to_ascii_lowercase()) {
                return refuse(&format!("a handler cannot set the header {name}"));
            }
            if value.chars().any(|c| c.is_ascii_control() && c != '\t') {
                return refuse(&format!(
                    "the value of the header {name} contains a line break or another control character"
                ));
            }
        }
        Ok(())
    }

    async fn follow(mut self, ctx: &Ctx) -> Result<Response> {
        self.check()?;
        loop {
            let url = Url::parse(&self.url)?;
            let mut response = ctx.http(&self).await?;
            response.url = without_user(&self.url);
            let location = match response.status {
                301 | 302 | 303 | 307 | 308 if self.redirects > 0 => response.header("location"),
                _ => None,
            };
            let Some(location) = location else {
                return Ok(response);
            };
            let next = url.join(location)?;
            self.redirects -= 1;
            self.redirect(&url, &next, response.status);
        }
    }

    /// Turns this into the request for a redirect.
    fn redirect(&mut self, from: &Url, to: &Url, status: u16) {
        // As in browsers: a POST is not repeated, unless the status requires it.
        let becomes_get = status == 303 && self.method != "HEAD"
            || matches!(status, 301 | 302) && self.method == "POST";
        if becomes_get {
            "GET".clone_into(&mut self.method);
            self.body.clear();
        }
        let same_server = from.origin() == to.origin();
        self.headers.retain(|(name, _)| {
            let is = |other: &&str| name.eq_ignore_ascii_case(other);
            let of_body = ["content-type", "content-length", "content-encoding"];
            let credentials = ["authorization", "cookie", "proxy-authorization"];
            !(becomes_get && of_body.iter().any(is)) && (same_server || !credentials.iter().any(is))
        });
        self.url = to.to_string();
    }
}

/// True for the name of a header or a method (RFC 9110, 5.6.2).
fn is_token(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_plain)
}
