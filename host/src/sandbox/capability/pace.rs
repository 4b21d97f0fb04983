//! Limits the number of lines that a guest may log within a second.

use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);

/// Counts the lines of each second, and the excess lines.
#[derive(Debug)]
pub(super) struct Pace {
    per_second: u32,
    since: Option<Instant>,
    lines: u32,
    dropped: u64,
}

impl Pace {
    pub(super) fn new(per_second: u32) -> Self {
        Self {
            per_second,
            since: None,
            lines: 0,
            dropped: 0,
        }
    }

    /// True if one more line may be logged now.
    pub(super) fn allows(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now - since >= SECOND) {
            self.since = Some(now);
            self.lines = 0;
        }
        if self.lines >= self.per_second {
            self.dropped += 1;
            return false;
        }
        self.lines += 1;
        true
    }

    /// Counts more lines as dropped.
    pub(super) fn drop_lines(&mut self, lines: usize) {
        self.dropped += lines as u64;
    }

    /// A notice of the lines that were dropped since the last notice.
    pub(super) fn dropped(&mut self) -> Option<String> {
        let lines = std::mem::take(&mut self.dropped);
        (lines > 0).then(|| {
            format!(
                "{lines} lines were dropped: an attempt may log at most {} lines within a second",
                self.per_second
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_and_count_excess_lines_of_a_second() {
        let (mut pace, start) = (Pace::new(2), Instant::now());
        let allowed = (0..5).filter(|_| pace.allows(start)).count();
        assert_eq!(allowed, 2);
        assert!(pace.allows(start + SECOND));
        let notice = pace.dropped().unwrap();
        assert!(notice.starts_with("3 lines were dropped"), "{notice}");
        assert_eq!(pace.dropped(), None);
    }
}
