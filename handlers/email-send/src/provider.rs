//! The APIs of the providers.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{Addresses, Input};

/// The provider of the API.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Provider {
    /// Any API with a bearer token and the fields of the payload.
    #[default]
    Generic,
    /// Postmark (<https://postmarkapp.com/developer/api/email-api>).
    Postmark,
    /// Resend (<https://resend.com/docs/api-reference/emails/send-email>).
    Resend,
}

impl Provider {
    /// The URL of its API, if it is known.
    pub(crate) fn url(self) -> Option<&'static str> {
        match self {
            Self::Generic => None,
            Self::Postmark => Some("https://api.postmarkapp.com/email"),
            Self::Resend => Some("https://api.resend.com/emails"),
        }
    }

    /// The header that authenticates the sender.
    pub(crate) fn credential(self, secret: &str) -> (&'static str, String) {
        match self {
            Self::Generic | Self::Resend => ("authorization", format!("Bearer {secret}")),
            Self::Postmark => ("x-postmark-server-token", secret.to_owned()),
        }
    }

    /// The email in the provider's format.
    pub(crate) fn body(self, mail: &Input, id: &str) -> Value {
        match self {
            Self::Generic | Self::Resend => {
                let list = |addresses: &Option<Addresses>| {
                    addresses.as_ref().map(|addresses| json!(addresses.list()))
                };
                object([
                    ("from", Some(json!(mail.from))),
                    ("to", Some(json!(mail.to.list()))),
                    ("cc", list(&mail.cc)),
                    ("bcc", list(&mail.bcc)),
                    ("reply_to", mail.reply_to.as_ref().map(|to| json!(to))),
                    ("subject", Some(json!(mail.subject))),
                    ("text", mail.text.as_ref().map(|text| json!(text))),
                    ("html", mail.html.as_ref().map(|html| json!(html))),
                ])
            }
            Self::Postmark => {
                let joined = |addresses: &Addresses| json!(addresses.list().join(", "));
                object([
                    ("From", Some(json!(mail.from))),
                    ("To", Some(joined(&mail.to))),
                    ("Cc", mail.cc.as_ref().map(joined)),
                    ("Bcc", mail.bcc.as_ref().map(joined)),
                    ("ReplyTo", mail.reply_to.as_ref().map(|to| json!(to))),
                    ("Subject", Some(json!(mail.subject))),
                    ("TextBody", mail.text.as_ref().map(|text| json!(text))),
                    ("HtmlBody", mail.html.as_ref().map(|html| json!(html))),
                    // Postmark has no idempotency key; this makes duplicates recognisable.
                    ("Metadata", Some(json!({ "id": id }))),
                ])
            }
        }
    }
}

fn object<const N: usize>(fields: [(&str, Option<Value>); N]) -> Value {
    let given = fields
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?)));
    Value::Object(given.collect::<Map<_, _>>())
}

/// The provider's id of the email: Resend and many others use `id`, Postmark `MessageID`.
pub(crate) fn message_id(body: &Value) -> Option<String> {
    let names = ["id", "MessageID", "message_id", "messageId"];
    let found = names.iter().find_map(|name| body[*name].as_str());
    found.map(str::to_owned)
}
