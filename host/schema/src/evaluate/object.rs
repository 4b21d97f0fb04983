//! The rules for objects.

use super::super::json::{Location, Member};
use super::super::mismatch::{Detail, Mismatch};
use super::super::node::{NodeId, ObjectRules};
use super::violation::check_count;
use super::{Check, Evaluated, Stop};

impl<'s, 'j> Check<'s, 'j, '_> {
    pub(super) fn object(
        &mut self,
        id: NodeId,
        rules: &'s ObjectRules,
        at: Location,
        mut evaluated: Option<&mut Evaluated>,
    ) -> Result<(), Stop<'s>> {
        let members = self.members(at)?;
        check_count(
            id,
            at,
            members.len() as u64,
            (rules.min_properties, "minProperties"),
            (rules.max_properties, "maxProperties"),
        )?;
        self.require(id, at, &members, &rules.required, "required")?;
        for (name, names) in &rules.dependent_required {
            self.count_bytes(name.len())?;
            if has(&members, name) {
                self.require(id, at, &members, names, "dependentRequired")?;
            }
        }
        // Properties with nested rules come last, so that a tag selects the alternative first.
        let first = self.deferred.len();
        for member in &members {
            if let Some(names) = rules.property_names {
                self.fits(names, member.name_at, None)?;
            }
            let mut is_evaluated = false;
            if let Some(node) = rules.properties.get(&*member.name) {
                is_evaluated = true;
                self.check_or_defer(*node, member.at)?;
            }
            for (pattern, node) in &rules.pattern_properties {
                self.count(pattern.steps(&member.name))?;
                if pattern.is_in(&member.name) {
                    is_evaluated = true;
                    self.check_or_defer(*node, member.at)?;
                }
            }
            if let Some(node) = rules.additional_properties
                && !is_evaluated
            {
                is_evaluated = true;
                self.check_or_defer(node, member.at)?;
            }
            if let Some(evaluated) = &mut evaluated
                && is_evaluated
            {
                evaluated.insert(member.at);
            }
        }
        drop(members);
        for number in first..self.deferred.len() {
            let (node, at) = self.deferred[number];
            self.fits(node, at, None)?;
        }
        self.deferred.truncate(first);
        Ok(())
    }

    /// [`fits`](Self::fits), deferred if the subschema has rules for nested values.
    fn check_or_defer(&mut self, id: NodeId, at: Location) -> Result<(), Stop<'s>> {
        match self.schema.node(id).is_deep {
            true => self.deferred.push((id, at)),
            false => self.fits(id, at, None)?,
        }
        Ok(())
    }

    fn require(
        &mut self,
        id: NodeId,
        at: Location,
        members: &[Member<'_>],
        names: &'s [Box<str>],
        keyword: &'static str,
    ) -> Result<(), Stop<'s>> {
        for name in names {
            self.count_bytes(name.len())?;
            if !has(members, name) {
                return Err(Stop::Mismatch(Mismatch {
                    at,
                    node: id,
                    keyword,
                    detail: Detail::Missing(name),
                }));
            }
        }
        Ok(())
    }

    /// The members of an object, sorted by name.
    pub(crate) fn members(&mut self, at: Location) -> Result<Vec<Member<'j>>, Stop<'s>> {
        let mut count: u64 = 0;
        for name in self.json.items(at).step_by(2) {
            self.count_bytes(self.json.raw(name).len())?;
            count += 1;
        }
        // Pays for sorting the members, and for recording the evaluated ones.
        self.count(count * u64::from(2 + count.max(1).ilog2() / 2))?;
        Ok(self.json.members(at))
    }
}

/// True if one of the members, which are sorted, has this name.
pub(super) fn has(members: &[Member<'_>], name: &str) -> bool {
    members
        .binary_search_by(|member| (*member.name).cmp(name))
        .is_ok()
}
