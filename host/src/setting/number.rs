//! Numbers: the fields that hold them, how `rouse.toml` and options write them, and their bounds.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::{Value, json};

/// A field, by its type; the type decides how `rouse.toml` writes it.
#[derive(Debug)]
pub enum Field<'a> {
    /// A count, or bytes.
    Usize(&'a mut usize),
    /// A count.
    U8(&'a mut u8),
    /// A count.
    U32(&'a mut u32),
    /// A count, or bytes.
    U64(&'a mut u64),
    /// Bytes, written in MiB.
    Mib(&'a mut usize),
    /// Written as "90s" or "2h".
    Time(&'a mut Duration),
    /// A number with a fraction.
    Ratio(&'a mut f64),
}

/// A value as `rouse.toml` writes it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    /// A count, bytes, or MiB.
    Whole(u64),
    /// A duration.
    Time(Duration),
    /// A number with a fraction.
    Ratio(f64),
}

impl From<u32> for Number {
    fn from(count: u32) -> Self {
        Self::Whole(count.into())
    }
}

impl From<u64> for Number {
    fn from(count: u64) -> Self {
        Self::Whole(count)
    }
}

impl From<usize> for Number {
    fn from(count: usize) -> Self {
        Self::Whole(count as u64)
    }
}

impl From<Duration> for Number {
    fn from(time: Duration) -> Self {
        Self::Time(time)
    }
}

impl From<f64> for Number {
    fn from(ratio: f64) -> Self {
        Self::Ratio(ratio)
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(count) => write!(f, "{count}"),
            Self::Time(time) => f.write_str(&rouse_display::when::in_days(*time)),
            Self::Ratio(ratio) => write!(f, "{ratio}"),
        }
    }
}

impl Number {
    /// As written in `rouse.toml`.
    pub fn written(self) -> String {
        match self {
            Self::Time(_) => format!("\"{self}\""),
            Self::Whole(_) | Self::Ratio(_) => self.json().to_string(),
        }
    }

    /// As JSON; a duration in milliseconds.
    pub fn json(self) -> Value {
        match self {
            Self::Whole(count) => json!(count),
            Self::Time(time) => json!(millis(time)),
            Self::Ratio(ratio) => json!(ratio),
        }
    }

    /// Rejects a number that is out of these bounds.
    ///
    /// # Errors
    /// The bounds and the number, as a sentence without its subject.
    pub(super) fn check(self, bounds: &RangeInclusive<u64>) -> Result<(), String> {
        let (min, max) = (*bounds.start(), *bounds.end());
        let fits = match self {
            Self::Whole(count) => bounds.contains(&count),
            // A fraction of a millisecond counts: 1.5 ms is not within 0 to 1 ms.
            Self::Time(time) => {
                (Duration::from_millis(min)..=Duration::from_millis(max)).contains(&time)
            }
            Self::Ratio(ratio) => (min as f64..=max as f64).contains(&ratio),
        };
        if fits {
            return Ok(());
        }
        let [min, max] = [min, max].map(|bound| self.bound(bound));
        Err(format!("must be between {min} and {max}, not {self}"))
    }

    /// A bound, in the unit of this number.
    pub(super) fn bound(self, bound: u64) -> Self {
        match self {
            Self::Whole(_) => Self::Whole(bound),
            Self::Time(_) => Self::Time(Duration::from_millis(bound)),
            Self::Ratio(_) => Self::Ratio(bound as f64),
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Field<'_> {
    pub(super) fn get(self) -> Number {
        match self {
            Self::Usize(count) => Number::Whole(*count as u64),
            Self::U8(count) => Number::Whole((*count).into()),
            Self::U32(count) => Number::Whole((*count).into()),
            Self::U64(count) => Number::Whole(*count),
            Self::Mib(bytes) => Number::Whole((*bytes >> 20) as u64),
            Self::Time(time) => Number::Time(*time),
            Self::Ratio(ratio) => Number::Ratio(*ratio),
        }
    }

    /// Bounds reject values that do not fit the type before they get here.
    pub(super) fn set(self, number: Number) {
        match (self, number) {
            (Self::Usize(count), Number::Whole(number)) => {
                *count = usize::try_from(number).unwrap_or(usize::MAX);
            }
            (Self::U8(count), Number::Whole(number)) => {
                *count = u8::try_from(number).unwrap_or(u8::MAX);
            }
            (Self::U32(count), Number::Whole(number)) => {
                *count = u32::try_from(number).unwrap_or(u32::MAX);
            }
            (Self::U64(count), Number::Whole(number)) => *count = number,
            (Self::Mib(bytes), Number::Whole(number)) => {
                *bytes = usize::try_from(number)
                    .unwrap_or(usize::MAX)
                    .saturating_mul(1 << 20);
            }
            (Self::Time(time), Number::Time(number)) => *time = number,
            (Self::Ratio(ratio), Number::Ratio(number)) => *ratio = number,
            (field, number) => panic!("{field:?} cannot hold {number:?}"),
        }
    }
}
