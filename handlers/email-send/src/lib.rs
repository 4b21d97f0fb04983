//! Sends an email through the HTTP API of a provider.

mod provider;

use std::time::Duration;

use rouse_sdk::{Ctx, Error, export, handler, http};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use provider::Provider;

/// The payload of `email.send`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// The provider; `generic` by default.
    #[serde(default)]
    pub provider: Provider,
    /// The URL of the API; by default that of the provider, if it is known.
    pub url: Option<String>,
    /// The name of the secret for the API.
    pub secret: String,
    /// `a@b.example` or `Name <a@b.example>`.
    pub from: String,
    /// The recipients.
    pub to: Addresses,
    /// Recipients of a copy.
    pub cc: Option<Addresses>,
    /// Recipients of a blind copy.
    pub bcc: Option<Addresses>,
    /// The address for replies.
    pub reply_to: Option<String>,
    /// The subject.
    pub subject: String,
    /// The content as text. At least one of `text` and `html` is required.
    pub text: Option<String>,
    /// The content as HTML.
    pub html: Option<String>,
    /// Identifies the email for the provider, up to 64 letters, digits, `-` and `_`; by default derived from the job's
    /// id. All attempts of a job have the same id.
    pub id: Option<String>,
}

/// One address or several.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum Addresses {
    /// One address.
    One(String),
    /// Several addresses.
    Many(Vec<String>),
}

impl Addresses {
    pub(crate) fn list(&self) -> &[String] {
        match self {
            Self::One(address) => std::slice::from_ref(address),
            Self::Many(addresses) => addresses,
        }
    }
}

/// The maximum length of an id, which is sent in a header, and in fields of providers with a limit of 80.
const ID_CHARS_MAX: usize = 64;

/// Providers respond within a second or two of receiving the email.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The maximum delay from `retry-after`: a server that asks for a year does not want the request.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Some providers reject requests without a user agent.
const USER_AGENT: &str = concat!("rouse-email-send/", env!("CARGO_PKG_VERSION"));

/// The maximum length of a response that is read: an id and a few words.
const RESPONSE_BYTES_MAX: usize = 64 << 10;

/// The result of `email.send`.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Sent {
    /// The status of the provider's response: 200 to 299.
    pub status: u16,
    /// The provider's id of the email, if it returns one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message_id: Option<String>,
    /// The id that was sent to the provider.
    pub id: String,
}

/// Sends an email through the HTTP API of a provider.
#[handler(
    name = "email.send",
    max_attempts = 10,
    retry_initial = "10s",
    retry_max = "1h",
    timeout = "2m",
    capabilities = ["http", "secrets"]
)]
pub async fn send(ctx: &Ctx, input: Input) -> Result<Sent, Error> {
    let (url, id) = check(ctx, &input)?;
    let (name, value) = input.provider.credential(&ctx.secret(&input.secret)?);
    let response = http::post(url)
        .header("accept", "application/json")
        .header("user-agent", USER_AGENT)
        .header(name, value)
        .header("idempotency-key", &id)
        .json(&input.provider.body(&input, &id))?
        .timeout(TIMEOUT)
        .truncate_response(RESPONSE_BYTES_MAX)
        .send(ctx)
        .await?;
    if (300..400).contains(&response.status) {
        return Err(Error::permanent(format_args!(
            "{} responded with a redirect ({}), which is not followed: check `url`",
            response.url, response.status
        ))
        .kind("redirected"));
    }
    let response = response.error_for_status();
    let response = response.map_err(|error| error.retry_within(RETRY_AFTER_MAX))?;
    let body: Value = response.json().unwrap_or_default();
    ctx.info(format_args!("sent as {id}: {}", response.status));
    Ok(Sent {
        status: response.status,
        message_id: provider::message_id(&body),
        id,
    })
}

/// Checks rules that the types do not enforce; returns the API's URL, and the id.
fn check(ctx: &Ctx, input: &Input) -> Result<(String, String), Error> {
    let refuse = |why: String| Err(Error::permanent(why).kind("invalid_payload"));
    if input.text.is_none() && input.html.is_none() {
        return refuse("an email needs `text` or `html`, or both".to_owned());
    }
    if input.to.list().is_empty() {
        return refuse("`to` is empty".to_owned());
    }
    let own = input.url.as_deref().or(input.provider.url());
    let Some(url) = own else {
        return refuse("the provider `generic` needs the `url` of its API".to_owned());
    };
    let job = ctx.job();
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let id = match &input.id {
        // The time distinguishes jobs of different databases.
        None => format!("job_{}_{}", job.requested_at_ms, job.id),
        Some(id) if (1..=ID_CHARS_MAX).contains(&id.len()) && id.bytes().all(fits) => id.clone(),
        Some(_) => {
            return refuse(format!(
                "id must have 1 to {ID_CHARS_MAX} letters, digits, - and _"
            ));
        }
    };
    Ok((url.to_owned(), id))
}

export!(send);

#[cfg(test)]
mod tests;
