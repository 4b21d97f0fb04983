//! The events of a simulation, in the order of their times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::Nanos;

/// Something that happens at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// A host looks at its slots and lanes.
    Look(u32),
    /// A claim of a host reaches the server.
    Claim(u32),
    /// The response to the claim of a host arrives.
    Response(u32),
    /// The oldest settlement of a host is committed.
    Settled(u32),
    /// A host learns that the oldest of its settlements is committed.
    Freed(u32),
    /// A host sweeps its lanes.
    Sweep(u32),
    /// A job of a class is enqueued.
    Enqueue(u32),
    /// A fault happens to a host.
    Fault(u32),
    /// A host starts again, or continues after a freeze.
    Start(u32),
    /// The shards of a dead host get other owners.
    Reassign(u32),
    /// The end of a window of the report.
    Window,
}

/// Events by time; those of the same time in the order in which they were added.
#[derive(Debug, Default)]
pub(crate) struct Events {
    heap: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    added: u64,
}

impl Events {
    pub(crate) fn add(&mut self, at: Nanos, event: Event) {
        self.added += 1;
        self.heap.push(Reverse((at, self.added, event)));
    }

    pub(crate) fn next(&mut self) -> Option<(Nanos, Event)> {
        self.heap.pop().map(|Reverse((at, _, event))| (at, event))
    }
}
