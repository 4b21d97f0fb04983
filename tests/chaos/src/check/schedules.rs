//! Whether each due time of a schedule has one job.

use std::collections::BTreeMap;

use super::{Found, Known};

const SECOND_US: i64 = 1_000_000;

/// Each due time, one every second, has exactly one job; and each job of a schedule belongs to a due time.
pub(super) fn each_due_time_once(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut jobs: BTreeMap<(&str, i64), i64> = BTreeMap::new();
    for due in &known.world.due {
        let Some(due_us) = due.due_us else {
            found.unless(due.job, true, || {
                "a schedule has enqueued it without a due time".into()
            });
            continue;
        };
        *jobs.entry((&due.schedule, due_us)).or_default() += due.jobs;
    }
    let mut previous: Option<(&str, i64)> = None;
    for (&(schedule, due_us), &count) in &jobs {
        found.case(None, count != 1, || {
            format!("schedule {schedule} has {count} jobs for its due time {due_us}")
        });
        let skipped =
            previous.is_some_and(|(before, us)| before == schedule && due_us - us != SECOND_US);
        found.unless(None, skipped, || {
            format!("schedule {schedule} has left out a due time before {due_us}")
        });
        previous = Some((schedule, due_us));
    }
    found
}
