//! The samples of a profile, with repeated values stored once.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant, SystemTime};

use crate::sandbox::attempt::stack::StackFrame;

/// The samples. Names, functions, frames and stacks are stored once and referred to by number.
pub(super) struct Samples {
    pub(super) started_at: SystemTime,
    pub(super) started: Instant,
    /// The time that sampling took. The guest was paused meanwhile, so the times of the samples leave it out.
    pub(super) sampling_time: Duration,
    pub(super) names: Table<String>,
    pub(super) functions: Table<Function>,
    pub(super) frames: Table<Frame>,
    pub(super) stacks: Table<Stack>,
    pub(super) samples: Vec<Sample>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Function {
    pub(super) name: usize,
    pub(super) file: Option<usize>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Frame {
    pub(super) function: usize,
    pub(super) line: Option<u32>,
    pub(super) column: Option<u32>,
}

/// A frame and its caller's stack.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Stack {
    pub(super) below: Option<usize>,
    pub(super) frame: usize,
}

pub(super) struct Sample {
    /// The time since the start.
    pub(super) at: Duration,
    pub(super) stack: Option<usize>,
}

impl Samples {
    /// Adds a sample; the stack has the innermost function first.
    pub(super) fn add(&mut self, at: Duration, stack: Vec<StackFrame>) {
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

/// Numbered values.
pub(super) struct Table<T> {
    pub(super) all: Vec<T>,
    pub(super) numbers: HashMap<T, usize>,
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
    fn number(&mut self, value: T) -> usize {
        if let Some(number) = self.numbers.get(&value) {
            return *number;
        }
        let number = self.all.len();
        self.all.push(value.clone());
        self.numbers.insert(value, number);
        number
    }

    pub(super) fn column<V>(&self, of: impl FnMut(&T) -> V) -> Vec<V> {
        self.all.iter().map(of).collect()
    }
}
