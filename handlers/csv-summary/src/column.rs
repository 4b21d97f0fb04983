//! Statistics of one column.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use schemars::JsonSchema;
use serde::Serialize;

/// One column of the CSV.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
pub struct Column {
    /// Its name in the header.
    pub name: String,
    /// The kind of its values.
    pub kind: Kind,
    /// Fields with a value.
    pub count: u64,
    /// Fields without a value.
    pub empty: u64,
    /// Distinct values.
    pub distinct: usize,
    /// The smallest value; the first in byte order for text.
    pub min: Option<Scalar>,
    /// The largest value; the last in byte order for text.
    pub max: Option<Scalar>,
    /// The mean of numbers.
    pub mean: Option<f64>,
    /// The sample standard deviation of numbers (with n − 1); `None` for fewer than two.
    pub stddev: Option<f64>,
}

/// The kind of the values of a column: the most specific that fits them all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The column has no values.
    Empty,
    /// Whole numbers.
    Integer,
    /// Numbers.
    Number,
    /// Anything else.
    Text,
}

/// A value of a column.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Scalar {
    /// In an integer column.
    Integer(i64),
    /// In a number column.
    Number(f64),
    /// In a text column.
    Text(String),
}

/// Accumulates the statistics of a column, one field at a time.
pub(crate) struct Tally {
    name: String,
    kind: Kind,
    count: u64,
    empty: u64,
    /// Hashes of the values, so that long strings cost no more memory than short ones. Two different values collide
    /// with a probability of 2⁻⁶⁴.
    seen: HashSet<u64>,
    integers: Option<(i64, i64)>,
    numbers: Option<(f64, f64)>,
    text_range: Option<(String, String)>,
    mean: f64,
    /// The sum of squared distances from the mean.
    squares: f64,
}

impl Tally {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kind: Kind::Empty,
            count: 0,
            empty: 0,
            seen: HashSet::new(),
            integers: None,
            numbers: None,
            text_range: None,
            mean: 0.0,
            squares: 0.0,
        }
    }

    pub(crate) fn add(&mut self, field: &str) {
        let value = field.trim();
        if value.is_empty() {
            self.empty += 1;
            return;
        }
        self.count += 1;
        let mut hasher = DefaultHasher::new();
        value.hash(&mut hasher);
        self.seen.insert(hasher.finish());

        let integer = value.parse::<i64>().ok();
        // `inf` and `nan` parse as numbers, but are words in real tables.
        let number = value
            .parse::<f64>()
            .ok()
            .filter(|number| number.is_finite());
        self.kind = match (self.kind, integer, number) {
            (Kind::Empty | Kind::Integer, Some(_), _) => Kind::Integer,
            (Kind::Empty | Kind::Integer | Kind::Number, _, Some(_)) => Kind::Number,
            (Kind::Empty | Kind::Integer | Kind::Number | Kind::Text, _, _) => Kind::Text,
        };
        if let Some(integer) = integer {
            let (min, max) = self.integers.get_or_insert((integer, integer));
            *min = integer.min(*min);
            *max = integer.max(*max);
        }
        if let Some(number) = number {
            let (min, max) = self.numbers.get_or_insert((number, number));
            *min = number.min(*min);
            *max = number.max(*max);
            // Welford 1962: one pass, without the cancellation of sums of squares.
            let before = number - self.mean;
            self.mean += before / self.count as f64;
            self.squares += before * (number - self.mean);
        }
        match &mut self.text_range {
            None => self.text_range = Some((value.to_owned(), value.to_owned())),
            Some((min, _)) if value < min.as_str() => value.clone_into(min),
            Some((_, max)) if value > max.as_str() => value.clone_into(max),
            Some(_) => {}
        }
    }

    pub(crate) fn finish(self) -> Column {
        let range = match self.kind {
            Kind::Empty => None,
            Kind::Integer => self
                .integers
                .map(|(min, max)| (Scalar::Integer(min), Scalar::Integer(max))),
            Kind::Number => self
                .numbers
                .map(|(min, max)| (Scalar::Number(min), Scalar::Number(max))),
            Kind::Text => self
                .text_range
                .map(|(min, max)| (Scalar::Text(min), Scalar::Text(max))),
        };
        let is_numeric = matches!(self.kind, Kind::Integer | Kind::Number);
        let (min, max) = range.unzip();
        Column {
            name: self.name,
            kind: self.kind,
            count: self.count,
            empty: self.empty,
            distinct: self.seen.len(),
            min,
            max,
            mean: is_numeric.then_some(self.mean),
            stddev: (is_numeric && self.count > 1)
                .then(|| (self.squares / (self.count - 1) as f64).sqrt()),
        }
    }
}
