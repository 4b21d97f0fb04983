//! Gates: limits of how many jobs run, how often they start, and which are enqueued.

mod merged;
mod operators;
