//! The load queue: the order in which files are loaded, and the number that are loaded at once.

use std::collections::VecDeque;

/// Files that wait to be loaded, and the number of running loads.
///
/// Files that took too long are retried after all others. To keep retries from blocking the others, one more load may
/// run when all running loads are retries.
pub(super) struct LoadQueue<T> {
    running_max: usize,
    first: VecDeque<T>,
    retries: VecDeque<T>,
    running_first: usize,
    running_retries: usize,
}

/// The next file to load.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next<T> {
    First(T),
    Retry(T),
}

impl<T> LoadQueue<T> {
    pub(super) fn new(running_max: usize) -> Self {
        Self {
            running_max: running_max.max(1),
            first: VecDeque::new(),
            retries: VecDeque::new(),
            running_first: 0,
            running_retries: 0,
        }
    }

    pub(super) fn push(&mut self, file: T) {
        self.first.push_back(file);
    }

    pub(super) fn push_retry(&mut self, file: T) {
        self.retries.push_back(file);
    }

    /// Takes the next file if it may be loaded now. The caller calls one of the two methods below when the file is
    /// loaded.
    pub(super) fn take(&mut self) -> Option<Next<T>> {
        let running = self.running_first + self.running_retries;
        let is_free = running < self.running_max;
        if (is_free || self.running_first == 0)
            && let Some(file) = self.first.pop_front()
        {
            self.running_first += 1;
            return Some(Next::First(file));
        }
        if !is_free {
            return None;
        }
        let file = self.retries.pop_front()?;
        self.running_retries += 1;
        Some(Next::Retry(file))
    }

    pub(super) fn done_first(&mut self) {
        self.running_first -= 1;
    }

    pub(super) fn done_retry(&mut self) {
        self.running_retries -= 1;
    }

    /// Discards waiting files.
    pub(super) fn clear(&mut self) {
        self.first.clear();
        self.retries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_files_in_order_up_to_the_maximum_at_once() {
        let mut queue = LoadQueue::new(2);
        for file in 0..4 {
            queue.push(file);
        }
        assert_eq!(queue.take(), Some(Next::First(0)));
        assert_eq!(queue.take(), Some(Next::First(1)));
        assert_eq!(queue.take(), None);
        queue.done_first();
        assert_eq!(queue.take(), Some(Next::First(2)));
        assert_eq!(queue.take(), None);
    }

    #[test]
    fn retries_wait_for_all_others_and_never_block_them() {
        for running_max in [1, 2] {
            let mut queue = LoadQueue::new(running_max);
            for bomb in 0..5 {
                queue.push_retry(bomb);
            }
            queue.push(10);
            assert_eq!(queue.take(), Some(Next::First(10)));
            queue.done_first();
            for bomb in 0..running_max {
                assert_eq!(queue.take(), Some(Next::Retry(bomb)));
            }
            assert_eq!(queue.take(), None);
            queue.push(11);
            queue.push(12);
            assert_eq!(queue.take(), Some(Next::First(11)));
            assert_eq!(queue.take(), None, "one more load, not two");
            queue.done_first();
            assert_eq!(queue.take(), Some(Next::First(12)));
            queue.done_first();
            queue.done_retry();
            assert_eq!(queue.take(), Some(Next::Retry(running_max)));
        }
    }
}
