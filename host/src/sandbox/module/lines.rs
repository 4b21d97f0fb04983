//! Maps a guest's code to its source lines.
//!
//! A module has this mapping as DWARF: megabytes in a format for debuggers, in which an untrusted author can write data
//! that takes hours to read. So the compiler process reads it once, within its limits, and the host gets a table for
//! binary search.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::hash::Hash;
use std::panic::catch_unwind;

use addr2line::{Context, Frame};
use gimli::{Dwarf, EndianSlice, LittleEndian};
use serde::{Deserialize, Serialize};
use wasmparser::{KnownCustom, Name, Parser, Payload};

/// Longer names are truncated, because they do not fit into a line of a listing.
const NAME_BYTES_MAX: usize = 512;

/// The maximum rows and calls of one module: its code is a few million bytes long, a row covers several of them, and a
/// call several rows. With the names of all calls this takes 100 MB in the host. Rows and calls beyond the maximum are
/// left out.
const ROWS_MAX: usize = 4 << 20;
const CALLS_MAX: usize = 1 << 20;

/// The maximum size of all names together.
const NAMES_BYTES_MAX: usize = 32 << 20;

/// The maximum depth of inlined calls; outer calls beyond it are left out.
const INLINED_MAX: usize = 64;

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// The lines of a module's source, by offset in its file.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::sandbox) struct Lines {
    /// Start offsets with the call at each; `None` where nothing is known. Ascending.
    ranges: Vec<(u32, Option<u32>)>,
    calls: Vec<Call>,
    names: Vec<String>,
}

/// A function's location in the source; `within`: the call into which it was inlined. Numbers are indices.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Call {
    function: Option<u32>,
    file: Option<u32>,
    line: Option<u32>,
    column: Option<u32>,
    within: Option<u32>,
}

/// A function at some offset.
#[derive(Debug, PartialEq)]
pub(in crate::sandbox) struct SourceLine<'a> {
    /// Its name, demangled.
    pub(in crate::sandbox) function: Option<&'a str>,
    pub(in crate::sandbox) file: Option<&'a str>,
    pub(in crate::sandbox) line: Option<u32>,
    pub(in crate::sandbox) column: Option<u32>,
}

impl Lines {
    /// Reads the line tables of a component. Absent and malformed data is left out. The duration depends on the
    /// component's author, so call it only where the time is limited.
    pub(in crate::sandbox) fn read(component: &[u8]) -> Self {
        // A panic in the DWARF reader must not cause a module to be refused.
        catch_unwind(|| Self::read_all(component)).unwrap_or_default()
    }

    fn read_all(component: &[u8]) -> Self {
        let mut rows = Vec::new();
        let mut builder = Builder::default();
        for module in modules(component) {
            // A partial table is better than none.
            let _ = module.rows(&mut builder, &mut rows);
        }
        let mut lines = builder.lines;
        lines.ranges = ranges(rows);
        lines
    }

    /// The calls at this file offset, innermost first; empty if unknown.
    pub(in crate::sandbox) fn at(&self, offset: usize) -> impl Iterator<Item = SourceLine<'_>> {
        let after = self
            .ranges
            .partition_point(|(start, _)| *start as usize <= offset);
        let found = after.checked_sub(1).and_then(|at| self.ranges[at].1);
        let call = |index: u32| self.calls.get(index as usize);
        let mut next = found.and_then(call);
        std::iter::from_fn(move || {
            let this = next?;
            // In the table, a call comes after the one into which it was inlined, so this ends; `take` ends it for a
            // damaged table.
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

/// The length of the longest function name in this component, in bytes; `None` if no function has a name.
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

/// A core module inside a component.
#[derive(Default)]
struct Module<'a> {
    /// The offset at which its code starts in the file, and its length.
    code: u32,
    code_bytes: u32,
    /// `.debug_line` and so on.
    sections: HashMap<&'a str, &'a [u8]>,
}

/// The core modules that have debug sections.
fn modules(component: &[u8]) -> Vec<Module<'_>> {
    let mut done = Vec::new();
    // Modules and components nest.
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
            // The compiler reports the error.
            Err(_) => return Vec::new(),
        }
    }
    done.retain(|module| !module.sections.is_empty());
    done
}

/// A range of offsets, and the call there.
type Row = (u32, u32, Option<u32>);

impl<'a> Module<'a> {
    fn rows(&self, builder: &mut Builder<'a>, rows: &mut Vec<Row>) -> Result<(), gimli::Error> {
        let section = |id: gimli::SectionId| -> Result<_, gimli::Error> {
            let bytes = self.sections.get(id.name()).copied().unwrap_or_default();
            Ok(EndianSlice::new(bytes, LittleEndian))
        };
        let source = Context::from_dwarf(Dwarf::load(section)?)?;
        for (start, bytes, _) in source.find_location_range(0, u64::from(self.code_bytes))? {
            if rows.len() == ROWS_MAX || builder.is_full() {
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
                call = Some(builder.call(frame, call));
            }
            let end = start.saturating_add(bytes);
            let offset =
                |at: u64| u32::try_from(at).map_or(u32::MAX, |at| at.saturating_add(self.code));
            rows.push((offset(start), offset(end), call));
        }
        Ok(())
    }
}

/// Turns rows into ranges that do not overlap; neighbours with the same call are merged.
fn ranges(mut rows: Vec<Row>) -> Vec<(u32, Option<u32>)> {
    rows.sort_by_key(|(start, ..)| *start);
    let mut ranges: Vec<(u32, Option<u32>)> = Vec::new();
    let mut put = |at: u32, call: Option<u32>| {
        if ranges.last().is_some_and(|(last, _)| *last == at) {
            ranges.pop();
        }
        if ranges.last().is_none_or(|(_, last)| *last != call) {
            ranges.push((at, call));
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
    ranges.shrink_to_fit();
    ranges
}

/// A table that is being built; repeated values are stored once.
#[derive(Default)]
struct Builder<'a> {
    lines: Lines,
    calls: HashMap<Call, u32>,
    /// By mangled name.
    functions: HashMap<&'a [u8], u32>,
    files: HashMap<String, u32>,
    names_bytes: usize,
}

impl<'a> Builder<'a> {
    /// One more row may add as many calls as the inlining depth.
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
        let end = file.floor_char_boundary(NAME_BYTES_MAX);
        names.push(file[..end].to_owned());
        self.names_bytes += end;
        let new = index(names);
        self.files.insert(file.to_owned(), new);
        new
    }
}

/// The index of the last element; there are at most [`CALLS_MAX`] calls, and fewer than twice as many names.
fn index<T>(of: &[T]) -> u32 {
    u32::try_from(of.len() - 1).unwrap_or(u32::MAX)
}

/// The demangled name of a function, possibly truncated: a name of 200 bytes can demangle to a megabyte.
pub(in crate::sandbox) fn demangled(name: &str) -> String {
    let mut prefix = Prefix(String::new());
    // An error means that the limit was reached.
    let _ = write!(prefix, "{:#}", rustc_demangle::demangle(name));
    prefix.0
}

/// Accepts text up to [`NAME_BYTES_MAX`].
struct Prefix(String);

impl fmt::Write for Prefix {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let free = NAME_BYTES_MAX - self.0.len();
        let (fits, rest) = text.split_at(text.floor_char_boundary(free));
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
