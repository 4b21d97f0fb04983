//! Turns a violated keyword into a mismatch.

use super::super::json::Location;
use super::super::mismatch::{Detail, Mismatch};
use super::super::node::NodeId;
use super::Stop;

/// The mismatch of a value that violates `keyword`.
pub(super) fn fails<'s>(node: NodeId, at: Location, keyword: &'static str) -> Result<(), Stop<'s>> {
    Err(Stop::Mismatch(Mismatch {
        at,
        node,
        keyword,
        detail: Detail::None,
    }))
}

/// The mismatch of the first violated keyword, if any.
pub(super) fn first_violated<'s>(
    node: NodeId,
    at: Location,
    rules: &[(bool, &'static str)],
) -> Result<(), Stop<'s>> {
    match rules.iter().find(|(violated, _)| *violated) {
        Some((_, keyword)) => fails(node, at, keyword),
        None => Ok(()),
    }
}

/// The mismatch of a count outside its bounds.
pub(super) fn check_count<'s>(
    node: NodeId,
    at: Location,
    count: u64,
    (min, min_keyword): (Option<u64>, &'static str),
    (max, max_keyword): (Option<u64>, &'static str),
) -> Result<(), Stop<'s>> {
    let too_few = min.is_some_and(|min| count < min);
    let too_many = max.is_some_and(|max| count > max);
    let keyword = match (too_few, too_many) {
        (true, _) => min_keyword,
        (false, true) => max_keyword,
        (false, false) => return Ok(()),
    };
    Err(Stop::Mismatch(Mismatch {
        at,
        node,
        keyword,
        detail: Detail::Count(count),
    }))
}
