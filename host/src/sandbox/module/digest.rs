//! The sha256 that identifies a file.

use std::fmt;
use std::str::FromStr;

use ring::digest::{SHA256, digest};

/// The sha256 of a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of these bytes.
    pub fn compute(bytes: &[u8]) -> Self {
        let mut own = [0; 32];
        own.copy_from_slice(digest(&SHA256, bytes).as_ref());
        Self(own)
    }

    /// The SHA-256 of the nonce followed by the bytes: only a party that has the bytes can compute it for a new
    /// nonce.
    pub fn proof(nonce: &str, bytes: &[u8]) -> Self {
        Self::compute(&[nonce.as_bytes(), bytes].concat())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Reads what `Display` writes.
impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let value = |digit: u8| char::from(digit).to_digit(16);
        let byte = |pair: &[u8]| match *pair {
            [high, low] => u8::try_from(value(high)? * 16 + value(low)?).ok(),
            _ => None,
        };
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not a sha256 (64 hexadecimal digits)"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_and_read_a_digest_as_sha256sum_does() {
        let written = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::compute(b"").to_string(), written);
        assert_eq!(written.parse(), Ok(Digest::compute(b"")));
        for broken in [
            "",
            &written[1..],
            &written[2..],
            &format!("{written}00"),
            &written.replace('e', "+"),
        ] {
            assert!(
                broken
                    .parse::<Digest>()
                    .unwrap_err()
                    .contains("is not a sha256")
            );
        }
    }
}
