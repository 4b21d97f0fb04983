//! A JSON text as the list of its parts, each with its location in the text.
//!
//! Numbers keep all their digits, nesting needs no stack, and each part has 16 bytes, where a `Value` can have hundreds for one
//! byte of text.

use std::borrow::Cow;

use serde_json::value::RawValue;

/// 64 MiB of parts: a list with as many numbers as a result of the usual size can have.
pub(super) const PARTS_MAX: usize = 4 << 20;

/// A JSON text with the list of its parts.
pub(super) struct Document<'a> {
    text: Cow<'a, str>,
    /// In the order of the text: a container is followed by what is in it, a member's name by its value.
    parts: Vec<Part>,
}

/// A view of a document.
#[derive(Clone, Copy)]
pub(super) struct Json<'a> {
    text: &'a str,
    parts: &'a [Part],
}

struct Part {
    kind: Kind,
    /// Where it is in the text.
    start: u32,
    end: u32,
    /// The part behind it and all that is in it.
    next: u32,
}

/// Which part of a text.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Location(u32);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Null,
    Boolean,
    Number,
    String,
    Array,
    Object,
}

/// A member of an object.
pub(super) struct Member<'a> {
    pub(super) name: Cow<'a, str>,
    pub(super) name_at: Location,
    pub(super) at: Location,
}

#[derive(Debug)]
pub(super) enum Unread {
    NoJson(String),
    TooManyParts,
}

impl<'a> Document<'a> {
    /// Reads a JSON text.
    ///
    /// # Errors
    /// Where it is not JSON, or has too many parts.
    pub(super) fn read(text: &'a [u8]) -> Result<Self, Unread> {
        // This goes through the text without a stack, and without keeping anything.
        let raw: &RawValue =
            serde_json::from_slice(text).map_err(|error| Unread::NoJson(error.to_string()))?;
        let text = raw.get();
        if u32::try_from(text.len()).is_err() {
            return Err(Unread::TooManyParts);
        }
        let bytes = text.as_bytes();
        let mut parts: Vec<Part> = Vec::new();
        let mut open: Vec<usize> = Vec::new();
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            let (kind, end) = match byte {
                b'{' => (Kind::Object, at + 1),
                b'[' => (Kind::Array, at + 1),
                b'"' => (Kind::String, string_end(bytes, at)),
                b'n' => (Kind::Null, at + 4),
                b't' => (Kind::Boolean, at + 4),
                b'f' => (Kind::Boolean, at + 5),
                b'-' | b'0'..=b'9' => (Kind::Number, number_end(bytes, at)),
                b'}' | b']' => {
                    let next = parts.len() as u32;
                    let opened = open.pop().expect("the text is JSON");
                    parts[opened].end = at as u32 + 1;
                    parts[opened].next = next;
                    at += 1;
                    continue;
                }
                // Blanks, commas, colons.
                _ => {
                    at += 1;
                    continue;
                }
            };
            if parts.len() == PARTS_MAX {
                return Err(Unread::TooManyParts);
            }
            if matches!(kind, Kind::Array | Kind::Object) {
                open.push(parts.len());
            }
            parts.push(Part {
                kind,
                start: at as u32,
                end: end as u32,
                next: parts.len() as u32 + 1,
            });
            at = end;
        }
        Ok(Self {
            text: text.into(),
            parts,
        })
    }

    pub(super) fn into_owned(self) -> Document<'static> {
        Document {
            text: self.text.into_owned().into(),
            parts: self.parts,
        }
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn json(&self) -> Json<'_> {
        Json {
            text: &self.text,
            parts: &self.parts,
        }
    }
}

impl<'a> Json<'a> {
    /// How many arrays and objects the deepest part is in, itself included.
    pub(super) fn levels(self) -> usize {
        let mut open: Vec<u32> = Vec::new();
        let mut levels = 0;
        for (number, part) in self.parts.iter().enumerate() {
            while open.pop_if(|end| *end as usize <= number).is_some() {}
            if matches!(part.kind, Kind::Array | Kind::Object) {
                open.push(part.next);
                levels = levels.max(open.len());
            }
        }
        levels
    }

    /// How many parts it has with all that is in it.
    pub(super) fn parts_of(self, at: Location) -> u64 {
        u64::from(self.part(at).next - at.0)
    }

    /// True where a part is this one, or in it.
    pub(super) fn is_within(self, outer: Location, part: Location) -> bool {
        (outer.0..self.part(outer).next).contains(&part.0)
    }

    pub(super) fn root(self) -> Location {
        Location(0)
    }

    pub(super) fn kind(self, at: Location) -> Kind {
        self.part(at).kind
    }

    /// The text of this part, as it was written.
    pub(super) fn raw(self, at: Location) -> &'a str {
        let part = self.part(at);
        &self.text[part.start as usize..part.end as usize]
    }

    /// What a string says.
    pub(super) fn string(self, at: Location) -> Cow<'a, str> {
        let raw = self.raw(at);
        let inner = &raw[1..raw.len() - 1];
        match inner.contains('\\') {
            false => Cow::Borrowed(inner),
            // Half a character is none, so that it stays as it was written.
            true => serde_json::from_str(raw).map_or(Cow::Borrowed(inner), Cow::Owned),
        }
    }

    /// What is in an array, or names and values by turns of an object.
    pub(super) fn items(self, at: Location) -> impl Iterator<Item = Location> + use<'a> {
        let end = self.part(at).next;
        let mut next = at.0 + 1;
        std::iter::from_fn(move || {
            let item = (next < end).then_some(Location(next))?;
            next = self.part(item).next;
            Some(item)
        })
    }

    /// The members of an object by name. Of those that are there twice the last one counts, as for Postgres.
    pub(super) fn members(self, at: Location) -> Vec<Member<'a>> {
        let mut members: Vec<Member<'a>> = self
            .items(at)
            .step_by(2)
            .map(|name_at| Member {
                name: self.string(name_at),
                name_at,
                at: Location(name_at.0 + 1),
            })
            .collect();
        members.sort_by(|a, b| a.name.cmp(&b.name));
        // Of equal names the first stays, which is the last in the text once this is turned around.
        members.reverse();
        members.dedup_by(|a, b| a.name == b.name);
        members.reverse();
        members
    }

    /// The way to this part: a JSON pointer (RFC 6901). Of a member's name it is that of the member, with true.
    pub(super) fn pointer(self, to: Location) -> (String, bool) {
        let mut pointer = String::new();
        let mut at = self.root();
        while at != to {
            let object = self.kind(at) == Kind::Object;
            let mut children = self.items(at).enumerate();
            let (number, child) = children
                .find(|(_, child)| self.is_within(*child, to))
                .expect("every part is within the root");
            match (object, number % 2 == 0) {
                (false, _) => pointer += &format!("/{number}"),
                (true, true) => {
                    pointer += &format!("/{}", escaped(&self.string(child)));
                    return (pointer, true);
                }
                (true, false) => {
                    let name = self.string(Location(child.0 - 1));
                    pointer += &format!("/{}", escaped(&name));
                }
            }
            at = child;
        }
        (pointer, false)
    }

    fn part(self, at: Location) -> &'a Part {
        &self.parts[at.0 as usize]
    }
}

/// A name as it stands in a JSON pointer.
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// Behind the closing quote of the string that begins here.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    loop {
        match bytes[at] {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

fn number_end(bytes: &[u8], start: usize) -> usize {
    let is_part = |byte: &&u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
    start + bytes[start..].iter().take_while(is_part).count()
}
