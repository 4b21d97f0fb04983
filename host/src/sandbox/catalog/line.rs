//! The load queue: in which order files are loaded, and how many at once.

use std::collections::VecDeque;

/// Files that wait to be loaded, and the number of running loads.
///
/// Files that exhausted their compiler are retried after all others. So that they do not block the others, one extra
/// place opens when retries occupy all places.
pub(super) struct Line<T> {
    places: usize,
    first: VecDeque<T>,
    again: VecDeque<T>,
    running_first: usize,
    running_again: usize,
}

/// The next file to load.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next<T> {
    First(T),
    Again(T),
}

impl<T> Line<T> {
    pub(super) fn new(places: usize) -> Self {
        Self {
            places: places.max(1),
            first: VecDeque::new(),
            again: VecDeque::new(),
            running_first: 0,
            running_again: 0,
        }
    }

    pub(super) fn push(&mut self, file: T) {
        self.first.push_back(file);
    }

    pub(super) fn push_again(&mut self, file: T) {
        self.again.push_back(file);
    }

    /// Takes the next file if there is a place for it. The caller calls one of the two methods below when it is done.
    pub(super) fn take(&mut self) -> Option<Next<T>> {
        let running = self.running_first + self.running_again;
        let has_place = running < self.places;
        if (has_place || self.running_first == 0)
            && let Some(file) = self.first.pop_front()
        {
            self.running_first += 1;
            return Some(Next::First(file));
        }
        if !has_place {
            return None;
        }
        let file = self.again.pop_front()?;
        self.running_again += 1;
        Some(Next::Again(file))
    }

    pub(super) fn done_first(&mut self) {
        self.running_first -= 1;
    }

    pub(super) fn done_again(&mut self) {
        self.running_again -= 1;
    }

    /// Discards waiting files.
    pub(super) fn clear(&mut self) {
        self.first.clear();
        self.again.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_files_in_order_within_the_number_of_places() {
        let mut line = Line::new(2);
        for file in 0..4 {
            line.push(file);
        }
        assert_eq!(line.take(), Some(Next::First(0)));
        assert_eq!(line.take(), Some(Next::First(1)));
        assert_eq!(line.take(), None);
        line.done_first();
        assert_eq!(line.take(), Some(Next::First(2)));
        assert_eq!(line.take(), None);
    }

    #[test]
    fn retries_wait_for_all_others_and_never_block_them() {
        for places in [1, 2] {
            let mut line = Line::new(places);
            for bomb in 0..5 {
                line.push_again(bomb);
            }
            line.push(10);
            assert_eq!(line.take(), Some(Next::First(10)));
            line.done_first();
            for bomb in 0..places {
                assert_eq!(line.take(), Some(Next::Again(bomb)));
            }
            assert_eq!(line.take(), None);
            line.push(11);
            line.push(12);
            assert_eq!(line.take(), Some(Next::First(11)));
            assert_eq!(line.take(), None, "one extra place, not two");
            line.done_first();
            assert_eq!(line.take(), Some(Next::First(12)));
            line.done_first();
            line.done_again();
            assert_eq!(line.take(), Some(Next::Again(places)));
        }
    }
}
