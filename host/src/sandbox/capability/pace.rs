//! How many lines a guest may say within a second.

use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);

/// Counts the lines of each second, and those that were too many.
#[derive(Debug)]
pub(super) struct Pace {
    per_second: u32,
    since: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Pace {
    pub(super) fn new(per_second: u32) -> Self {
        Self {
            per_second,
            since: None,
            lines: 0,
            left_out: 0,
        }
    }

    /// Whether one more line may be said now.
    pub(super) fn allows(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now - since >= SECOND) {
            self.since = Some(now);
            self.lines = 0;
        }
        if self.lines >= self.per_second {
            self.left_out += 1;
            return false;
        }
        self.lines += 1;
        true
    }

    /// So many more are too many.
    pub(super) fn leave_out(&mut self, lines: usize) {
        self.left_out += lines as u64;
    }

    /// What there is to say of the lines that were left out since it was asked last.
    pub(super) fn left_out(&mut self) -> Option<String> {
        let lines = std::mem::take(&mut self.left_out);
        (lines > 0).then(|| {
            format!(
                "{lines} lines are left out: an attempt may say {} within a second",
                self.per_second
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_much_for_a_second_is_left_out_and_counted() {
        let (mut pace, start) = (Pace::new(2), Instant::now());
        let allowed = (0..5).filter(|_| pace.allows(start)).count();
        assert_eq!(allowed, 2);
        assert!(pace.allows(start + SECOND));
        let said = pace.left_out().unwrap();
        assert!(said.starts_with("3 lines are left out"), "{said}");
        assert_eq!(pace.left_out(), None);
    }
}
