//! The types of a schema, as far as the type systems of programming languages can express them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::names::Names;
use crate::sandbox::HandlerManifest;

/// The maximum depth of nesting that is read.
const DEPTH_MAX: usize = 16;

/// The maximum number of types of one handler; further types accept anything.
const TYPES_MAX: usize = 500;

/// The maximum number of fields of one object.
const FIELDS_MAX: usize = 500;

/// The maximum number of literals of one type.
const LITERALS_MAX: usize = 200;

/// The number up to which a 64-bit floating-point number, such as JavaScript's, holds every integer exactly.
const EXACT_MAX: f64 = 9_007_199_254_740_991.0;

/// A type. Each value that matches the schema has this type; a value of this type may still violate the schema.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Type {
    Any,
    Null,
    Boolean,
    Integer,
    /// An integer that may exceed what a floating-point number holds exactly.
    Long,
    /// An integer that may exceed the maximum of signed 64-bit integers, and is not negative.
    Unsigned,
    Number,
    Text,
    /// A string, number or boolean.
    Literal(Value),
    List(Box<Type>),
    Map(Box<Type>),
    /// Only as a definition.
    Object(Vec<Field>),
    /// Only as a definition, except with null.
    Union(Vec<Type>),
    /// A definition of the handler, by its name in the generated code.
    Named(String),
}

/// A property of an object.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Field {
    pub(super) name: String,
    pub(super) of: Type,
    pub(super) required: bool,
    pub(super) description: String,
}

/// A named type.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Definition {
    pub(super) name: String,
    pub(super) of: Type,
    pub(super) description: String,
}

/// The types of one handler.
#[derive(Debug)]
pub(super) struct HandlerTypes {
    pub(super) handler: String,
    pub(super) description: String,
    /// The name of the handler in UpperCamelCase, unique in the file.
    pub(super) stem: String,
    pub(super) definitions: Vec<Definition>,
    pub(super) payload: String,
    pub(super) result: String,
    /// As the module wrote them.
    pub(super) schemas: [String; 2],
}

impl HandlerTypes {
    /// The types of a handler. `names` are those of the file so far.
    pub(super) fn from_manifest(manifest: &HandlerManifest, names: &mut Names) -> Self {
        let stem = names.take(&super::names::upper_camel(&manifest.name));
        let mut definitions = Vec::new();
        let roots = [
            ("Payload", "", &manifest.input_schema),
            ("Result", "Result", &manifest.output_schema),
        ];
        let [payload, result] = roots.map(|(what, infix, schema)| {
            // If a `Value` cannot hold one of the schema's numbers, the type accepts any value.
            let schema = serde_json::from_str(schema.written()).unwrap_or(Value::Bool(true));
            let root = names.take(&format!("{stem}{what}"));
            let mut reader = Reader {
                stem: format!("{stem}{infix}"),
                schema: &schema,
                names,
                definitions: &mut definitions,
                by_pointer: BTreeMap::from([(String::new(), root.clone())]),
                pending: vec![(String::new(), root.clone())],
                count: 0,
            };
            reader.read_all();
            root
        });
        Self {
            handler: manifest.name.clone(),
            description: manifest.description.clone(),
            stem,
            definitions,
            payload,
            result,
            schemas: [&manifest.input_schema, &manifest.output_schema]
                .map(|it| it.written().to_owned()),
        }
    }

    /// The definitions that can refer back to themselves.
    pub(super) fn recursive(&self) -> BTreeSet<&str> {
        let by_name: BTreeMap<&str, &Type> = self
            .definitions
            .iter()
            .map(|it| (&*it.name, &it.of))
            .collect();
        let reaches_itself = |name: &&str| {
            let mut seen = BTreeSet::new();
            let mut open = vec![*name];
            while let Some(at) = open.pop() {
                for next in by_name
                    .get(at)
                    .map(|of| of.references())
                    .unwrap_or_default()
                {
                    if next == *name {
                        return true;
                    }
                    if seen.insert(next) {
                        open.push(next);
                    }
                }
            }
            false
        };
        by_name.keys().copied().filter(reaches_itself).collect()
    }
}

impl Type {
    /// The names of the definitions that it refers to.
    fn references(&self) -> Vec<&str> {
        match self {
            Self::Named(name) => vec![name],
            Self::List(of) | Self::Map(of) => of.references(),
            Self::Union(all) => all.iter().flat_map(Self::references).collect(),
            Self::Object(fields) => fields
                .iter()
                .flat_map(|field| field.of.references())
                .collect(),
            _ => Vec::new(),
        }
    }

    /// The type without null, and whether null was part of it.
    pub(super) fn without_null(&self) -> (Self, bool) {
        let Self::Union(all) = self else {
            return (self.clone(), *self == Self::Null);
        };
        let others: Vec<Self> = all
            .iter()
            .filter(|it| **it != Self::Null)
            .cloned()
            .collect();
        let is_nullable = others.len() < all.len();
        (union(others), is_nullable)
    }

    /// The strings, if the type consists of string literals.
    pub(super) fn strings(&self) -> Option<Vec<&str>> {
        let all = match self {
            Self::Union(all) => all,
            one => std::slice::from_ref(one),
        };
        let strings = all.iter().map(|it| match it {
            Self::Literal(Value::String(text)) => Some(&**text),
            _ => None,
        });
        strings.collect()
    }
}

/// Each expression once: several types may be written as the same one.
pub(super) fn distinct(expressions: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut distinct = Vec::new();
    for one in expressions {
        if !distinct.contains(&one) {
            distinct.push(one);
        }
    }
    distinct
}

fn union(all: Vec<Type>) -> Type {
    let mut distinct: Vec<Type> = Vec::new();
    for one in all {
        if one == Type::Any {
            return Type::Any;
        }
        if !distinct.contains(&one) {
            distinct.push(one);
        }
    }
    if distinct.contains(&Type::Long) {
        distinct.retain(|of| *of != Type::Integer);
    }
    match distinct.len() {
        0 => Type::Any,
        1 => distinct.remove(0),
        _ => Type::Union(distinct),
    }
}

struct Reader<'a> {
    stem: String,
    schema: &'a Value,
    names: &'a mut Names,
    definitions: &'a mut Vec<Definition>,
    /// The names of the definitions, by their JSON pointers.
    by_pointer: BTreeMap<String, String>,
    pending: Vec<(String, String)>,
    count: usize,
}

impl Reader<'_> {
    fn read_all(&mut self) {
        while let Some((pointer, name)) = self.pending.pop() {
            let schema = self
                .schema
                .pointer(&pointer)
                .cloned()
                .unwrap_or(Value::Bool(true));
            let of = self.read(&schema, DEPTH_MAX, &name);
            self.definitions.push(Definition {
                name,
                of,
                description: text(&schema, "description"),
            });
        }
    }

    /// A type within another type: it gets a name if it needs one.
    fn inner(&mut self, schema: &Value, depth: usize, name: &str) -> Type {
        let of = self.read(schema, depth, name);
        let (of, is_nullable) = match of {
            Type::Null => return Type::Null,
            of => of.without_null(),
        };
        let needs_name = matches!(of, Type::Object(_) | Type::Union(_)) || of.strings().is_some();
        let of = match needs_name {
            false => of,
            true => {
                let name = self.names.take(name);
                self.definitions.push(Definition {
                    name: name.clone(),
                    of,
                    description: text(schema, "description"),
                });
                Type::Named(name)
            }
        };
        match is_nullable && of != Type::Any {
            true => Type::Union(vec![of, Type::Null]),
            false => of,
        }
    }

    fn read(&mut self, schema: &Value, depth: usize, name: &str) -> Type {
        let Value::Object(keywords) = schema else {
            return Type::Any;
        };
        self.count += 1;
        if depth == 0 || self.count > TYPES_MAX {
            return Type::Any;
        }
        if let Some(reference) = keywords.get("$ref") {
            return reference
                .as_str()
                .map_or(Type::Any, |it| self.reference(it));
        }
        if let Some(value) = keywords.get("const") {
            return literal(value);
        }
        if let Some(Value::Array(values)) = keywords.get("enum")
            && values.len() <= LITERALS_MAX
        {
            return union(values.iter().map(literal).collect());
        }
        for keyword in ["anyOf", "oneOf"] {
            if let Some(Value::Array(all)) = keywords.get(keyword) {
                return match keywords.contains_key("properties") {
                    true => self.by_types(&with_alternatives(keywords, all), depth, name),
                    false => self.alternatives(all, depth, name),
                };
            }
        }
        match keywords.get("allOf") {
            Some(Value::Array(all)) if all.len() == 1 && !keywords.contains_key("properties") => {
                return self.read(&all[0], depth - 1, name);
            }
            Some(_) => return Type::Any,
            None => {}
        }
        self.by_types(keywords, depth, name)
    }

    /// Alternatives with `const` or `enum` add their literals to one type; others get names if they need them.
    fn alternatives(&mut self, all: &[Value], depth: usize, name: &str) -> Type {
        let read = all.iter().enumerate().map(|(index, one)| {
            let name = match text(one, "title") {
                title if title.is_empty() => format!("{name}{}", index + 1),
                title => format!("{name}{}", super::names::upper_camel(&title)),
            };
            let is_text = one.get("const").is_some() || one.get("enum").is_some();
            match is_text {
                true => self.read(one, depth - 1, &name),
                false => self.inner(one, depth - 1, &name),
            }
        });
        let read: Vec<Type> = read.collect();
        let flat = read.into_iter().flat_map(|of| match of {
            Type::Union(all) => all,
            of => vec![of],
        });
        union(flat.collect())
    }

    fn by_types(&mut self, keywords: &Map<String, Value>, depth: usize, name: &str) -> Type {
        let types: Vec<&str> = match keywords.get("type") {
            Some(Value::String(of)) => vec![of],
            Some(Value::Array(all)) => all.iter().filter_map(Value::as_str).collect(),
            _ if keywords.contains_key("properties") => vec!["object"],
            _ => return Type::Any,
        };
        let only = types.iter().filter(|of| **of != "null").count() == 1;
        let all = types.into_iter().map(|of| match of {
            "null" => Type::Null,
            "boolean" => Type::Boolean,
            "integer" => integer(keywords),
            "number" => Type::Number,
            "string" => Type::Text,
            "array" => match (keywords.get("items"), keywords.get("prefixItems")) {
                (Some(items), None) => {
                    let of = self.inner(items, depth - 1, &format!("{name}Item"));
                    Type::List(Box::new(of))
                }
                _ => Type::List(Box::new(Type::Any)),
            },
            "object" if only => self.object(keywords, depth, name),
            "object" => Type::Map(Box::new(Type::Any)),
            _ => Type::Any,
        });
        union(all.collect())
    }

    fn object(&mut self, keywords: &Map<String, Value>, depth: usize, name: &str) -> Type {
        let Some(Value::Object(properties)) = keywords.get("properties") else {
            let values = keywords
                .get("additionalProperties")
                .filter(|it| it.is_object());
            let of = values.map_or(Type::Any, |values| {
                self.inner(values, depth - 1, &format!("{name}Value"))
            });
            return Type::Map(Box::new(of));
        };
        if properties.len() > FIELDS_MAX {
            return Type::Map(Box::new(Type::Any));
        }
        let required: Vec<&str> = match keywords.get("required") {
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let fields = properties.iter().map(|(field, schema)| Field {
            name: field.clone(),
            of: self.inner(
                schema,
                depth - 1,
                &format!("{name}{}", super::names::upper_camel(field)),
            ),
            required: required.contains(&&**field),
            description: text(schema, "description"),
        });
        Type::Object(fields.collect())
    }

    fn reference(&mut self, reference: &str) -> Type {
        // Other references are resolved only by the host.
        let pointer = reference.strip_prefix('#');
        let Some(pointer) = pointer.filter(|it| it.is_empty() || it.starts_with('/')) else {
            return Type::Any;
        };
        if pointer.contains('%') || self.schema.pointer(pointer).is_none() {
            return Type::Any;
        }
        if let Some(name) = self.by_pointer.get(pointer) {
            return Type::Named(name.clone());
        }
        if self.by_pointer.len() >= TYPES_MAX {
            return Type::Any;
        }
        let last = pointer.rsplit('/').next().unwrap_or_default();
        let name = format!("{}{}", self.stem, super::names::upper_camel(last));
        let name = self.names.take(&name);
        self.by_pointer.insert(pointer.to_owned(), name.clone());
        self.pending.push((pointer.to_owned(), name.clone()));
        Type::Named(name)
    }
}

/// An object with both properties and alternatives: properties that only alternatives have are optional.
fn with_alternatives(keywords: &Map<String, Value>, all: &[Value]) -> Map<String, Value> {
    let mut merged = keywords.clone();
    let own = &keywords["properties"];
    let Some(Value::Object(properties)) = merged.get_mut("properties") else {
        return merged;
    };
    let of_alternatives = all
        .iter()
        .filter_map(|one| one.get("properties")?.as_object());
    for (name, schema) in of_alternatives.flatten() {
        if own.get(name).is_none() {
            let found = properties
                .entry(name.clone())
                .or_insert_with(|| schema.clone());
            // The alternatives differ: only a type for any value fits all of them.
            if found != schema {
                *found = Value::Bool(true);
            }
        }
    }
    merged
}

/// The type of the integers that match these rules.
fn integer(keywords: &Map<String, Value>) -> Type {
    let text = |keyword: &str| keywords.get(keyword).and_then(Value::as_str);
    let may_be_large = match keywords.get("maximum") {
        Some(max) => max.is_u64() && !max.is_i64(),
        // Rust's u64 and usize. Values of these formats may exceed bigint, too (`rouse contract`).
        None => matches!(text("format"), Some("uint64" | "uint")),
    };
    let is_unsigned = keywords.get("minimum").is_some_and(Value::is_u64);
    let mut bounds = ["minimum", "maximum"]
        .into_iter()
        .map(|keyword| keywords.get(keyword));
    // An integer without a format and without bounds is hardly ever that large.
    let is_long = match text("format") {
        Some("int64" | "int" | "uint64" | "uint") => bounds.any(|it| it.is_none_or(is_inexact)),
        Some(_) | None => bounds.any(|it| it.is_some_and(is_inexact)),
    };
    match (is_unsigned && may_be_large, is_long) {
        (true, _) => Type::Unsigned,
        (false, true) => Type::Long,
        (false, false) => Type::Integer,
    }
}

/// True if a 64-bit floating-point number may not hold this integer.
pub(super) fn is_inexact(integer: &Value) -> bool {
    let integer = integer.as_f64();
    integer.is_none_or(|integer| integer.abs() > EXACT_MAX)
}

fn literal(value: &Value) -> Type {
    match value {
        Value::Null => Type::Null,
        Value::String(_) | Value::Bool(_) => Type::Literal(value.clone()),
        // The same number may be written in a different way.
        Value::Number(number) if number.is_f64() => Type::Number,
        Value::Number(_) => Type::Literal(value.clone()),
        Value::Array(_) | Value::Object(_) => Type::Any,
    }
}

fn text(schema: &Value, keyword: &str) -> String {
    schema
        .get(keyword)
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn integers_have_the_type_that_holds_all_that_match() {
        for (schema, of) in [
            (json!({"format": "uint64", "minimum": 0}), Type::Unsigned),
            (json!({"format": "uint", "minimum": 0}), Type::Unsigned),
            (json!({"minimum": 0, "maximum": u64::MAX}), Type::Unsigned),
            (json!({"minimum": -1, "maximum": u64::MAX}), Type::Long),
            (
                json!({"format": "uint64", "minimum": 0, "maximum": 9}),
                Type::Integer,
            ),
            (json!({"format": "uint32", "minimum": 0}), Type::Integer),
            (json!({"format": "int64"}), Type::Long),
            (json!({"format": "int64", "maximum": 9}), Type::Long),
            (
                json!({"format": "int64", "minimum": -9, "maximum": 9_007_199_254_740_991_u64}),
                Type::Integer,
            ),
            (json!({"maximum": 9_007_199_254_740_992_u64}), Type::Long),
            (json!({"minimum": i64::MIN}), Type::Long),
            (json!({"minimum": 0}), Type::Integer),
            (json!({}), Type::Integer),
        ] {
            assert_eq!(integer(schema.as_object().unwrap()), of, "{schema}");
        }
        let both = union(vec![Type::Integer, Type::Null, Type::Long]);
        assert_eq!(both, Type::Union(vec![Type::Null, Type::Long]));
    }
}
