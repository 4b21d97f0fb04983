//! The parameters of the SQL function that enqueues a payload.

use std::collections::BTreeSet;

use crate::json::{Json, Kind};
use crate::node::{Compiled, Node, NodeId};

/// The maximum length of the name of a parameter, in bytes: Postgres truncates longer ones.
const NAME_BYTES_MAX: usize = 63;

/// The maximum number of parameters; Postgres allows 100, and the options of `rouse.enqueue` need some.
const COUNT_MAX: usize = 80;

/// The maximum length of a default, in bytes.
const DEFAULT_BYTES_MAX: usize = 1024;

/// The maximum number of references that are followed for a type.
const REFERENCES_MAX: usize = 8;

/// Parameters that start with this prefix are options of the enqueue.
const OPTION_PREFIX: &str = "rouse_";

/// The parameters of the typed function of a handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Parameters {
    /// One for each property of the payload, required ones first.
    Each(Vec<Parameter>),
    /// One for the whole payload, of this SQL type: the payload is not an object, or its properties cannot be
    /// parameters.
    Whole(&'static str),
}

/// A property of a payload, as a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// The name of the property.
    pub name: String,
    /// The SQL type; `jsonb` for values without a closer type.
    pub sql_type: &'static str,
    /// False if it may be left out.
    pub required: bool,
    /// The text of a constant of that type.
    pub default: Option<String>,
    /// The description in the schema.
    pub description: Option<String>,
}

pub(super) fn from_schema(compiled: &Compiled, written: Json<'_>) -> Parameters {
    let types = Typing { compiled, written };
    let root = types.resolve(NodeId(0));
    let whole = Parameters::Whole(types.sql_type(root));
    let node = compiled.node(root);
    let Some(object) = &node.object else {
        return whole;
    };
    let others_are_allowed = object
        .additional_properties
        .is_none_or(|id| !compiled.node(id).never);
    let names = object.properties.keys();
    let is_object = node
        .types
        .is_some_and(|types| types.object && !types.null && !types.array && !types.string);
    if !is_object
        || node.combined.is_some()
        || !object.pattern_properties.is_empty()
        || (object.properties.is_empty() && others_are_allowed)
        || object.properties.len() > COUNT_MAX
        || !names.clone().all(|name| is_parameter(name))
    {
        return whole;
    }
    let required: BTreeSet<&str> = object.required.iter().map(|name| &**name).collect();
    let mut parameters: Vec<Parameter> = object
        .properties
        .iter()
        .map(|(name, id)| {
            let sql_type = types.sql_type(types.resolve(*id));
            let required = required.contains(&**name);
            Parameter {
                name: name.to_string(),
                sql_type,
                required,
                default: (!required).then(|| types.default(*id, sql_type)).flatten(),
                description: types.text(*id, "description"),
            }
        })
        .collect();
    // A required property that `properties` does not list has no parameter to set it.
    if required
        .iter()
        .any(|name| !object.properties.contains_key(*name))
    {
        return whole;
    }
    parameters.sort_by_key(|parameter| !parameter.required);
    Parameters::Each(parameters)
}

fn is_parameter(name: &str) -> bool {
    // PL/pgSQL calls the first parameter `$1` itself.
    let is_position = name
        .strip_prefix('$')
        .is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()));
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && !name.contains('\0')
        && !name.starts_with(OPTION_PREFIX)
        && !is_position
}

struct Typing<'a> {
    compiled: &'a Compiled,
    written: Json<'a>,
}

impl Typing<'_> {
    /// Follows subschemas that are only a reference, or an alternative to null.
    fn resolve(&self, mut id: NodeId) -> NodeId {
        for _ in 0..REFERENCES_MAX {
            let node = self.compiled.node(id);
            let next = node.leads_to.or_else(|| self.not_null(node));
            match next {
                Some(next) => id = next,
                None => break,
            }
        }
        id
    }

    /// The only alternative to null.
    fn not_null(&self, node: &Node) -> Option<NodeId> {
        let combined = node.combined.as_ref()?;
        let [one, other] = match (&combined.any_of[..], &combined.one_of[..]) {
            ([one, other], []) | ([], [one, other]) => [*one, *other],
            _ => return None,
        };
        let is_alone = node.types.is_none()
            && combined.references.is_empty()
            && combined.all_of.is_empty()
            && combined.not.is_none()
            && combined.condition.is_none();
        let is_null = |id: NodeId| {
            let types = self.compiled.node(id).types;
            types.is_some_and(|it| it.null && single(Some(it)).is_none())
        };
        match (is_alone, is_null(one), is_null(other)) {
            (true, true, false) => Some(other),
            (true, false, true) => Some(one),
            _ => None,
        }
    }

    fn sql_type(&self, id: NodeId) -> &'static str {
        let node = self.compiled.node(id);
        if node.combined.is_some() {
            return "jsonb";
        }
        match single(node.types) {
            Some("array") => {
                let items = node
                    .array
                    .as_ref()
                    .filter(|array| array.prefix_items.is_empty());
                let items = items.and_then(|array| array.items);
                match items.map(|id| self.sql_type_of_item(self.resolve(id))) {
                    Some("text") => "text[]",
                    Some("bigint") => "bigint[]",
                    Some("boolean") => "boolean[]",
                    Some("timestamptz") => "timestamptz[]",
                    Some("date") => "date[]",
                    Some("uuid") => "uuid[]",
                    Some(_) | None => "jsonb",
                }
            }
            _ => self.sql_type_of_item(id),
        }
    }

    fn sql_type_of_item(&self, id: NodeId) -> &'static str {
        let node = self.compiled.node(id);
        if node.combined.is_some() {
            return "jsonb";
        }
        let format = self.text(id, "format");
        match (single(node.types), format.as_deref()) {
            (Some("string"), Some("date-time")) => "timestamptz",
            (Some("string"), Some("date")) => "date",
            (Some("string"), Some("uuid")) => "uuid",
            (Some("string"), _) => "text",
            // Values of these formats may exceed bigint.
            (Some("integer"), Some("uint" | "uint64" | "uint128" | "int128")) => "numeric",
            (Some("integer"), _) => "bigint",
            (Some("number"), _) => "numeric",
            (Some("boolean"), _) => "boolean",
            _ => "jsonb",
        }
    }

    fn text(&self, id: NodeId, keyword: &str) -> Option<String> {
        let at = self.compiled.rule(self.written, id, keyword)?;
        (self.written.kind(at) == Kind::String).then(|| self.written.string(at).into_owned())
    }

    /// The default of a property, if it is a constant of the type.
    fn default(&self, id: NodeId, sql_type: &str) -> Option<String> {
        let at = self.compiled.rule(self.written, id, "default")?;
        let raw = self.written.raw(at);
        let text = match (sql_type, self.written.kind(at)) {
            (_, Kind::Null) => return None,
            ("text", Kind::String) => self.written.string(at).into_owned(),
            ("bigint", Kind::Number) => raw.parse::<i64>().ok()?.to_string(),
            ("numeric", Kind::Number) => super::number(raw)?,
            ("boolean", Kind::Boolean) | ("jsonb", _) => raw.to_owned(),
            _ => return None,
        };
        let is_storable = !text.contains('\0') && !text.contains("\\u0000");
        (text.len() <= DEFAULT_BYTES_MAX && is_storable).then_some(text)
    }
}

/// The only type other than null.
fn single(types: Option<crate::node::Types>) -> Option<&'static str> {
    let mut listed = types?.names().filter(|name| *name != "null");
    match (listed.next(), listed.next()) {
        (Some(name), None) => Some(name),
        _ => None,
    }
}
