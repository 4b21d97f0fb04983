//! Decimal numbers of any size, compared without rounding.

use std::borrow::Cow;
use std::cmp::Ordering;

/// ±0.DIGITS × 10^exponent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decimal<'a> {
    negative: bool,
    /// Without leading and trailing zeros; empty for 0.
    digits: Cow<'a, str>,
    exponent: i64,
}

impl<'a> Decimal<'a> {
    /// Parses a JSON number.
    pub(super) fn read(text: &'a str) -> Self {
        let (negative, text) = match text.strip_prefix('-') {
            Some(text) => (true, text),
            None => (false, text),
        };
        // By bytes: searching a string for one of two characters takes several times as long.
        let (mantissa, power) = match text.bytes().position(|byte| matches!(byte, b'e' | b'E')) {
            Some(at) => (&text[..at], &text[at + 1..]),
            None => (text, "0"),
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let all: Cow<'a, str> = match fraction {
            "" => whole.into(),
            _ => format!("{whole}{fraction}").into(),
        };
        let zeros = all.len() - all.trim_start_matches('0').len();
        let digits: Cow<'a, str> = match all {
            Cow::Borrowed(all) => all.trim_matches('0').into(),
            Cow::Owned(all) => all.trim_matches('0').to_owned().into(),
        };
        if digits.is_empty() {
            return Self {
                negative: false,
                digits,
                exponent: 0,
            };
        }
        // Exponents beyond these are treated as equal. Postgres stores only numbers below 10^131072, so no job has such
        // a number in its payload or result; only a schema, or an invocation without the queue, can have one.
        let extreme = match power.starts_with('-') {
            true => i64::MIN / 4,
            false => i64::MAX / 4,
        };
        let power = power
            .parse()
            .unwrap_or(extreme)
            .clamp(i64::MIN / 4, i64::MAX / 4);
        Self {
            negative,
            digits,
            exponent: power + whole.len() as i64 - zeros as i64,
        }
    }

    pub(super) fn into_owned(self) -> Decimal<'static> {
        Decimal {
            digits: self.digits.into_owned().into(),
            ..self
        }
    }

    pub(super) fn is_positive(&self) -> bool {
        !self.negative && !self.digits.is_empty()
    }

    /// True if it is an integer. 1.0 and 1e400 are integers too.
    pub(super) fn is_integer(&self) -> bool {
        self.last() >= 0
    }

    /// The number as a count; `None` if it is negative or not an integer.
    pub(super) fn count(&self) -> Option<u64> {
        if self.digits.is_empty() {
            return Some(0);
        }
        let zeros = usize::try_from(self.last()).ok()?;
        if self.negative {
            return None;
        }
        // No value can have more items than this.
        let max = || Some(u64::MAX);
        match zeros {
            0..20 => format!("{}{:0<zeros$}", self.digits, "")
                .parse()
                .ok()
                .or_else(max),
            20.. => max(),
        }
    }

    /// True if its digits fit into 64 bits, so that remainders are fast to compute. 19 digits do; a double has 17.
    pub(super) fn is_unit(&self) -> bool {
        self.is_positive() && self.digits.parse::<u64>().is_ok()
    }

    /// True if this is an integer multiple of `unit`, which [is a unit](Self::is_unit).
    pub(super) fn is_multiple_of(&self, unit: &Decimal<'_>) -> bool {
        if self.digits.is_empty() {
            return true;
        }
        let Ok(divisor) = unit.digits.parse::<u64>() else {
            return false;
        };
        // If its last digit is at a lower position than that of the unit, it is not a multiple.
        let Ok(zeros) = u64::try_from(self.last() - unit.last()) else {
            return false;
        };
        let divisor = u128::from(divisor);
        let rest = self.digits.bytes().fold(0, |rest, digit| {
            (rest * 10 + u128::from(digit - b'0')) % divisor
        });
        (rest * power_of_ten(zeros, divisor)).is_multiple_of(divisor)
    }

    /// Writes the same bytes for all spellings of a number, and different bytes for different numbers.
    pub(super) fn canonical_into(&self, out: &mut Vec<u8>) {
        if self.negative {
            out.push(b'-');
        }
        out.extend(self.digits.as_bytes());
        out.push(b'e');
        out.extend(self.exponent.to_le_bytes());
    }

    /// The position of the last digit: 0 for ones, -2 for hundredths.
    fn last(&self) -> i64 {
        self.exponent - self.digits.len() as i64
    }

    fn size(&self, other: &Decimal<'_>) -> Ordering {
        let zero = |decimal: &Decimal<'_>| !decimal.digits.is_empty();
        (zero(self), self.exponent, &*self.digits).cmp(&(
            zero(other),
            other.exponent,
            &*other.digits,
        ))
    }
}

/// 10^power modulo the divisor, which is less than 2^64.
fn power_of_ten(mut power: u64, divisor: u128) -> u128 {
    let (mut result, mut base) = (1 % divisor, 10 % divisor);
    while power > 0 {
        if power % 2 == 1 {
            result = result * base % divisor;
        }
        base = base * base % divisor;
        power /= 2;
    }
    result
}

impl Ord for Decimal<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self.negative, other.negative) {
            (false, false) => self.size(other),
            (true, true) => other.size(self),
            (false, true) => Ordering::Greater,
            (true, false) => Ordering::Less,
        }
    }
}

impl PartialOrd for Decimal<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
