//! Locks and signatures: an operator lists or signs the modules that may serve.
//!
//! Both checks cover the bytes that are loaded, not a file that was checked earlier, so replacing the file in between
//! has no effect. File names do not matter; a listed or signed module may have any name.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};

use super::digest::Digest;

/// The size of a public or private key, in bytes.
const KEY_BYTES: usize = 32;

/// The requirements that a module must meet before it may serve. If both are set, both apply. Default: none.
#[derive(Debug, Clone, Default)]
pub struct Pin {
    /// The file with the digests of all modules that may serve, as `sha256sum` writes it.
    pub lock: Option<PathBuf>,
    /// Keys whose signatures are accepted. If there are any, each `x.wasm` needs a signature `x.wasm.sig` by one of
    /// them.
    pub trusted_keys: Vec<PublicKey>,
}

/// The digests of the modules that may serve.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Lock(BTreeSet<Digest>);

impl Lock {
    /// True if it lists this digest.
    pub fn allows(&self, digest: Digest) -> bool {
        self.0.contains(&digest)
    }
}

/// Parses lines as `sha256sum` writes them: a digest, two spaces (or a space and `*`), a name. Empty lines and lines
/// that start with `#` are skipped.
impl FromStr for Lock {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut digests = BTreeSet::new();
        for (number, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with('#') {
                continue;
            }
            // A leading backslash means that the name contains escaped characters.
            let (digest, name) = line
                .trim_start_matches('\\')
                .split_once(' ')
                .unwrap_or((line, ""));
            match digest.parse() {
                Ok(digest) if !name.trim_start_matches([' ', '*']).is_empty() => {
                    digests.insert(digest)
                }
                Ok(_) | Err(_) => {
                    return Err(format!(
                        "line {} is not a line of sha256sum: a digest, two spaces and a name",
                        number + 1
                    ));
                }
            };
        }
        Ok(Self(digests))
    }
}

/// The line of a lock that allows a module.
pub fn lock_line(digest: Digest, file: &str) -> String {
    format!("{digest}  {file}")
}

/// A key that verifies signatures: ed25519, written as base64.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PublicKey([u8; KEY_BYTES]);

impl PublicKey {
    /// True if this signature (in base64) was made by this key for exactly these bytes.
    pub fn signed(&self, bytes: &[u8], signature: &str) -> bool {
        let Ok(signature) = BASE64_STANDARD.decode(signature.trim()) else {
            return false;
        };
        UnparsedPublicKey::new(&ED25519, self.0)
            .verify(bytes, &signature)
            .is_ok()
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&BASE64_STANDARD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

impl FromStr for PublicKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        key(text).map(Self)
    }
}

/// A key that signs modules. Never printed.
pub struct SigningKey(Ed25519KeyPair);

impl SigningKey {
    /// A new random private key, as text. Keep it secret.
    pub fn random() -> String {
        BASE64_STANDARD.encode(rand::random::<[u8; KEY_BYTES]>())
    }

    /// The key that verifies its signatures.
    pub fn public(&self) -> PublicKey {
        let mut key = [0; KEY_BYTES];
        key.copy_from_slice(self.0.public_key().as_ref());
        PublicKey(key)
    }

    /// The signature of these bytes, in base64.
    pub fn sign(&self, bytes: &[u8]) -> String {
        BASE64_STANDARD.encode(self.0.sign(bytes))
    }
}

impl FromStr for SigningKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let pair = Ed25519KeyPair::from_seed_unchecked(&key(text)?);
        pair.map(Self).map_err(|error| error.to_string())
    }
}

fn key(text: &str) -> Result<[u8; KEY_BYTES], String> {
    let bytes = BASE64_STANDARD.decode(text.trim()).ok();
    bytes.and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| {
        format!("it is not a key: a key is {KEY_BYTES} bytes in base64; `rouse handlers keygen` creates one")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_a_lock_as_sha256sum_writes_it() {
        let digest = Digest::compute(b"");
        let lock: Lock = format!(
            "# ours\n\n{digest}  a.wasm\n{}",
            lock_line(Digest::compute(b"b"), "b c.wasm")
        )
        .parse()
        .unwrap();
        assert!(lock.allows(digest) && lock.allows(Digest::compute(b"b")));
        assert!(!lock.allows(Digest::compute(b"c")));
        // In binary mode, and with an escaped name.
        for line in [
            format!("{digest} *a.wasm"),
            format!("\\{digest}  a\\\\b.wasm"),
        ] {
            assert!(line.parse::<Lock>().unwrap().allows(digest), "{line}");
        }
        assert_eq!("".parse(), Ok(Lock::default()));
    }

    #[test]
    fn name_the_line_that_does_not_parse() {
        let digest = Digest::compute(b"");
        for text in [
            format!("{digest}  a.wasm\nrubbish"),
            format!("\n{digest}"),
            format!("\n{digest}  "),
            format!("\n{}  a.wasm", &digest.to_string()[1..]),
            format!("\nx{}  a.wasm", &digest.to_string()[1..]),
        ] {
            let why = text.parse::<Lock>().unwrap_err();
            assert!(
                why.starts_with("line 2 is not a line of sha256sum"),
                "{text}: {why}"
            );
        }
    }

    #[test]
    fn a_signature_is_valid_for_its_bytes_and_key_only() {
        let key: SigningKey = SigningKey::random().parse().unwrap();
        let other: SigningKey = SigningKey::random().parse().unwrap();
        let signature = key.sign(b"module");
        assert!(key.public().signed(b"module", &format!("{signature}\n")));
        assert!(!key.public().signed(b"modul3", &signature));
        assert!(!other.public().signed(b"module", &signature));
        for broken in ["", "rubbish!", &signature[4..], &key.public().to_string()] {
            assert!(!key.public().signed(b"module", broken), "{broken}");
        }
    }

    #[test]
    fn signatures_match_rfc_8032() {
        // Section 7.1, test 1: an empty message.
        let seed = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60";
        let public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
        let bytes = |hex: &str| {
            let digits: Vec<u32> = hex.chars().map(|c| c.to_digit(16).unwrap()).collect();
            digits
                .chunks(2)
                .map(|pair| (pair[0] * 16 + pair[1]) as u8)
                .collect::<Vec<_>>()
        };
        let key: SigningKey = BASE64_STANDARD.encode(bytes(seed)).parse().unwrap();
        assert_eq!(
            key.public().to_string(),
            BASE64_STANDARD.encode(bytes(public))
        );
        let signature = "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b";
        assert_eq!(key.sign(b""), BASE64_STANDARD.encode(bytes(signature)));
    }

    #[test]
    fn refuse_text_that_is_not_a_key() {
        for text in [
            "",
            "short",
            "AAAA",
            "not base64 at all .............................",
        ] {
            assert!(
                text.parse::<PublicKey>().unwrap_err().contains("keygen"),
                "{text}"
            );
            assert!(text.parse::<SigningKey>().is_err(), "{text}");
        }
    }
}
