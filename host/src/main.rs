//! The `rouse` command.
fn main() {}
