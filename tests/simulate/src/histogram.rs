//! Percentiles of a large number of values, in little memory.

/// Each power of two is divided into this many parts, so a percentile is off by at most 1 in 64.
const PARTS: u64 = 64;

/// Counts values by their size.
#[derive(Debug, Clone, Default)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    all: u64,
    max: u64,
}

impl Histogram {
    /// Counts a value.
    pub(crate) fn record(&mut self, value: u64) {
        let part = part_of(value);
        if part >= self.counts.len() {
            self.counts.resize(part + 1, 0);
        }
        self.counts[part] += 1;
        self.all += 1;
        self.max = self.max.max(value);
    }

    /// The largest value; 0 if there is none.
    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    /// The value that this share of all values does not exceed; 0 if there is none.
    pub(crate) fn percentile(&self, share: f64) -> u64 {
        let wanted = (self.all as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (part, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted.max(1) {
                return end_of(part).min(self.max);
            }
        }
        self.max
    }
}

fn part_of(value: u64) -> usize {
    let whole = if value < 2 * PARTS {
        value
    } else {
        let shift = u64::from(value.ilog2()) - u64::from(PARTS.ilog2());
        (shift + 1) * PARTS + (value >> shift) - PARTS
    };
    whole as usize
}

/// The largest value of a part.
fn end_of(part: usize) -> u64 {
    let part = part as u64;
    if part < 2 * PARTS {
        return part;
    }
    let shift = part / PARTS - 1;
    ((part % PARTS + PARTS + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_in_a_part_that_ends_a_little_above_it() {
        let mut last = 0;
        for value in 0..100_000 {
            let part = part_of(value);
            assert!(part == last || part == last + 1, "{value}");
            last = part;
        }
        for value in (0..100_000).chain((0..60).map(|shift| 3 << shift)) {
            let end = end_of(part_of(value));
            assert!(end >= value && end - value <= value / 64, "{value}: {end}");
        }
    }

    #[test]
    fn percentiles_are_those_of_the_values() {
        let mut delays = Histogram::default();
        assert_eq!((delays.percentile(0.5), delays.max()), (0, 0));
        (1..=100).for_each(|value| delays.record(value));
        assert_eq!((delays.percentile(0.5), delays.percentile(0.99)), (50, 99));
        assert_eq!((delays.percentile(1.0), delays.all), (100, 100));
    }
}
