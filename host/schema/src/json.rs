//! A JSON text as a list of its parts, each with its location in the text.
//!
//! Numbers keep all their digits, nesting uses no stack, and each part takes 16 bytes, whereas a `Value` can take
//! hundreds of bytes for one byte of text.

use std::borrow::Cow;

use serde_json::value::RawValue;

/// 64 MiB of parts: enough for a list of numbers in a result of the default maximum size.
pub(super) const PARTS_MAX: usize = 4 << 20;

/// A JSON text with the list of its parts.
pub(super) struct Document<'a> {
    text: Cow<'a, str>,
    /// The parts in the order of the text: a container is followed by its contents, a member's name by its value.
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
    /// Its range in the text.
    start: u32,
    end: u32,
    /// The index of the part after this one and its contents.
    next: u32,
}

/// The index of a part.
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
    NotJson(String),
    TooManyParts,
}

impl<'a> Document<'a> {
    /// Reads a JSON text.
    ///
    /// # Errors
    /// If it is not JSON, or has too many parts.
    pub(super) fn read(text: &'a [u8]) -> Result<Self, Unread> {
        // Validates the text without recursion, and without allocating.
        let raw: &RawValue =
            serde_json::from_slice(text).map_err(|error| Unread::NotJson(error.to_string()))?;
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
                // White space, commas, colons.
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
    /// The nesting depth: the number of arrays and objects that contain the deepest part, including itself.
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

    /// The number of parts in this one, including itself.
    pub(super) fn parts_of(self, at: Location) -> u64 {
        u64::from(self.part(at).next - at.0)
    }

    /// True if `part` is `outer` or inside it.
    pub(super) fn is_within(self, outer: Location, part: Location) -> bool {
        (outer.0..self.part(outer).next).contains(&part.0)
    }

    pub(super) fn root(self) -> Location {
        Location(0)
    }

    pub(super) fn kind(self, at: Location) -> Kind {
        self.part(at).kind
    }

    /// The text of this part as it was written.
    pub(super) fn raw(self, at: Location) -> &'a str {
        let part = self.part(at);
        &self.text[part.start as usize..part.end as usize]
    }

    /// The text of a string.
    pub(super) fn string(self, at: Location) -> Cow<'a, str> {
        let raw = self.raw(at);
        let inner = &raw[1..raw.len() - 1];
        match inner.contains('\\') {
            false => Cow::Borrowed(inner),
            // A lone surrogate is not a character; the text stays as it was written.
            true => serde_json::from_str(raw).map_or(Cow::Borrowed(inner), Cow::Owned),
        }
    }

    /// The items of an array, or alternately the names and values of an object.
    pub(super) fn items(self, at: Location) -> impl Iterator<Item = Location> + use<'a> {
        let end = self.part(at).next;
        let mut next = at.0 + 1;
        std::iter::from_fn(move || {
            let item = (next < end).then_some(Location(next))?;
            next = self.part(item).next;
            Some(item)
        })
    }

    /// The members of an object, sorted by name. The last of duplicate members wins, as in Postgres.
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
        // Among equal names, the first is kept. After this reversal, that is the last one in the text.
        members.reverse();
        members.dedup_by(|a, b| a.name == b.name);
        members.reverse();
        members
    }

    /// The JSON pointer to this part (RFC 6901). For a member's name, the pointer of the member, and true.
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

/// Escapes a name for a JSON pointer.
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// The position after the closing quote of the string that starts here.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    loop {
        // Payloads of several KiB are mostly long strings.
        at += memchr::memchr2(b'"', b'\\', &bytes[at..]).expect("the text is JSON");
        match bytes[at] {
            b'"' => return at + 1,
            _ => at += 2,
        }
    }
}

fn number_end(bytes: &[u8], start: usize) -> usize {
    let is_part = |byte: &&u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
    start + bytes[start..].iter().take_while(is_part).count()
}
