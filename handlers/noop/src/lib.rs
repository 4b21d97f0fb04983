//! noop
