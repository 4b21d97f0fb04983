//! One attempt at a job or a batch, from the call to the end.

pub(super) mod run;

pub(super) mod contract;
pub(super) mod idle;
pub(super) mod instance;
pub(super) mod reuse;
pub(super) mod state;

pub(super) mod end;
pub(super) mod failure;

pub(super) mod limits;
pub(super) mod memory;
pub(super) mod meter;

pub(super) mod abort;
pub(super) mod boottime;

pub(super) mod clocks;
pub(super) mod journal;
pub(super) mod profile;
pub(super) mod stack;
