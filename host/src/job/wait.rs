//! What a suspended attempt waits for, and the jobs that an attempt enqueues.

use std::time::SystemTime;

use serde_json::json;

use super::{JobId, JsonText};

/// Why an attempt is suspended: a step that waits.
#[derive(Debug, Clone, PartialEq)]
pub struct Suspension {
    /// The name of the step; of several calls, that of the first.
    pub step: String,
    /// What it waits for.
    pub wait: Wait,
    /// True if an earlier attempt has recorded the start of the wait.
    pub is_recorded: bool,
}

/// What a suspended job waits for.
#[derive(Debug, Clone, PartialEq)]
pub enum Wait {
    /// A time, by the database's clock.
    Sleep {
        /// The end of the wait.
        until: SystemTime,
    },
    /// A signal.
    Signal {
        /// The name of the signal.
        name: String,
        /// The time at which the wait times out (database clock); `None`: never.
        until: Option<SystemTime>,
    },
    /// The ends of the chains of jobs that it has called.
    Calls {
        /// The jobs that an earlier attempt has called. Further jobs are enqueued with the settlement.
        jobs: Vec<JobId>,
    },
}

impl Suspension {
    /// The time at which the wait ends in any case. `None`: never.
    pub fn until(&self) -> Option<SystemTime> {
        match &self.wait {
            Wait::Sleep { until } => Some(*until),
            Wait::Signal { until, .. } => *until,
            Wait::Calls { .. } => None,
        }
    }

    /// The wait as it is stored (migrations/functions/suspensions.sql), as JSON.
    pub fn to_json(&self) -> JsonText {
        let mut stored = json!({"kind": self.wait.kind().as_str(), "step": self.step});
        match &self.wait {
            Wait::Sleep { .. } => {}
            Wait::Signal { name, .. } => stored["name"] = json!(name),
            Wait::Calls { jobs } => {
                stored["jobs"] = jobs.iter().map(|job| job.0).collect();
            }
        }
        if let Some(until) = self.until() {
            stored["until_ms"] = json!(unix_ms(until));
        }
        if self.is_recorded {
            stored["is_recorded"] = json!(true);
        }
        JsonText(stored.to_string())
    }
}

impl Wait {
    /// Its kind.
    pub fn kind(&self) -> WaitKind {
        match self {
            Self::Sleep { .. } => WaitKind::Sleep,
            Self::Signal { .. } => WaitKind::Signal,
            Self::Calls { .. } => WaitKind::Call,
        }
    }
}

/// The kind of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitKind {
    /// For a time.
    Sleep,
    /// For a signal.
    Signal,
    /// For jobs that were called.
    Call,
}

impl WaitKind {
    /// The word for logs, listings and the database.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sleep => "sleep",
            Self::Signal => "signal",
            Self::Call => "call",
        }
    }

    /// Parses a word of [`as_str`](Self::as_str). `None` for any other word.
    pub fn parse(word: &str) -> Option<Self> {
        let kinds = [Self::Sleep, Self::Signal, Self::Call];
        kinds.into_iter().find(|kind| kind.as_str() == word)
    }
}

/// The recorded start of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedWait {
    /// Its kind.
    pub kind: WaitKind,
    /// The time at which it ends in any case (database clock). `None`: never.
    pub until: Option<SystemTime>,
}

/// A step that an earlier attempt recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordedStep {
    /// It is done.
    Done {
        /// The size of its result.
        bytes: usize,
        /// Its result, as JSON. `None` if it is too large to be read together with the others.
        result: Option<Vec<u8>>,
    },
    /// It waits.
    Waits(RecordedWait),
}

/// The state of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReturnedCall {
    /// The called job has not ended.
    Pending(JobId),
    /// It has ended: JSON, `{"output": …}` or `{"failed": {…}}`.
    Done(Vec<u8>),
}

/// The end of a chain that the job has waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentEnd {
    /// Its name in `after`.
    pub name: String,
    /// The last job of the chain. `None` if it is no longer kept.
    pub job: Option<JobId>,
    /// The state of that job.
    pub state: Option<String>,
    /// Its result or its error, as JSON.
    pub output: Option<JsonText>,
}

/// Milliseconds since 1970, rounded up so that no wait ends early; 0 for earlier times.
fn unix_ms(at: SystemTime) -> u64 {
    let since = at
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// A job that an attempt enqueues. It is committed with the outcome.
#[derive(Debug, Clone, PartialEq)]
pub struct NewJob {
    /// Its relation to the job of the attempt.
    pub kind: NewJobKind,
    /// Its handler.
    pub handler: String,
    /// Its payload.
    pub payload: JsonText,
    /// Further arguments of `rouse.enqueue`, a JSON object. `None`: their defaults.
    pub options: Option<JsonText>,
}

/// The relation of a new job to the job of the attempt that enqueues it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewJobKind {
    /// It runs independently.
    Child,
    /// The attempt's job waits for it, in this step.
    Call {
        /// The name of the step.
        step: String,
    },
    /// It continues the chain.
    Next,
}

impl NewJobKind {
    /// The word that `rouse.settle` takes.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Child => "child",
            Self::Call { .. } => "call",
            Self::Next => "next",
        }
    }
}

impl NewJob {
    /// The number of bytes that its settlement sends.
    pub fn bytes(&self) -> usize {
        let options = self.options.as_ref().map_or(0, |options| options.0.len());
        self.handler.len() + self.payload.0.len() + options
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::Value;

    use super::*;

    #[test]
    fn a_stored_wait_names_its_step_and_never_ends_early() {
        let until = SystemTime::UNIX_EPOCH + Duration::from_nanos(7_000_000_001);
        let signal = Wait::Signal {
            name: "go".into(),
            until: None,
        };
        let calls = Wait::Calls {
            jobs: vec![JobId(3)],
        };
        for (wait, is_recorded, stored) in [
            (
                Wait::Sleep { until },
                true,
                json!({"kind": "sleep", "step": "s", "until_ms": 7001, "is_recorded": true}),
            ),
            (
                signal,
                false,
                json!({"kind": "signal", "step": "s", "name": "go"}),
            ),
            (
                calls,
                false,
                json!({"kind": "call", "step": "s", "jobs": [3]}),
            ),
        ] {
            let suspension = Suspension {
                step: "s".into(),
                wait,
                is_recorded,
            };
            let json: Value = serde_json::from_str(&suspension.to_json().0).expect("JSON");
            assert_eq!(json, stored);
        }
    }
}
