//! Resolves `$ref` and `$dynamicRef` to locations, by pointer or anchor, in the whole schema or in an embedded one with
//! its own `$id`.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use url::Url;

use super::json::{Json, Kind, Location, Member};
use super::pointer::Pointers;

/// The base of relative references if the schema has no `$id`.
const BASE: &str = "json-schema:///";

/// The maximum size of the URI of an embedded schema, in bytes. Each is stored separately, so a schema whose `$id`s are
/// all relative to one long `$id` would need memory in proportion to the square of its size.
const URI_BYTES_MAX: usize = 2048;

/// Keywords whose value is a schema, an array of schemas, or schemas by name.
const SCHEMA: &[&str] = &[
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];
const LISTS: &[&str] = &["allOf", "anyOf", "oneOf", "prefixItems"];
const BY_NAME: &[&str] = &[
    "$defs",
    "definitions",
    "dependencies",
    "dependentSchemas",
    "patternProperties",
    "properties",
];

/// The names that a schema defines.
pub(super) struct References<'a> {
    json: Json<'a>,
    pointers: Pointers<'a>,
    /// The resources in the order of the text; the first is the whole schema.
    resources: Vec<Resource>,
    by_uri: HashMap<String, usize>,
    anchors: HashMap<(usize, String), Location>,
    /// The first `$dynamicAnchor` of each name.
    dynamic: HashMap<String, Location>,
    /// The `$dynamicAnchor`s that share their name with others.
    ambiguous: HashSet<Location>,
}

/// The whole schema, or an embedded one with an `$id`: the scope of `#`.
struct Resource {
    root: Location,
    /// The enclosing resource.
    parent: usize,
    base: Url,
}

/// An error, and the subschema that it is in.
type Mistake = (Location, String);

impl<'a> References<'a> {
    /// Collects the names in a schema.
    ///
    /// # Errors
    /// An invalid or duplicate name.
    pub(super) fn new(json: Json<'a>) -> Result<Self, Mistake> {
        let mut references = Self {
            json,
            pointers: Pointers::new(json),
            resources: Vec::new(),
            by_uri: HashMap::new(),
            anchors: HashMap::new(),
            dynamic: HashMap::new(),
            ambiguous: HashSet::new(),
        };
        let mut schemas = schemas(json);
        // Enclosing schemas come first.
        schemas.sort_unstable_by_key(|(location, _)| *location);
        for (location, members) in &schemas {
            let mistake = |why| (*location, why);
            let id = text(json, members, "$id").map_err(mistake)?;
            references.add(*location, id).map_err(mistake)?;
            for keyword in ["$anchor", "$dynamicAnchor"] {
                if let Some(name) = text(json, members, keyword).map_err(mistake)? {
                    references.name(*location, keyword, name).map_err(mistake)?;
                }
            }
        }
        if references.resources.is_empty() {
            references
                .add(json.root(), None)
                .map_err(|why| (json.root(), why))?;
        }
        Ok(references)
    }

    /// Adds a resource, if this is one.
    fn add(&mut self, root: Location, id: Option<String>) -> Result<(), String> {
        let enclosing = (!self.resources.is_empty()).then(|| self.resource_of(root));
        let base = match enclosing {
            Some(enclosing) => &self.resources[enclosing].base,
            None => &Url::parse(BASE).expect("it is a URI"),
        };
        let base = match id {
            None if enclosing.is_some() => return Ok(()),
            None => base.clone(),
            Some(id) => match base.join(&id) {
                Ok(uri) if uri.fragment().unwrap_or_default().is_empty() => without_fragment(uri),
                Ok(_) | Err(_) => return Err("\"$id\" is not a URI without a fragment".into()),
            },
        };
        if base.as_str().len() > URI_BYTES_MAX {
            return Err(format!(
                "\"$id\" is a URI of {} bytes; the maximum is {URI_BYTES_MAX}",
                base.as_str().len()
            ));
        }
        match self.by_uri.entry(base.to_string()) {
            Entry::Vacant(vacant) => vacant.insert(self.resources.len()),
            Entry::Occupied(_) => return Err(format!("\"$id\" is given twice: {base}")),
        };
        self.resources.push(Resource {
            root,
            parent: enclosing.unwrap_or_default(),
            base,
        });
        Ok(())
    }

    fn name(&mut self, location: Location, keyword: &str, name: String) -> Result<(), String> {
        if keyword == "$dynamicAnchor" {
            let first = *self.dynamic.entry(name.clone()).or_insert(location);
            if first != location {
                self.ambiguous.extend([first, location]);
            }
        }
        let resource = self.resource_of(location);
        match self.anchors.insert((resource, name), location) {
            // A schema may have both anchors.
            Some(other) if other != location => Err(format!("\"{keyword}\" is given twice")),
            Some(_) | None => Ok(()),
        }
    }

    /// The innermost resource that contains a location.
    fn resource_of(&self, location: Location) -> usize {
        let before = self
            .resources
            .partition_point(|resource| resource.root <= location);
        let mut resource = before.saturating_sub(1);
        while !self.json.is_within(self.resources[resource].root, location) {
            resource = self.resources[resource].parent;
        }
        resource
    }

    /// Resolves a reference in the schema at this location.
    ///
    /// # Errors
    /// The problem, as the rest of a sentence.
    pub(super) fn find(
        &mut self,
        from: Location,
        reference: &str,
    ) -> Result<Location, &'static str> {
        const ELSEWHERE: &str =
            "which is another document: a schema has to contain everything that it refers to";
        let enclosing = self.resource_of(from);
        let (resource, fragment) = match reference.strip_prefix('#') {
            Some(fragment) => (enclosing, fragment.to_owned()),
            None => {
                let uri = self.resources[enclosing].base.join(reference);
                let uri = uri.map_err(|_| "which is not a URI reference")?;
                let fragment = uri.fragment().unwrap_or_default().to_owned();
                let resource = self.by_uri.get(without_fragment(uri).as_str());
                (*resource.ok_or(ELSEWHERE)?, fragment)
            }
        };
        let fragment = percent_encoding::percent_decode_str(&fragment).decode_utf8_lossy();
        let location = if fragment.is_empty() || fragment.starts_with('/') {
            self.pointers
                .location(self.resources[resource].root, &fragment)
        } else {
            let name = (resource, fragment.into_owned());
            self.anchors.get(&name).copied()
        };
        location.ok_or("which does not exist in the schema")
    }

    /// True if a `$dynamicRef` that [resolves](Self::find) to this location could resolve to others too, depending on
    /// the path that led to it.
    pub(super) fn is_dynamic(&self, target: Location) -> bool {
        self.ambiguous.contains(&target)
    }
}

/// All subschemas that are objects, at all positions that the standard defines, with their members.
fn schemas(json: Json<'_>) -> Vec<(Location, Vec<Member<'_>>)> {
    let mut schemas = Vec::new();
    let mut pending = vec![json.root()];
    while let Some(location) = pending.pop() {
        if json.kind(location) != Kind::Object {
            continue;
        }
        let members = json.members(location);
        for member in &members {
            let keyword = &&*member.name;
            match json.kind(member.at) {
                Kind::Object if BY_NAME.contains(keyword) => {
                    let named = json.members(member.at).into_iter();
                    pending.extend(named.map(|named| named.at));
                }
                Kind::Object if SCHEMA.contains(keyword) => pending.push(member.at),
                Kind::Array if LISTS.contains(keyword) => pending.extend(json.items(member.at)),
                _ => {}
            }
        }
        schemas.push((location, members));
    }
    schemas
}

fn text(json: Json<'_>, members: &[Member<'_>], keyword: &str) -> Result<Option<String>, String> {
    let found = members.binary_search_by(|member| (*member.name).cmp(keyword));
    let Ok(number) = found else {
        return Ok(None);
    };
    let at = members[number].at;
    match json.kind(at) {
        Kind::String => Ok(Some(json.string(at).into_owned())),
        Kind::Null | Kind::Boolean | Kind::Number | Kind::Array | Kind::Object => {
            Err(format!("\"{keyword}\" is not a string"))
        }
    }
}

fn without_fragment(mut uri: Url) -> Url {
    uri.set_fragment(None);
    uri
}
