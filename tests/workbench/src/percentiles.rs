//! Percentiles and medians of measurements.

use anyhow::{Result, ensure};

/// Percentiles, in the unit of the measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Percentiles {
    /// 50 in 100 values are at most this.
    pub p50: f64,
    /// 95 in 100 values are at most this.
    pub p95: f64,
    /// 99 in 100 values are at most this.
    pub p99: f64,
    /// The largest value.
    pub max: f64,
}

impl Percentiles {
    /// By nearest rank: each percentile is one of the values.
    pub fn of(mut values: Vec<f64>) -> Result<Self> {
        ensure!(!values.is_empty(), "there are no measurements");
        values.sort_by(f64::total_cmp);
        let rank = |percent: usize| values[(values.len() * percent).div_ceil(100).max(1) - 1];
        Ok(Self {
            p50: rank(50),
            p95: rank(95),
            p99: rank(99),
            max: rank(100),
        })
    }
}

/// The median; for an even number of values, the mean of the two in the middle.
pub fn median(mut values: Vec<f64>) -> Result<f64> {
    ensure!(!values.is_empty(), "there are no measurements");
    values.sort_by(f64::total_cmp);
    let (lower, upper) = ((values.len() - 1) / 2, values.len() / 2);
    Ok(f64::midpoint(values[lower], values[upper]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_percentile_is_one_of_the_values() {
        let hundred = (1..=100).rev().map(f64::from).collect();
        let found = Percentiles::of(hundred).unwrap();
        assert_eq!(
            (found.p50, found.p95, found.p99, found.max),
            (50.0, 95.0, 99.0, 100.0)
        );
        let single = Percentiles::of(vec![7.0]).unwrap();
        assert_eq!((single.p50, single.max), (7.0, 7.0));
        assert!(Percentiles::of(Vec::new()).is_err());
    }

    #[test]
    fn the_median_is_the_middle_value_or_the_mean_of_two() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]).unwrap(), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 8.0]).unwrap(), 3.0);
    }
}
