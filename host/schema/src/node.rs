//! A schema after it was read: its subschemas, each with its rules by what they are about.

use std::collections::{BTreeMap, HashSet};

use super::json::{Json, Kind, Location};
use super::number::Decimal;
use super::pattern::Pattern;

/// A schema, ready to be checked against. The first node is the whole of it.
#[derive(Default)]
pub(super) struct Compiled {
    pub(super) nodes: Vec<Node>,
}

/// One subschema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct NodeId(pub(super) u32);

/// A property's name, and what its presence asks for.
pub(super) type Dependent<T> = Vec<(Box<str>, T)>;

/// A keyword, and the canonical texts of the values that fit it.
pub(super) type Values = (&'static str, HashSet<Vec<u8>>);

#[derive(Default)]
pub(super) struct Node {
    /// Where it is written.
    pub(super) location: Location,
    /// The schema `false`.
    pub(super) never: bool,
    pub(super) types: Option<Types>,
    /// Of `const` and `enum`.
    pub(super) values: Vec<Values>,
    pub(super) number: Option<Box<NumberRules>>,
    pub(super) string: Option<Box<StringRules>>,
    pub(super) array: Option<Box<ArrayRules>>,
    pub(super) object: Option<Box<ObjectRules>>,
    pub(super) combined: Option<Box<Combined>>,
    /// Of items at which nothing else here has looked.
    pub(super) unevaluated_items: Option<NodeId>,
    /// The same of properties.
    pub(super) unevaluated_properties: Option<NodeId>,
    /// It is a reference and nothing else: where it leads.
    pub(super) leads_to: Option<NodeId>,
    /// More than one subschema leads to it, so that it may meet the same part of a value more than once.
    pub(super) is_shared: bool,
    /// It has subschemas for what is within the value, by itself or where its references and alternatives lead.
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

/// Subschemas for the very same value.
#[derive(Default)]
pub(super) struct Combined {
    /// Of `$ref` and `$dynamicRef`.
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

    /// True where everything fits.
    pub(super) fn is_open(&self) -> bool {
        self.nodes.first().is_none_or(Node::is_open)
    }

    /// Where a subschema is written: a JSON pointer into `written`, which is the whole of it.
    pub(super) fn pointer(&self, written: Json<'_>, id: NodeId) -> String {
        format!("#{}", written.pointer(self.node(id).location).0)
    }

    /// What a subschema has under a keyword.
    pub(super) fn rule(&self, written: Json<'_>, id: NodeId, keyword: &str) -> Option<Location> {
        let location = self.node(id).location;
        if written.kind(location) != Kind::Object {
            return None;
        }
        let mut members = written.members(location).into_iter();
        Some(members.find(|member| member.name == keyword)?.at)
    }

    /// Notes what can be said of each subschema once all are there.
    ///
    /// # Errors
    /// A subschema that comes back to itself without having gone deeper into the value.
    pub(super) fn relate(&mut self) -> Result<(), NodeId> {
        for id in self.inner_first()? {
            let node = self.node(id);
            let mut in_place = node.in_place().into_iter();
            let is_deep = !node.within().is_empty() || in_place.any(|id| self.node(id).is_deep);
            self.nodes[id.0 as usize].is_deep = is_deep;
        }
        let mut led_to = vec![0_u8; self.nodes.len()];
        for node in &self.nodes {
            for id in node.in_place().into_iter().chain(node.within()) {
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

    /// All subschemas, each behind those for the very same value that it leads to; or one that leads to itself.
    fn inner_first(&self) -> Result<Vec<NodeId>, NodeId> {
        let mut done = vec![false; self.nodes.len()];
        let mut on_the_way = vec![false; self.nodes.len()];
        let mut order = Vec::with_capacity(self.nodes.len());
        for start in 0..self.nodes.len() {
            if done[start] {
                continue;
            }
            let mut way = vec![(start, self.nodes[start].in_place())];
            on_the_way[start] = true;
            while let Some((at, left)) = way.last_mut() {
                match left.pop() {
                    Some(next) if on_the_way[next.0 as usize] => return Err(next),
                    Some(next) if done[next.0 as usize] => {}
                    Some(next) => {
                        let next = next.0 as usize;
                        on_the_way[next] = true;
                        way.push((next, self.nodes[next].in_place()));
                    }
                    None => {
                        done[*at] = true;
                        on_the_way[*at] = false;
                        order.push(NodeId(*at as u32));
                        way.pop();
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

    /// True where it says something besides what it says by other subschemas for the same value.
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
    fn within(&self) -> Vec<NodeId> {
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

    /// The subschemas for the very same value.
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
    /// True where a value of this kind fits. `is_integer`: whether a number is one.
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
