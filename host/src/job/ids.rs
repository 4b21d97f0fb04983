//! Numbers that must not be swapped.

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number! {
    /// A job's id: given at enqueue, kept for ever.
    JobId(i64)
}
number! {
    /// Which attempt at a job: 1 for the first.
    Attempt(i32)
}
number! {
    /// A random 64-bit number drawn for each claim. Only who knows it can settle the job; it is
    /// never a sequence, because a server crash can hand the same sequence value out twice.
    Fence(i64)
}
number! {
    /// One life of a worker: a new number each time that a host starts.
    Incarnation(i64)
}
number! {
    /// A lane: the jobs of one (queue, handler, priority class, required tags).
    LaneId(i64)
}
