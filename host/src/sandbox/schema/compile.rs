//! From a schema as it was written to one that can be checked against; its own mistakes are found here.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::canonical::canonical_text;
use super::excerpt;
use super::json::escaped;
use super::node::{
    ArrayRules, Combined, Compiled, Condition, Contains, Dependent, Node, NodeId, NumberRules,
    ObjectRules, StringRules, Types, Values, WrittenAt,
};
use super::number::Decimal;
use super::pattern::Pattern;

/// Reads a schema. `pattern_bytes`: what its patterns may still need.
///
/// # Errors
/// The mistake and its place.
pub(super) fn compile(written: &Value, pattern_bytes: &mut usize) -> Result<Compiled, String> {
    let mut compiler = Compiler {
        root: written,
        compiled: Compiled::default(),
        known: HashMap::new(),
        pending: Vec::new(),
        pattern_bytes,
    };
    let top = WrittenAt {
        within: None,
        step: "#".into(),
    };
    compiler.add(written, top);
    // One after the other: a chain of references costs no stack.
    while let Some((id, written)) = compiler.pending.pop() {
        let node = compiler.read(id, written).map_err(|why| {
            let at = excerpt(&compiler.compiled.pointer(id));
            format!("{at}: {why}")
        })?;
        let written_at = std::mem::take(&mut compiler.compiled.nodes[id.0 as usize].written_at);
        compiler.compiled.nodes[id.0 as usize] = Node { written_at, ..node };
    }
    match compiler.compiled.endless() {
        None => Ok(compiler.compiled),
        Some(id) => Err(format!(
            "{}: comes back to itself without an end",
            excerpt(&compiler.compiled.pointer(id))
        )),
    }
}

struct Compiler<'a, 'p> {
    root: &'a Value,
    compiled: Compiled,
    /// Subschemas by their address: references may lead to the same one.
    known: HashMap<*const Value, NodeId>,
    pending: Vec<(NodeId, &'a Value)>,
    pattern_bytes: &'p mut usize,
}

impl<'a> Compiler<'a, '_> {
    /// A place for a subschema, which is read later.
    fn add(&mut self, written: &'a Value, written_at: WrittenAt) -> NodeId {
        let id = NodeId(self.compiled.nodes.len() as u32);
        let id = *self.known.entry(std::ptr::from_ref(written)).or_insert(id);
        if id.0 as usize == self.compiled.nodes.len() {
            self.compiled.nodes.push(Node {
                written_at,
                ..Node::default()
            });
            self.pending.push((id, written));
        }
        id
    }

    fn read(&mut self, id: NodeId, written: &'a Value) -> Result<Node, String> {
        let map = match written {
            Value::Bool(anything) => {
                return Ok(Node {
                    never: !anything,
                    ..Node::default()
                });
            }
            Value::Object(map) => map,
            Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                return Err("is no JSON Schema (an object, true or false)".into());
            }
        };
        let mut reader = Reader {
            compiler: self,
            id,
            map,
        };
        // Looked into for its mistakes; what is used comes by reference.
        reader.by_name("$defs")?;
        Ok(Node {
            written_at: WrittenAt::default(),
            never: false,
            types: reader.types()?,
            values: reader.values()?,
            number: reader.number_rules()?.map(Box::new),
            string: reader.string_rules()?.map(Box::new),
            array: reader.array_rules()?.map(Box::new),
            object: reader.object_rules()?.map(Box::new),
            combined: reader.combined()?.map(Box::new),
            unevaluated_properties: reader.schema("unevaluatedProperties")?,
        })
    }
}

/// Reads one subschema.
struct Reader<'c, 'a, 'p> {
    compiler: &'c mut Compiler<'a, 'p>,
    id: NodeId,
    map: &'a Map<String, Value>,
}

impl<'a> Reader<'_, 'a, '_> {
    fn has_any(&self, keywords: &[&str]) -> bool {
        keywords
            .iter()
            .any(|keyword| self.map.contains_key(*keyword))
    }

    fn types(&self) -> Result<Option<Types>, String> {
        let Some(written) = self.map.get("type") else {
            return Ok(None);
        };
        let names = match written {
            Value::Array(names) => names.as_slice(),
            Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::String(_)
            | Value::Object(_) => std::slice::from_ref(written),
        };
        let mut types = Types::default();
        for name in names {
            let known = match name.as_str().unwrap_or_default() {
                "null" => &mut types.null,
                "boolean" => &mut types.boolean,
                "number" => &mut types.number,
                "integer" => &mut types.integer,
                "string" => &mut types.string,
                "array" => &mut types.array,
                "object" => &mut types.object,
                _ => return Err(wrong("type", written, "a type of JSON, or a list of such")),
            };
            *known = true;
        }
        Ok(Some(types))
    }

    fn values(&self) -> Result<Vec<Values>, String> {
        let mut values = Vec::new();
        if let Some(value) = self.map.get("const") {
            values.push(("const", HashSet::from([canonical_text(value)?])));
        }
        match self.map.get("enum") {
            None => {}
            Some(Value::Array(listed)) => {
                let texts = listed.iter().map(canonical_text);
                values.push(("enum", texts.collect::<Result<_, _>>()?));
            }
            Some(other) => return Err(wrong("enum", other, "a list")),
        }
        Ok(values)
    }

    fn number_rules(&self) -> Result<Option<NumberRules>, String> {
        let rules = NumberRules {
            minimum: self.number("minimum")?,
            exclusive_minimum: self.number("exclusiveMinimum")?,
            maximum: self.number("maximum")?,
            exclusive_maximum: self.number("exclusiveMaximum")?,
            multiple_of: self.number("multipleOf")?,
        };
        if rules
            .multiple_of
            .as_ref()
            .is_some_and(|of| !of.is_positive())
        {
            return Err("\"multipleOf\" has to be more than 0".into());
        }
        let keywords = [
            "minimum",
            "exclusiveMinimum",
            "maximum",
            "exclusiveMaximum",
            "multipleOf",
        ];
        Ok(self.has_any(&keywords).then_some(rules))
    }

    fn string_rules(&mut self) -> Result<Option<StringRules>, String> {
        let pattern = match self.map.get("pattern") {
            None => None,
            Some(Value::String(pattern)) => Some(self.pattern(pattern)?),
            Some(other) => return Err(wrong("pattern", other, "a regular expression")),
        };
        let rules = StringRules {
            min_length: self.count("minLength")?,
            max_length: self.count("maxLength")?,
            pattern,
        };
        Ok(self
            .has_any(&["minLength", "maxLength", "pattern"])
            .then_some(rules))
    }

    fn array_rules(&mut self) -> Result<Option<ArrayRules>, String> {
        let unique_items = match self.map.get("uniqueItems") {
            None => false,
            Some(Value::Bool(unique)) => *unique,
            Some(other) => return Err(wrong("uniqueItems", other, "true or false")),
        };
        let contains = self.schema("contains")?;
        let min = self.count("minContains")?.unwrap_or(1);
        let max = self.count("maxContains")?;
        let rules = ArrayRules {
            min_items: self.count("minItems")?,
            max_items: self.count("maxItems")?,
            unique_items,
            prefix_items: self.list("prefixItems")?,
            items: self.schema("items")?,
            contains: contains.map(|node| Contains { node, min, max }),
        };
        let keywords = ["minItems", "maxItems", "prefixItems", "items", "contains"];
        Ok((unique_items || self.has_any(&keywords)).then_some(rules))
    }

    fn object_rules(&mut self) -> Result<Option<ObjectRules>, String> {
        let mut pattern_properties = Vec::new();
        for (written, node) in self.by_name("patternProperties")? {
            pattern_properties.push((self.pattern(&written)?, node));
        }
        let required = match self.map.get("required") {
            None => Vec::new(),
            Some(names) => names_of("required", names)?,
        };
        let mut dependent_required = Dependent::new();
        match self.map.get("dependentRequired") {
            None => {}
            Some(Value::Object(map)) => {
                for (name, names) in map {
                    let names = names_of("dependentRequired", names)?;
                    dependent_required.push((name.as_str().into(), names));
                }
            }
            Some(other) => return Err(wrong("dependentRequired", other, "an object of lists")),
        }
        let rules = ObjectRules {
            min_properties: self.count("minProperties")?,
            max_properties: self.count("maxProperties")?,
            required,
            dependent_required,
            property_names: self.schema("propertyNames")?,
            properties: self.by_name("properties")?.into_iter().collect(),
            pattern_properties,
            additional_properties: self.schema("additionalProperties")?,
        };
        let keywords = [
            "minProperties",
            "maxProperties",
            "required",
            "dependentRequired",
            "propertyNames",
            "properties",
            "patternProperties",
            "additionalProperties",
        ];
        Ok(self.has_any(&keywords).then_some(rules))
    }

    fn combined(&mut self) -> Result<Option<Combined>, String> {
        let then = self.schema("then")?;
        let otherwise = self.schema("else")?;
        let condition = self.schema("if")?.map(|when| Condition {
            when,
            then,
            otherwise,
        });
        let combined = Combined {
            reference: self.reference()?,
            all_of: self.list("allOf")?,
            any_of: self.list("anyOf")?,
            one_of: self.list("oneOf")?,
            not: self.schema("not")?,
            condition,
            dependent_schemas: self.by_name("dependentSchemas")?,
        };
        let keywords = [
            "$ref",
            "allOf",
            "anyOf",
            "oneOf",
            "not",
            "if",
            "dependentSchemas",
        ];
        Ok(self.has_any(&keywords).then_some(combined))
    }

    /// What `$ref` leads to, within this schema.
    fn reference(&mut self) -> Result<Option<NodeId>, String> {
        let Some(written) = self.map.get("$ref") else {
            return Ok(None);
        };
        let wrong = |what| Err(wrong("$ref", written, what));
        let Some(path) = written.as_str().and_then(|path| path.strip_prefix('#')) else {
            return wrong("a place in the same schema: #, or #/$defs/…");
        };
        let decoded = percent_encoding::percent_decode_str(path).decode_utf8_lossy();
        let Some(target) = self.compiler.root.pointer(&decoded) else {
            return wrong("a place that there is in the schema");
        };
        let written_at = WrittenAt {
            within: None,
            step: format!("#{decoded}").into(),
        };
        Ok(Some(self.compiler.add(target, written_at)))
    }

    /// The subschema under this keyword.
    fn schema(&mut self, keyword: &str) -> Result<Option<NodeId>, String> {
        let Some(written) = self.map.get(keyword) else {
            return Ok(None);
        };
        match written {
            Value::Object(_) | Value::Bool(_) => Ok(Some(self.add(written, format!("/{keyword}")))),
            Value::Array(_) if keyword == "items" => Err(wrong(
                keyword,
                written,
                "a schema (a list of them is \"prefixItems\")",
            )),
            Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                Err(wrong(keyword, written, "a schema"))
            }
        }
    }

    /// The subschemas in a list.
    fn list(&mut self, keyword: &str) -> Result<Vec<NodeId>, String> {
        match self.map.get(keyword) {
            None => Ok(Vec::new()),
            Some(Value::Array(written)) if !written.is_empty() => Ok(written
                .iter()
                .enumerate()
                .map(|(number, written)| self.add(written, format!("/{keyword}/{number}")))
                .collect()),
            Some(other) => Err(wrong(keyword, other, "a list of schemas")),
        }
    }

    /// The subschemas in an object.
    fn by_name(&mut self, keyword: &str) -> Result<Dependent<NodeId>, String> {
        match self.map.get(keyword) {
            None => Ok(Vec::new()),
            Some(Value::Object(map)) => Ok(map
                .iter()
                .map(|(name, written)| {
                    let step = format!("/{keyword}/{}", escaped(name));
                    (name.as_str().into(), self.add(written, step))
                })
                .collect()),
            Some(other) => Err(wrong(keyword, other, "an object of schemas")),
        }
    }

    fn add(&mut self, written: &'a Value, step: String) -> NodeId {
        let written_at = WrittenAt {
            within: Some(self.id),
            step: step.into(),
        };
        self.compiler.add(written, written_at)
    }

    fn number(&self, keyword: &str) -> Result<Option<Decimal<'static>>, String> {
        match self.map.get(keyword) {
            None => Ok(None),
            Some(Value::Number(number)) => {
                Ok(Some(Decimal::read(&number.to_string()).into_owned()))
            }
            Some(other) => Err(wrong(keyword, other, "a number")),
        }
    }

    /// A number of things; 3.0 is one too.
    fn count(&self, keyword: &str) -> Result<Option<u64>, String> {
        let Some(written) = self.map.get(keyword) else {
            return Ok(None);
        };
        let whole = |number: &f64| *number >= 0.0 && number.fract() == 0.0;
        let number = match written.as_u64() {
            Some(count) => Some(count),
            None => written.as_f64().filter(whole).map(|number| number as u64),
        };
        match number {
            Some(count) => Ok(Some(count)),
            None => Err(wrong(keyword, written, "a number of things: 0, 1, 2 …")),
        }
    }

    fn pattern(&mut self, written: &str) -> Result<Pattern, String> {
        Pattern::parse(written, self.compiler.pattern_bytes)
            .map_err(|why| format!("\"{}\": {why}", excerpt(written)))
    }
}

fn names_of(keyword: &str, written: &Value) -> Result<Vec<Box<str>>, String> {
    let names = written.as_array().and_then(|names| {
        let names = names.iter().map(|name| name.as_str().map(Box::from));
        names.collect::<Option<_>>()
    });
    names.ok_or_else(|| wrong(keyword, written, "a list of names"))
}

fn wrong(keyword: &str, written: &Value, what: &str) -> String {
    format!(
        "\"{keyword}\" is {}; it has to be {what}",
        excerpt(&written.to_string())
    )
}
