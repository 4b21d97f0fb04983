//! Checks a value against a schema, and finds the first rule that it does not match, with the location.

use std::cmp::Ordering;
use std::collections::HashSet;

use super::json::{Json, Kind, Location, Member};
use super::mismatch::{Detail, Mismatch};
use super::node::{
    ArrayRules, Combined, Compiled, Node, NodeId, NumberRules, ObjectRules, StringRules,
};
use super::number::Decimal;
use super::remembered::Remembered;

/// The maximum nesting of schemas, not counting those that are only a reference. Guests in Rust read JSON down to 128 levels, and each
/// level takes up to four: the property, an alternative for `null`, one for the variant, its object.
pub(super) const DEPTH_MAX: u32 = 512;

/// Bytes that are compared or copied in one step.
const BYTES_PER_STEP: usize = 32;

/// How many parts of objects may be kept while others are checked: about 80 MB.
const HELD_PARTS_MAX: u64 = 8 << 20;

/// The interval of checks for cancellation: this many steps take a few milliseconds.
const STEPS_PER_CANCELLATION_CHECK: u64 = 1 << 14;

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
    /// The number of object parts that are kept.
    pub(super) held: u64,
    pub(super) depth: u32,
    /// Properties whose check is deferred until the other properties of their object match; those of outer objects first.
    pub(super) deferred: Vec<(NodeId, Location)>,
    pub(super) remembered: Remembered<'s>,
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
            remembered: Remembered::new(),
            is_cancelled,
        }
    }

    pub(super) fn whole(&mut self) -> Result<(), Stop<'s>> {
        self.fits(NodeId(0), self.json.root(), None)
    }

    pub(super) fn count(&mut self, steps: u64) -> Result<(), Stop<'s>> {
        self.steps = self.steps.checked_sub(steps).ok_or(Stop::TooManySteps)?;
        if self.steps_at_cancellation_check - self.steps >= STEPS_PER_CANCELLATION_CHECK {
            self.steps_at_cancellation_check = self.steps;
            if (self.is_cancelled)() {
                return Err(Stop::TooManySteps);
            }
        }
        Ok(())
    }

    /// Reserves the maximum that can be recorded about an object, until it is [released](Self::release).
    fn hold(&mut self, at: Location) -> Result<(), Stop<'s>> {
        self.held += self.json.parts_of(at);
        match self.held > HELD_PARTS_MAX {
            true => Err(Stop::TooManySteps),
            false => Ok(()),
        }
    }

    fn release(&mut self, at: Location) {
        self.held -= self.json.parts_of(at);
    }

    pub(super) fn count_bytes(&mut self, bytes: usize) -> Result<(), Stop<'s>> {
        self.count(1 + (bytes / BYTES_PER_STEP) as u64)
    }

    /// `evaluated` collects the evaluated properties, if a caller needs them.
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
        match self.remembered.find(id, at) {
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
        let took = steps - self.steps;
        self.remembered.note(id, at, mismatch, took);
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
        // A mismatch ends the check, or is released by `try_match`.
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

    fn number(&mut self, id: NodeId, rules: &NumberRules, at: Location) -> Result<(), Stop<'s>> {
        let raw = self.json.raw(at);
        self.count_bytes(raw.len())?;
        if rules.multiple_of.is_some() {
            // One division per digit.
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

    fn string(&mut self, id: NodeId, rules: &StringRules, at: Location) -> Result<(), Stop<'s>> {
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

    fn array(
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
        within(
            id,
            at,
            length,
            (rules.min_items, "minItems"),
            (rules.max_items, "maxItems"),
        )?;
        if let Some(contains) = &rules.contains {
            let min = (Some(contains.min), "contains");
            within(id, at, fitting, min, (contains.max, "maxContains"))?;
        }
        let repeated = rules.unique_items && self.has_equal_items(at)?;
        first_violated(id, at, &[(repeated, "uniqueItems")])
    }

    fn object(
        &mut self,
        id: NodeId,
        rules: &'s ObjectRules,
        at: Location,
        mut evaluated: Option<&mut Evaluated>,
    ) -> Result<(), Stop<'s>> {
        let members = self.members(at)?;
        within(
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
        // Properties with nested rules come last: a tag decides first which alternative this is.
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

    fn combined(
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

    /// [`fits`](Self::fits), except that a mismatch does not end the check. An alternative that does not match has evaluated nothing.
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
    fn fits_or_not(
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

    pub(super) fn members(&mut self, at: Location) -> Result<Vec<Member<'j>>, Stop<'s>> {
        let mut count: u64 = 0;
        for name in self.json.items(at).step_by(2) {
            self.count_bytes(self.json.raw(name).len())?;
            count += 1;
        }
        // They are sorted, and may be recorded.
        self.count(count * u64::from(2 + count.max(1).ilog2() / 2))?;
        Ok(self.json.members(at))
    }
}

fn has(members: &[Member<'_>], name: &str) -> bool {
    members
        .binary_search_by(|member| (*member.name).cmp(name))
        .is_ok()
}

fn fails<'s>(node: NodeId, at: Location, keyword: &'static str) -> Result<(), Stop<'s>> {
    Err(Stop::Mismatch(Mismatch {
        at,
        node,
        keyword,
        detail: Detail::None,
    }))
}

fn first_violated<'s>(
    node: NodeId,
    at: Location,
    rules: &[(bool, &'static str)],
) -> Result<(), Stop<'s>> {
    match rules.iter().find(|(violated, _)| *violated) {
        Some((_, keyword)) => fails(node, at, keyword),
        None => Ok(()),
    }
}

fn within<'s>(
    node: NodeId,
    at: Location,
    count: u64,
    (min, min_keyword): (Option<u64>, &'static str),
    (max, max_keyword): (Option<u64>, &'static str),
) -> Result<(), Stop<'s>> {
    let too_few = min.is_some_and(|min| count < min);
    let too_many = max.is_some_and(|max| count > max);
    let keyword = match (too_few, too_many) {
        (true, _) => min_keyword,
        (false, true) => max_keyword,
        (false, false) => return Ok(()),
    };
    Err(Stop::Mismatch(Mismatch {
        at,
        node,
        keyword,
        detail: Detail::Count(count),
    }))
}
