//! Statistics of a text.

use std::collections::HashMap;

use rouse_sdk::{Ctx, export, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The payload of `text.stats`.
#[derive(Debug, Deserialize, JsonSchema)]
pub struct Input {
    /// The text.
    pub text: String,
    /// How many of its most frequent words to list.
    #[serde(default = "default_top")]
    pub top: usize,
}

fn default_top() -> usize {
    5
}

/// The result of `text.stats`. A word is a run of letters and digits, with apostrophes and hyphens inside. Words that
/// differ only in case count as the same word.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Stats {
    /// Bytes of UTF-8.
    pub bytes: usize,
    /// Unicode characters.
    pub chars: usize,
    /// Lines, including a last line without a line break.
    pub lines: usize,
    /// Words.
    pub words: usize,
    /// Distinct words.
    pub unique_words: usize,
    /// The longest word; of several, the first.
    pub longest_word: Option<String>,
    /// The most frequent words; in alphabetical order if equally frequent.
    pub top_words: Vec<WordCount>,
}

/// The frequency of a word.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct WordCount {
    /// In lower case.
    pub word: String,
    /// The number of occurrences.
    pub count: usize,
}

/// Counts the words, lines and characters of a text.
#[handler(name = "text.stats", timeout = "1m")]
pub fn stats(ctx: &Ctx, input: Input) -> Stats {
    let text = &input.text;
    let mut counts: HashMap<String, usize> = HashMap::new();
    let mut words = 0;
    let mut longest: Option<(usize, &str)> = None;
    for word in words_of(text) {
        words += 1;
        let chars = word.chars().count();
        if longest.is_none_or(|(max, _)| chars > max) {
            longest = Some((chars, word));
        }
        *counts.entry(word.to_lowercase()).or_default() += 1;
    }
    ctx.debug(format_args!("{words} words in {} bytes", text.len()));

    let unique_words = counts.len();
    let mut top_words: Vec<WordCount> = counts
        .into_iter()
        .map(|(word, count)| WordCount { word, count })
        .collect();
    top_words.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.word.cmp(&b.word)));
    top_words.truncate(input.top);

    Stats {
        bytes: text.len(),
        chars: text.chars().count(),
        lines: text.lines().count(),
        words,
        unique_words,
        longest_word: longest.map(|(_, word)| word.to_owned()),
        top_words,
    }
}

fn words_of(text: &str) -> impl Iterator<Item = &str> {
    let joins = |c: char| matches!(c, '\'' | '’' | '-');
    text.split(move |c: char| !c.is_alphanumeric() && !joins(c))
        .map(move |word| word.trim_matches(joins))
        .filter(|word| !word.is_empty())
}

export!(stats);

#[cfg(test)]
mod tests {
    use rouse_sdk::{Level, TestCtx};
    use serde_json::json;

    use super::*;

    fn stats_from(text: &str) -> Stats {
        let input = Input {
            text: text.to_owned(),
            top: 2,
        };
        stats(&TestCtx::new(), input)
    }

    #[test]
    fn words_lines_and_characters_are_counted() {
        let stats = stats_from("The cat saw the dog.\nThe dog didn't — naïve!\n");
        assert_eq!(stats.words, 9);
        assert_eq!(stats.lines, 2);
        assert_eq!((stats.bytes, stats.chars), (48, 45));
        assert_eq!(stats.unique_words, 6);
        assert_eq!(stats.longest_word.as_deref(), Some("didn't"));
    }

    #[test]
    fn the_most_frequent_words_come_first_in_lower_case() {
        let top: Vec<_> = stats_from("b B a A c")
            .top_words
            .into_iter()
            .map(|top| (top.word, top.count))
            .collect();
        assert_eq!(top, [("a".to_owned(), 2), ("b".to_owned(), 2)]);
    }

    #[test]
    fn an_empty_text_has_no_words() {
        let stats = stats_from("");
        assert_eq!((stats.words, stats.lines, stats.chars), (0, 0, 0));
        assert_eq!(stats.longest_word, None);
        assert_eq!(stats_from(" -- ' \n").words, 0);
    }

    #[test]
    fn a_payload_without_a_text_is_refused_permanently() {
        let error = TestCtx::new()
            .run::<super::stats>(json!({"txt": ""}))
            .unwrap_err();
        assert!(error.permanent);
        assert_eq!(error.kind, "invalid_payload");
        let why = "missing required property \"text\"";
        assert!(error.message.contains(why), "{error}");
    }

    #[test]
    fn the_counts_are_logged() {
        let ctx = TestCtx::new();
        let result = ctx.run::<super::stats>(json!({"text": "one two"})).unwrap();
        assert_eq!(result["words"], 2);
        assert_eq!(ctx.logs()[0].level, Level::Debug);
        assert_eq!(ctx.logs()[0].message, "2 words in 7 bytes");
    }
}
