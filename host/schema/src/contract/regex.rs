//! Patterns in schemas as Postgres regular expressions.

use regex_syntax::hir::{Class, Hir, HirKind, Look};

use super::REPEATS_MAX;
use crate::ecma;

/// The maximum length of a pattern, in bytes.
const BYTES_MAX: usize = 500;

/// The maximum total number of repetitions of the parts of a pattern: Postgres expands each repetition.
const EXPANDED_MAX: u64 = 2000;

/// The maximum number of ranges in a class.
const RANGES_MAX: usize = 40;

/// The same pattern for Postgres, with flag `s`. `None` if it may not mean the same there, or is too large.
pub(super) fn to_postgres(written: &str) -> Option<String> {
    let pattern = ecma::parse(written).ok()?;
    let mut out = String::new();
    write(&pattern, &mut out)?;
    (out.len() <= BYTES_MAX && expanded(&pattern)? <= EXPANDED_MAX).then_some(out)
}

/// The approximate number of states that Postgres creates for it.
fn expanded(pattern: &Hir) -> Option<u64> {
    let total = |parts: &[Hir]| {
        parts
            .iter()
            .try_fold(1_u64, |sum, part| Some(sum.saturating_add(expanded(part)?)))
    };
    match pattern.kind() {
        HirKind::Empty | HirKind::Look(_) | HirKind::Class(_) => Some(1),
        HirKind::Literal(literal) => Some(literal.0.len() as u64),
        HirKind::Repetition(repetition) => {
            let times = u64::from(repetition.max.unwrap_or(repetition.min).max(1));
            Some(times.saturating_mul(expanded(&repetition.sub)?))
        }
        HirKind::Capture(capture) => expanded(&capture.sub),
        HirKind::Concat(parts) | HirKind::Alternation(parts) => total(parts),
    }
}

fn write(pattern: &Hir, out: &mut String) -> Option<()> {
    match pattern.kind() {
        HirKind::Empty => out.push_str("(?:)"),
        HirKind::Literal(literal) => {
            for character in std::str::from_utf8(&literal.0).ok()?.chars() {
                escape(character, out)?;
            }
        }
        HirKind::Class(Class::Unicode(class)) => {
            let ranges = class.ranges();
            if ranges.is_empty() || ranges.len() > RANGES_MAX {
                return None;
            }
            out.push('[');
            for range in ranges {
                // Postgres cannot store NUL characters.
                let start = u32::from(range.start()).max(1);
                escape(char::from_u32(start)?, out)?;
                out.push('-');
                escape(range.end(), out)?;
            }
            out.push(']');
        }
        HirKind::Class(Class::Bytes(_)) => return None,
        // Without flag `m` these are the start and the end of the text in both dialects.
        HirKind::Look(Look::Start) => out.push('^'),
        HirKind::Look(Look::End) => out.push('$'),
        HirKind::Look(_) => return None,
        HirKind::Repetition(repetition) => {
            // Postgres does not accept a repetition of an empty pattern.
            repetition
                .sub
                .properties()
                .minimum_len()
                .filter(|len| *len > 0)?;
            out.push_str("(?:");
            write(&repetition.sub, out)?;
            out.push(')');
            let (min, max) = (repetition.min, repetition.max);
            if u64::from(max.unwrap_or(min).max(min)) > REPEATS_MAX {
                return None;
            }
            match (min, max) {
                (0, None) => out.push('*'),
                (1, None) => out.push('+'),
                (0, Some(1)) => out.push('?'),
                (min, None) => out.push_str(&format!("{{{min},}}")),
                (min, Some(max)) => out.push_str(&format!("{{{min},{max}}}")),
            }
        }
        HirKind::Capture(capture) => {
            out.push_str("(?:");
            write(&capture.sub, out)?;
            out.push(')');
        }
        HirKind::Concat(parts) => {
            for part in parts {
                write(part, out)?;
            }
        }
        HirKind::Alternation(parts) => {
            out.push_str("(?:");
            for (index, part) in parts.iter().enumerate() {
                if index > 0 {
                    out.push('|');
                }
                write(part, out)?;
            }
            out.push(')');
        }
    }
    (out.len() <= BYTES_MAX).then_some(())
}

/// Writes a character so that it stands for itself, inside and outside of classes.
fn escape(character: char, out: &mut String) -> Option<()> {
    match character {
        '\0' => return None,
        'a'..='z' | 'A'..='Z' | '0'..='9' => out.push(character),
        other => out.push_str(&format!("\\U{:08X}", u32::from(other))),
    }
    Some(())
}
