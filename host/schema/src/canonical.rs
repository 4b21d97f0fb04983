//! Canonical text: equal values have equal text, with members sorted by name, and numbers and strings normalised.

use super::evaluate::{Check, DEPTH_MAX, Stop};
use super::json::{Json, Kind, Location};
use super::node::Compiled;
use super::number::Decimal;

/// The canonical text of a value: the same for all its spellings.
///
/// # Errors
/// If it is nested too deeply.
pub(super) fn canonical_text(json: Json<'_>, at: Location) -> Result<Vec<u8>, String> {
    let empty_schema = Compiled::default();
    let mut check = Check::new(&empty_schema, json, u64::MAX, &|| false);
    let mut out = Vec::new();
    match check.canonical(at, &mut out) {
        Ok(()) => Ok(out),
        Err(_) => Err("has a value that is nested too deeply".into()),
    }
}

impl<'s> Check<'s, '_, '_> {
    /// Compares by sorting, so that no list takes quadratic time.
    pub(super) fn has_equal_items(&mut self, at: Location) -> Result<bool, Stop<'s>> {
        let json = self.json;
        let mut all = Vec::new();
        let mut items: Vec<(usize, usize)> = Vec::new();
        for item in json.items(at) {
            let start = all.len();
            self.canonical(item, &mut all)?;
            items.push((start, all.len()));
        }
        let text = |item: &(usize, usize)| &all[item.0..item.1];
        // Sorting compares each item about log2(n) times.
        let rounds = usize::BITS - items.len().leading_zeros();
        self.count_bytes(all.len().saturating_mul(rounds as usize))?;
        items.sort_unstable_by(|a, b| text(a).cmp(text(b)));
        Ok(items
            .windows(2)
            .any(|pair| text(&pair[0]) == text(&pair[1])))
    }

    /// Writes the canonical text of the value.
    pub(super) fn canonical(&mut self, at: Location, out: &mut Vec<u8>) -> Result<(), Stop<'s>> {
        if self.depth == DEPTH_MAX {
            return Err(Stop::TooDeep);
        }
        self.depth += 1;
        let json = self.json;
        match json.kind(at) {
            Kind::Null | Kind::Boolean => {
                self.count(1)?;
                out.extend(json.raw(at).as_bytes());
            }
            Kind::Number => {
                self.count_bytes(json.raw(at).len())?;
                Decimal::read(json.raw(at)).canonical_into(out);
            }
            Kind::String => {
                self.count_bytes(json.raw(at).len())?;
                string_into(&json.string(at), out);
            }
            Kind::Array => {
                self.count(1)?;
                out.push(b'[');
                for item in json.items(at) {
                    self.canonical(item, out)?;
                    out.push(b',');
                }
                out.push(b']');
            }
            Kind::Object => {
                out.push(b'{');
                for member in self.members(at)? {
                    string_into(&member.name, out);
                    self.canonical(member.at, out)?;
                    out.push(b',');
                }
                out.push(b'}');
            }
        }
        self.depth -= 1;
        Ok(())
    }
}

/// A string with its length in front, so that it needs no escapes.
fn string_into(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    out.extend(text.len().to_le_bytes());
    out.extend(text.as_bytes());
}
