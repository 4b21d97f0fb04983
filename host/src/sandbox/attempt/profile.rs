//! Where a guest spends its time: what stands on its stack at each tick.
//!
//! wasmtime's own `GuestProfiler` knows functions but no lines of their source; the backtraces that it makes of traps know
//! both, so these are what is kept. Only what computes is seen: a tick finds a guest at a function's start or at a turn of a loop, and
//! one that waits for the host when it comes back from there.

mod firefox;

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use wasmtime::{AsContext, WasmBacktrace};

use super::stack::{Called, called};
use crate::sandbox::module::lines::Lines;

/// What one attempt was doing, tick by tick.
pub struct Profile(Mutex<Samples>);

impl Profile {
    /// How often a guest should be looked at: the [`tick`](super::Settings::tick) of a sandbox in which attempts are
    /// profiled. A look at a large module takes some 40 ms, in which the guest stands still.
    pub const EVERY: Duration = Duration::from_millis(1);

    /// An empty one, which starts now.
    pub fn start() -> Self {
        Self(Mutex::new(Samples {
            started_at: SystemTime::now(),
            started: Instant::now(),
            looking: Duration::ZERO,
            names: Table::default(),
            functions: Table::default(),
            frames: Table::default(),
            stacks: Table::default(),
            samples: Vec::new(),
        }))
    }

    /// How often the guest was seen.
    pub fn len(&self) -> usize {
        self.lock().samples.len()
    }

    /// True where it was never seen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As a file for <https://profiler.firefox.com>. `name`: what was profiled.
    pub fn firefox_json(&self, name: &str) -> serde_json::Value {
        firefox::json(&self.lock(), name)
    }

    /// Looks at what the guest is doing.
    pub(in crate::sandbox) fn look(&self, store: impl AsContext, lines: &Lines) {
        let start = Instant::now();
        let stack = called(&WasmBacktrace::force_capture(store), lines);
        let mut samples = self.lock();
        let at = start
            .duration_since(samples.started)
            .saturating_sub(samples.looking);
        samples.add(at, stack);
        samples.looking += start.elapsed();
    }

    fn lock(&self) -> MutexGuard<'_, Samples> {
        // Nothing panics while it holds the lock but the allocator.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profile").field("len", &self.len()).finish()
    }
}

/// What was seen. A name, a function, a frame and a stack are kept once, and are numbers from there on.
struct Samples {
    started_at: SystemTime,
    started: Instant,
    /// The time that the looks took: the guest stood still, and so does its clock.
    looking: Duration,
    names: Table<String>,
    functions: Table<Function>,
    frames: Table<Frame>,
    stacks: Table<Stack>,
    samples: Vec<Sample>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Function {
    name: usize,
    file: Option<usize>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Frame {
    function: usize,
    line: Option<u32>,
    column: Option<u32>,
}

/// A frame, and the stack that it stands on.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Stack {
    below: Option<usize>,
    frame: usize,
}

struct Sample {
    /// Since the start.
    at: Duration,
    stack: Option<usize>,
}

impl Samples {
    /// Adds one; the stack has the innermost function first.
    fn add(&mut self, at: Duration, stack: Vec<Called>) {
        let mut below = None;
        for called in stack.into_iter().rev() {
            let function = Function {
                name: self.names.number(called.function),
                file: called.file.map(|file| self.names.number(file)),
            };
            let frame = Frame {
                function: self.functions.number(function),
                line: called.line,
                column: called.column,
            };
            let frame = self.frames.number(frame);
            below = Some(self.stacks.number(Stack { below, frame }));
        }
        self.samples.push(Sample { at, stack: below });
    }
}

/// Things with numbers.
struct Table<T> {
    all: Vec<T>,
    numbers: HashMap<T, usize>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self {
            all: Vec::new(),
            numbers: HashMap::new(),
        }
    }
}

impl<T: Clone + Eq + Hash> Table<T> {
    fn number(&mut self, thing: T) -> usize {
        if let Some(number) = self.numbers.get(&thing) {
            return *number;
        }
        let number = self.all.len();
        self.all.push(thing.clone());
        self.numbers.insert(thing, number);
        number
    }

    fn column<V>(&self, of: impl FnMut(&T) -> V) -> Vec<V> {
        self.all.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests;
