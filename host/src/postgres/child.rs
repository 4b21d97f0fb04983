//! A child process that runs to its end, unless the start that needs it is cancelled.

use std::{
    io,
    process::{Command, Output, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio_util::sync::CancellationToken;

/// How often the child's watcher checks whether the start was cancelled.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Runs a command to its end and returns what it printed. When `cancel` is cancelled, the child gets SIGTERM, and its exit
/// status says so. Blocks.
///
/// # Errors
/// When the command cannot be started or waited for.
pub(super) fn output(command: &mut Command, cancel: &CancellationToken) -> io::Result<Output> {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("no valid process id"))?;
    // The descriptor names this child even after its number was given to another process.
    let handle = pidfd_open(pid, PidfdFlags::empty())?;
    thread::scope(|scope| {
        let (done, ended) = mpsc::channel::<()>();
        scope.spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(LOOK_EVERY) {
                if cancel.is_cancelled() {
                    // It fails only when the child has just ended.
                    let _ = pidfd_send_signal(&handle, Signal::TERM);
                    return;
                }
            }
        });
        let output = child.wait_with_output();
        drop(done);
        output
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    #[test]
    fn a_cancelled_child_ends_and_any_other_returns_what_it_printed() {
        let never = CancellationToken::new();
        let printed = output(Command::new("echo").arg("hello"), &never).unwrap();
        assert_eq!(printed.stdout, b"hello\n");
        let cancelled = CancellationToken::new();
        cancelled.cancel();
        let ended = output(Command::new("sleep").arg("600"), &cancelled).unwrap();
        assert_eq!(ended.status.signal(), Some(libc::SIGTERM));
    }
}
