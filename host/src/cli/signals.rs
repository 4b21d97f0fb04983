//! SIGTERM, SIGINT and SIGHUP, for long-running commands.

use std::future::pending;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;

use crate::worker::Stop;

/// SIGTERM, SIGINT and SIGHUP since [`Signals::install`].
pub(super) struct Signals {
    term: Signal,
    int: Signal,
    /// `None` if SIGHUP is ignored: since the start of the process (`nohup`), or after the first signal, because a
    /// terminal that is closed may send it more than once. Its handler stays installed.
    hup: Option<Signal>,
}

impl Signals {
    /// Installs the handlers. After that, a signal no longer ends the process automatically. A long-running command
    /// calls this before it starts anything, so that it can shut down everything that it has started.
    ///
    /// # Errors
    /// If the system refuses a handler.
    pub(super) fn install() -> anyhow::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hup: match is_ignored(libc::SIGHUP) {
                true => None,
                false => Some(signal(SignalKind::hangup())?),
            },
        })
    }

    /// Waits for the next signal.
    pub(super) async fn next(&mut self) {
        let Self { term, int, hup } = self;
        let hung_up = async {
            match hup.as_mut() {
                Some(hup) => _ = hup.recv().await,
                None => pending().await,
            }
        };
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
            () = hung_up => {}
        }
        *hup = None;
    }

    /// Runs `work` to its end. If a signal comes first, drops it and returns `None`.
    pub(super) async fn unless<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.next() => None,
            done = work => Some(done),
        }
    }

    /// Drains on the first signal, and stops running attempts on the second.
    pub(super) async fn stop(mut self, stop: Stop) {
        self.next().await;
        info!(
            "stopping: no new attempts start, running ones are finished (a second signal stops them too)"
        );
        stop.drain();
        self.next().await;
        stop.now();
    }
}

/// Logs that a command ended before it started its work.
pub(super) fn stopped_early() {
    info!("stopped before anything was started");
}

/// True if this process was started with this signal ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status");
    status.is_ok_and(|status| ignores(&status, signal))
}

/// True if a process with this `/proc/PID/status` ignores the signal.
fn ignores(status: &str, signal: i32) -> bool {
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| (mask >> (signal - 1)) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_status_of_the_process() {
        let nohup =
            "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n";
        assert!(ignores(nohup, libc::SIGHUP));
        assert!(ignores(nohup, libc::SIGPIPE));
        assert!(!ignores(nohup, libc::SIGINT));
        assert!(!ignores("", libc::SIGHUP));
    }
}
