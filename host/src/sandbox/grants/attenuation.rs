//! A job's attenuation, which restricts the grants and limits of its handler. It can never extend them.

use std::time::Duration;

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::{Host, HostPattern, Mode};
use crate::job::pattern_covers;

/// A job's attenuation of its handler's grants and limits: all of its parts apply. A job that another job enqueues has
/// the parts of that job, and its own.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Attenuation(Vec<Part>);

/// A part of an attenuation. Kinds that it does not name are not restricted.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    #[serde(default, deserialize_with = "hosts")]
    http: Option<Vec<HostPattern>>,
    #[serde(default)]
    secrets: Option<Vec<String>>,
    /// Directory paths as the guest sees them; `/out:read` restricts access to reading.
    #[serde(default)]
    dirs: Option<Vec<String>>,
    #[serde(default)]
    env: Option<Vec<String>>,
    /// Handlers whose jobs it may enqueue: names and patterns.
    #[serde(default)]
    enqueue: Option<Vec<String>>,
    /// False removes the handler's state.
    #[serde(default)]
    state: Option<bool>,
    /// The names of SQL statements.
    #[serde(default)]
    sql: Option<Vec<String>>,
    #[serde(default)]
    memory_mb: Option<usize>,
    #[serde(default, deserialize_with = "crate::duration::optional")]
    cpu: Option<Duration>,
    #[serde(default, deserialize_with = "crate::duration::optional")]
    timeout: Option<Duration>,
}

impl Attenuation {
    /// Parses a job's grants: an object, or an array of objects.
    ///
    /// # Errors
    /// A human-readable message with the reason why this host cannot enforce them.
    pub fn parse(json: &str) -> Result<Self, String> {
        // Serde would read an array as the fields of a part in order.
        let parts = match json.trim_start().starts_with('[') {
            true => serde_json::from_str::<Vec<Map<String, Value>>>(json),
            false => serde_json::from_str::<Map<String, Value>>(json).map(|part| vec![part]),
        };
        let parts = parts.and_then(|parts| {
            let parts = parts.into_iter().map(Value::Object);
            parts.map(serde_json::from_value).collect()
        });
        parts.map(Self).map_err(|error| {
            format!(
                "this host cannot enforce the job's grants, so it does not run the job: {error}"
            )
        })
    }

    /// The run timeout of the job, given that of its handler.
    pub fn timeout(&self, usual: Duration) -> Duration {
        let parts = self.0.iter().filter_map(|part| part.timeout);
        parts.fold(usual, Duration::min)
    }

    pub(in crate::sandbox) fn cpu(&self, usual: Duration) -> Duration {
        let parts = self.0.iter().filter_map(|part| part.cpu);
        parts.fold(usual, Duration::min)
    }

    pub(in crate::sandbox) fn memory_bytes(&self) -> Option<usize> {
        let parts = self.0.iter().filter_map(|part| part.memory_mb);
        parts.min().map(|mb| mb.saturating_mul(1 << 20))
    }

    pub(in crate::sandbox) fn leaves_host(&self, host: &Host) -> bool {
        let covers = |left: &Vec<HostPattern>| left.iter().any(|pattern| pattern.covers(host));
        let mut parts = self.0.iter();
        parts.all(|part| part.http.as_ref().is_none_or(covers))
    }

    pub(in crate::sandbox) fn leaves_secret(&self, name: &str) -> bool {
        let mut parts = self.0.iter();
        parts.all(|part| lists(part.secrets.as_ref(), name))
    }

    pub(in crate::sandbox) fn leaves_env(&self, name: &str) -> bool {
        let mut parts = self.0.iter();
        parts.all(|part| lists(part.env.as_ref(), name))
    }

    pub(in crate::sandbox) fn leaves_sql(&self, name: &str) -> bool {
        let mut parts = self.0.iter();
        parts.all(|part| lists(part.sql.as_ref(), name))
    }

    pub(in crate::sandbox) fn leaves_state(&self) -> bool {
        self.0.iter().all(|part| part.state != Some(false))
    }

    /// What the attenuation leaves of these patterns of handlers: the granted patterns that a pattern of each part
    /// covers, and the patterns of a part that the granted ones cover.
    pub(in crate::sandbox) fn leaves_enqueue(&self, granted: &[String]) -> Vec<String> {
        let covers = |one: &String, other: &str| one == other || pattern_covers(one, other);
        let parts = self.0.iter().filter_map(|part| part.enqueue.as_ref());
        parts.fold(granted.to_vec(), |granted, listed| {
            let covered = |one: &[String], other: &[String]| -> Vec<String> {
                let one = one.iter();
                let left = one.filter(|one| other.iter().any(|other| covers(other, one)));
                left.cloned().collect()
            };
            let mut left = covered(&granted, listed);
            left.extend(covered(listed, &granted));
            left.sort_unstable();
            left.dedup();
            left
        })
    }

    /// The job's access to the directory at this path; `None` means no access.
    pub(in crate::sandbox) fn mode(&self, at: &str, granted: Mode) -> Option<Mode> {
        let mut parts = self.0.iter();
        parts.try_fold(granted, |granted, part| part.mode(at, granted))
    }
}

impl Part {
    fn mode(&self, at: &str, granted: Mode) -> Option<Mode> {
        let Some(dirs) = &self.dirs else {
            return Some(granted);
        };
        let left = dirs.iter().filter_map(|dir| match Mode::split(dir) {
            (path, mode) if path == at => Some(mode.unwrap_or(granted)),
            (_, _) => None,
        });
        left.map(|mode| match (mode, granted) {
            (Mode::ReadWrite, Mode::ReadWrite) => Mode::ReadWrite,
            (Mode::Read | Mode::ReadWrite, Mode::Read) | (Mode::Read, Mode::ReadWrite) => {
                Mode::Read
            }
        })
        // If the directory is listed twice, the more restricted access counts.
        .min_by_key(|mode| *mode == Mode::ReadWrite)
    }
}

fn lists(left: Option<&Vec<String>>, name: &str) -> bool {
    left.is_none_or(|left| left.iter().any(|it| it == name))
}

fn hosts<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Vec<HostPattern>>, D::Error> {
    let strings = Vec::<String>::deserialize(input)?;
    let read = |text: &String| {
        text.parse()
            .map_err(|why| serde::de::Error::custom(format!("http: {text:?}: {why}")))
    };
    strings.iter().map(read).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Attenuation {
        Attenuation::parse(json).unwrap_or_else(|why| panic!("{why}"))
    }

    #[test]
    fn kinds_that_are_not_named_are_not_restricted() {
        let job = read("{}");
        assert!(job.leaves_secret("KEY") && job.leaves_env("LANG"));
        assert!(job.leaves_host(&Host::Name("a.example".into())));
        assert_eq!(job.mode("/out", Mode::ReadWrite), Some(Mode::ReadWrite));
        assert!(job.leaves_state());
        let hour = Duration::from_secs(3600);
        assert_eq!(job.timeout(hour), hour);
    }

    #[test]
    fn a_list_keeps_only_what_it_names_and_extends_nothing() {
        let job = read(
            r#"{"http": ["*.a.example"], "secrets": ["KEY"], "env": [], "dirs": ["/in:read-write", "/out:read"],
                "state": false, "memory_mb": 32, "cpu": "5s", "timeout": "2h"}"#,
        );
        assert!(job.leaves_host(&Host::Name("x.a.example".into())));
        assert!(!job.leaves_host(&Host::Name("a.example".into())));
        assert!(job.leaves_secret("KEY") && !job.leaves_secret("OTHER"));
        assert!(!job.leaves_env("LANG"));
        assert_eq!(job.mode("/in", Mode::Read), Some(Mode::Read));
        assert_eq!(job.mode("/out", Mode::ReadWrite), Some(Mode::Read));
        assert_eq!(job.mode("/else", Mode::ReadWrite), None);
        assert_eq!(job.memory_bytes(), Some(32 << 20));
        let hour = Duration::from_secs(3600);
        assert_eq!(job.timeout(hour), hour);
    }

    #[test]
    fn all_parts_apply() {
        let job = read(
            r#"[{"http": ["*.a.example"], "secrets": ["KEY", "OTHER"], "dirs": ["/out"], "enqueue": ["photo.*", "mail.send"], "memory_mb": 64},
                {"http": ["x.a.example", "b.example"], "secrets": ["KEY"], "dirs": ["/out:read"], "enqueue": ["*"], "memory_mb": 32, "timeout": "1m"}]"#,
        );
        let host = |name: &str| job.leaves_host(&Host::Name(name.into()));
        assert!(host("x.a.example") && !host("y.a.example") && !host("b.example"));
        assert!(job.leaves_secret("KEY") && !job.leaves_secret("OTHER"));
        assert_eq!(job.mode("/out", Mode::ReadWrite), Some(Mode::Read));
        assert_eq!(job.mode("/in", Mode::Read), None);
        assert_eq!(job.memory_bytes(), Some(32 << 20));
        assert_eq!(
            job.timeout(Duration::from_secs(3600)),
            Duration::from_secs(60)
        );
        let left = |granted: &[&str]| {
            let granted: Vec<String> = granted.iter().map(|it| (*it).to_owned()).collect();
            job.leaves_enqueue(&granted)
        };
        assert_eq!(
            left(&["photo.resize", "mail.*", "x"]),
            ["mail.send", "photo.resize"]
        );
        assert_eq!(left(&["*"]), ["mail.send", "photo.*"]);
        assert!(left(&[]).is_empty());
    }

    #[test]
    fn refuse_attenuations_that_this_host_does_not_know() {
        for json in [
            r#"{"sockets": []}"#,
            r#"{"http": ["https://a"]}"#,
            r#"{"http": null}"#,
            r#"{"cpu": 5}"#,
            r#"{"memory_mb": -1}"#,
            "[[]]",
            "7",
        ] {
            assert!(Attenuation::parse(json).is_err(), "{json}");
        }
    }
}
