//! Redacts secrets in a stream, wherever the stream is split into pieces.
//!
//! The same amount of any text is held back, so that the timing of the output reveals nothing about a secret.
//! Otherwise, a reader that cooperates with the writer could see which guess at the start of a secret is held back
//! longer.

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};

use crate::sandbox::grants::Secret;

/// Redacts secrets in a stream. It always holds back one byte less than the longest secret has, until more bytes arrive
/// or the stream ends.
pub(in crate::sandbox::capability::http) struct Redactor {
    /// The longest secret first: if one secret starts with another, the longer one is replaced.
    pairs: Vec<(Secret, String)>,
    /// The size of the longest secret, in bytes.
    longest: usize,
    held_back: BytesMut,
}

impl Redactor {
    /// Creates a redactor for secrets and the words that replace them.
    pub(in crate::sandbox::capability::http) fn new(mut pairs: Vec<(Secret, String)>) -> Self {
        pairs.sort_by_key(|(secret, _)| std::cmp::Reverse(secret.reveal().len()));
        let longest = pairs.first().map_or(0, |(secret, _)| secret.reveal().len());
        Self {
            pairs,
            longest,
            held_back: BytesMut::new(),
        }
    }

    /// Adds bytes, and returns the text that is final.
    pub(in crate::sandbox::capability::http) fn push(&mut self, bytes: &[u8]) -> Bytes {
        self.held_back.extend_from_slice(bytes);
        let (clean, used) = self.clean(&self.held_back, false);
        drop(self.held_back.split_to(used));
        clean.into()
    }

    /// Returns the remaining bytes that were held back, at the end.
    pub(in crate::sandbox::capability::http) fn finish(&mut self) -> Bytes {
        let (clean, _) = self.clean(&self.held_back, true);
        self.held_back.clear();
        clean.into()
    }

    /// Redacts the values of these fields.
    pub(in crate::sandbox::capability::http) fn redact_fields(&self, fields: &mut HeaderMap) {
        redact_each(fields, |value| {
            let (clean, _) = self.clean(value, true);
            (clean != value).then_some(clean)
        });
    }

    /// The text without secrets, and the number of bytes of input that it covers: all of them if `is_end`.
    fn clean(&self, text: &[u8], is_end: bool) -> (Vec<u8>, usize) {
        let mut clean = Vec::with_capacity(text.len());
        let mut at = 0;
        while at < text.len() && (is_end || text.len() - at >= self.longest) {
            let rest = &text[at..];
            let found = self
                .pairs
                .iter()
                .find(|(secret, _)| rest.starts_with(secret.reveal().as_bytes()));
            match found {
                Some((secret, word)) => {
                    clean.extend_from_slice(word.as_bytes());
                    at += secret.reveal().len();
                }
                None => {
                    clean.push(rest[0]);
                    at += 1;
                }
            }
        }
        (clean, at)
    }
}

/// Redacts each value of these fields.
fn redact_each(fields: &mut HeaderMap, redact: impl Fn(&[u8]) -> Option<Vec<u8>>) {
    for value in fields.values_mut() {
        if let Some(clean) = redact(value.as_bytes()) {
            *value = HeaderValue::from_bytes(&clean)
                .expect("a header without a secret is still one, and a placeholder is ASCII");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn redactor() -> Redactor {
        let pair = |secret: &str, word: &str| (Secret::new(secret).expect("a secret"), word.into());
        Redactor::new(vec![
            pair("abababab", "<short>"),
            pair("ababababcc", "<long>"),
            pair("something else", "<other>"),
        ])
    }

    fn in_pieces(text: &[u8], cuts: &[usize]) -> Vec<u8> {
        let mut redactor = redactor();
        let (mut out, mut from) = (Vec::new(), 0);
        for cut in cuts.iter().map(|cut| cut % (text.len() + 1)) {
            if cut > from {
                out.extend(redactor.push(&text[from..cut]));
                from = cut;
            }
        }
        out.extend(redactor.push(&text[from..]));
        out.extend(redactor.finish());
        out
    }

    #[test]
    fn find_a_secret_at_the_start_in_the_middle_and_at_the_end() {
        for (text, clean) in [
            ("abababab", "<short>"),
            ("xabababab", "x<short>"),
            ("abababababab", "<short>abab"),
            ("ababababcc!", "<long>!"),
            ("ababababc", "<short>c"),
            ("abababa", "abababa"),
            ("-something else-", "-<other>-"),
        ] {
            assert_eq!(in_pieces(text.as_bytes(), &[]), clean.as_bytes(), "{text}");
        }
    }

    #[test]
    fn hold_back_one_byte_less_than_the_longest_secret() {
        let mut redactor = redactor();
        assert_eq!(redactor.push(b"hello, everybody"), &b"hel"[..]);
        assert_eq!(redactor.push(b"!"), &b"l"[..]);
        assert_eq!(redactor.finish(), &b"o, everybody!"[..]);
    }

    /// The lengths of the output for these pieces.
    fn lengths(pieces: &[Vec<u8>]) -> Vec<usize> {
        let mut redactor = redactor();
        let mut lengths: Vec<_> = pieces
            .iter()
            .map(|piece| redactor.push(piece).len())
            .collect();
        lengths.push(redactor.finish().len());
        lengths
    }

    #[test]
    fn output_timing_does_not_reveal_a_correct_guess() {
        let secret = b"something else";
        // The last byte completes the secret, which only a party that knows it can write.
        for known in 0..secret.len() - 1 {
            let pieces = |guess: u8| {
                let guess = [&secret[..known], &[guess]].concat();
                [guess, b"-".to_vec(), vec![b'-'; 40], b"-".to_vec()]
            };
            let right = lengths(&pieces(secret[known]));
            assert_eq!(right, lengths(&pieces(b'!')), "{known} bytes are known");
        }
    }

    proptest! {
        #[test]
        fn output_lengths_depend_only_on_input_lengths(
            // Text that is as close to secrets as possible, but never is one.
            pieces in prop::collection::vec("(abababa|someth|ing els|c|x){0,4}", 0..8),
        ) {
            let pieces: Vec<_> = pieces.into_iter().map(String::into_bytes).collect();
            let others: Vec<_> = pieces.iter().map(|piece| vec![b'!'; piece.len()]).collect();
            prop_assert_eq!(lengths(&pieces), lengths(&others));
        }

        #[test]
        fn the_output_does_not_depend_on_the_cuts(
            text in "(ab|c|abababab|something |else|ababababcc){0,12}",
            mut cuts in prop::collection::vec(any::<usize>(), 0..8),
        ) {
            let whole = in_pieces(text.as_bytes(), &[]);
            let len = text.len() + 1;
            cuts.sort_by_key(|cut| cut % len);
            prop_assert_eq!(&in_pieces(text.as_bytes(), &cuts), &whole);
            let whole = String::from_utf8(whole).expect("UTF-8");
            prop_assert!(!whole.contains("something else"));
        }
    }
}
