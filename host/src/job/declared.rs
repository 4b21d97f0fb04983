//! Decides the schedule of a handler from the declarations of the modules of all live workers.

use semver::Version;
use serde::{Deserialize, Serialize};

/// The times at which a module wants its handler to run.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct DeclaredSchedule {
    /// A cron expression, with single spaces.
    pub cron: String,
    /// The IANA name of its time zone.
    #[serde(default = "utc")]
    pub time_zone: String,
}

fn utc() -> String {
    "UTC".into()
}

/// A live worker that has the handler.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Declaring {
    /// Its incarnation: the higher, the later it registered.
    pub incarnation: i64,
    /// The version of its module.
    pub version: Option<String>,
    /// The schedule that its module declares, if the worker's operator allows it.
    pub schedule: Option<DeclaredSchedule>,
}

/// The schedule that hosts have created for a module.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Current {
    /// The version of the module.
    pub version: String,
    /// The schedule that it declared.
    #[serde(flatten)]
    pub schedule: DeclaredSchedule,
}

/// The change to the schedule of a handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Nothing changes.
    Keep,
    /// It is created or replaced.
    Put(Current),
    /// It is deleted.
    Delete,
}

/// Decides by the newest version of the module among the live workers: if the operator of a worker with that version
/// allows its schedule, the handler gets that schedule; otherwise it gets none. Among several such workers, the one
/// that registered last decides. While no worker has the handler, nothing changes: its hosts may be restarting.
pub fn change(workers: &[Declaring], current: Option<&Current>) -> Change {
    let newest = workers.iter().map(|worker| key(&worker.version)).max();
    let Some(newest) = newest else {
        return Change::Keep;
    };
    let of_newest = workers
        .iter()
        .filter(|worker| key(&worker.version) == newest);
    let allowed = of_newest
        .filter_map(|worker| Some((worker.incarnation, worker.schedule.as_ref()?)))
        .max_by_key(|(incarnation, _)| *incarnation);
    match (allowed, current) {
        (None, None) => Change::Keep,
        (None, Some(_)) => Change::Delete,
        (Some((_, schedule)), current) => {
            let wanted = Current {
                version: newest.1.to_owned(),
                schedule: schedule.clone(),
            };
            match current == Some(&wanted) {
                true => Change::Keep,
                false => Change::Put(wanted),
            }
        }
    }
}

/// The sort key of a version; a string that is not a version is older than any version.
fn key(version: &Option<String>) -> (Option<Version>, &str) {
    let text = version.as_deref().unwrap_or_default();
    (Version::parse(text).ok(), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(incarnation: i64, version: &str, cron: Option<&str>) -> Declaring {
        Declaring {
            incarnation,
            version: Some(version.into()),
            schedule: cron.map(declared),
        }
    }

    fn declared(cron: &str) -> DeclaredSchedule {
        DeclaredSchedule {
            cron: cron.into(),
            time_zone: utc(),
        }
    }

    fn current(version: &str, cron: &str) -> Current {
        Current {
            version: version.into(),
            schedule: declared(cron),
        }
    }

    #[test]
    fn the_newest_version_decides_regardless_of_the_host() {
        let old = worker(9, "1.9.0", Some("0 1 * * *"));
        let new = worker(2, "1.10.0", Some("0 2 * * *"));
        for workers in [[old.clone(), new.clone()], [new.clone(), old.clone()]] {
            let wanted = current("1.10.0", "0 2 * * *");
            assert_eq!(change(&workers, None), Change::Put(wanted.clone()));
            assert_eq!(change(&workers, Some(&wanted)), Change::Keep);
        }
        // After a rollback, the old version decides again.
        let rolled_back = change(&[old], Some(&current("1.10.0", "0 2 * * *")));
        assert_eq!(rolled_back, Change::Put(current("1.9.0", "0 1 * * *")));
        // A newer version without a schedule ends it.
        let workers = [new, worker(3, "2.0.0", None)];
        assert_eq!(
            change(&workers, Some(&current("1.10.0", "0 2 * * *"))),
            Change::Delete
        );
        assert_eq!(change(&workers, None), Change::Keep);
    }

    #[test]
    fn one_host_that_allows_it_is_enough_and_the_latest_registration_decides_between_equal_versions()
     {
        let workers = [
            worker(1, "1.0.0", Some("0 1 * * *")),
            worker(3, "1.0.0", None),
            worker(2, "1.0.0", Some("0 2 * * *")),
        ];
        assert_eq!(
            change(&workers, None),
            Change::Put(current("1.0.0", "0 2 * * *"))
        );
        let disallowed = [worker(3, "1.0.0", None)];
        assert_eq!(
            change(&disallowed, Some(&current("1.0.0", "0 2 * * *"))),
            Change::Delete
        );
    }

    #[test]
    fn nothing_changes_while_no_worker_has_the_handler() {
        assert_eq!(
            change(&[], Some(&current("1.0.0", "0 2 * * *"))),
            Change::Keep
        );
    }

    #[test]
    fn a_string_that_is_not_a_version_is_older_than_any() {
        let workers = [
            worker(5, "latest", Some("0 1 * * *")),
            worker(1, "0.0.1", Some("0 2 * * *")),
        ];
        assert_eq!(
            change(&workers, None),
            Change::Put(current("0.0.1", "0 2 * * *"))
        );
    }
}
