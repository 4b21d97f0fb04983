//! Runs a child process to its end, unless the start that needs it is cancelled.

use std::{
    io,
    process::{Command, Output, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio_util::sync::CancellationToken;

/// The interval of checks for cancellation.
const CHECK_EVERY: Duration = Duration::from_millis(10);

/// Runs a command to its end and returns its output. If `cancel` is cancelled, the child gets SIGTERM, and its exit
/// status shows that. Blocks.
///
/// # Errors
/// If the command cannot be started or waited for.
pub(super) fn output(command: &mut Command, cancel: &CancellationToken) -> io::Result<Output> {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| io::Error::other("no valid process id"))?;
    // The descriptor refers to this child even after its pid was reused.
    let handle = pidfd_open(pid, PidfdFlags::empty())?;
    thread::scope(|scope| {
        let (done, ended) = mpsc::channel::<()>();
        scope.spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(CHECK_EVERY) {
                if cancel.is_cancelled() {
                    // It fails only if the child has just ended.
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
    fn a_cancelled_child_ends_and_others_return_their_output() {
        let never = CancellationToken::new();
        let printed = output(Command::new("echo").arg("hello"), &never).unwrap();
        assert_eq!(printed.stdout, b"hello\n");
        let cancelled = CancellationToken::new();
        cancelled.cancel();
        let ended = output(Command::new("sleep").arg("600"), &cancelled).unwrap();
        assert_eq!(ended.status.signal(), Some(libc::SIGTERM));
    }
}
