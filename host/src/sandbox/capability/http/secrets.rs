//! Secrets that the guest never sees. It has a placeholder, a random word for its attempt, which the host replaces with
//! the secret in requests to servers that the grant allows. In responses from there, the host replaces the secret with
//! the placeholder again if it appears literally; an encoded or compressed secret is not recognised.

mod redactor;

use http::HeaderValue;
use http::header::CONTENT_LENGTH;
use http::request::Parts;

pub(super) use redactor::Redactor;

use super::access::HttpAccess;
use super::attempt::FIELDS_BYTES_MAX;
use super::denial;
use super::tally::fields_bytes;
use super::target::Target;
use crate::sandbox::grants::{Secret, SecretGrant};

/// The prefix of placeholders, so that people recognise them.
const PREFIX: &str = "rouse-secret-";

/// Why the secrets of a request are not inserted.
pub(super) enum NotInserted {
    /// The denial, with a remedy for the operator.
    Denied(String),
    /// With the secrets, the fields of the request would be larger than [`FIELDS_BYTES_MAX`].
    TooLarge,
}

/// The placeholders of one attempt.
#[derive(Debug, Default)]
pub(super) struct Placeholders(Vec<Placeholder>);

#[derive(Debug)]
struct Placeholder {
    name: String,
    word: String,
}

impl Placeholders {
    /// The placeholder of this secret, which is the same at each call.
    ///
    /// # Errors
    /// The denial, if the handler is not granted the secret, with a remedy for the operator.
    pub(super) fn get(&mut self, access: &HttpAccess, name: &str) -> Result<String, String> {
        if !access.has_secret(name) {
            return Err(match access.secrets.contains_key(name) {
                true => denial::secret_removed_by_job(&access.handler, name),
                false => no_secret(access, name, denial::no_secret),
            });
        }
        Ok(self.word_for(name))
    }

    fn word_for(&mut self, name: &str) -> String {
        if let Some(known) = self.0.iter().find(|known| known.name == name) {
            return known.word.clone();
        }
        let word = format!("{PREFIX}{:032x}", rand::random::<u128>());
        self.0.push(Placeholder {
            name: name.to_owned(),
            word: word.clone(),
        });
        word
    }

    /// Inserts secrets into the headers of a request, and returns the replacements for its body.
    ///
    /// # Errors
    /// If one of them may not go there, or the headers would be too large.
    pub(super) fn put_into(
        &self,
        access: &HttpAccess,
        target: &Target,
        request: &mut Parts,
    ) -> Result<Replacements, NotInserted> {
        let mut in_body = Vec::new();
        let mut bytes = fields_bytes(&request.headers);
        for Placeholder { name, word } in &self.0 {
            let Some(granted) = access.secrets.get(name) else {
                continue;
            };
            let secret = &granted.secret;
            if request.uri.to_string().contains(word.as_str()) {
                let denial = denial::secret_in_path(&access.handler, name, target);
                return Err(NotInserted::Denied(denial));
            }
            let grants: Vec<&SecretGrant> = granted
                .grants()
                .filter(|grant| grant.reaches(&target.host))
                .collect();
            for (header, value) in &mut request.headers {
                let times = count(value.as_bytes(), word.as_bytes());
                if times == 0 {
                    continue;
                }
                let header = header.as_str();
                if !grants
                    .iter()
                    .any(|grant| grant.headers.iter().any(|it| it == header))
                {
                    return Err(NotInserted::Denied(denial::secret_in_header(
                        &access.handler,
                        name,
                        header,
                        target,
                        &access.config,
                    )));
                }
                // Checked before the replacement, as for a body.
                bytes = bytes - times * word.len() + times * secret.reveal().len();
                if bytes > FIELDS_BYTES_MAX {
                    return Err(NotInserted::TooLarge);
                }
                if let Some(replaced) =
                    replace_all(value.as_bytes(), word.as_bytes(), secret.reveal())
                {
                    *value = HeaderValue::from_bytes(&replaced)
                        .expect("a secret has only characters that a header can carry");
                    // Keeps the secret out of debug output and out of HTTP/2 header tables.
                    value.set_sensitive(true);
                }
            }
            if grants.iter().any(|grant| grant.body) {
                in_body.push((word.clone(), secret.clone()));
            }
        }
        if !in_body.is_empty() {
            // The length changes with the body; the client writes the new one.
            request.headers.remove(CONTENT_LENGTH);
        }
        Ok(Replacements(in_body))
    }

    /// A redactor for the secrets that this server may know; `None` if there are none.
    ///
    /// Secrets that are never sent there are not redacted: the server does not have them from this host, and redaction
    /// would reveal whether it guessed one.
    pub(super) fn redactor(&mut self, access: &HttpAccess, target: &Target) -> Option<Redactor> {
        let known = access
            .secrets
            .iter()
            .filter(|(_, granted)| granted.may_be_known_to(&target.host));
        let pairs: Vec<_> = known
            .map(|(name, granted)| (granted.secret.clone(), self.word_for(name)))
            .collect();
        (!pairs.is_empty()).then(|| Redactor::new(pairs))
    }
}

/// HMAC-SHA256 of a message, with a secret that is granted for signing as the key.
///
/// # Errors
/// The denial, if it is not granted, with a remedy for the operator.
pub(super) fn sign(access: &HttpAccess, name: &str, message: &[u8]) -> Result<Vec<u8>, String> {
    let granted = access.secrets.get(name);
    match granted.filter(|granted| granted.grants().any(|grant| grant.sign)) {
        Some(granted) => granted
            .secret
            .hmac_sha256(message)
            .map(Vec::from)
            .map_err(|why| format!("the secret {name} is not a key: {why}")),
        // The handler has it, but the job's attenuation removes it.
        None if granted.is_some_and(|granted| granted.is_removed_by_job) => {
            Err(denial::secret_removed_by_job(&access.handler, name))
        }
        None => Err(no_secret(access, name, denial::no_signing)),
    }
}

/// The denial of a secret that is not granted, or whose table does not name a module.
fn no_secret(
    access: &HttpAccess,
    name: &str,
    otherwise: fn(&str, &str, Option<&str>, &str) -> String,
) -> String {
    match access.unbound_secrets.get(name) {
        Some(lines) => denial::unbound_secret(&access.handler, name, lines),
        None => otherwise(
            &access.handler,
            name,
            access.binding.as_deref(),
            &access.config,
        ),
    }
}

/// The replacements for a body: placeholders and their secrets.
pub(super) struct Replacements(Vec<(String, Secret)>);

impl Replacements {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The body with its secrets; `None` if it would be larger than `bytes_max`.
    pub(super) fn put_into(&self, body: Vec<u8>, bytes_max: usize) -> Option<Vec<u8>> {
        self.0.iter().try_fold(body, |body, (word, secret)| {
            let (word, secret) = (word.as_bytes(), secret.reveal());
            let times = count(&body, word);
            // Checked before the replacement, because a short placeholder may stand for a long secret and occur a
            // thousand times.
            let bytes = body.len() - times * word.len() + times * secret.len();
            (bytes <= bytes_max).then(|| replace_all(&body, word, secret).unwrap_or(body))
        })
    }
}

/// The text with all occurrences of a word replaced; `None` if there are none.
fn replace_all(text: &[u8], word: &[u8], with: &str) -> Option<Vec<u8>> {
    let mut replaced = Vec::new();
    let mut rest = text;
    while let Some(at) = find(rest, word) {
        replaced.extend_from_slice(&rest[..at]);
        replaced.extend_from_slice(with.as_bytes());
        rest = &rest[at + word.len()..];
    }
    if rest.len() == text.len() {
        return None;
    }
    replaced.extend_from_slice(rest);
    Some(replaced)
}

fn count(text: &[u8], word: &[u8]) -> usize {
    let (mut times, mut rest) = (0, text);
    while let Some(at) = find(rest, word) {
        times += 1;
        rest = &rest[at + word.len()..];
    }
    times
}

fn find(text: &[u8], word: &[u8]) -> Option<usize> {
    text.windows(word.len()).position(|window| window == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replace_all_occurrences_of_a_word() {
        let replace = |text: &str| {
            replace_all(text.as_bytes(), b"word", "a secret")
                .map(|bytes| String::from_utf8(bytes).expect("UTF-8"))
        };
        assert_eq!(replace("Bearer word").as_deref(), Some("Bearer a secret"));
        assert_eq!(replace("wordword w").as_deref(), Some("a secreta secret w"));
        assert_eq!(replace("wor"), None);
        assert_eq!(replace(""), None);
    }

    #[test]
    fn limit_the_size_of_a_body_with_its_secrets() {
        let secret = Secret::new("0123456789").expect("a secret");
        let replacements = Replacements(vec![("word".into(), secret)]);
        let put = |bytes_max| replacements.put_into(b"word, word".to_vec(), bytes_max);
        assert_eq!(put(22).as_deref(), Some(&b"0123456789, 0123456789"[..]));
        assert_eq!(put(21), None);
    }
}
