//! Patterns of schemas, compiled with limits and matched in linear time.

use regex_automata::Input;
use regex_automata::meta::{Config, Regex};

use super::ecma;

/// The maximum length of a pattern, in bytes: far beyond what people write.
const WRITTEN_BYTES_MAX: usize = 4 << 10;

/// The maximum memory of a pattern, in bytes. `.{1,1000}` takes 1 MiB and `\p{L}{1,50}` takes 2.4 MiB; both compile
/// within 50 ms.
const BYTES_MAX: usize = 4 << 20;

/// The minimum size that a pattern counts as, in bytes, because part of its memory is not reported.
const BYTES_MIN: usize = 8 << 10;

/// The maximum additional memory during a search, in bytes.
const CACHE_BYTES_MAX: usize = 256 << 10;

/// In the worst case, each byte of a text is matched against every state of a pattern. This many bytes of a pattern
/// count as one step of 10 to 100 ns.
const BYTES_PER_STEP: usize = 1 << 10;

pub(super) struct Pattern {
    regex: Regex,
    steps_per_byte: u64,
}

impl Pattern {
    /// Compiles a pattern, and deducts its memory from the budget.
    pub(super) fn parse(written: &str, bytes_left: &mut usize) -> Result<Self, String> {
        if written.len() > WRITTEN_BYTES_MAX {
            return Err(format!(
                "the pattern is {} bytes long; at most {WRITTEN_BYTES_MAX} are allowed",
                written.len()
            ));
        }
        let config = Config::new()
            .nfa_size_limit(Some(BYTES_MAX.min(*bytes_left)))
            .onepass_size_limit(Some(CACHE_BYTES_MAX))
            .hybrid_cache_capacity(CACHE_BYTES_MAX);
        let regex = Regex::builder()
            .configure(config)
            .build_from_hir(&ecma::parse(written)?)
            .map_err(|error| match error.size_limit() {
                Some(_) => {
                    "the pattern is too large, or the module's patterns are too large in total"
                        .into()
                }
                None => format!("the pattern cannot be compiled: {error}"),
            })?;
        let bytes = regex.memory_usage().max(BYTES_MIN);
        *bytes_left = bytes_left
            .checked_sub(bytes)
            .ok_or("the module's patterns are too large in total")?;
        Ok(Self {
            regex,
            steps_per_byte: bytes.div_ceil(BYTES_PER_STEP) as u64,
        })
    }

    /// The number of steps that a search in this text takes; setting up its cache counts as one more byte.
    pub(super) fn steps(&self, text: &str) -> u64 {
        self.steps_per_byte * (1 + text.len() as u64)
    }

    /// True if the pattern matches anywhere in the text.
    pub(super) fn is_in(&self, text: &str) -> bool {
        // A cache for each search, because the caches that a regex keeps are never freed.
        let mut cache = self.regex.create_cache();
        let input = Input::new(text).earliest(true);
        self.regex.search_half_with(&mut cache, &input).is_some()
    }
}
