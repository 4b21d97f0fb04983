//! Whether hosts come back to a server without haste.

use std::collections::HashMap;

use super::super::ledger::What;
use super::super::world::Try;
use super::{Found, Known};

/// The first wait; each later one is twice as long, up to a minute. Jitter takes off half at most.
const FIRST_US: i64 = 1_000_000;
const LONGEST_US: i64 = 60_000_000;
/// Between the failure and the line about it.
const SLACK_US: i64 = 50_000;
/// Connections that one host may be opening when the server goes away: those of its pool, and one to listen.
const AT_ONCE_MAX: usize = 20;

/// All failed tries of a host to connect are on one ladder: the next one comes after 1, 2, 4 … 60 s, of which at least half, whatever
/// waits for a connection. A host that is told to stop may hurry.
pub(super) fn one_backoff(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut of_hosts: HashMap<&str, Vec<&Try>> = HashMap::new();
    for one in &known.world.tries {
        of_hosts.entry(&one.worker).or_default().push(one);
    }
    // Two hosts with one id write to one log.
    of_hosts.retain(|worker, _| !known.is_shared(worker));
    for (worker, tries) in of_hosts {
        let stops = stops(known, worker);
        let mut last: Option<&Try> = None;
        let mut at_once = 0;
        for one in tries {
            // A failure that is the first in a row starts anew: the server was reached meanwhile, or it is another host.
            let last_us = last.filter(|_| one.failures > 1).map(|last| last.at_us);
            match (one.counted, last_us) {
                (false, _) => {
                    at_once += 1;
                    found.case(None, at_once > AT_ONCE_MAX, || {
                        format!("{worker} has tried {at_once} times at once: {one:?}")
                    });
                    continue;
                }
                (true, Some(last_us)) if !stops.iter().any(|at| *at <= one.at_us) => {
                    let step = i64::from(one.failures.min(10)) - 2;
                    let wait_us = (FIRST_US << step.max(0)).min(LONGEST_US) / 2;
                    let waited_us = one.at_us - last_us;
                    found.case(None, waited_us < wait_us - SLACK_US, || {
                        format!(
                            "{worker} has tried again after {} ms: {one:?}",
                            waited_us / 1000
                        )
                    });
                }
                (true, _) => {}
            }
            at_once = 0;
            last = Some(one);
        }
    }
    found
}

/// When the host was told to stop.
fn stops(known: &Known<'_>, worker: &str) -> Vec<i64> {
    let happened = known.world.happened.iter();
    let stopped = happened.filter(
        |h| matches!(&h.what, What::HostStopped { worker: stopped, .. } if stopped == worker),
    );
    stopped.map(|h| h.from_us).collect()
}
