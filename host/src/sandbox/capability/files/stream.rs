//! A stream into a file: closed once the attempt has to stop, and held to the quota of its directory.

use std::fs::File;
use std::sync::Arc;

use bytes::Bytes;
use wasmtime_wasi::async_trait;
use wasmtime_wasi::p2::{DynOutputStream, OutputStream, Pollable, StreamError, StreamResult};

use super::fds::{InQuota, no_space};
use crate::sandbox::AbortHandle;
use crate::sandbox::quota::{Charge, Size};

pub(super) struct GuardedStream {
    pub(super) inner: DynOutputStream,
    pub(super) abort: AbortHandle,
    /// None: there is no quota.
    pub(super) counted: Option<Counted>,
}

/// What a stream has written into a file whose directory has a quota.
pub(super) struct Counted {
    quota: Arc<InQuota>,
    file: Arc<File>,
    /// Where the next bytes go; none: to the end.
    position: Option<u64>,
    /// Of the last write, until it is known to be done.
    last: Option<Charge>,
}

impl Counted {
    pub(super) fn new(quota: Arc<InQuota>, file: Arc<File>, position: Option<u64>) -> Self {
        Self {
            quota,
            file,
            position,
            last: None,
        }
    }

    fn count(&mut self, bytes: u64) -> StreamResult<()> {
        let more = match self.position {
            None => bytes,
            Some(position) => {
                // A write begins only once the one before it has ended, so this is how long the file is.
                let size = self.file.metadata().map_or(0, |about| about.len());
                let end = position.saturating_add(bytes);
                self.position = Some(end);
                end.saturating_sub(size)
            }
        };
        self.last = None;
        let charge = self.quota.charge(Size::bytes(more));
        let failed = |()| StreamError::LastOperationFailed(no_space().into());
        self.last = Some(charge.map_err(failed)?);
        Ok(())
    }
}

impl GuardedStream {
    fn open(&self) -> StreamResult<()> {
        match self.abort.reason() {
            Some(_) => Err(StreamError::Closed),
            None => Ok(()),
        }
    }
}

#[async_trait]
impl Pollable for GuardedStream {
    async fn ready(&mut self) {
        self.inner.ready().await;
        if let Some(counted) = &mut self.counted {
            counted.last = None;
        }
    }
}

#[async_trait]
impl OutputStream for GuardedStream {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.open()?;
        if let Some(counted) = &mut self.counted {
            counted.count(bytes.len() as u64)?;
        }
        self.inner.write(bytes)
    }

    // What was written before may still go to the disk.
    fn flush(&mut self) -> StreamResult<()> {
        self.inner.flush()
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        self.open()?;
        self.inner.check_write()
    }

    async fn cancel(&mut self) {
        self.inner.cancel().await;
    }
}
