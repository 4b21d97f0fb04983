//! The rules for arrays.

use super::super::json::Location;
use super::super::node::{ArrayRules, NodeId};
use super::violation::{check_count, first_violated};
use super::{Check, Evaluated, Stop};

impl<'s> Check<'s, '_, '_> {
    pub(super) fn array(
        &mut self,
        id: NodeId,
        rules: &'s ArrayRules,
        at: Location,
        mut evaluated: Option<&mut Evaluated>,
    ) -> Result<(), Stop<'s>> {
        let json = self.json;
        let mut length = 0;
        let mut fitting = 0;
        let mut prefix = rules.prefix_items.iter();
        for item in json.items(at) {
            length += 1;
            self.count(1)?;
            let mut is_evaluated = false;
            if let Some(node) = prefix.next().copied().or(rules.items) {
                is_evaluated = true;
                self.fits(node, item, None)?;
            }
            if let Some(contains) = &rules.contains
                && self.fits_or_not(contains.node, item, None)?.is_ok()
            {
                is_evaluated = true;
                fitting += 1;
            }
            if let Some(evaluated) = &mut evaluated
                && is_evaluated
            {
                evaluated.insert(item);
            }
        }
        check_count(
            id,
            at,
            length,
            (rules.min_items, "minItems"),
            (rules.max_items, "maxItems"),
        )?;
        if let Some(contains) = &rules.contains {
            let min = (Some(contains.min), "contains");
            check_count(id, at, fitting, min, (contains.max, "maxContains"))?;
        }
        let repeated = rules.unique_items && self.has_equal_items(at)?;
        first_violated(id, at, &[(repeated, "uniqueItems")])
    }
}
