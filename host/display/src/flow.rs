//! The edges of a flow, from the rows of `rouse.flow`.

use std::cmp::Reverse;

use serde_json::Value;

/// The chains that a job waits or waited for, each once, in the order of their ids, each with its `on_failure` unless
/// that is the default. If a chain has several names, the strictest applies, as in Postgres: `cancel` (the default),
/// then `wait`, then `run`.
pub fn chains(job: &Value) -> impl Iterator<Item = (Option<&str>, i64)> {
    let mut chains: Vec<_> = job["after"]
        .as_object()
        .into_iter()
        .flatten()
        .filter_map(|(_, entry)| match entry.as_i64() {
            Some(chain) => Some((None, chain)),
            None => Some((entry["on_failure"].as_str(), entry["job"].as_i64()?)),
        })
        .collect();
    // In this order, the strictest entry of a chain comes first: `None` (the default), then `wait`, then `run`.
    chains.sort_by_key(|&(on_failure, chain)| (chain, on_failure.map(Reverse)));
    chains.dedup_by_key(|&mut (_, chain)| chain);
    chains.into_iter()
}
