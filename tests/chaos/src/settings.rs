//! The rouse.toml of each host of a run.

use std::time::Duration;

use super::load::{ATTEMPTS_MAX, LINE, PATIENT, PAY, SPIN, SPIN_ATTEMPTS_MAX, TAG, WORK};
use super::module::NAME;

/// Short, so that a short run has many lost and adopted attempts.
pub(super) const LEASE: Duration = Duration::from_secs(5);
/// The default.
pub(super) const LOST_MAX: i32 = 3;
/// One host alone must carry the load for a while, and still have slots free for orphans.
const SLOTS: usize = 96;
/// Hosts with few slots, so that claims wait in line.
pub(super) const LINE_SLOTS: usize = 8;
/// Long enough that a host which misses a cancellation notices it only after the cancelled jobs have ended (it renews
/// at 0.4 of the lease).
const PATIENT_LEASE: Duration = Duration::from_secs(20);
/// Every host in this seat has the same id and key, and takes over the jobs of its predecessor at once.
const KEEPS_ITS_ID: usize = 1;
/// The host in this seat only polls.
const POLLS: usize = 2;
/// The number of hosts of the queue [`LINE`]: one listens, and one only polls.
pub(super) const LINE_HOSTS: usize = 2;
const LINE_POLLS: usize = 1;

/// The purpose of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// A target of faults.
    Main(usize),
    /// It serves [`LINE`] only. Faults of the server affect it; other faults do not.
    Line(usize),
    /// It shares its id and key with another host.
    Twin,
}

/// The worker id: fixed if the seat keeps its id, otherwise a new one for each host.
pub(super) fn worker_id(role: Role, number: usize) -> String {
    match role {
        Role::Main(KEEPS_ITS_ID) => format!("host-{KEEPS_ITS_ID}"),
        Role::Main(seat) => format!("host-{seat}-{number}"),
        Role::Line(seat) => format!("line-{seat}-{number}"),
        Role::Twin => format!("twin-{number}"),
    }
}

/// Whether all hosts of a seat have this id.
pub(super) fn keeps_its_id(worker: &str) -> bool {
    worker == worker_id(Role::Main(KEEPS_ITS_ID), 0)
}

/// Whether the host with this id listens for notifications instead of only polling.
pub(super) fn listens(worker: &str) -> bool {
    let of = |role: &str, seat: usize| worker.starts_with(&format!("{role}-{seat}-"));
    !of("host", POLLS) && !of("line", LINE_POLLS)
}

/// The settings of a host. `login` is the connection string of the handler with effects. The seats differ: the first
/// two have the tag, the second keeps its id, the third only polls, and every second one has a short drain timeout.
pub(super) fn for_role(role: Role, evidence: &str, login: &str) -> String {
    let tags = match role {
        Role::Main(0 | 1) => format!("[\"{TAG}\"]"),
        Role::Line(_) => format!("[\"{LINE}\"]"),
        _ => "[]".into(),
    };
    let queues = match role {
        Role::Line(_) => format!("queues = [\"{LINE}\"]\n"),
        Role::Main(_) | Role::Twin => String::new(),
    };
    let slots = match role {
        Role::Main(_) => SLOTS,
        Role::Line(_) | Role::Twin => LINE_SLOTS,
    };
    let drain_timeout = match role {
        Role::Main(seat) if seat % 2 == 0 => "500ms",
        _ => "10s",
    };
    let key = match role {
        Role::Main(KEEPS_ITS_ID) | Role::Twin => "worker_key_file = \"key\"\n",
        Role::Main(_) | Role::Line(_) => "",
    };
    let notify = !matches!(role, Role::Main(POLLS) | Role::Line(LINE_POLLS));
    let handler = |pattern: &str, lease: Duration, more: &str| {
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
            lease.as_secs()
        )
    };
    let attempts = format!("max_attempts = {ATTEMPTS_MAX}");
    let enqueues = format!("{attempts}\nenqueue = [\"{WORK}\"]");
    let work = handler("chaos.*", LEASE, &enqueues);
    let patient = handler(PATIENT, PATIENT_LEASE, &attempts);
    let pay = handler(PAY, LEASE, &attempts);
    let spin = format!("max_attempts = {SPIN_ATTEMPTS_MAX}\ntimeout = \"200ms\"");
    let spin = handler(SPIN, LEASE, &spin);
    format!(
        r#"slots = {slots}
lost_max = {LOST_MAX}
{queues}tags = {tags}
notify = {notify}
drain_timeout = "{drain_timeout}"
{key}
[limits]
memory_mb = 16
{work}{patient}{spin}{pay}
[handlers."{PAY}".sql]
login = {{ url = {login:?} }}
statements = "all"
connections_max = 4
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_third_seat_and_the_second_host_of_the_line_poll_and_all_others_listen() {
        for (role, listening) in [
            (Role::Main(0), true),
            (Role::Main(1), true),
            (Role::Main(2), false),
            (Role::Line(0), true),
            (Role::Line(1), false),
            (Role::Twin, true),
        ] {
            assert_eq!(listens(&worker_id(role, 2)), listening, "{role:?}");
            let notify = format!("notify = {listening}");
            assert!(
                for_role(role, "/evidence", "postgres://").contains(&notify),
                "{role:?}"
            );
        }
    }
}
