//! Reads files that settings name, for a limited time. Opening a pipe waits until somebody opens its other end, and a
//! mount may never respond: a host that waits for ever reports nothing, and does not stop at a signal either. Pipes are
//! not refused, because shells and secret managers pass secrets through them (`<(…)`, `/dev/stdin`).

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Long enough for a program that asks a server or a person for a secret before it writes it to a pipe.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs `read`, which opens or reads a file, on a thread of its own, and waits for it for at most 30 s. After that, the
/// thread stays blocked until the file can be read or the process ends.
///
/// # Errors
/// The error of `read`; or of kind `TimedOut` after 30 s.
pub(crate) fn read_in_time<T: Send + 'static>(
    read: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    read_within(READ_TIMEOUT, read)
}

fn read_within<T: Send + 'static>(
    timeout: Duration,
    read: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (sender, result) = mpsc::channel();
    let reading = move || {
        // Nobody may be waiting for it any more.
        let _ = sender.send(read());
    };
    thread::Builder::new()
        .name("read file".into())
        .spawn(reading)?;
    match result.recv_timeout(timeout) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!(
                "it could not be read within {} s: nobody writes to this pipe, or its file system does not respond",
                timeout.as_secs()
            ),
        )),
        Err(RecvTimeoutError::Disconnected) => Err(io::Error::other("reading it has panicked")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    /// A named pipe in a folder that is removed when dropped.
    fn pipe() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let (mode, kind) = (
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            rustix::fs::FileType::Fifo,
        );
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
        (dir, pipe)
    }

    #[test]
    fn a_pipe_that_nobody_writes_to_is_given_up() {
        let (_dir, pipe) = pipe();
        let path = pipe.clone();
        let read = read_within(Duration::from_millis(10), move || fs::read(path));
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
        // Lets the thread end.
        fs::write(&pipe, "late").unwrap();
    }

    #[test]
    fn a_pipe_is_read_when_somebody_writes_to_it() {
        let (_dir, pipe) = pipe();
        let path = pipe.clone();
        // Waits for the reader.
        let writer = thread::spawn(move || fs::write(path, "secret"));
        assert_eq!(read_in_time(move || fs::read(pipe)).unwrap(), b"secret");
        writer.join().unwrap().unwrap();
    }
}
