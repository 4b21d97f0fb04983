//! Counts in sentences.

use std::fmt::Display;

/// The count and the noun, for instance `1 job` or `17 jobs`. The plural of the noun ends in s.
pub fn counted<N: Display + PartialEq + From<u8>>(count: N, noun: &str) -> String {
    let text = format!("{count} {noun}");
    text + choose(count, "", "s")
}

/// The first word for a count of one, the second for any other, for instance `is` and `are`.
pub fn choose<'a, N: PartialEq + From<u8>>(count: N, one: &'a str, others: &'a str) -> &'a str {
    if count == N::from(1) { one } else { others }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_is_singular() {
        assert_eq!(counted(0_usize, "job"), "0 jobs");
        assert_eq!(counted(1_i64, "job"), "1 job");
        assert_eq!(counted(2_i32, "job"), "2 jobs");
        assert_eq!(choose(1_u64, "is", "are"), "is");
        assert_eq!(choose(-1, "is", "are"), "are");
    }
}
