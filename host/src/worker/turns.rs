//! Decides whose turn it is: the crate `rouse-turns` (`host/turns`), applied to lanes of the catalog.

use crate::job::LaneId;

pub(super) use rouse_turns::{Class, Place};

/// The share of a claim that a lane gets.
pub(super) type Part = rouse_turns::Part<LaneId>;

/// The lanes that are known to have jobs.
pub(super) type Turns = rouse_turns::Turns<LaneId>;
