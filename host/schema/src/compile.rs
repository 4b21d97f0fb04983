//! Compiles a schema from its JSON text, and reports its errors.

use std::collections::{HashMap, HashSet};

use super::Excerpt;
use super::canonical::canonical_text;
use super::json::{Json, Kind, Location, Member};
use super::node::{
    ArrayRules, Combined, Compiled, Condition, Contains, Dependent, Node, NodeId, NumberRules,
    ObjectRules, StringRules, Types, Values,
};
use super::number::Decimal;
use super::pattern::Pattern;
use super::references::References;

/// Compiles a schema. `pattern_bytes` is the remaining budget for its patterns; `excerpt` quotes it in messages.
///
/// # Errors
/// The problem and its location.
pub(super) fn compile(
    written: Json<'_>,
    pattern_bytes: &mut usize,
    excerpt: Excerpt,
) -> Result<Compiled, String> {
    let mistake = |location, why| {
        let at = excerpt.shorten(&written.pointer(location).0);
        format!("#{at}: {why}")
    };
    let references = References::new(written).map_err(|(location, why)| mistake(location, why))?;
    let mut compiler = Compiler {
        written,
        references,
        compiled: Compiled::default(),
        known: HashMap::new(),
        pending: Vec::new(),
        pattern_bytes,
        excerpt,
    };
    compiler.add(written.root());
    // Iteratively: a chain of references uses no stack.
    while let Some((id, location)) = compiler.pending.pop() {
        let node = compiler
            .read(location)
            .map_err(|why| mistake(location, why))?;
        compiler.compiled.nodes[id.0 as usize] = node;
    }
    let mut compiled = compiler.compiled;
    match compiled.relate() {
        Ok(()) => Ok(compiled),
        Err(id) => {
            let why = "refers to itself endlessly".into();
            Err(mistake(compiled.node(id).location, why))
        }
    }
}

struct Compiler<'a, 'p> {
    written: Json<'a>,
    references: References<'a>,
    compiled: Compiled,
    /// Several references may lead to the same location.
    known: HashMap<Location, NodeId>,
    pending: Vec<(NodeId, Location)>,
    pattern_bytes: &'p mut usize,
    excerpt: Excerpt,
}

impl<'a> Compiler<'a, '_> {
    /// A node for a subschema, which is read later.
    fn add(&mut self, location: Location) -> NodeId {
        let id = NodeId(self.compiled.nodes.len() as u32);
        let id = *self.known.entry(location).or_insert(id);
        if id.0 as usize == self.compiled.nodes.len() {
            self.compiled.nodes.push(Node {
                location,
                ..Node::default()
            });
            self.pending.push((id, location));
        }
        id
    }

    fn read(&mut self, location: Location) -> Result<Node, String> {
        let written = self.written;
        match written.kind(location) {
            Kind::Object => {}
            Kind::Boolean => {
                return Ok(Node {
                    location,
                    never: written.raw(location) == "false",
                    ..Node::default()
                });
            }
            Kind::Null | Kind::Number | Kind::String | Kind::Array => {
                return Err("expected a JSON Schema (an object, true or false)".into());
            }
        }
        let mut reader = Reader {
            written,
            location,
            members: written.members(location),
            compiler: self,
        };
        reader.dialect()?;
        // Checked for errors; the definitions that are used are reached by reference.
        reader.by_name("$defs")?;
        Ok(Node {
            location,
            types: reader.types()?,
            values: reader.values()?,
            number: reader.number_rules()?.map(Box::new),
            string: reader.string_rules()?.map(Box::new),
            array: reader.array_rules()?.map(Box::new),
            object: reader.object_rules()?.map(Box::new),
            combined: reader.combined()?.map(Box::new),
            unevaluated_items: reader.schema("unevaluatedItems")?,
            unevaluated_properties: reader.schema("unevaluatedProperties")?,
            ..Node::default()
        })
    }
}

/// Reads one subschema.
struct Reader<'c, 'a, 'p> {
    compiler: &'c mut Compiler<'a, 'p>,
    written: Json<'a>,
    location: Location,
    /// Sorted by name.
    members: Vec<Member<'a>>,
}

impl<'a> Reader<'_, 'a, '_> {
    fn get(&self, keyword: &str) -> Option<Location> {
        let found = self
            .members
            .binary_search_by(|member| (*member.name).cmp(keyword));
        found.ok().map(|number| self.members[number].at)
    }

    fn has_any(&self, keywords: &[&str]) -> bool {
        keywords.iter().any(|keyword| self.get(keyword).is_some())
    }

    /// Rejects dialects that would change the meaning of other keywords.
    fn dialect(&self) -> Result<(), String> {
        if let Some(at) = self.get("$schema") {
            let uri = self.text(at).unwrap_or_default();
            let official = ["https://json-schema.org/", "http://json-schema.org/"];
            if !official.iter().any(|official| uri.starts_with(official)) {
                let expected =
                    "a dialect of https://json-schema.org/: others may turn keywords off";
                return Err(self.invalid_value("$schema", at, expected));
            }
        }
        match self.get("$recursiveRef") {
            Some(_) => {
                Err("\"$recursiveRef\" is not part of 2020-12, expected \"$dynamicRef\"".into())
            }
            None => Ok(()),
        }
    }

    fn types(&self) -> Result<Option<Types>, String> {
        let Some(at) = self.get("type") else {
            return Ok(None);
        };
        let names = match self.written.kind(at) {
            Kind::Array => self.written.items(at).collect(),
            Kind::Null | Kind::Boolean | Kind::Number | Kind::String | Kind::Object => vec![at],
        };
        let mut types = Types::default();
        for name in names {
            let known = match &*self.text(name).unwrap_or_default() {
                "null" => &mut types.null,
                "boolean" => &mut types.boolean,
                "number" => &mut types.number,
                "integer" => &mut types.integer,
                "string" => &mut types.string,
                "array" => &mut types.array,
                "object" => &mut types.object,
                _ => {
                    return Err(self.invalid_value("type", at, "a JSON type, or an array of them"));
                }
            };
            *known = true;
        }
        Ok(Some(types))
    }

    fn values(&self) -> Result<Vec<Values>, String> {
        let mut values = Vec::new();
        if let Some(at) = self.get("const") {
            values.push(("const", HashSet::from([canonical_text(self.written, at)?])));
        }
        if let Some(at) = self.get("enum") {
            let listed = self.listed("enum", at, "an array")?.into_iter();
            let texts = listed.map(|at| canonical_text(self.written, at));
            values.push(("enum", texts.collect::<Result<_, _>>()?));
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
        if let Some(at) = self.get("multipleOf")
            && !rules.multiple_of.as_ref().is_some_and(Decimal::is_unit)
        {
            let expected = "a number above 0 with at most 19 digits";
            return Err(self.invalid_value("multipleOf", at, expected));
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
        let pattern = match self.get("pattern") {
            None => None,
            Some(at) => match self.text(at) {
                Some(pattern) => Some(self.pattern(&pattern)?),
                None => return Err(self.invalid_value("pattern", at, "a regular expression")),
            },
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
        let unique_items = match self.get("uniqueItems").map(|at| (at, self.written.raw(at))) {
            None => false,
            Some((_, "true")) => true,
            Some((_, "false")) => false,
            Some((at, _)) => return Err(self.invalid_value("uniqueItems", at, "true or false")),
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
        let required = match self.get("required") {
            None => Vec::new(),
            Some(at) => self.names("required", at)?,
        };
        let mut dependent_required = Dependent::new();
        if let Some(at) = self.get("dependentRequired") {
            for member in self.members_of("dependentRequired", at, "an object of lists")? {
                let names = self.names("dependentRequired", member.at)?;
                dependent_required.push((member.name.into(), names));
            }
        }
        for member in self.dependencies()? {
            if self.written.kind(member.at) == Kind::Array {
                let names = self.names("dependencies", member.at)?;
                dependent_required.push((member.name.into(), names));
            }
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
            "dependencies",
            "propertyNames",
            "properties",
            "patternProperties",
            "additionalProperties",
        ];
        Ok(self.has_any(&keywords).then_some(rules))
    }

    /// The keyword of earlier drafts for both `dependentRequired` and `dependentSchemas`.
    fn dependencies(&self) -> Result<Vec<Member<'a>>, String> {
        match self.get("dependencies") {
            Some(at) => self.members_of("dependencies", at, "an object of schemas and lists"),
            None => Ok(Vec::new()),
        }
    }

    fn combined(&mut self) -> Result<Option<Combined>, String> {
        let then = self.schema("then")?;
        let otherwise = self.schema("else")?;
        let condition = self.schema("if")?.map(|when| Condition {
            when,
            then,
            otherwise,
        });
        let mut dependent_schemas = self.by_name("dependentSchemas")?;
        for member in self.dependencies()? {
            if self.written.kind(member.at) != Kind::Array {
                let node = self.compiler.add(member.at);
                dependent_schemas.push((member.name.into(), node));
            }
        }
        let combined = Combined {
            references: self.references()?,
            all_of: self.list("allOf")?,
            any_of: self.list("anyOf")?,
            one_of: self.list("oneOf")?,
            not: self.schema("not")?,
            condition,
            dependent_schemas,
        };
        let keywords = [
            "$ref",
            "$dynamicRef",
            "allOf",
            "anyOf",
            "oneOf",
            "not",
            "if",
            "dependentSchemas",
            "dependencies",
        ];
        Ok(self.has_any(&keywords).then_some(combined))
    }

    /// The targets of `$ref` and `$dynamicRef`, within this schema.
    fn references(&mut self) -> Result<Vec<NodeId>, String> {
        let mut nodes = Vec::new();
        for keyword in ["$ref", "$dynamicRef"] {
            let Some(at) = self.get(keyword) else {
                continue;
            };
            let Some(reference) = self.text(at) else {
                return Err(self.invalid_value(keyword, at, "a URI reference"));
            };
            let references = &mut self.compiler.references;
            let mut target = references.find(self.location, &reference);
            if keyword == "$dynamicRef"
                && target
                    .as_ref()
                    .is_ok_and(|target| references.is_dynamic(*target))
            {
                target = Err(
                    "which is ambiguous: more than one \"$dynamicAnchor\" has this name, and references are resolved \
                     when the module loads",
                );
            }
            let target = target.map_err(|why| {
                let reference = self.compiler.excerpt.shorten(&reference);
                format!("\"{keyword}\" is \"{reference}\", {why}")
            })?;
            nodes.push(self.compiler.add(target));
        }
        Ok(nodes)
    }

    /// The subschema under this keyword.
    fn schema(&mut self, keyword: &str) -> Result<Option<NodeId>, String> {
        let Some(at) = self.get(keyword) else {
            return Ok(None);
        };
        match self.written.kind(at) {
            Kind::Object | Kind::Boolean => Ok(Some(self.compiler.add(at))),
            Kind::Array if keyword == "items" => {
                let expected = "a schema (an array of them is \"prefixItems\")";
                Err(self.invalid_value(keyword, at, expected))
            }
            Kind::Null | Kind::Number | Kind::String | Kind::Array => {
                Err(self.invalid_value(keyword, at, "a schema"))
            }
        }
    }

    /// The subschemas in a list.
    fn list(&mut self, keyword: &str) -> Result<Vec<NodeId>, String> {
        let Some(at) = self.get(keyword) else {
            return Ok(Vec::new());
        };
        let listed = self.listed(keyword, at, "an array of schemas")?;
        if listed.is_empty() {
            return Err(self.invalid_value(keyword, at, "an array of schemas"));
        }
        Ok(listed.into_iter().map(|at| self.compiler.add(at)).collect())
    }

    /// The subschemas in an object.
    fn by_name(&mut self, keyword: &str) -> Result<Dependent<NodeId>, String> {
        let Some(at) = self.get(keyword) else {
            return Ok(Vec::new());
        };
        let members = self.members_of(keyword, at, "an object of schemas")?;
        let nodes = members.into_iter().map(|member| {
            let node = self.compiler.add(member.at);
            (member.name.into(), node)
        });
        Ok(nodes.collect())
    }

    fn number(&self, keyword: &str) -> Result<Option<Decimal<'static>>, String> {
        match self.get(keyword) {
            None => Ok(None),
            Some(at) if self.written.kind(at) == Kind::Number => {
                Ok(Some(Decimal::read(self.written.raw(at)).into_owned()))
            }
            Some(at) => Err(self.invalid_value(keyword, at, "a number")),
        }
    }

    /// A count; 3.0 is valid too.
    fn count(&self, keyword: &str) -> Result<Option<u64>, String> {
        let Some(at) = self.get(keyword) else {
            return Ok(None);
        };
        let number = match self.written.kind(at) {
            Kind::Number => Decimal::read(self.written.raw(at)).count(),
            Kind::Null | Kind::Boolean | Kind::String | Kind::Array | Kind::Object => None,
        };
        match number {
            Some(count) => Ok(Some(count)),
            None => Err(self.invalid_value(keyword, at, "a count: 0, 1, 2 …")),
        }
    }

    fn pattern(&mut self, written: &str) -> Result<Pattern, String> {
        Pattern::parse(written, self.compiler.pattern_bytes)
            .map_err(|why| format!("\"{}\": {why}", self.compiler.excerpt.shorten(written)))
    }

    fn names(&self, keyword: &str, at: Location) -> Result<Vec<Box<str>>, String> {
        let names = self.listed(keyword, at, "an array of names")?.into_iter();
        let names = names.map(|name| self.text(name).map(Box::from));
        let names: Option<_> = names.collect();
        names.ok_or_else(|| self.invalid_value(keyword, at, "an array of names"))
    }

    /// The text of a string.
    fn text(&self, at: Location) -> Option<std::borrow::Cow<'a, str>> {
        (self.written.kind(at) == Kind::String).then(|| self.written.string(at))
    }

    fn listed(&self, keyword: &str, at: Location, expected: &str) -> Result<Vec<Location>, String> {
        match self.written.kind(at) {
            Kind::Array => Ok(self.written.items(at).collect()),
            Kind::Null | Kind::Boolean | Kind::Number | Kind::String | Kind::Object => {
                Err(self.invalid_value(keyword, at, expected))
            }
        }
    }

    fn members_of(
        &self,
        keyword: &str,
        at: Location,
        expected: &str,
    ) -> Result<Vec<Member<'a>>, String> {
        match self.written.kind(at) {
            Kind::Object => Ok(self.written.members(at)),
            Kind::Null | Kind::Boolean | Kind::Number | Kind::String | Kind::Array => {
                Err(self.invalid_value(keyword, at, expected))
            }
        }
    }

    fn invalid_value(&self, keyword: &str, at: Location, expected: &str) -> String {
        format!(
            "\"{keyword}\" is {}, expected {expected}",
            self.compiler.excerpt.shorten(self.written.raw(at))
        )
    }
}
