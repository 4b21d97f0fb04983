//! `--where KEY=VALUE`: filters the handlers of the fleet.

use serde_json::Value;

use crate::job::{is_pattern, pattern_covers};
use crate::sandbox::GRANTS;

/// One condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Filter {
    /// A name, or a pattern such as `image.*`.
    Handler(String),
    /// Its version.
    Version(String),
    /// A queue that its worker serves.
    Queue(String),
    /// A tag that its worker has.
    Tag(String),
    /// Its worker's id.
    Worker(String),
    /// A capability that its operator grants it.
    Grant(String),
}

impl std::str::FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = || {
            "expected a condition such as handler=image.*, version=1.2.0, queue=mail, tag=gpu, worker=mail-1 or grant=http".to_string()
        };
        let pair = text.split_once('=').filter(|(_, value)| !value.is_empty());
        let (key, value) = pair.ok_or_else(invalid)?;
        let value = value.to_string();
        match key {
            "handler" if is_pattern(&value) => Ok(Self::Handler(value)),
            "handler" => Err(format!(
                "{value:?} is neither a handler's name nor a pattern such as image.* or *"
            )),
            "version" => Ok(Self::Version(value)),
            "queue" => Ok(Self::Queue(value)),
            "tag" => Ok(Self::Tag(value)),
            "worker" => Ok(Self::Worker(value)),
            "grant" if GRANTS.contains(&value.as_str()) => Ok(Self::Grant(value)),
            "grant" => Err(format!(
                "{value:?} is not a capability; expected one of {}",
                GRANTS.join(", ")
            )),
            _ => Err(invalid()),
        }
    }
}

impl Filter {
    /// True for a row of `rouse.handlers` that matches.
    pub(super) fn passes(&self, row: &Value) -> bool {
        let has = |key: &str, wanted: &str| {
            let mut all = row[key].as_array().into_iter().flatten();
            all.any(|value| value == wanted)
        };
        match self {
            Self::Handler(pattern) => {
                pattern_covers(pattern, row["handler"].as_str().unwrap_or_default())
            }
            Self::Version(version) => row["version"] == **version,
            // A worker without queues serves all of them.
            Self::Queue(queue) => {
                row["queues"].as_array().is_none_or(Vec::is_empty) || has("queues", queue)
            }
            Self::Tag(tag) => has("tags", tag),
            Self::Worker(id) => row["worker_id"] == **id,
            Self::Grant(grant) => has("grants", grant),
        }
    }

    /// True for a row of `rouse.backlog` that matches. No worker has its handler, so it has neither version nor worker.
    pub(super) fn passes_waiting(&self, row: &Value) -> bool {
        match self {
            Self::Queue(queue) => row["queue"] == **queue,
            Self::Handler(_) | Self::Tag(_) => self.passes(row),
            Self::Version(_) | Self::Worker(_) | Self::Grant(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_condition_looks_at_its_own_column() {
        let row = json!({
            "handler": "image.crop", "version": "1.2.0", "worker_id": "a", "queues": ["mail"], "tags": ["gpu"],
            "grants": ["http", "state"],
        });
        for (text, passes) in [
            ("handler=image.*", true),
            ("handler=image.crop", true),
            ("handler=text.*", false),
            ("version=1.2.0", true),
            ("version=1.2", false),
            ("queue=mail", true),
            ("queue=other", false),
            ("tag=gpu", true),
            ("tag=big", false),
            ("worker=a", true),
            ("worker=b", false),
            ("grant=http", true),
            ("grant=files", false),
        ] {
            let filter: Filter = text.parse().unwrap();
            assert_eq!(filter.passes(&row), passes, "{text}");
        }
        let everywhere = json!({"handler": "x", "queues": []});
        assert!("queue=any".parse::<Filter>().unwrap().passes(&everywhere));
    }

    #[test]
    fn an_invalid_condition_is_refused_with_an_example() {
        assert!(
            "grant=net"
                .parse::<Filter>()
                .unwrap_err()
                .contains("files, http")
        );
        for text in [
            "image.*",
            "color=red",
            "handler=Image",
            "queue=",
            "tag=",
            "worker=",
        ] {
            let error = text.parse::<Filter>().unwrap_err();
            assert!(error.contains("such as"), "{error}");
        }
    }
}
