//! Output streams of files: closed once the attempt has to stop, and limited by the quota of their directory.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::replace;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use bytes::Bytes;
use rustix::io::{Errno, ReadWriteFlags, pwritev2};
use wasmtime_wasi::async_trait;
use wasmtime_wasi::p2::{OutputStream, Pollable, StreamError, StreamResult};
use wasmtime_wasi::runtime::AbortOnDropJoinHandle;

use super::disk::Disk;
use super::fds::{InQuota, InUse, no_space};
use crate::sandbox::capability::output::{WRITE_BYTES_MAX, too_much};
use crate::sandbox::grants::quota::{Charge, Size};

/// An output stream of a file.
pub(super) struct FileOutput {
    disk: Disk,
    file: Arc<File>,
    /// The position of the next bytes; `None` appends.
    position: Option<u64>,
    /// The directory's quota, if any.
    quota: Option<Arc<InQuota>>,
    /// Keeps the file counted as open.
    _open: InUse,
    state: State,
}

enum State {
    Ready,
    /// A write is in progress, and counted until it is done.
    Writing {
        done: AbortOnDropJoinHandle<Option<io::Result<()>>>,
        _charge: Option<Charge>,
    },
    Failed(io::Error),
    Closed,
}

impl FileOutput {
    pub(super) fn new(
        disk: Disk,
        file: Arc<File>,
        position: Option<u64>,
        quota: Option<Arc<InQuota>>,
        open: InUse,
    ) -> Self {
        Self {
            disk,
            file,
            position,
            quota,
            _open: open,
            state: State::Ready,
        }
    }

    /// Counts the growth of a write, if there is a quota.
    fn count(&self, bytes: u64) -> StreamResult<Option<Charge>> {
        let Some(quota) = &self.quota else {
            return Ok(None);
        };
        let more = match self.position {
            None => bytes,
            Some(position) => {
                // A write starts only after the previous one has ended, so this is the size of the file.
                let size = self.file.metadata().map_or(0, |metadata| metadata.len());
                position.saturating_add(bytes).saturating_sub(size)
            }
        };
        let charge = quota.charge(Size::bytes(more));
        let failed = |()| StreamError::LastOperationFailed(no_space().into());
        charge.map(Some).map_err(failed)
    }

    /// Returns the error of the last write, once.
    fn take_error(&mut self) -> StreamResult<()> {
        match replace(&mut self.state, State::Closed) {
            State::Closed => Err(StreamError::Closed),
            State::Failed(error) => Err(StreamError::LastOperationFailed(error.into())),
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
        if let State::Writing { done, .. } = &mut self.state {
            self.state = match done.await {
                Some(Ok(())) => State::Ready,
                Some(Err(error)) => State::Failed(error),
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
        let charge = self.count(bytes.len() as u64)?;
        let (file, position) = (self.file.clone(), self.position);
        self.position = position.map(|at| at.saturating_add(bytes.len() as u64));
        let done = self.disk.change(move || match position {
            Some(position) => file.write_all_at(&bytes, position),
            None => append(&file, &bytes),
        });
        self.state = State::Writing {
            done,
            _charge: charge,
        };
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
            State::Writing { .. } | State::Failed(_) | State::Closed => Ok(0),
        }
    }

    async fn cancel(&mut self) {
        if let State::Writing { done, .. } = replace(&mut self.state, State::Closed) {
            // A started write is completed.
            done.cancel().await;
        }
    }
}

/// Appends to a file, at its end at that time.
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
