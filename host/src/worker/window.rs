//! How far back to look for entries whose time has come. While a transaction is open all day, an index keeps the entries
//! that were handled since then; a look that starts after these does not read them.

use std::time::Duration;

use tokio::time::Instant;

/// The time between two looks for all entries. The others leave out those whose time came long before the look before.
const ALL_EVERY: Duration = Duration::from_secs(600);

/// How long before the previous look the time of an entry may have come that was not visible then: its transaction was
/// open.
const LATE: Duration = Duration::from_secs(60);

/// The looks that have left nothing to handle.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// The last one for all entries.
    for_all: Option<Instant>,
    last: Option<Instant>,
}

impl Window {
    /// For which entries to look now: those whose time came within this time; `None`: all.
    pub(super) fn within(&self, now: Instant) -> Option<Duration> {
        let (for_all, last) = (self.for_all?, self.last?);
        (now - for_all < ALL_EVERY).then(|| now - last + LATE)
    }

    /// A look that began at this time has left nothing to handle.
    pub(super) fn found_nothing(&mut self, began: Instant, within: Option<Duration>) {
        self.last = Some(began);
        if within.is_none() {
            self.for_all = Some(began);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_handled_is_read_again_every_ten_minutes_only() {
        let start = Instant::now();
        let mut window = Window::default();
        assert_eq!(window.within(start), None, "the first look is for all");
        window.found_nothing(start, None);
        let later = start + Duration::from_secs(15);
        let within = window.within(later);
        assert_eq!(within, Some(Duration::from_secs(75)));
        window.found_nothing(later, within);
        assert_eq!(
            window.within(start + ALL_EVERY - Duration::from_secs(1)),
            Some(ALL_EVERY + Duration::from_secs(44))
        );
        assert_eq!(window.within(start + ALL_EVERY), None);
    }
}
