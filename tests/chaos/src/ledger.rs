//! Requests, responses and faults: lines of JSON outside the database.
//!
//! A request is written to the ledger before it is sent, so the ledger contains it even if the request or its response
//! is lost.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::cuts::{At, How};
use super::flows::FlowSpec;
use super::load::JobSpec;
use super::plan::Fault;

/// A line of the ledger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Line {
    Run(Run),
    Sent {
        at_us: i64,
        call: u64,
        request: Box<Request>,
    },
    Answered {
        at_us: i64,
        call: u64,
        response: Response,
    },
    Happened(Incident),
}

/// The settings of the run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) seed: u64,
    pub(super) minutes: f64,
    pub(super) hosts: usize,
    pub(super) producers: usize,
    /// Jobs per second, of all producers together.
    pub(super) rate: u32,
    pub(super) faults: Vec<Fault>,
    pub(super) lease_us: i64,
    pub(super) lost_max: i32,
}

/// A request to the database.
#[expect(
    clippy::large_enum_variant,
    reason = "a request is written once, and not kept in memory"
)]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    Enqueue {
        spec: JobSpec,
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
    /// `None` reschedules to now.
    Reschedule {
        job: i64,
        run_at_us: Option<i64>,
    },
    Signal {
        job: i64,
        /// Identifies the signal: its payload.
        mark: i64,
    },
    EnqueueFlow {
        spec: FlowSpec,
    },
    /// The responses to this request and to the next two contain the number of jobs that were cancelled, retried or
    /// deleted.
    CancelFlow {
        flow: i64,
    },
    /// Jobs that ended at `before_us` or later are left alone.
    RetryFlow {
        flow: i64,
        before_us: i64,
    },
    DeleteFlow {
        flow: i64,
    },
    Pause {
        queue: String,
    },
    Resume {
        queue: String,
    },
}

/// The response to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Response {
    /// An id, a number of jobs, or 1 and 0 for true and false.
    Ok(i64),
    /// Postgres refused it, or it was rolled back.
    Refused(String),
    /// The connection was lost before the response came.
    Unknown(String),
}

/// A fault or another event, from its start to its end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Incident {
    pub(super) from_us: i64,
    pub(super) until_us: i64,
    pub(super) event: Event,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Event {
    HostKilled {
        worker: String,
    },
    HostFrozen {
        worker: String,
        /// The jobs that it was claiming, if it was frozen during a claim.
        #[serde(default)]
        jobs: Vec<i64>,
    },
    HostStopped {
        worker: String,
        status: String,
        clean: bool,
    },
    /// The host exited on its own. `up_us`: how long it had run.
    HostEnded {
        worker: String,
        status: String,
        up_us: i64,
    },
    BackendsTerminated {
        count: u64,
    },
    /// All listening connections.
    ListenersCut {
        count: u64,
    },
    /// For a few seconds, claims of a burst that seemed to wait in line were cancelled. `count`: how many.
    LineCancelled {
        count: u64,
    },
    /// The hosts of this job were killed until it failed as lost.
    JobCrashed {
        job: i64,
        kills: u64,
    },
    /// Two hosts shared this id, from the start of the second one. `exits`: each time that one of them exited on its
    /// own.
    IdShared {
        worker: String,
        exits: Vec<Exit>,
    },
    /// From the crash until the server answers again. `how`: the fault.
    ServerCrashed {
        how: Fault,
    },
    /// The transaction of an attempt's effects on this host.
    EffectsCut {
        at: At,
        how: How,
        worker: String,
    },
    SleepersForgotten {
        rows: u64,
    },
    ModuleReplaced {
        sha256: String,
    },
    /// A fault that could not be injected at this moment.
    Skipped {
        fault: Fault,
        why: String,
    },
    /// After this, no producer enqueues and no fault starts.
    LoadEnded,
}

/// One of two hosts that share an id exited on its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Exit {
    /// 0 or 1.
    pub(super) host: usize,
    pub(super) from_us: i64,
    pub(super) until_us: i64,
}

/// The ledger file.
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

    /// Writes a request, and returns the number of the call for its response.
    pub(super) fn sent(&self, request: Request) -> Result<u64> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let at_us = now_us();
        self.write(&Line::Sent {
            at_us,
            call,
            request: Box::new(request),
        })?;
        Ok(call)
    }

    pub(super) fn answered(&self, call: u64, response: Response) -> Result<()> {
        let at_us = now_us();
        self.write(&Line::Answered {
            at_us,
            call,
            response,
        })
    }

    /// Writes an event that started at `from_us` and ends now.
    pub(super) fn happened(&self, from_us: i64, event: Event) -> Result<()> {
        let until_us = now_us();
        self.write(&Line::Happened(Incident {
            from_us,
            until_us,
            event,
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

/// Microseconds since 1970, by the clock that Postgres, the hosts and this program share.
pub(super) fn now_us() -> i64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_micros() as i64)
}
