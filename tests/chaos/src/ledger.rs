//! What was asked, what was answered, and what was done to the system: lines of JSON outside of the database.
//!
//! A question is written before it is sent. So whatever is lost on the way, the ledger has at least the question.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::load::Wish;
use super::plan::Fault;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    Run(Run),
    Asked {
        at_us: i64,
        call: u64,
        ask: Ask,
    },
    Answered {
        at_us: i64,
        call: u64,
        answer: Answer,
    },
    Happened(Happened),
}

/// What the run is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) seed: u64,
    pub(super) minutes: f64,
    pub(super) hosts: usize,
    pub(super) producers: usize,
    /// Jobs a second, of all producers together.
    pub(super) rate: u32,
    pub(super) faults: Vec<Fault>,
    pub(super) lease_us: i64,
    pub(super) lost_max: i32,
}

/// A question to the database.
#[expect(
    clippy::large_enum_variant,
    reason = "a question is written once and kept nowhere"
)]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ask {
    Enqueue {
        wish: Wish,
        run_at_us: Option<i64>,
    },
    Cancel {
        job: i64,
    },
    Complete {
        job: i64,
        mark: String,
    },
    Fail {
        job: i64,
        mark: String,
    },
    Retry {
        job: i64,
    },
    /// Without a time: at once.
    Reschedule {
        job: i64,
        run_at_us: Option<i64>,
    },
    Pause {
        queue: String,
    },
    Resume {
        queue: String,
    },
}

/// What came back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    /// An id, or 1 and 0 for true and false.
    Ok(i64),
    /// Postgres says that it was not done, or it was rolled back.
    Refused(String),
    /// The connection was lost before the answer came.
    Unknown(String),
}

/// Something that was done to the system, from its start to its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Happened {
    pub(super) from_us: i64,
    pub(super) until_us: i64,
    pub(super) what: What,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum What {
    HostKilled {
        worker: String,
    },
    HostFrozen {
        worker: String,
        /// Those that it was claiming, where it was frozen in a claim.
        #[serde(default)]
        jobs: Vec<i64>,
    },
    HostStopped {
        worker: String,
        status: String,
        clean: bool,
    },
    /// Nobody had told it to. `up_us`: how long it had been there.
    HostEnded {
        worker: String,
        status: String,
        up_us: i64,
    },
    BackendsTerminated {
        count: u64,
    },
    /// All that listened.
    ListenersCut {
        count: u64,
    },
    /// A burst, until nothing of it was left. `count`: how many of it were cancelled that seemed to stand in line.
    LineCancelled {
        count: u64,
    },
    /// Two hosts had this id; from the start of the second on. What each of them has ended of itself is in `exits`.
    IdShared {
        worker: String,
        exits: Vec<Exit>,
    },
    /// Until it answers again. `how`: the fault.
    ServerCrashed {
        how: Fault,
    },
    SleepersForgotten {
        rows: u64,
    },
    ModuleReplaced {
        sha256: String,
    },
    /// It could not be done at this moment.
    Skipped {
        fault: Fault,
        why: String,
    },
    /// Nobody enqueues any more, no fault starts any more.
    LoadEnded,
}

/// One end of one of two hosts that share an id, which nobody had asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Exit {
    /// 0 or 1.
    pub(super) host: usize,
    pub(super) from_us: i64,
    pub(super) until_us: i64,
}

/// The file.
pub(super) struct Ledger {
    file: Mutex<File>,
    calls: AtomicU64,
}

impl Ledger {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let file = OpenOptions::new()
            .append(true)
            .create_new(true)
            .open(path)
            .with_context(|| format!("create {}", path.display()))?;
        Ok(Self {
            file: Mutex::new(file),
            calls: AtomicU64::new(1),
        })
    }

    /// Writes a question down; the number goes with its answer.
    pub(super) fn asked(&self, ask: Ask) -> Result<u64> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let at_us = now_us();
        self.write(&Line::Asked { at_us, call, ask })?;
        Ok(call)
    }

    pub(super) fn answered(&self, call: u64, answer: Answer) -> Result<()> {
        let at_us = now_us();
        self.write(&Line::Answered {
            at_us,
            call,
            answer,
        })
    }

    /// Something has happened since `from_us`.
    pub(super) fn happened(&self, from_us: i64, what: What) -> Result<()> {
        let until_us = now_us();
        self.write(&Line::Happened(Happened {
            from_us,
            until_us,
            what,
        }))
    }

    pub(super) fn write(&self, line: &Line) -> Result<()> {
        let mut text = serde_json::to_string(line)?;
        text.push('\n');
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.write_all(text.as_bytes())
            .context("write to the ledger")
    }
}

/// Microseconds since 1970, by the clock that Postgres and the hosts share with us.
pub(super) fn now_us() -> i64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as i64)
}
