//! CPU time of a host by threads, and of a Postgres server by processes, as counted by the kernel.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

/// CPU time, user and system.
pub(super) type Seconds = f64;

/// USER_HZ, the unit of /proc/*/stat: 100 on every architecture that Rust and wasmtime support.
const TICKS_PER_S: f64 = 100.0;

/// Name prefix of guest threads; see `host/src/sandbox/engine.rs`.
const GUEST_THREADS: &str = "rouse-guest";

/// CPU time of a host since its start.
#[derive(Clone, Copy, Default)]
pub(super) struct HostCpu {
    pub(super) total: Seconds,
    /// CPU time of the guest threads.
    pub(super) guests: Seconds,
}

impl HostCpu {
    /// CPU time of all other threads, which talk to Postgres and make decisions.
    pub(super) fn control(self) -> Seconds {
        self.total - self.guests
    }

    pub(super) fn since(self, before: Self) -> Self {
        Self {
            total: self.total - before.total,
            guests: self.guests - before.guests,
        }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            total: self.total + other.total,
            guests: self.guests + other.guests,
        }
    }
}

/// CPU time of a host, including ended threads.
pub(super) fn host(pid: u32) -> Result<HostCpu> {
    let stat = Stat::read(&format!("/proc/{pid}/stat"))?;
    let mut guests = 0.0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        // A thread may end between the listing and the reading.
        let Ok(name) = fs::read_to_string(task.join("comm")) else {
            continue;
        };
        if name.starts_with(GUEST_THREADS) {
            guests += running(&task).unwrap_or(0.0);
        }
    }
    Ok(HostCpu {
        total: stat.own,
        guests,
    })
}

/// CPU time of a Postgres server: the postmaster, its children, and ended children, without the processes in `without`.
pub(super) fn postgres(postmaster: u32, without: &[u32]) -> Result<Seconds> {
    let stat = Stat::read(&format!("/proc/{postmaster}/stat"))?;
    let mut total = running(Path::new(&format!("/proc/{postmaster}")))? + stat.ended_children;
    for process in fs::read_dir("/proc")? {
        let process = process?;
        let Some(pid) = process
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        if without.contains(&pid) {
            continue;
        }
        // A process may end between the listing and the reading.
        let Ok(stat) = Stat::read(&format!("/proc/{pid}/stat")) else {
            continue;
        };
        if stat.parent == postmaster {
            total += running(&process.path()).unwrap_or(stat.own);
        }
    }
    Ok(total)
}

/// CPU time of one thread with nanosecond resolution; `stat` counts in units of 10 ms.
fn running(task: &Path) -> Result<Seconds> {
    let Ok(text) = fs::read_to_string(task.join("schedstat")) else {
        return Ok(Stat::read(&task.join("stat").to_string_lossy())?.own);
    };
    let ns: f64 = text
        .split_whitespace()
        .next()
        .and_then(|ns| ns.parse().ok())
        .with_context(|| format!("read {}/schedstat", task.display()))?;
    Ok(ns / 1e9)
}

struct Stat {
    parent: u32,
    own: Seconds,
    ended_children: Seconds,
}

impl Stat {
    fn read(path: &str) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
        Self::parse(&text).with_context(|| format!("parse {path}"))
    }

    /// See proc(5): the name of the process is in parentheses, and may contain any character.
    fn parse(text: &str) -> Option<Self> {
        let (_, fields) = text.rsplit_once(") ")?;
        let fields: Vec<&str> = fields.split_whitespace().collect();
        let ticks = |index: usize| fields.get(index)?.parse::<f64>().ok();
        Some(Self {
            parent: fields.get(1)?.parse().ok()?,
            own: (ticks(11)? + ticks(12)?) / TICKS_PER_S,
            ended_children: (ticks(13)? + ticks(14)?) / TICKS_PER_S,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_a_process_name_with_parentheses_and_spaces() {
        let text = "7 (a) b (c)) S 3 7 7 0 -1 4194560 1 2 3 4 150 50 20 5 20 0 1 0 9 0 0";
        let stat = Stat::parse(text).unwrap();
        assert_eq!(stat.parent, 3);
        assert_eq!(stat.own, 2.0);
        assert_eq!(stat.ended_children, 0.25);
    }

    #[test]
    fn our_own_cpu_time_grows_with_work() {
        let own = |pid| host(pid).unwrap().total;
        let before = own(std::process::id());
        let mut sum = 0_u64;
        while own(std::process::id()) < before + 0.02 {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(sum > 0);
    }
}
