//! Newtypes for numbers that must not be mixed up.

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
    /// A job's id. It is assigned at enqueue and never changes.
    JobId(i64)
}
number! {
    /// The number of an attempt at a job; 1 for the first.
    Attempt(i32)
}
number! {
    /// A random 64-bit number drawn for each claim. Settling the job requires it. It does not come from a sequence,
    /// because a server crash can make a sequence return the same value twice.
    Fence(i64)
}
number! {
    /// One registration of a worker id: a new number each time that a host starts.
    Incarnation(i64)
}
number! {
    /// A lane's id: a hash of what its jobs have in common.
    LaneId(i64)
}
