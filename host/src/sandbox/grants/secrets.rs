//! Secrets, and their grants to handlers.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;

use super::{Host, HostPattern};

/// Shorter secrets would match unrelated text in responses, and be redacted there.
const SECRET_BYTES_MIN: usize = 8;

/// The space that a request header has for a secret.
const SECRET_BYTES_MAX: usize = 4 << 10;

/// The prefix of Standard Webhooks signing keys; base64 follows.
const KEY_PREFIX: &str = "whsec_";

/// A value that only the host may know. It does not appear in any log line, error or result.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl Secret {
    /// Validates a secret.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it, without revealing it.
    pub fn new(text: &str) -> Result<Self, String> {
        if !(SECRET_BYTES_MIN..=SECRET_BYTES_MAX).contains(&text.len()) {
            return Err(format!(
                "it is {} bytes long; a secret must be {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes long",
                text.len()
            ));
        }
        match text.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
            true => Ok(Self(text.into())),
            false => Err(
                "it has characters that are not allowed in a header (use printable ASCII)".into(),
            ),
        }
    }

    /// HMAC-SHA256 of a message with this secret as the key: its bytes, or the decoded key if it is a Standard
    /// Webhooks key.
    ///
    /// # Errors
    /// If the secret starts like such a key but is not valid. The error does not reveal the secret.
    pub fn hmac_sha256(&self, message: &[u8]) -> Result<[u8; 32], String> {
        let key = match self.0.strip_prefix(KEY_PREFIX) {
            None => self.0.as_bytes().to_vec(),
            Some(text) => STANDARD.decode(text).map_err(|_| {
                format!("it starts with {KEY_PREFIX} but does not continue in base64")
            })?,
        };
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        let mut tag = [0; 32];
        tag.copy_from_slice(hmac::sign(&key, message).as_ref());
        Ok(tag)
    }

    /// The secret itself, for the request that carries it and for finding it in responses.
    pub(in crate::sandbox) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The secrets of a host, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Secrets(pub BTreeMap<String, Secret>);

/// The ways in which a handler or a family of handlers may use a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretGrant {
    /// A handler's name, or a pattern.
    pub handler: String,
    /// The secret's name.
    pub name: String,
    /// The servers that it may be sent to.
    pub hosts: Vec<HostPattern>,
    /// The headers that may carry it, in lower case.
    pub headers: Vec<String>,
    /// Whether bodies may also carry it.
    pub body: bool,
    /// Whether it may sign; signatures may be sent anywhere.
    pub sign: bool,
}

impl SecretGrant {
    /// True if the secret may be sent to this server.
    pub(in crate::sandbox) fn reaches(&self, host: &Host) -> bool {
        self.hosts.iter().any(|pattern| pattern.covers(host))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_printed() {
        let secret = Secret::new("correct horse").expect("a secret");
        assert!(!format!("{secret:?}").contains("horse"));
    }

    #[test]
    fn signatures_match_standard_webhooks() {
        let signed = |key: &str, message: &str| {
            let secret = Secret::new(key).expect("a secret");
            let tag = secret.hmac_sha256(message.as_bytes());
            tag.map(|tag| STANDARD.encode(tag))
        };
        // The example from the tests of the Standard Webhooks libraries.
        let message = "msg_p5jXN8AQM9LWM0D4loKWxJek.1614265330.{\"test\": 2432232314}";
        assert_eq!(
            signed("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", message),
            Ok("g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=".into())
        );
        // Any other secret is the key itself.
        let plain = signed("correct horse", "what do ya want for nothing?");
        assert_eq!(
            plain,
            Ok("0NcNZehXGEyIjS2+wqTBdhFeGO2bA0uCi6mamjKUyn8=".into())
        );
        let why = signed("whsec_!correct horse", "x").expect_err("it is not a key");
        assert!(why.contains("base64") && !why.contains("horse"), "{why}");
    }

    #[test]
    fn refuse_secrets_that_are_too_short_too_long_or_not_printable() {
        assert!(Secret::new("1234567").is_err());
        assert!(Secret::new(&"x".repeat(5000)).is_err());
        for bad in ["12345678\n", "12345678\0", "pässwörter"] {
            let why = Secret::new(bad).expect_err("must be refused");
            assert!(why.contains("printable"), "{why}");
        }
    }
}
