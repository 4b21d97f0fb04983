//! Secrets that the guest never holds. It has a placeholder, a random word of its attempt; on its way to a server to
//! which the grant lets it go, the host puts the secret in its place. In what comes back from there, the secret is replaced
//! by the placeholder again, where it stands as it is; encoded or compressed it is not recognised.

mod redactor;

use http::HeaderValue;
use http::header::CONTENT_LENGTH;
use http::request::Parts;

pub(super) use redactor::Redactor;

use super::access::HttpAccess;
use super::denial;
use super::target::Target;
use crate::sandbox::grants::{Secret, SecretGrant};

/// How placeholders start, so that people who meet one know what it is.
const PREFIX: &str = "rouse-secret-";

/// The placeholders of one attempt.
#[derive(Debug, Default)]
pub(super) struct Placeholders(Vec<Placeholder>);

#[derive(Debug)]
struct Placeholder {
    name: String,
    word: String,
}

impl Placeholders {
    /// What stands for this secret, the same at each call.
    ///
    /// # Errors
    /// That the handler is not granted it, with what the operator can do.
    pub(super) fn of(&mut self, access: &HttpAccess, name: &str) -> Result<String, String> {
        if !access.has_secret(name) {
            return Err(match access.secrets.contains_key(name) {
                true => denial::secret_taken_away(&access.handler, name),
                false => no_secret(access, name, denial::no_secret),
            });
        }
        Ok(self.word(name))
    }

    fn word(&mut self, name: &str) -> String {
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

    /// Puts secrets into the headers of a request, and says what is to be put into its body.
    ///
    /// # Errors
    /// That one of them may not go there, with what the operator can do.
    pub(super) fn put_into(
        &self,
        access: &HttpAccess,
        target: &Target,
        request: &mut Parts,
    ) -> Result<Replacements, String> {
        let mut in_body = Vec::new();
        for Placeholder { name, word } in &self.0 {
            let Some(granted) = access.secrets.get(name) else {
                continue;
            };
            let secret = &granted.secret;
            if request.uri.to_string().contains(word.as_str()) {
                return Err(denial::secret_in_path(&access.handler, name, target));
            }
            let here: Vec<&SecretGrant> = granted
                .grants()
                .filter(|grant| grant.reaches(&target.host))
                .collect();
            for (header, value) in &mut request.headers {
                let Some(replaced) =
                    replace_all(value.as_bytes(), word.as_bytes(), secret.reveal())
                else {
                    continue;
                };
                let header = header.as_str();
                if !here
                    .iter()
                    .any(|grant| grant.headers.iter().any(|it| it == header))
                {
                    return Err(denial::secret_in_header(
                        &access.handler,
                        name,
                        header,
                        target,
                        &access.config,
                    ));
                }
                *value = HeaderValue::from_bytes(&replaced)
                    .expect("a secret is of characters that a header can carry");
                // Keeps it out of what is printed, and out of the tables of HTTP/2.
                value.set_sensitive(true);
            }
            if here.iter().any(|grant| grant.body) {
                in_body.push((word.clone(), secret.clone()));
            }
        }
        if !in_body.is_empty() {
            // It changes with the body, and the client writes the new one.
            request.headers.remove(CONTENT_LENGTH);
        }
        Ok(Replacements(in_body))
    }

    /// Takes out of what this server answers the secrets that it may know; none where there are none.
    ///
    /// Those that never go there stay out of it: the server has them not from here, and by what is replaced it would
    /// be told whether it has guessed one.
    pub(super) fn redactor(&mut self, access: &HttpAccess, target: &Target) -> Option<Redactor> {
        let known = access
            .secrets
            .iter()
            .filter(|(_, granted)| granted.may_be_known_to(&target.host));
        let pairs: Vec<_> = known
            .map(|(name, granted)| (granted.secret.clone(), self.word(name)))
            .collect();
        (!pairs.is_empty()).then(|| Redactor::new(pairs))
    }
}

/// HMAC-SHA256 of a message, with a secret that is granted for that as the key.
///
/// # Errors
/// That it is not, with what the operator can do.
pub(super) fn sign(access: &HttpAccess, name: &str, message: &[u8]) -> Result<Vec<u8>, String> {
    let granted = access.secrets.get(name);
    match granted.filter(|granted| granted.grants().any(|grant| grant.sign)) {
        Some(granted) => granted
            .secret
            .hmac_sha256(message)
            .map(Vec::from)
            .map_err(|why| format!("the secret {name} is no key: {why}")),
        // It has it, but not for this job.
        None if granted.is_some_and(|granted| granted.is_taken_away) => {
            Err(denial::secret_taken_away(&access.handler, name))
        }
        None => Err(no_secret(access, name, denial::no_signing)),
    }
}

/// That a handler is not granted a secret, or that the table which grants it does not say which module it is for.
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

/// What is put into a body: for each word the secret.
pub(super) struct Replacements(Vec<(String, Secret)>);

impl Replacements {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The body with the secrets in it; none where it has more bytes then.
    pub(super) fn put_into(&self, body: Vec<u8>, bytes_max: usize) -> Option<Vec<u8>> {
        self.0.iter().try_fold(body, |body, (word, secret)| {
            let (word, secret) = (word.as_bytes(), secret.reveal());
            let times = count(&body, word);
            // Looked at before it is made: a short word may stand for a long secret, a thousand times.
            let bytes = body.len() - times * word.len() + times * secret.len();
            (bytes <= bytes_max).then(|| replace_all(&body, word, secret).unwrap_or(body))
        })
    }
}

/// The text with a word replaced wherever it stands; none where it does not.
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
    fn a_word_is_replaced_wherever_it_stands() {
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
    fn a_body_is_as_long_as_it_is_with_its_secrets() {
        let secret = Secret::new("0123456789").expect("a secret");
        let replacements = Replacements(vec![("word".into(), secret)]);
        let put = |bytes_max| replacements.put_into(b"word, word".to_vec(), bytes_max);
        assert_eq!(put(22).as_deref(), Some(&b"0123456789, 0123456789"[..]));
        assert_eq!(put(21), None);
    }
}
