//! Checks a value against a schema, and finds the first rule that it does not match, with the location.

mod array;
mod budget;
mod combined;
mod object;
mod scalar;
mod violation;

use std::collections::HashSet;

use super::cache::Cache;
use super::json::{Json, Kind, Location};
use super::mismatch::Mismatch;
use super::node::{Compiled, Node, NodeId};
use super::number::Decimal;
use violation::fails;

/// The maximum nesting of schemas, not counting those that are only a reference. Guests in Rust read JSON down to 128
/// levels, and each level takes up to four: the property, an alternative for `null`, one for the variant, its object.
pub(super) const DEPTH_MAX: u32 = 512;

/// Why a value is not accepted.
pub(super) enum Stop<'s> {
    Mismatch(Mismatch<'s>),
    TooManySteps,
    TooDeep,
}

/// The properties of an object, or the items of an array, that have been evaluated.
type Evaluated = HashSet<Location>;

/// Checks the whole value. `steps` is the budget; `is_cancelled` returns true if the result is no longer needed.
pub(super) fn evaluate<'s>(
    schema: &'s Compiled,
    json: Json<'_>,
    steps: u64,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<(), Stop<'s>> {
    Check::new(schema, json, steps, is_cancelled).whole()
}

/// A check in progress, with its remaining budgets.
pub(super) struct Check<'s, 'j, 'u> {
    pub(super) schema: &'s Compiled,
    pub(super) json: Json<'j>,
    pub(super) steps: u64,
    /// The remaining steps at the last check for cancellation.
    pub(super) steps_at_cancellation_check: u64,
    /// The number of parts that are reserved by `hold`.
    pub(super) held: u64,
    pub(super) depth: u32,
    /// Properties whose check is deferred until the other properties of their object match; those of outer objects
    /// first.
    pub(super) deferred: Vec<(NodeId, Location)>,
    pub(super) cache: Cache<'s>,
    pub(super) is_cancelled: &'u dyn Fn() -> bool,
}

impl<'s, 'j, 'u> Check<'s, 'j, 'u> {
    pub(super) fn new(
        schema: &'s Compiled,
        json: Json<'j>,
        steps: u64,
        is_cancelled: &'u dyn Fn() -> bool,
    ) -> Self {
        Self {
            schema,
            json,
            steps,
            steps_at_cancellation_check: steps,
            held: 0,
            depth: 0,
            deferred: Vec::new(),
            cache: Cache::new(),
            is_cancelled,
        }
    }

    pub(super) fn whole(&mut self) -> Result<(), Stop<'s>> {
        self.fits(NodeId(0), self.json.root(), None)
    }

    /// Checks one part of the value against one subschema. `evaluated` collects the evaluated properties or items, if a
    /// caller needs them.
    fn fits(
        &mut self,
        mut id: NodeId,
        at: Location,
        evaluated: Option<&mut Evaluated>,
    ) -> Result<(), Stop<'s>> {
        self.count(1)?;
        let mut node = self.schema.node(id);
        while let Some(target) = node.leads_to {
            self.count(1)?;
            id = target;
            node = self.schema.node(id);
        }
        if !node.is_shared {
            return self.evaluate_node(id, node, at, evaluated);
        }
        match self.cache.get(id, at) {
            Some(Some(mismatch)) => return Err(Stop::Mismatch(mismatch)),
            // The cache does not contain the evaluated properties.
            Some(None) if evaluated.is_none() => return Ok(()),
            Some(None) | None => {}
        }
        let steps = self.steps;
        let fits = self.evaluate_node(id, node, at, evaluated);
        let mismatch = match fits {
            Ok(()) => None,
            Err(Stop::Mismatch(mismatch)) => Some(mismatch),
            Err(Stop::TooManySteps | Stop::TooDeep) => return fits,
        };
        let used = steps - self.steps;
        self.cache.insert(id, at, mismatch, used);
        fits
    }

    fn evaluate_node(
        &mut self,
        id: NodeId,
        node: &'s Node,
        at: Location,
        evaluated: Option<&mut Evaluated>,
    ) -> Result<(), Stop<'s>> {
        if self.depth == DEPTH_MAX {
            return Err(Stop::TooDeep);
        }
        self.depth += 1;
        let rest = match self.json.kind(at) {
            Kind::Array => node.unevaluated_items,
            Kind::Object => node.unevaluated_properties,
            Kind::Null | Kind::Boolean | Kind::Number | Kind::String => None,
        };
        let fits = match rest {
            None => self.rules(id, node, at, evaluated),
            Some(rest) => self.with_unevaluated(id, node, at, rest, evaluated),
        };
        self.depth -= 1;
        fits
    }

    fn with_unevaluated(
        &mut self,
        id: NodeId,
        node: &'s Node,
        at: Location,
        rest: NodeId,
        outer: Option<&mut Evaluated>,
    ) -> Result<(), Stop<'s>> {
        let mut evaluated = Evaluated::new();
        self.hold(at)?;
        // After a mismatch, the check ends, or `fits_or_not` releases this.
        self.rules(id, node, at, Some(&mut evaluated))?;
        self.release(at);
        let mut unevaluated: Vec<Location> = match self.json.kind(at) {
            Kind::Object => self.members(at)?.iter().map(|member| member.at).collect(),
            _ => self.json.items(at).collect(),
        };
        self.count(unevaluated.len() as u64)?;
        unevaluated.retain(|part| evaluated.insert(*part));
        for part in unevaluated {
            self.fits(rest, part, None)?;
        }
        if let Some(outer) = outer {
            self.count(evaluated.len() as u64)?;
            outer.extend(evaluated);
        }
        Ok(())
    }

    fn rules(
        &mut self,
        id: NodeId,
        node: &'s Node,
        at: Location,
        mut evaluated: Option<&mut Evaluated>,
    ) -> Result<(), Stop<'s>> {
        let kind = self.json.kind(at);
        let rule = |keyword| fails(id, at, keyword);
        if node.never {
            return rule("false");
        }
        if let Some(types) = node.types {
            let raw = self.json.raw(at);
            if kind == Kind::Number {
                self.count_bytes(raw.len())?;
            }
            if !types.allow(kind, || Decimal::read(raw).is_integer()) {
                return rule("type");
            }
        }
        if !node.values.is_empty() {
            let mut text = Vec::new();
            self.canonical(at, &mut text)?;
            if let Some((keyword, _)) = node.values.iter().find(|(_, fit)| !fit.contains(&text)) {
                return rule(keyword);
            }
        }
        match kind {
            Kind::Null | Kind::Boolean => {}
            Kind::Number => {
                if let Some(rules) = &node.number {
                    self.number(id, rules, at)?;
                }
            }
            Kind::String => {
                if let Some(rules) = &node.string {
                    self.string(id, rules, at)?;
                }
            }
            Kind::Array => {
                if let Some(rules) = &node.array {
                    self.array(id, rules, at, evaluated.as_deref_mut())?;
                }
            }
            Kind::Object => {
                if let Some(rules) = &node.object {
                    self.object(id, rules, at, evaluated.as_deref_mut())?;
                }
            }
        }
        match &node.combined {
            Some(combined) => self.combined(id, combined, at, evaluated),
            None => Ok(()),
        }
    }
}
