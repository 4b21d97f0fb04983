//! A guest's standard output and standard error, which become lines in the host's log.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use tokio::io::AsyncWrite;
use wasmtime_wasi::async_trait;
use wasmtime_wasi::cli::{IsTerminal, StdoutStream};
use wasmtime_wasi::p2::{OutputStream, Pollable, StreamError, StreamResult};

use super::log::{GuestLog, Stream};

/// The maximum size of one write to a byte stream, which `check-write` returns, as for wasmtime's own streams. More
/// would be uninterruptible work and uncounted memory.
pub(super) const WRITE_BYTES_MAX: usize = 64 << 10;

/// A stream that writes to the log. Writing never fails, because a failing `println!` would panic.
#[derive(Clone)]
pub(in crate::sandbox) struct GuestOutput {
    log: Arc<GuestLog>,
    stream: Stream,
}

impl GuestOutput {
    pub(in crate::sandbox) fn new(log: Arc<GuestLog>, stream: Stream) -> Self {
        Self { log, stream }
    }
}

impl IsTerminal for GuestOutput {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for GuestOutput {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(self.clone())
    }

    // Writes directly to the log: the default would start a task for each stream, and lose the last output of a
    // stopped guest.
    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(self.clone())
    }
}

/// The error of a write that exceeds what `check-write` allowed.
pub(super) fn too_much() -> StreamError {
    StreamError::trap("a write to a stream is larger than check-write allowed")
}

#[async_trait]
impl Pollable for GuestOutput {
    async fn ready(&mut self) {}
}

impl OutputStream for GuestOutput {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        if bytes.len() > WRITE_BYTES_MAX {
            return Err(too_much());
        }
        self.log.print(self.stream, &bytes);
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(WRITE_BYTES_MAX)
    }
}

impl AsyncWrite for GuestOutput {
    fn poll_write(
        self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let bytes = &bytes[..bytes.len().min(WRITE_BYTES_MAX)];
        self.log.print(self.stream, bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
