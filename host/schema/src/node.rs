//! A compiled schema: its subschemas, with their rules grouped by type.

use std::collections::{BTreeMap, HashSet};

use super::json::{Json, Kind, Location};
use super::number::Decimal;
use super::pattern::Pattern;

/// A compiled schema. The first node is the root.
#[derive(Default)]
pub(super) struct Compiled {
    pub(super) nodes: Vec<Node>,
}

/// The index of a subschema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct NodeId(pub(super) u32);

/// A property's name, and the requirement that its presence triggers.
pub(super) type Dependent<T> = Vec<(Box<str>, T)>;

/// A keyword, and the canonical text of each of its values.
pub(super) type Values = (&'static str, HashSet<Vec<u8>>);

/// One subschema.
#[derive(Default)]
pub(super) struct Node {
    /// Its location in the schema's text.
    pub(super) location: Location,
    /// The schema `false`.
    pub(super) never: bool,
    pub(super) types: Option<Types>,
    /// The values of `const` and `enum`.
    pub(super) values: Vec<Values>,
    pub(super) number: Option<Box<NumberRules>>,
    pub(super) string: Option<Box<StringRules>>,
    pub(super) array: Option<Box<ArrayRules>>,
    pub(super) object: Option<Box<ObjectRules>>,
    pub(super) combined: Option<Box<Combined>>,
    /// Applies to items that nothing else has evaluated.
    pub(super) unevaluated_items: Option<NodeId>,
    /// Applies to properties that nothing else has evaluated.
    pub(super) unevaluated_properties: Option<NodeId>,
    /// The target, if it is only a reference.
    pub(super) leads_to: Option<NodeId>,
    /// True if more than one subschema refers to it, so that it may be applied to the same part of a value more than
    /// once.
    pub(super) is_shared: bool,
    /// True if it has subschemas for nested values, directly or through references and alternatives.
    pub(super) is_deep: bool,
}

#[derive(Default, Clone, Copy)]
pub(super) struct Types {
    pub(super) null: bool,
    pub(super) boolean: bool,
    pub(super) number: bool,
    pub(super) integer: bool,
    pub(super) string: bool,
    pub(super) array: bool,
    pub(super) object: bool,
}

impl Types {
    /// Their names; `integer` only without `number`.
    pub(super) fn names(self) -> impl Iterator<Item = &'static str> {
        [
            (self.string, "string"),
            (self.number, "number"),
            (self.integer && !self.number, "integer"),
            (self.boolean, "boolean"),
            (self.array, "array"),
            (self.object, "object"),
            (self.null, "null"),
        ]
        .into_iter()
        .filter_map(|(is_listed, name)| is_listed.then_some(name))
    }
}

#[derive(Default)]
pub(super) struct NumberRules {
    pub(super) minimum: Option<Decimal<'static>>,
    pub(super) exclusive_minimum: Option<Decimal<'static>>,
    pub(super) maximum: Option<Decimal<'static>>,
    pub(super) exclusive_maximum: Option<Decimal<'static>>,
    pub(super) multiple_of: Option<Decimal<'static>>,
}

#[derive(Default)]
pub(super) struct StringRules {
    pub(super) min_length: Option<u64>,
    pub(super) max_length: Option<u64>,
    pub(super) pattern: Option<Pattern>,
}

#[derive(Default)]
pub(super) struct ArrayRules {
    pub(super) min_items: Option<u64>,
    pub(super) max_items: Option<u64>,
    pub(super) unique_items: bool,
    pub(super) prefix_items: Vec<NodeId>,
    pub(super) items: Option<NodeId>,
    pub(super) contains: Option<Contains>,
}

pub(super) struct Contains {
    pub(super) node: NodeId,
    pub(super) min: u64,
    pub(super) max: Option<u64>,
}

#[derive(Default)]
pub(super) struct ObjectRules {
    pub(super) min_properties: Option<u64>,
    pub(super) max_properties: Option<u64>,
    pub(super) required: Vec<Box<str>>,
    pub(super) dependent_required: Dependent<Vec<Box<str>>>,
    pub(super) property_names: Option<NodeId>,
    pub(super) properties: BTreeMap<Box<str>, NodeId>,
    pub(super) pattern_properties: Vec<(Pattern, NodeId)>,
    pub(super) additional_properties: Option<NodeId>,
}

/// Subschemas that apply to the same value.
#[derive(Default)]
pub(super) struct Combined {
    /// The targets of `$ref` and `$dynamicRef`.
    pub(super) references: Vec<NodeId>,
    pub(super) all_of: Vec<NodeId>,
    pub(super) any_of: Vec<NodeId>,
    pub(super) one_of: Vec<NodeId>,
    pub(super) not: Option<NodeId>,
    pub(super) condition: Option<Condition>,
    pub(super) dependent_schemas: Dependent<NodeId>,
}

pub(super) struct Condition {
    pub(super) when: NodeId,
    pub(super) then: Option<NodeId>,
    pub(super) otherwise: Option<NodeId>,
}

impl Compiled {
    pub(super) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// True if every value matches.
    pub(super) fn is_open(&self) -> bool {
        self.nodes.first().is_none_or(Node::is_open)
    }

    /// The location of a subschema: a JSON pointer into `written`, the whole schema.
    pub(super) fn pointer(&self, written: Json<'_>, id: NodeId) -> String {
        format!("#{}", written.pointer(self.node(id).location).0)
    }

    /// The value of a keyword in a subschema.
    pub(super) fn rule(&self, written: Json<'_>, id: NodeId, keyword: &str) -> Option<Location> {
        let location = self.node(id).location;
        if written.kind(location) != Kind::Object {
            return None;
        }
        let mut members = written.members(location).into_iter();
        Some(members.find(|member| member.name == keyword)?.at)
    }

    /// Computes the properties of each subschema that depend on others.
    ///
    /// # Errors
    /// A subschema that leads back to itself without descending into the value.
    pub(super) fn relate(&mut self) -> Result<(), NodeId> {
        for id in self.inner_first()? {
            let node = self.node(id);
            let mut in_place = node.in_place().into_iter();
            let is_deep = !node.children().is_empty() || in_place.any(|id| self.node(id).is_deep);
            self.nodes[id.0 as usize].is_deep = is_deep;
        }
        let mut led_to = vec![0_u8; self.nodes.len()];
        for node in &self.nodes {
            for id in node.in_place().into_iter().chain(node.children()) {
                let count = &mut led_to[id.0 as usize];
                *count = count.saturating_add(1);
            }
        }
        for (node, count) in self.nodes.iter_mut().zip(led_to) {
            node.is_shared = count > 1;
            node.leads_to = node.only_reference();
        }
        Ok(())
    }

    /// All subschemas, each after the subschemas for the same value that it refers to; or one that refers to itself.
    fn inner_first(&self) -> Result<Vec<NodeId>, NodeId> {
        let mut done = vec![false; self.nodes.len()];
        let mut in_progress = vec![false; self.nodes.len()];
        let mut order = Vec::with_capacity(self.nodes.len());
        for start in 0..self.nodes.len() {
            if done[start] {
                continue;
            }
            let mut path = vec![(start, self.nodes[start].in_place())];
            in_progress[start] = true;
            while let Some((at, left)) = path.last_mut() {
                match left.pop() {
                    Some(next) if in_progress[next.0 as usize] => return Err(next),
                    Some(next) if done[next.0 as usize] => {}
                    Some(next) => {
                        let next = next.0 as usize;
                        in_progress[next] = true;
                        path.push((next, self.nodes[next].in_place()));
                    }
                    None => {
                        done[*at] = true;
                        in_progress[*at] = false;
                        order.push(NodeId(*at as u32));
                        path.pop();
                    }
                }
            }
        }
        Ok(order)
    }
}

impl Node {
    fn is_open(&self) -> bool {
        !self.has_rules() && self.combined.is_none()
    }

    /// True if it has rules other than references to subschemas for the same value.
    fn has_rules(&self) -> bool {
        self.never
            || self.types.is_some()
            || !self.values.is_empty()
            || self.number.is_some()
            || self.string.is_some()
            || self.array.is_some()
            || self.object.is_some()
            || self.unevaluated_items.is_some()
            || self.unevaluated_properties.is_some()
    }

    fn only_reference(&self) -> Option<NodeId> {
        let combined = self.combined.as_ref().filter(|_| !self.has_rules())?;
        match (combined.references.as_slice(), self.in_place().len()) {
            ([target], 1) => Some(*target),
            _ => None,
        }
    }

    /// The subschemas for parts of the value.
    fn children(&self) -> Vec<NodeId> {
        let mut nodes = Vec::from_iter(self.unevaluated_items);
        nodes.extend(self.unevaluated_properties);
        if let Some(array) = &self.array {
            nodes.extend(&array.prefix_items);
            nodes.extend(array.items);
            nodes.extend(array.contains.as_ref().map(|contains| contains.node));
        }
        if let Some(object) = &self.object {
            nodes.extend(object.property_names);
            nodes.extend(object.properties.values());
            nodes.extend(object.pattern_properties.iter().map(|(_, node)| *node));
            nodes.extend(object.additional_properties);
        }
        nodes
    }

    /// The subschemas for the same value.
    fn in_place(&self) -> Vec<NodeId> {
        let Some(combined) = &self.combined else {
            return Vec::new();
        };
        let mut nodes = combined.references.clone();
        nodes.extend(combined.not);
        nodes.extend(&combined.all_of);
        nodes.extend(&combined.any_of);
        nodes.extend(&combined.one_of);
        if let Some(condition) = &combined.condition {
            nodes.push(condition.when);
            nodes.extend(condition.then.iter().chain(&condition.otherwise));
        }
        nodes.extend(combined.dependent_schemas.iter().map(|(_, node)| *node));
        nodes
    }
}

impl Types {
    /// True if a value of this kind is allowed. `is_integer` checks whether a number is an integer.
    pub(super) fn allow(self, kind: Kind, is_integer: impl FnOnce() -> bool) -> bool {
        match kind {
            Kind::Null => self.null,
            Kind::Boolean => self.boolean,
            Kind::Number => self.number || (self.integer && is_integer()),
            Kind::String => self.string,
            Kind::Array => self.array,
            Kind::Object => self.object,
        }
    }
}
