//! `[limits]` and `[handlers."…".limits]`: what attempts may use.

use std::time::Duration;

use serde::Deserialize;

use super::checks::within;
use crate::sandbox::{Limits, LimitsSet};

/// The limits as written. Every key may be left out.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LimitsTable {
    /// Memory of an attempt in MiB; default 128.
    memory_mb: Option<usize>,
    /// Memory of an attempt in MiB after one that ran out of it; default twice `memory_mb`.
    memory_retry_mb: Option<usize>,
    /// CPU time of an attempt; default 10 minutes.
    #[serde(default, deserialize_with = "crate::duration::optional")]
    cpu: Option<Duration>,
    /// The largest result; default 4 MiB.
    result_bytes: Option<usize>,
    /// What an attempt may print and log; default 256 KiB.
    log_bytes: Option<usize>,
    /// Lines of that within a second; default 1,000.
    log_lines_per_second: Option<u32>,
    /// Elements of a table; default 20,000, which is the most.
    table_elements: Option<usize>,
    /// What one call may carry to the host; default 8 MiB.
    hostcall_bytes: Option<usize>,
    /// Open files at once; default 64.
    files: Option<usize>,
    /// Open files, streams and pollables at once; default 1,024.
    resources: Option<usize>,
    /// Handles at once; default 4,096.
    handles: Option<usize>,
    /// Of one request for random numbers; default 1 MiB.
    random_bytes: Option<u64>,
    /// Steps of a job; default 1,000.
    steps: Option<usize>,
    /// The result of a step; default 256 KiB.
    step_bytes: Option<usize>,
    /// The results of all steps of a job; default 8 MiB.
    steps_bytes: Option<usize>,
    /// Requests over HTTP; default 1,000.
    http_requests: Option<usize>,
    /// What all of them send and receive; default 1 GiB.
    http_bytes: Option<u64>,
    /// The body of one request or response; default 256 MiB.
    http_body_bytes: Option<u64>,
    /// How often an attempt may ask for its state; default 10,000.
    state_calls: Option<usize>,
    /// What it may read and write of it; default 64 MiB.
    state_bytes: Option<usize>,
}

impl LimitsTable {
    /// For the sandbox.
    pub(super) fn set(&self) -> LimitsSet {
        LimitsSet {
            memory_bytes: self.memory_mb.map(|mb| mb << 20),
            memory_retry_bytes: self.memory_retry_mb.map(|mb| mb << 20),
            cpu: self.cpu,
            result_bytes: self.result_bytes,
            log_bytes: self.log_bytes,
            log_lines_per_second: self.log_lines_per_second,
            table_elements: self.table_elements,
            hostcall_bytes: self.hostcall_bytes,
            files: self.files,
            resources: self.resources,
            handles: self.handles,
            random_bytes: self.random_bytes,
            steps: self.steps,
            step_bytes: self.step_bytes,
            steps_bytes: self.steps_bytes,
            http_requests: self.http_requests,
            http_bytes: self.http_bytes,
            http_body_bytes: self.http_body_bytes,
            state_calls: self.state_calls,
            state_bytes: self.state_bytes,
        }
    }

    /// Says what is wrong, with the key. `other`: what holds where nothing is set here.
    pub(super) fn check(&self, table: &str, other: &Limits) -> Result<(), String> {
        let count = |value: Option<usize>| value.map(|value| value as u64);
        let cpu_ms = self
            .cpu
            .map(|cpu| u64::try_from(cpu.as_millis()).unwrap_or(u64::MAX));
        let memory_mb = self.memory_mb.unwrap_or(other.memory_bytes >> 20) as u64;
        // Where only the memory is set, what the next attempt may have follows from it.
        for (key, value, min, max) in [
            ("memory_mb", count(self.memory_mb), 1, 4096),
            (
                "memory_retry_mb",
                count(self.memory_retry_mb),
                memory_mb,
                4096,
            ),
            ("cpu", cpu_ms, 1, 30 * 86_400_000),
            ("result_bytes", count(self.result_bytes), 2, 64 << 20),
            ("log_bytes", count(self.log_bytes), 0, 64 << 20),
            (
                "log_lines_per_second",
                self.log_lines_per_second.map(u64::from),
                1,
                1_000_000,
            ),
            ("table_elements", count(self.table_elements), 1, 20_000),
            (
                "hostcall_bytes",
                count(self.hostcall_bytes),
                64 << 10,
                128 << 20,
            ),
            ("files", count(self.files), 0, 100_000),
            ("resources", count(self.resources), 1, 100_000),
            ("handles", count(self.handles), 16, 1_000_000),
            ("random_bytes", self.random_bytes, 32, 64 << 20),
            ("steps", count(self.steps), 0, 100_000),
            ("step_bytes", count(self.step_bytes), 2, 8 << 20),
            ("steps_bytes", count(self.steps_bytes), 2, 64 << 20),
            ("http_requests", count(self.http_requests), 0, 1_000_000),
            ("http_bytes", self.http_bytes, 1024, 1 << 40),
            ("http_body_bytes", self.http_body_bytes, 1024, 1 << 40),
            ("state_calls", count(self.state_calls), 0, 1_000_000),
            ("state_bytes", count(self.state_bytes), 0, 1 << 30),
        ] {
            let unit = match key {
                "cpu" => " ms",
                "memory_retry_mb" => " (memory_mb is the least)",
                _ => "",
            };
            within(&format!("{table}.{key}"), value, min, max, unit)?;
        }
        Ok(())
    }
}
