//! Output streams of files: closed once the attempt has to stop, and limited by the quota of their directory.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::replace;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use bytes::Bytes;
use rustix::io::{Errno, ReadWriteFlags, pwritev2};
use tokio::sync::OwnedSemaphorePermit;
use wasmtime_wasi::async_trait;
use wasmtime_wasi::p2::{OutputStream, Pollable, StreamError, StreamResult};
use wasmtime_wasi::runtime::AbortOnDropJoinHandle;

use super::disk::Disk;
use super::fds::{InQuota, SharedFile, no_space};
use crate::sandbox::capability::output::{WRITE_BYTES_MAX, too_much};
use crate::sandbox::grants::quota::{Charge, Size};

/// An output stream of a file.
pub(super) struct FileOutput {
    disk: Disk,
    file: SharedFile,
    /// The position of the next bytes; `None` appends.
    position: Option<u64>,
    /// The directory's quota, if any.
    quota: Option<Arc<InQuota>>,
    _permit: OwnedSemaphorePermit,
    state: State,
}

enum State {
    Ready,
    /// A write is in progress, which started at this position.
    Writing {
        done: AbortOnDropJoinHandle<Option<Written>>,
        from: Option<u64>,
    },
    /// The last write did not fit into the quota. Another one may.
    Full,
    Failed(io::Error),
    Closed,
}

/// The end of a write.
enum Written {
    Done(io::Result<()>),
    /// It did not fit into the quota, and nothing was written.
    Full,
}

impl FileOutput {
    pub(super) fn new(
        disk: Disk,
        file: SharedFile,
        position: Option<u64>,
        quota: Option<Arc<InQuota>>,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            disk,
            file,
            position,
            quota,
            _permit: permit,
            state: State::Ready,
        }
    }

    /// Returns the error of the last write, once.
    fn take_error(&mut self) -> StreamResult<()> {
        match replace(&mut self.state, State::Closed) {
            State::Closed => Err(StreamError::Closed),
            State::Failed(error) => Err(StreamError::LastOperationFailed(error.into())),
            State::Full => {
                self.state = State::Ready;
                Err(StreamError::LastOperationFailed(no_space().into()))
            }
            state @ (State::Ready | State::Writing { .. }) => {
                self.state = state;
                Ok(())
            }
        }
    }
}

#[async_trait]
impl Pollable for FileOutput {
    async fn ready(&mut self) {
        if let State::Writing { done, from } = &mut self.state {
            let from = *from;
            self.state = match done.await {
                Some(Written::Done(Ok(()))) => State::Ready,
                Some(Written::Done(Err(error))) => State::Failed(error),
                Some(Written::Full) => {
                    self.position = from;
                    State::Full
                }
                None => State::Closed,
            };
        }
    }
}

#[async_trait]
impl OutputStream for FileOutput {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        if bytes.len() > self.check_write()? {
            return Err(too_much());
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let (from, len) = (self.position, bytes.len() as u64);
        self.position = from.map(|at| at.saturating_add(len));
        // The growth is counted on the thread that writes, because measuring a directory may take a long time.
        let (quota, file) = (self.quota.clone(), self.file.clone());
        let count = move || {
            let quota = quota.as_deref();
            quota
                .map(|quota| charge(quota, file.file(), from, len))
                .transpose()
        };
        let file = self.file.clone();
        let done = self.disk.change(count, move |charge| {
            // The charge counts as under way until the write is done.
            let Ok(_charge) = charge else {
                return Written::Full;
            };
            Written::Done(match from {
                Some(position) => file.file().write_all_at(&bytes, position),
                None => append(file.file(), &bytes),
            })
        });
        self.state = State::Writing { done, from };
        Ok(())
    }

    // Earlier writes may still be in progress.
    fn flush(&mut self) -> StreamResult<()> {
        self.take_error()
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        if self.disk.abort.reason().is_some() {
            return Err(StreamError::Closed);
        }
        self.take_error()?;
        match self.state {
            State::Ready => Ok(WRITE_BYTES_MAX),
            State::Writing { .. } | State::Full | State::Failed(_) | State::Closed => Ok(0),
        }
    }

    async fn cancel(&mut self) {
        if let State::Writing { done, .. } = replace(&mut self.state, State::Closed) {
            // A started write is completed.
            done.cancel().await;
        }
    }
}

/// Counts the growth of a file by a write.
fn charge(quota: &InQuota, file: &File, from: Option<u64>, bytes: u64) -> Result<Charge, ()> {
    let more = match from {
        None => bytes,
        Some(position) => {
            // A write starts only after the previous one has ended, so this is the size of the file.
            let size = file.metadata().map_or(0, |metadata| metadata.len());
            position.saturating_add(bytes).saturating_sub(size)
        }
    };
    quota.charge(Size::bytes(more))
}

/// Appends to a file, at whatever its end is at that time.
fn append(file: &File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match pwritev2(file, &[IoSlice::new(bytes)], 0, ReadWriteFlags::APPEND) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            // An old kernel, or a file system without support.
            Err(Errno::NOSYS | Errno::NOTSUP) => {
                return file.write_all_at(bytes, file.metadata()?.len());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::disk::Threads;
    use super::super::fds::{OpenFile, unlimited};
    use super::*;
    use crate::job::AbortReason;
    use crate::sandbox::capability::LogSource;
    use crate::sandbox::capability::log::GuestLog;
    use crate::sandbox::grants::quota::{Ledger, Ledgers};
    use crate::sandbox::grants::{Quota, Root};
    use crate::sandbox::{AbortHandle, Limits};

    /// A file in a directory that may contain 100 bytes.
    struct Limited {
        dir: tempfile::TempDir,
        ledger: Arc<Ledger>,
        abort: AbortHandle,
        output: FileOutput,
    }

    impl Limited {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let ledger = Ledgers::default().get(&Root::new(dir.path()));
            let abort = AbortHandle::new();
            let limits = Limits::default();
            let log = GuestLog::new(LogSource::Module, abort.clone(), &limits, None);
            let quota = Quota {
                bytes_max: 100,
                files_max: 3,
            };
            let quota = InQuota::new(ledger.clone(), quota, "/out", Arc::new(log));
            let disk = Disk::new(abort.clone(), Arc::default(), Threads::default());
            let file = File::create(dir.path().join("file")).unwrap();
            let file = OpenFile::unlimited(file, disk.clone());
            let output = FileOutput::new(disk, file, Some(0), Some(Arc::new(quota)), unlimited());
            Self {
                dir,
                ledger,
                abort,
                output,
            }
        }

        fn text(&self) -> String {
            std::fs::read_to_string(self.dir.path().join("file")).unwrap()
        }
    }

    #[tokio::test]
    async fn a_write_is_not_made_if_the_attempt_is_aborted_while_the_directory_is_measured() {
        let mut limited = Limited::new();
        let measuring = limited.ledger.block_measuring();
        let written = limited.output.write(Bytes::from_static(b"late"));
        assert!(written.is_ok(), "the call itself does not wait");
        assert!(matches!(limited.output.check_write(), Ok(0)));
        limited
            .abort
            .abort(AbortReason::TimedOut, Duration::from_secs(60));
        drop(measuring);
        limited.output.ready().await;
        assert_eq!(limited.text(), "");
    }

    #[tokio::test]
    async fn a_write_that_does_not_fit_is_an_error_after_which_a_smaller_one_fits() {
        let mut limited = Limited::new();
        for (text, fits) in [("x".repeat(101), false), ("fits".into(), true)] {
            assert!(limited.output.write(text.into()).is_ok());
            limited.output.ready().await;
            assert_eq!(limited.output.flush().is_ok(), fits);
        }
        assert_eq!(limited.text(), "fits");
    }
}
