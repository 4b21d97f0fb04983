//! From the bytes of a file to a module that can run.

pub(super) mod digest;
pub(super) mod load;
pub(super) mod loads;
pub(super) mod ready;
pub(super) mod refused;

pub(super) mod cache;
pub(super) mod code;
pub(super) mod compile;
pub(super) mod lines;

pub(super) mod describe;
pub(super) mod manifest;

pub(super) mod admission;
pub(super) mod binding;
pub(super) mod pin;
