//! Where `$ref` and `$dynamicRef` lead: to places by their pointer or their anchor, in the schema as a whole or in one within it
//! that has an `$id` of its own.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use url::Url;

use super::json::{Json, Kind, Member, Place};
use super::pointer::Pointers;

/// What relative references are relative to, where the schema does not say it.
const BASE: &str = "json-schema:///";

/// Keywords with a schema, with a list of schemas, and with schemas by name.
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

/// The names that a schema gives to parts of it.
pub(super) struct References<'a> {
    json: Json<'a>,
    pointers: Pointers<'a>,
    /// In the order of the text; the first is the whole.
    resources: Vec<Resource>,
    by_uri: HashMap<String, usize>,
    anchors: HashMap<(usize, String), Place>,
    /// Which of them are `$dynamicAnchor`s, by name.
    dynamic: HashMap<String, Vec<Place>>,
}

/// The whole, or a schema with an `$id`: what `#` means in it.
struct Resource {
    root: Place,
    /// The one around it.
    parent: usize,
    base: Url,
}

/// A mistake, and the subschema that has it.
type Mistake = (Place, String);

impl<'a> References<'a> {
    /// Looks for the names in a schema.
    ///
    /// # Errors
    /// A name that is not one, or is given twice.
    pub(super) fn new(json: Json<'a>) -> Result<Self, Mistake> {
        let mut references = Self {
            json,
            pointers: Pointers::new(json),
            resources: Vec::new(),
            by_uri: HashMap::new(),
            anchors: HashMap::new(),
            dynamic: HashMap::new(),
        };
        let mut schemas = schemas(json);
        // What is around others stands before them.
        schemas.sort_unstable_by_key(|(place, _)| *place);
        for (place, members) in &schemas {
            let mistake = |why| (*place, why);
            let id = text(json, members, "$id").map_err(mistake)?;
            references.add(*place, id).map_err(mistake)?;
            for keyword in ["$anchor", "$dynamicAnchor"] {
                if let Some(name) = text(json, members, keyword).map_err(mistake)? {
                    references.name(*place, keyword, name).map_err(mistake)?;
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

    /// Notes a resource, if this is one.
    fn add(&mut self, root: Place, id: Option<String>) -> Result<(), String> {
        let around = (!self.resources.is_empty()).then(|| self.resource_of(root));
        let base = match around {
            Some(around) => &self.resources[around].base,
            None => &Url::parse(BASE).expect("it is a URI"),
        };
        let base = match id {
            None if around.is_some() => return Ok(()),
            None => base.clone(),
            Some(id) => match base.join(&id) {
                Ok(uri) if uri.fragment().unwrap_or_default().is_empty() => without_fragment(uri),
                Ok(_) | Err(_) => return Err("\"$id\" is not a URI without a fragment".into()),
            },
        };
        match self.by_uri.entry(base.to_string()) {
            Entry::Vacant(vacant) => vacant.insert(self.resources.len()),
            Entry::Occupied(_) => return Err(format!("\"$id\" is given twice: {base}")),
        };
        self.resources.push(Resource {
            root,
            parent: around.unwrap_or_default(),
            base,
        });
        Ok(())
    }

    fn name(&mut self, place: Place, keyword: &str, name: String) -> Result<(), String> {
        if keyword == "$dynamicAnchor" {
            self.dynamic.entry(name.clone()).or_default().push(place);
        }
        let resource = self.resource_of(place);
        match self.anchors.insert((resource, name), place) {
            // A schema may have both.
            Some(other) if other != place => Err(format!("\"{keyword}\" is given twice")),
            Some(_) | None => Ok(()),
        }
    }

    /// The innermost resource that a place is in.
    fn resource_of(&self, place: Place) -> usize {
        let before = self
            .resources
            .partition_point(|resource| resource.root <= place);
        let mut resource = before.saturating_sub(1);
        while !self.json.is_within(self.resources[resource].root, place) {
            resource = self.resources[resource].parent;
        }
        resource
    }

    /// Where a reference leads that stands in the schema at this place.
    ///
    /// # Errors
    /// What is wrong with it, as the rest of a sentence.
    pub(super) fn find(&mut self, from: Place, reference: &str) -> Result<Place, &'static str> {
        const ELSEWHERE: &str =
            "which is another document: a schema has to contain all that it refers to";
        let around = self.resource_of(from);
        let (resource, fragment) = match reference.strip_prefix('#') {
            Some(fragment) => (around, fragment.to_owned()),
            None => {
                let uri = self.resources[around].base.join(reference);
                let uri = uri.map_err(|_| "which is not a URI reference")?;
                let fragment = uri.fragment().unwrap_or_default().to_owned();
                let resource = self.by_uri.get(without_fragment(uri).as_str());
                (*resource.ok_or(ELSEWHERE)?, fragment)
            }
        };
        let fragment = percent_encoding::percent_decode_str(&fragment).decode_utf8_lossy();
        let place = if fragment.is_empty() || fragment.starts_with('/') {
            self.pointers
                .place(self.resources[resource].root, &fragment)
        } else {
            let name = (resource, fragment.into_owned());
            self.anchors.get(&name).copied()
        };
        place.ok_or("which leads to nothing in the schema")
    }

    /// True where a `$dynamicRef` that [leads](Self::find) to this place can lead to others too, by the way that led to it.
    pub(super) fn is_dynamic(&self, target: Place) -> bool {
        let mut named = self.dynamic.values();
        named.any(|places| places.len() > 1 && places.contains(&target))
    }
}

/// All subschemas that are objects, wherever the standard has some, with what is in them.
fn schemas(json: Json<'_>) -> Vec<(Place, Vec<Member<'_>>)> {
    let mut schemas = Vec::new();
    let mut pending = vec![json.root()];
    while let Some(place) = pending.pop() {
        if json.kind(place) != Kind::Object {
            continue;
        }
        let members = json.members(place);
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
        schemas.push((place, members));
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
