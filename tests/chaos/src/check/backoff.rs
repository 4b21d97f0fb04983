//! Whether hosts back off before they reconnect.

use std::collections::HashMap;

use super::super::ledger::Event;
use super::super::world::Try;
use super::{Found, Known};

/// The first wait; each later one is twice as long, up to a minute. Jitter subtracts at most half.
const FIRST_US: i64 = 1_000_000;
const LONGEST_US: i64 = 60_000_000;
/// Delay between the failure and its log line.
const SLACK_US: i64 = 50_000;
/// Connections that one host may be opening when the server goes down: those of its pool, and one to listen.
const AT_ONCE_MAX: usize = 20;

/// All failed connection attempts of a host with one login share one backoff: 1, 2, 4 … 60 s between tries, of which
/// jitter leaves at least half, no matter which task waits for a connection. A stopping host may retry sooner.
pub(super) fn one_backoff(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut of_hosts: HashMap<(&str, &str), Vec<&Try>> = HashMap::new();
    for failed in &known.world.tries {
        let of = (failed.worker.as_str(), failed.login.as_str());
        of_hosts.entry(of).or_default().push(failed);
    }
    // Two hosts with one id write to one log.
    of_hosts.retain(|(worker, _), _| !known.is_shared(worker));
    for ((worker, _), tries) in of_hosts {
        let stops = stops(known, worker);
        let mut last: Option<&Try> = None;
        let mut at_once = 0;
        for failed in tries {
            // The first failure of a series restarts the backoff: the host had reached the server in between, or the
            // failure is that of a different host.
            let last_us = last.filter(|_| failed.failures > 1).map(|last| last.at_us);
            match (failed.counted, last_us) {
                (false, _) => {
                    at_once += 1;
                    found.case(None, at_once > AT_ONCE_MAX, || {
                        format!("{worker} has tried {at_once} times at once: {failed:?}")
                    });
                    continue;
                }
                (true, Some(last_us)) if !stops.iter().any(|at| *at <= failed.at_us) => {
                    let step = i64::from(failed.failures.min(10)) - 2;
                    let wait_us = (FIRST_US << step.max(0)).min(LONGEST_US) / 2;
                    let waited_us = failed.at_us - last_us;
                    found.case(None, waited_us < wait_us - SLACK_US, || {
                        format!(
                            "{worker} has retried after only {} ms: {failed:?}",
                            waited_us / 1000
                        )
                    });
                }
                (true, _) => {}
            }
            at_once = 0;
            last = Some(failed);
        }
    }
    found
}

/// The times of the stop requests to the host.
fn stops(known: &Known<'_>, worker: &str) -> Vec<i64> {
    let happened = known.world.happened.iter();
    let stopped = happened.filter(
        |h| matches!(&h.event, Event::HostStopped { worker: stopped, .. } if stopped == worker),
    );
    stopped.map(|h| h.from_us).collect()
}
