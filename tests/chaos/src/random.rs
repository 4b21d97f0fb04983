//! Reproducible random numbers.

/// SplitMix64 (Steele, Lea, Flood 2014): one word of state, and every seed is valid.
#[derive(Clone)]
pub(super) struct Random(u64);

impl Random {
    /// An independent stream for each purpose, so that a change to one does not affect the others.
    pub(super) fn new(seed: u64, purpose: &str) -> Self {
        let mut random = Self(seed);
        for byte in purpose.bytes() {
            random.0 = random.next() ^ u64::from(byte);
        }
        random
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Less than `bound`, which is at least 1.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        // The bias of the remainder is negligible for bounds this small.
        self.next() % bound.max(1)
    }

    /// From `low` to `high`, both included.
    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True with a probability of `share` in a thousand.
    pub(super) fn per_mille(&mut self, share: u64) -> bool {
        self.below(1000) < share
    }

    /// A random element of `from`.
    ///
    /// # Panics
    /// If `from` is empty.
    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_numbers_and_each_purpose_has_its_own() {
        let numbers = |seed, purpose| {
            let mut random = Random::new(seed, purpose);
            [(); 4].map(|()| random.next())
        };
        assert_eq!(numbers(7, "load"), numbers(7, "load"));
        assert_ne!(numbers(7, "load"), numbers(8, "load"));
        assert_ne!(numbers(7, "load"), numbers(7, "faults"));
    }

    #[test]
    fn numbers_stay_within_their_bounds() {
        let mut random = Random::new(1, "bounds");
        assert!((0..1000).all(|_| (3..=5).contains(&random.between(3, 5))));
        assert!((0..1000).all(|_| !random.per_mille(0)));
        assert!((0..1000).all(|_| random.per_mille(1000)));
    }
}
