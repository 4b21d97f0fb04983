//! A job's attenuation: how it restricts the grants and limits of its handler. It can never extend them.

use std::time::Duration;

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::{Host, HostPattern, Mode};

/// A job's attenuation of its handler's grants and limits. Kinds that it does not name are not restricted.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attenuation {
    #[serde(default, deserialize_with = "hosts")]
    http: Option<Vec<HostPattern>>,
    #[serde(default)]
    secrets: Option<Vec<String>>,
    /// Directory paths as the guest sees them; `/out:read` restricts access to reading.
    #[serde(default)]
    dirs: Option<Vec<String>>,
    #[serde(default)]
    env: Option<Vec<String>>,
    /// False removes the handler's state.
    #[serde(default)]
    state: Option<bool>,
    #[serde(default)]
    memory_mb: Option<usize>,
    #[serde(default, deserialize_with = "crate::duration::optional")]
    pub(in crate::sandbox) cpu: Option<Duration>,
    #[serde(default, deserialize_with = "crate::duration::optional")]
    timeout: Option<Duration>,
}

impl Attenuation {
    /// Parses a job's grants.
    ///
    /// # Errors
    /// A message for people that says why this host cannot enforce them.
    pub fn parse(json: &str) -> Result<Self, String> {
        // Serde would read a list as the fields in order.
        let object = serde_json::from_str::<Map<String, Value>>(json).map(Value::Object);
        object.and_then(serde_json::from_value).map_err(|error| {
            format!(
                "this host cannot enforce the job's grants, so it does not run the job: {error}"
            )
        })
    }

    /// The run timeout of the job, given that of its handler.
    pub fn timeout(&self, usual: Duration) -> Duration {
        self.timeout.map_or(usual, |timeout| timeout.min(usual))
    }

    pub(in crate::sandbox) fn memory_bytes(&self) -> Option<usize> {
        self.memory_mb.map(|mb| mb.saturating_mul(1 << 20))
    }

    pub(in crate::sandbox) fn leaves_host(&self, host: &Host) -> bool {
        let covers = |left: &Vec<HostPattern>| left.iter().any(|pattern| pattern.covers(host));
        self.http.as_ref().is_none_or(covers)
    }

    pub(in crate::sandbox) fn leaves_secret(&self, name: &str) -> bool {
        lists(self.secrets.as_ref(), name)
    }

    pub(in crate::sandbox) fn leaves_env(&self, name: &str) -> bool {
        lists(self.env.as_ref(), name)
    }

    pub(in crate::sandbox) fn leaves_state(&self) -> bool {
        self.state != Some(false)
    }

    /// The job's access to the directory at this path; `None` means no access.
    pub(in crate::sandbox) fn mode(&self, at: &str, granted: Mode) -> Option<Mode> {
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
    let texts = Vec::<String>::deserialize(input)?;
    let read = |text: &String| {
        text.parse()
            .map_err(|why| serde::de::Error::custom(format!("http: {text:?}: {why}")))
    };
    texts.iter().map(read).collect::<Result<_, _>>().map(Some)
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
    fn refuse_attenuations_that_this_host_does_not_know() {
        for json in [
            r#"{"sockets": []}"#,
            r#"{"http": ["https://a"]}"#,
            r#"{"http": null}"#,
            r#"{"cpu": 5}"#,
            r#"{"memory_mb": -1}"#,
            "[]",
        ] {
            assert!(Attenuation::parse(json).is_err(), "{json}");
        }
    }
}
