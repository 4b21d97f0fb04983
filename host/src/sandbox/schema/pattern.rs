//! Patterns of schemas: those of JavaScript, as far as they can be matched in linear time.

use regex_automata::Input;
use regex_automata::meta::{Config, Regex};
use regex_automata::util::syntax;

/// A pattern that a person has written.
const WRITTEN_BYTES_MAX: usize = 4 << 10;

/// `.{1,1000}` has 1 MiB, `\p{L}{1,50}` 2.4 MiB: each of them is built within 50 ms.
const BYTES_MAX: usize = 4 << 20;

/// What the smallest pattern counts: some of its memory is not known.
const BYTES_MIN: usize = 8 << 10;

/// Groups within groups.
const NEST_MAX: u32 = 50;

/// What a search may use besides, while it lasts.
const CACHE_BYTES_MAX: usize = 256 << 10;

/// In the worst case each byte of a text meets every state of a pattern. So many bytes of a pattern are a step, of 10 to
/// 100 ns.
const BYTES_PER_STEP: usize = 1 << 10;

pub(super) struct Pattern {
    regex: Regex,
    steps_per_byte: u64,
}

impl Pattern {
    /// Compiles a pattern, and takes what it needs from what is left.
    pub(super) fn parse(written: &str, bytes_left: &mut usize) -> Result<Self, String> {
        if written.len() > WRITTEN_BYTES_MAX {
            return Err(format!(
                "the pattern has {} bytes; {WRITTEN_BYTES_MAX} are allowed",
                written.len()
            ));
        }
        let config = Config::new()
            .nfa_size_limit(Some(BYTES_MAX.min(*bytes_left)))
            .onepass_size_limit(Some(CACHE_BYTES_MAX))
            .hybrid_cache_capacity(CACHE_BYTES_MAX);
        let regex = Regex::builder()
            .configure(config)
            .syntax(syntax::Config::new().nest_limit(NEST_MAX))
            .build(&translated(written))
            .map_err(|error| match error.size_limit() {
                Some(_) => "the pattern is too large, or those of the module together are".into(),
                None => {
                    let why = error
                        .syntax_error()
                        .map_or(error.to_string(), |why| why.to_string());
                    let why = why.lines().last().unwrap_or_default();
                    format!("the pattern cannot be matched in linear time: {why}")
                }
            })?;
        let bytes = regex.memory_usage().max(BYTES_MIN);
        *bytes_left = bytes_left
            .checked_sub(bytes)
            .ok_or("the patterns of the module together are too large")?;
        Ok(Self {
            regex,
            steps_per_byte: bytes.div_ceil(BYTES_PER_STEP) as u64,
        })
    }

    /// How many steps a search in this text counts; its cache is one more byte.
    pub(super) fn steps(&self, text: &str) -> u64 {
        self.steps_per_byte * (1 + text.len() as u64)
    }

    /// True where the pattern is somewhere in the text.
    pub(super) fn is_in(&self, text: &str) -> bool {
        // A cache for each search: those that a regex keeps are never given back.
        let mut cache = self.regex.create_cache();
        let input = Input::new(text).earliest(true);
        self.regex.search_half_with(&mut cache, &input).is_some()
    }
}

/// The same pattern for the syntax of Rust, where `\d`, `\w` and `\b` know more than ASCII, and brackets have operators.
fn translated(written: &str) -> String {
    let mut out = String::with_capacity(written.len());
    let mut in_class = false;
    let mut characters = written.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\\' => {
                let escaped = characters.next();
                match escaped {
                    Some('d') => out.push_str("[0-9]"),
                    Some('D') => out.push_str("[^0-9]"),
                    Some('w') => out.push_str("[0-9A-Za-z_]"),
                    Some('W') => out.push_str("[^0-9A-Za-z_]"),
                    Some('b') if in_class => out.push_str("\\x08"),
                    Some('b') => out.push_str("(?-u:\\b)"),
                    Some(other) => out.extend(['\\', other]),
                    None => out.push('\\'),
                }
            }
            '[' if in_class => out.push_str("\\["),
            '[' => {
                in_class = true;
                out.push('[');
                if characters.next_if_eq(&'^').is_some() {
                    out.push('^');
                }
                // JavaScript's empty class, and its opposite. Rust would take the bracket for a member.
                if characters.next_if_eq(&']').is_some() {
                    let negated = out.ends_with('^');
                    out.truncate(out.len() - if negated { 2 } else { 1 });
                    out.push_str(if negated { "[\\s\\S]" } else { "[^\\s\\S]" });
                    in_class = false;
                }
            }
            ']' => {
                in_class = false;
                out.push(']');
            }
            '&' | '~' if in_class => out.extend(['\\', character]),
            // A range that begins or ends with a hyphen. Rust would take two for a difference.
            '-' if in_class && characters.next_if_eq(&'-').is_some() => {
                let begins = out.ends_with(['[', '^']);
                out.push_str(if begins { "\\--" } else { "-\\-" });
            }
            _ => out.push(character),
        }
    }
    out
}
