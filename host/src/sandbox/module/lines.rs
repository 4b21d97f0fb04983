//! Where in its source a guest's code stands.
//!
//! A module brings that along as DWARF: megabytes in a form that is made for debuggers, in which a stranger can
//! write things that take hours to read. So it is read once, by the compiler's process with its limits, and what the host gets is a
//! table in which a place is found by halving.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::hash::Hash;
use std::panic::catch_unwind;

use addr2line::{Context, Frame};
use gimli::{Dwarf, EndianSlice, LittleEndian};
use serde::{Deserialize, Serialize};
use wasmparser::{KnownCustom, Name, Parser, Payload};

/// Names longer than this are cut: a line of a listing has no room for them.
const NAME_BYTES_MAX: usize = 512;

/// Rows of one module, and calls: its code has a few million bytes, and a row is for several of them, a call for several rows.
/// With names for all calls that is 100 MB in the host; where there are more, the rest is unknown.
const ROWS_MAX: usize = 4 << 20;
const CALLS_MAX: usize = 1 << 20;

/// Of all names together.
const NAMES_BYTES_MAX: usize = 32 << 20;

/// Calls that the compiler has put into one another; beyond that the outer ones are left out.
const INLINED_MAX: usize = 64;

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// The lines of a module's source, by offset in its file.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::sandbox) struct Lines {
    /// Offset where something starts, and the call that it belongs to; none where nothing is known. Ascending.
    places: Vec<(u32, Option<u32>)>,
    calls: Vec<Call>,
    names: Vec<String>,
}

/// A function's place in the source; `within`: the call that the compiler has put it into. Numbers are indices.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Call {
    function: Option<u32>,
    file: Option<u32>,
    line: Option<u32>,
    column: Option<u32>,
    within: Option<u32>,
}

/// A function that stands at some place.
#[derive(Debug, PartialEq)]
pub(in crate::sandbox) struct SourceLine<'a> {
    /// Its name, demangled.
    pub(in crate::sandbox) function: Option<&'a str>,
    pub(in crate::sandbox) file: Option<&'a str>,
    pub(in crate::sandbox) line: Option<u32>,
    pub(in crate::sandbox) column: Option<u32>,
}

impl Lines {
    /// What a component says of its source. What it does not say, or says in a way that nobody understands, is
    /// missing. Takes as long as the component's author likes: call it where that has a limit.
    pub(in crate::sandbox) fn read(component: &[u8]) -> Self {
        // A fault in what reads them is no reason to refuse a module.
        catch_unwind(|| Self::read_all(component)).unwrap_or_default()
    }

    fn read_all(component: &[u8]) -> Self {
        let mut rows = Vec::new();
        let mut writing = Writing::default();
        for module in modules(component) {
            // Half of it is better than nothing.
            let _ = module.rows(&mut writing, &mut rows);
        }
        let mut lines = writing.lines;
        lines.places = places(rows);
        lines
    }

    /// What stands at this offset of the file, innermost first; nothing where that is not known.
    pub(in crate::sandbox) fn at(&self, offset: usize) -> impl Iterator<Item = SourceLine<'_>> {
        let after = self
            .places
            .partition_point(|(start, _)| *start as usize <= offset);
        let found = after.checked_sub(1).and_then(|at| self.places[at].1);
        let call = |index: u32| self.calls.get(index as usize);
        let mut next = found.and_then(call);
        std::iter::from_fn(move || {
            let this = next?;
            // A call stands behind the one that it is within.
            next = this.within.and_then(call);
            Some(SourceLine {
                function: this.function.and_then(|name| self.name(name)),
                file: this.file.and_then(|name| self.name(name)),
                line: this.line,
                column: this.column,
            })
        })
        .take(INLINED_MAX)
    }

    fn name(&self, index: u32) -> Option<&str> {
        self.names.get(index as usize).map(String::as_str)
    }
}

/// The length of the longest name that a function of this component has, bytes; none where none has one.
pub(in crate::sandbox) fn longest_name(component: &[u8]) -> Option<usize> {
    let names = |payload| match payload {
        Ok(Payload::CustomSection(section)) => match section.as_known() {
            KnownCustom::Name(names) => Some(names),
            _ => None,
        },
        _ => None,
    };
    Parser::new(0)
        .parse_all(component)
        .filter_map(names)
        .flatten()
        .filter_map(|names| match names {
            Ok(Name::Function(functions)) => Some(functions),
            _ => None,
        })
        .flatten()
        .filter_map(|naming| Some(naming.ok()?.name.len()))
        .max()
}

/// A core module within a component.
#[derive(Default)]
struct Module<'a> {
    /// Where its code starts in the file, and how long it is.
    code: u32,
    code_bytes: u32,
    /// `.debug_line` and so on.
    sections: HashMap<&'a str, &'a [u8]>,
}

/// The core modules that say something of their source.
fn modules(component: &[u8]) -> Vec<Module<'_>> {
    let mut done = Vec::new();
    // A module stands within a component, which stands within another.
    let mut open = Vec::new();
    for payload in Parser::new(0).parse_all(component) {
        match payload {
            Ok(Payload::Version { .. }) => open.push(Module::default()),
            Ok(Payload::End(_)) => done.extend(open.pop()),
            Ok(Payload::CodeSectionStart { range, .. }) => {
                if let Some(module) = open.last_mut() {
                    module.code = u32::try_from(range.start).unwrap_or(u32::MAX);
                    module.code_bytes = u32::try_from(range.len()).unwrap_or(u32::MAX);
                }
            }
            Ok(Payload::CustomSection(section)) if section.name().starts_with(".debug_") => {
                if let Some(module) = open.last_mut() {
                    module.sections.insert(section.name(), section.data());
                }
            }
            Ok(_) => {}
            // The compiler says what is wrong with it.
            Err(_) => return Vec::new(),
        }
    }
    done.retain(|module| !module.sections.is_empty());
    done
}

/// From one offset to before another, and what stands there.
type Row = (u32, u32, Option<u32>);

impl<'a> Module<'a> {
    fn rows(&self, writing: &mut Writing<'a>, rows: &mut Vec<Row>) -> Result<(), gimli::Error> {
        let section = |id: gimli::SectionId| -> Result<_, gimli::Error> {
            let bytes = self.sections.get(id.name()).copied().unwrap_or_default();
            Ok(EndianSlice::new(bytes, LittleEndian))
        };
        let source = Context::from_dwarf(Dwarf::load(section)?)?;
        for (start, bytes, _) in source.find_location_range(0, u64::from(self.code_bytes))? {
            if rows.len() == ROWS_MAX || writing.is_full() {
                break;
            }
            let mut frames = source.find_frames(start).skip_all_loads()?;
            let mut stack = Vec::new();
            while let Some(frame) = frames.next()? {
                stack.push(frame);
            }
            let stack = &stack[..stack.len().min(INLINED_MAX)];
            let mut call = None;
            for frame in stack.iter().rev() {
                call = Some(writing.call(frame, call));
            }
            let end = start.saturating_add(bytes);
            let offset =
                |at: u64| u32::try_from(at).map_or(u32::MAX, |at| at.saturating_add(self.code));
            rows.push((offset(start), offset(end), call));
        }
        Ok(())
    }
}

/// Rows as places: none overlaps another, and neighbours with the same call are one.
fn places(mut rows: Vec<Row>) -> Vec<(u32, Option<u32>)> {
    rows.sort_by_key(|(start, ..)| *start);
    let mut places: Vec<(u32, Option<u32>)> = Vec::new();
    let mut put = |at: u32, call: Option<u32>| {
        if places.last().is_some_and(|(last, _)| *last == at) {
            places.pop();
        }
        if places.last().is_none_or(|(_, last)| *last != call) {
            places.push((at, call));
        }
    };
    let mut end_of_last = 0;
    for (start, end, call) in rows {
        if start > end_of_last {
            put(end_of_last, None);
        }
        put(start, call);
        end_of_last = end_of_last.max(end);
    }
    put(end_of_last, None);
    places.shrink_to_fit();
    places
}

/// Lines that are being written: what comes again is kept once.
#[derive(Default)]
struct Writing<'a> {
    lines: Lines,
    calls: HashMap<Call, u32>,
    /// By what the module calls them.
    functions: HashMap<&'a [u8], u32>,
    files: HashMap<String, u32>,
    names_bytes: usize,
}

impl<'a> Writing<'a> {
    /// One more row may add as many calls as stand in one another.
    fn is_full(&self) -> bool {
        self.lines.calls.len() > CALLS_MAX - INLINED_MAX || self.names_bytes > NAMES_BYTES_MAX
    }

    fn call(&mut self, frame: &Frame<'_, Bytes<'a>>, within: Option<u32>) -> u32 {
        let location = frame.location.as_ref();
        let function = frame.function.as_ref();
        let function = function.map(|function| self.function(function.name.slice()));
        let file = location.and_then(|location| location.file);
        let call = Call {
            function,
            file: file.map(|file| self.file(file)),
            line: location.and_then(|location| location.line),
            column: location.and_then(|location| location.column),
            within,
        };
        let calls = &mut self.lines.calls;
        *self.calls.entry(call).or_insert_with_key(|call| {
            calls.push(call.clone());
            index(calls)
        })
    }

    fn function(&mut self, mangled: &'a [u8]) -> u32 {
        let names = &mut self.lines.names;
        *self.functions.entry(mangled).or_insert_with(|| {
            let name = String::from_utf8_lossy(mangled);
            let name = demangled(&name);
            self.names_bytes += name.len();
            names.push(name);
            index(names)
        })
    }

    fn file(&mut self, file: &str) -> u32 {
        if let Some(known) = self.files.get(file) {
            return *known;
        }
        let names = &mut self.lines.names;
        let start = file.floor_char_boundary(NAME_BYTES_MAX);
        names.push(file[..start].to_owned());
        self.names_bytes += start;
        let new = index(names);
        self.files.insert(file.to_owned(), new);
        new
    }
}

/// The last one's; there are never more than [`CALLS_MAX`], and fewer than twice as many names.
fn index<T>(of: &[T]) -> u32 {
    u32::try_from(of.len() - 1).unwrap_or(u32::MAX)
}

/// The name of a function as people write it, or its start: a name of 200 bytes can stand for a megabyte.
pub(in crate::sandbox) fn demangled(name: &str) -> String {
    let mut start = Begin(String::new());
    // It ends with an error where there is no room for more.
    let _ = write!(start, "{:#}", rustc_demangle::demangle(name));
    start.0
}

/// Takes text until it has [`NAME_BYTES_MAX`].
struct Begin(String);

impl fmt::Write for Begin {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = NAME_BYTES_MAX - self.0.len();
        let (fits, rest) = text.split_at(text.floor_char_boundary(room));
        self.0.push_str(fits);
        if rest.is_empty() {
            Ok(())
        } else {
            Err(fmt::Error)
        }
    }
}

#[cfg(test)]
mod tests;
