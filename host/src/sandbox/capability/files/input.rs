//! Input streams of files.

use std::fs::File;
use std::io;
use std::mem::replace;
use std::os::unix::fs::FileExt as _;

use bytes::{Bytes, BytesMut};
use tokio::sync::OwnedSemaphorePermit;
use wasmtime_wasi::async_trait;
use wasmtime_wasi::p2::{InputStream, Pollable, StreamError, StreamResult};
use wasmtime_wasi::runtime::AbortOnDropJoinHandle;

use super::disk::Disk;
use super::fds::SharedFile;

/// The maximum size of one read, as in wasmtime-wasi.
const READ_BYTES_MAX: usize = 64 << 10;

/// The number of bytes that are read for a guest that waits before it requests an amount.
const READ_BYTES_AHEAD: usize = 4 << 10;

/// An input stream of a file.
pub(super) struct FileInput {
    disk: Disk,
    file: SharedFile,
    position: u64,
    _permit: OwnedSemaphorePermit,
    state: State,
}

enum State {
    Idle,
    Reading(AbortOnDropJoinHandle<io::Result<Bytes>>),
    Read(Bytes),
    Failed(io::Error),
    Closed,
}

impl FileInput {
    pub(super) fn new(
        disk: Disk,
        file: SharedFile,
        position: u64,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            disk,
            file,
            position,
            _permit: permit,
            state: State::Idle,
        }
    }

    fn start(&mut self, bytes: usize) {
        let (file, position) = (self.file.clone(), self.position);
        let bytes = bytes.min(READ_BYTES_MAX);
        let reading = self.disk.read(move || read(file.file(), position, bytes));
        self.state = State::Reading(reading);
    }
}

#[async_trait]
impl Pollable for FileInput {
    async fn ready(&mut self) {
        if matches!(self.state, State::Idle) {
            self.start(READ_BYTES_AHEAD);
        }
        if let State::Reading(reading) = &mut self.state {
            self.state = match reading.await {
                Ok(read) if read.is_empty() => State::Closed,
                Ok(read) => State::Read(read),
                Err(error) => State::Failed(error),
            };
        }
    }
}

#[async_trait]
impl InputStream for FileInput {
    fn read(&mut self, bytes: usize) -> StreamResult<Bytes> {
        match replace(&mut self.state, State::Closed) {
            State::Idle => {
                self.state = State::Idle;
                if bytes > 0 {
                    self.start(bytes);
                }
                Ok(Bytes::new())
            }
            State::Reading(reading) => {
                self.state = State::Reading(reading);
                Ok(Bytes::new())
            }
            State::Read(mut read) => {
                let part = read.split_to(read.len().min(bytes));
                self.position += part.len() as u64;
                self.state = match read.is_empty() {
                    true => State::Idle,
                    false => State::Read(read),
                };
                Ok(part)
            }
            State::Failed(error) => Err(StreamError::LastOperationFailed(error.into())),
            State::Closed => Err(StreamError::Closed),
        }
    }

    /// Reads as much as requested, which `ready` cannot know.
    async fn blocking_read(&mut self, bytes: usize) -> StreamResult<Bytes> {
        loop {
            let read = self.read(bytes)?;
            if bytes == 0 || !read.is_empty() {
                return Ok(read);
            }
            self.ready().await;
        }
    }

    async fn cancel(&mut self) {
        if let State::Reading(reading) = replace(&mut self.state, State::Closed) {
            // A started read is completed.
            reading.cancel().await;
        }
    }
}

/// Reads from a position; an empty result means the end.
fn read(file: &File, position: u64, bytes: usize) -> io::Result<Bytes> {
    let mut buffer = BytesMut::zeroed(bytes);
    loop {
        match file.read_at(&mut buffer, position) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => {
                buffer.truncate(read?);
                return Ok(buffer.freeze());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::disk::Threads;
    use super::super::fds::{OpenFile, unlimited};
    use super::*;
    use crate::sandbox::AbortHandle;

    #[tokio::test]
    async fn read_a_file_to_its_end_in_pieces_of_any_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let text: Vec<u8> = (0..=255).cycle().take(3 * READ_BYTES_MAX + 5).collect();
        std::fs::write(&path, &text).unwrap();
        for (bytes, waits) in [(7_001, false), (usize::MAX, false), (5_000, true)] {
            let disk = Disk::new(AbortHandle::new(), Arc::default(), Threads::default());
            let file = OpenFile::unlimited(File::open(&path).unwrap(), disk.clone());
            let mut input = FileInput::new(disk, file, 3, unlimited());
            let mut read = Vec::new();
            let end = loop {
                if waits {
                    input.ready().await;
                }
                assert!(input.read(0).is_ok_and(|none| none.is_empty()) || waits);
                match input.blocking_read(bytes).await {
                    Ok(part) => read.extend_from_slice(&part),
                    Err(end) => break end,
                }
            };
            assert!(matches!(end, StreamError::Closed), "{end:?}");
            assert!(read == text[3..], "{bytes}");
        }
    }
}
