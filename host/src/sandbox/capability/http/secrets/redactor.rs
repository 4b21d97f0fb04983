//! Takes secrets out of a text that comes in pieces, wherever the pieces are cut.
//!
//! When a piece goes on tells nothing of a secret: whoever reads the text may work together with who writes it, and see
//! which guess at the start of one is held back longer than another. So as much is held back of any text.

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};

use crate::sandbox::grants::Secret;

/// Takes secrets out of a text that comes in pieces. Of what has come, as much is held back as the start of the longest
/// secret may be, whatever it is, until more comes or the text ends.
pub(in crate::sandbox::capability::http) struct Redactor {
    /// The longest first: where one starts with another, it is the whole that goes.
    pairs: Vec<(Secret, String)>,
    /// Bytes of the longest one.
    longest: usize,
    held: BytesMut,
}

impl Redactor {
    /// For each secret the word that takes its place.
    pub(super) fn new(mut pairs: Vec<(Secret, String)>) -> Self {
        pairs.sort_by_key(|(secret, _)| std::cmp::Reverse(secret.reveal().len()));
        let longest = pairs.first().map_or(0, |(secret, _)| secret.reveal().len());
        Self {
            pairs,
            longest,
            held: BytesMut::new(),
        }
    }

    /// What is certain of the text so far.
    pub(in crate::sandbox::capability::http) fn push(&mut self, bytes: &[u8]) -> Bytes {
        self.held.extend_from_slice(bytes);
        let (clean, used) = self.clean(&self.held, false);
        drop(self.held.split_to(used));
        clean.into()
    }

    /// What was held back.
    pub(in crate::sandbox::capability::http) fn finish(&mut self) -> Bytes {
        let (clean, _) = self.clean(&self.held, true);
        self.held.clear();
        clean.into()
    }

    /// Takes secrets out of the values of these fields.
    pub(in crate::sandbox::capability::http) fn redact_fields(&self, fields: &mut HeaderMap) {
        redact_each(fields, |value| {
            let (clean, _) = self.clean(value, true);
            (clean != value).then_some(clean)
        });
    }

    /// The text without secrets, and how much of it that is: all of it where this is its end.
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
    fn a_secret_is_found_at_the_start_in_the_middle_and_at_the_end() {
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
    fn one_byte_less_than_the_longest_secret_is_held_back() {
        let mut redactor = redactor();
        assert_eq!(redactor.push(b"hello, everybody"), &b"hel"[..]);
        assert_eq!(redactor.push(b"!"), &b"l"[..]);
        assert_eq!(redactor.finish(), &b"o, everybody!"[..]);
    }

    /// How long each part is that comes out for these pieces.
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
    fn who_guesses_the_start_of_a_secret_sees_the_same_as_who_is_wrong() {
        let secret = b"something else";
        // With its last byte it is the whole secret, which one has to know to say it.
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
        fn what_comes_out_when_depends_on_the_lengths_of_the_pieces_alone(
            // As near to secrets as can be, and never one.
            pieces in prop::collection::vec("(abababa|someth|ing els|c|x){0,4}", 0..8),
        ) {
            let pieces: Vec<_> = pieces.into_iter().map(String::into_bytes).collect();
            let others: Vec<_> = pieces.iter().map(|piece| vec![b'!'; piece.len()]).collect();
            prop_assert_eq!(lengths(&pieces), lengths(&others));
        }

        #[test]
        fn wherever_the_pieces_are_cut_the_same_comes_out(
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
