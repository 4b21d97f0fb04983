//! Divides the capacity of the sandbox between the queue and invocations.

/// How many attempts of each kind may run at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Slots of the queue.
    pub slots: usize,
    /// Invocations.
    pub invocations: usize,
}

impl Share {
    /// Fits both into `capacity` attempts. The queue comes first, but each side that wants any attempts gets at least
    /// one. If there is only one, they take turns.
    #[must_use]
    pub fn fit(self, capacity: usize) -> Self {
        let least = |wanted: usize| wanted.min(1);
        let slots = self
            .slots
            .min(capacity.saturating_sub(least(self.invocations)))
            .max(least(self.slots));
        let invocations = self
            .invocations
            .min(capacity.saturating_sub(slots))
            .max(least(self.invocations));
        Self { slots, invocations }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_comes_first_and_each_side_gets_at_least_one_attempt() {
        let fit = |slots, invocations, capacity| {
            let share = Share { slots, invocations }.fit(capacity);
            (share.slots, share.invocations)
        };
        assert_eq!(fit(8, 8, 16), (8, 8));
        assert_eq!(fit(8, 8, 12), (8, 4));
        assert_eq!(fit(8, 8, 8), (7, 1));
        assert_eq!(fit(8, 0, 8), (8, 0));
        assert_eq!(fit(0, 8, 4), (0, 4));
        assert_eq!(fit(8, 8, 1), (1, 1));
    }
}
