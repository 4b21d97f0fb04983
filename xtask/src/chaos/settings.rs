//! What the hosts of a run are told in their rouse.toml.

use std::time::Duration;

use super::load::{ATTEMPTS_MAX, SPIN, SPIN_ATTEMPTS_MAX, TAG};
use super::module::NAME;

/// Short, so that much is lost and found in a short run.
pub(super) const LEASE: Duration = Duration::from_secs(5);
/// As it is by default.
pub(super) const LOST_MAX: i32 = 3;
/// One host alone has to carry the load for a while, and still have slots free for orphans.
const SLOTS: usize = 96;
/// Here every host has the same id and key, and takes over at once what its predecessor had.
const KEEPS_ITS_ID: usize = 1;

/// The id of every host in this seat where that one keeps it, else another one each time.
pub(super) fn worker_id(seat: usize, born: usize) -> String {
    match seat {
        KEEPS_ITS_ID => format!("host-{seat}"),
        _ => format!("host-{seat}-{born}"),
    }
}

/// Whether this is the id of all hosts of a seat.
pub(super) fn keeps_its_id(worker: &str) -> bool {
    worker == worker_id(KEEPS_ITS_ID, 0)
}

/// The seats differ: the first two have the tag, the second keeps its id, the third polls only; every other one has
/// little patience when it stops.
pub(super) fn of(seat: usize, evidence: &str) -> String {
    let tags = match seat {
        0 | 1 => format!("[\"{TAG}\"]"),
        _ => "[]".into(),
    };
    let drain_timeout = match seat % 2 {
        0 => "500ms",
        _ => "10s",
    };
    let key = match seat {
        KEEPS_ITS_ID => "worker_key_file = \"key\"\n",
        _ => "",
    };
    let notify = seat != 2;
    let handler = |pattern: &str, more: &str| {
        format!(
            r#"
[handlers."{pattern}"]
module = "{NAME}"
lease = "{}s"
grace = "300ms"
retry_initial = "200ms"
retry_max = "1s"
fine_clocks = true
{more}
[[handlers."{pattern}".dirs]]
dir = {evidence:?}
at = "/evidence"
mode = "read-write"
"#,
            LEASE.as_secs()
        )
    };
    let work = handler("chaos.*", &format!("max_attempts = {ATTEMPTS_MAX}"));
    let spin = format!("max_attempts = {SPIN_ATTEMPTS_MAX}\ntimeout = \"200ms\"");
    let spin = handler(SPIN, &spin);
    format!(
        r#"slots = {SLOTS}
lost_max = {LOST_MAX}
tags = {tags}
notify = {notify}
drain_timeout = "{drain_timeout}"
{key}
[limits]
memory_mb = 16
{work}{spin}"#
    )
}
