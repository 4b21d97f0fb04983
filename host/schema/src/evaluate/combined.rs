//! The rules that combine schemas: references, alternatives, conditions.

use std::cmp::Ordering;

use super::super::json::{Kind, Location};
use super::super::mismatch::{Detail, Mismatch};
use super::super::node::{Combined, NodeId};
use super::object::has;
use super::violation::fails;
use super::{Check, Evaluated, Stop};

impl<'s> Check<'s, '_, '_> {
    pub(super) fn combined(
        &mut self,
        id: NodeId,
        combined: &'s Combined,
        at: Location,
        mut evaluated: Option<&mut Evaluated>,
    ) -> Result<(), Stop<'s>> {
        for node in combined.references.iter().chain(&combined.all_of) {
            self.fits(*node, at, evaluated.as_deref_mut())?;
        }
        if !combined.any_of.is_empty() {
            self.alternatives(id, "anyOf", &combined.any_of, at, evaluated.as_deref_mut())?;
        }
        if !combined.one_of.is_empty() {
            self.alternatives(id, "oneOf", &combined.one_of, at, evaluated.as_deref_mut())?;
        }
        if let Some(not) = combined.not
            && self.fits_or_not(not, at, None)?.is_ok()
        {
            return fails(id, at, "not");
        }
        if let Some(condition) = &combined.condition {
            let next = match self.try_match(condition.when, at, evaluated.as_deref_mut())? {
                Ok(()) => condition.then,
                Err(_) => condition.otherwise,
            };
            if let Some(next) = next {
                self.fits(next, at, evaluated.as_deref_mut())?;
            }
        }
        if !combined.dependent_schemas.is_empty() && self.json.kind(at) == Kind::Object {
            let members = self.members(at)?;
            let mut depending = Vec::new();
            for (name, node) in &combined.dependent_schemas {
                self.count_bytes(name.len())?;
                if has(&members, name) {
                    depending.push(*node);
                }
            }
            // Freed before the same object is read again.
            drop(members);
            for node in depending {
                self.fits(node, at, evaluated.as_deref_mut())?;
            }
        }
        Ok(())
    }

    /// At least one schema of `anyOf` has to match, exactly one of `oneOf`.
    fn alternatives(
        &mut self,
        id: NodeId,
        keyword: &'static str,
        nodes: &[NodeId],
        at: Location,
        mut evaluated: Option<&mut Evaluated>,
    ) -> Result<(), Stop<'s>> {
        let mut fitting = 0;
        let mut closest: Option<Mismatch<'s>> = None;
        let (mut best, mut tied) = (0, false);
        for node in nodes {
            match self.try_match(*node, at, evaluated.as_deref_mut())? {
                Ok(()) => fitting += 1,
                Err(mismatch) => {
                    let relevance = mismatch.relevance(at);
                    match relevance.cmp(&best) {
                        Ordering::Less => {}
                        Ordering::Equal => tied = true,
                        Ordering::Greater => {
                            (best, tied) = (relevance, false);
                            closest = Some(mismatch);
                        }
                    }
                }
            }
            if fitting == 2 && keyword == "oneOf" {
                return Err(Stop::Mismatch(Mismatch {
                    at,
                    node: id,
                    keyword,
                    detail: Detail::MatchesMany,
                }));
            }
            // All matches are needed only if a caller collects evaluated properties.
            if fitting == 1 && keyword == "anyOf" && evaluated.is_none() {
                break;
            }
        }
        match (fitting, closest) {
            (0, Some(mismatch)) if best > 1 || !tied => Err(Stop::Mismatch(mismatch)),
            (0, _) => fails(id, at, keyword),
            _ => Ok(()),
        }
    }

    /// [`fits`](Self::fits), except that a mismatch does not end the check. An alternative that does not match has
    /// evaluated nothing.
    fn try_match(
        &mut self,
        id: NodeId,
        at: Location,
        evaluated: Option<&mut Evaluated>,
    ) -> Result<Result<(), Mismatch<'s>>, Stop<'s>> {
        let mut own = evaluated.as_ref().map(|_| Evaluated::new());
        if own.is_some() {
            self.hold(at)?;
        }
        let fits = self.fits_or_not(id, at, own.as_mut());
        if own.is_some() {
            self.release(at);
        }
        let fits = fits?;
        if let (Ok(()), Some(evaluated), Some(own)) = (&fits, evaluated, own) {
            self.count(own.len() as u64)?;
            evaluated.extend(own);
        }
        Ok(fits)
    }

    /// [`fits`](Self::fits), except that a mismatch restores the reservations made on the way to it.
    pub(super) fn fits_or_not(
        &mut self,
        id: NodeId,
        at: Location,
        evaluated: Option<&mut Evaluated>,
    ) -> Result<Result<(), Mismatch<'s>>, Stop<'s>> {
        let (held, deferred) = (self.held, self.deferred.len());
        match self.fits(id, at, evaluated) {
            Ok(()) => Ok(Ok(())),
            Err(Stop::Mismatch(mismatch)) => {
                self.held = held;
                self.deferred.truncate(deferred);
                Ok(Err(mismatch))
            }
            Err(stop @ (Stop::TooManySteps | Stop::TooDeep)) => Err(stop),
        }
    }
}
