//! The rules for numbers and strings.

use super::super::json::Location;
use super::super::node::{NodeId, NumberRules, StringRules};
use super::super::number::Decimal;
use super::violation::first_violated;
use super::{Check, Stop};

impl<'s> Check<'s, '_, '_> {
    pub(super) fn number(
        &mut self,
        id: NodeId,
        rules: &NumberRules,
        at: Location,
    ) -> Result<(), Stop<'s>> {
        let raw = self.json.raw(at);
        self.count_bytes(raw.len())?;
        if rules.multiple_of.is_some() {
            // The check takes one division per digit.
            self.count(raw.len() as u64)?;
        }
        let number = Decimal::read(raw);
        let violated = [
            (
                rules.minimum.as_ref().is_some_and(|min| number < *min),
                "minimum",
            ),
            (
                rules
                    .exclusive_minimum
                    .as_ref()
                    .is_some_and(|min| number <= *min),
                "exclusiveMinimum",
            ),
            (
                rules.maximum.as_ref().is_some_and(|max| number > *max),
                "maximum",
            ),
            (
                rules
                    .exclusive_maximum
                    .as_ref()
                    .is_some_and(|max| number >= *max),
                "exclusiveMaximum",
            ),
            (
                rules
                    .multiple_of
                    .as_ref()
                    .is_some_and(|unit| !number.is_multiple_of(unit)),
                "multipleOf",
            ),
        ];
        first_violated(id, at, &violated)
    }

    pub(super) fn string(
        &mut self,
        id: NodeId,
        rules: &StringRules,
        at: Location,
    ) -> Result<(), Stop<'s>> {
        let text = self.json.string(at);
        self.count_bytes(text.len())?;
        if rules.min_length.is_some() || rules.max_length.is_some() {
            let length = text.chars().count() as u64;
            let short = rules.min_length.is_some_and(|min| length < min);
            let long = rules.max_length.is_some_and(|max| length > max);
            first_violated(id, at, &[(short, "minLength"), (long, "maxLength")])?;
        }
        match &rules.pattern {
            Some(pattern) => {
                self.count(pattern.steps(&text))?;
                first_violated(id, at, &[(!pattern.is_in(&text), "pattern")])
            }
            None => Ok(()),
        }
    }
}
