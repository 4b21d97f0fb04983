//! Resolves JSON pointers in a schema (RFC 6901). Thousands of pointers may lead through one large object, so each
//! container is indexed once.

use std::collections::HashMap;

use super::json::{Json, Kind, Location, Member};

/// Finds locations.
pub(super) struct Pointers<'a> {
    json: Json<'a>,
    arrays: HashMap<Location, Vec<Location>>,
    objects: HashMap<Location, Vec<Member<'a>>>,
}

impl<'a> Pointers<'a> {
    pub(super) fn new(json: Json<'a>) -> Self {
        Self {
            json,
            arrays: HashMap::new(),
            objects: HashMap::new(),
        }
    }

    /// The location that `path` leads to from here, if it exists.
    pub(super) fn location(&mut self, from: Location, path: &str) -> Option<Location> {
        if path.is_empty() {
            return Some(from);
        }
        let steps = path.strip_prefix('/')?.split('/');
        steps.into_iter().try_fold(from, |at, step| {
            self.child(at, &step.replace("~1", "/").replace("~0", "~"))
        })
    }

    fn child(&mut self, at: Location, step: &str) -> Option<Location> {
        let json = self.json;
        match json.kind(at) {
            Kind::Object => {
                let members = self.objects.entry(at);
                let members = members.or_insert_with(|| json.members(at));
                let found = members.binary_search_by(|member| (*member.name).cmp(step));
                found.ok().map(|number| members[number].at)
            }
            Kind::Array => {
                let number = match step.as_bytes() {
                    [b'0'] => 0,
                    [b'1'..=b'9', ..] => step.parse().ok()?,
                    _ => return None,
                };
                let items = self.arrays.entry(at);
                let items = items.or_insert_with(|| json.items(at).collect());
                items.get::<usize>(number).copied()
            }
            Kind::Null | Kind::Boolean | Kind::Number | Kind::String => None,
        }
    }
}
