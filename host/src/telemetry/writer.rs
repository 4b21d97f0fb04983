//! A thread that writes lines, so that a reader that stalls does not block any other thread.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// The maximum size of the lines that wait, in bytes. Further lines are dropped, and counted.
const WAITING_BYTES_MAX: usize = 4 << 20;

/// The lines that wait for the thread.
pub(super) struct Writer {
    waiting: Mutex<Waiting>,
    /// Notified when a line waits, and when no line is left.
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Lines that were dropped since the last report.
    dropped: u64,
    /// True while the thread works on a line that it has taken.
    is_writing: bool,
}

impl Writer {
    /// Starts the thread, which calls `write` for each line. After lines were dropped, it calls `report` with their
    /// number as soon as there is space again; `report` may [push](Self::push) a line.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn start(
        write: impl Fn(&[u8]) + Send + 'static,
        report: impl Fn(u64) + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let writer = Arc::new(Self {
            waiting: Mutex::default(),
            changed: Condvar::new(),
        });
        let own = writer.clone();
        thread::Builder::new()
            .name("log".into())
            .spawn(move || own.run(write, report))?;
        Ok(writer)
    }

    fn run(&self, write: impl Fn(&[u8]), report: impl Fn(u64)) {
        loop {
            write(&self.next());
            let dropped = self.dropped();
            if dropped > 0 {
                report(dropped);
            }
            self.wrote();
        }
    }

    /// Waits for the next line, and takes it.
    fn next(&self) -> Vec<u8> {
        let mut waiting = self.lock();
        loop {
            if let Some(line) = waiting.lines.pop_front() {
                waiting.bytes -= line.len();
                waiting.is_writing = true;
                return line;
            }
            waiting = self
                .changed
                .wait(waiting)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The number of lines that were dropped, once there is space for a report.
    fn dropped(&self) -> u64 {
        let mut waiting = self.lock();
        match waiting.bytes <= WAITING_BYTES_MAX / 2 {
            true => std::mem::take(&mut waiting.dropped),
            false => 0,
        }
    }

    fn wrote(&self) {
        let mut waiting = self.lock();
        waiting.is_writing = false;
        if waiting.lines.is_empty() {
            self.changed.notify_all();
        }
    }

    /// Adds a line, or drops it if too many wait. Never blocks.
    pub(super) fn push(&self, line: &[u8]) {
        let mut waiting = self.lock();
        if waiting.bytes + line.len() > WAITING_BYTES_MAX {
            waiting.dropped += 1;
            return;
        }
        waiting.bytes += line.len();
        waiting.lines.push_back(line.to_vec());
        // Otherwise the thread is awake, and takes this line after those before it.
        if waiting.lines.len() == 1 && !waiting.is_writing {
            self.changed.notify_all();
        }
    }

    /// Waits until all lines are written, for a limited time.
    pub(super) fn flush(&self, timeout: Duration) {
        let is_busy = |waiting: &mut Waiting| !waiting.lines.is_empty() || waiting.is_writing;
        // Lines that are not written in time are lost.
        drop(
            self.changed
                .wait_timeout_while(self.lock(), timeout, is_busy)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    #[test]
    fn a_reader_that_stalls_does_not_block_writers_and_gets_the_count_of_dropped_lines() {
        // Each write takes one permit.
        let (permits, permit) = mpsc::channel::<()>();
        let (written, lines) = mpsc::channel::<usize>();
        let (reported, report) = mpsc::channel::<u64>();
        let writer = Writer::start(
            move |line| {
                let _ = permit.recv();
                let _ = written.send(line.len());
            },
            move |dropped| {
                let _ = reported.send(dropped);
            },
        )
        .unwrap();
        writer.push(b"first");
        // Until the thread has taken it.
        while !writer.lock().is_writing {
            thread::yield_now();
        }
        let large = vec![b'x'; WAITING_BYTES_MAX / 4];
        for _ in 0..4 + 3 {
            writer.push(&large);
        }
        writer.flush(Duration::ZERO);
        assert_eq!(lines.try_recv().ok(), None, "nothing is written yet");
        for _ in 0..3 {
            permits.send(()).unwrap();
        }
        assert_eq!(lines.recv_timeout(TIMEOUT), Ok(5));
        assert_eq!(lines.recv_timeout(TIMEOUT), Ok(large.len()));
        assert_eq!(report.recv_timeout(TIMEOUT), Ok(3));
        assert_eq!(lines.recv_timeout(TIMEOUT), Ok(large.len()));
        // All others at once.
        drop(permits);
        writer.push(b"last");
        writer.flush(TIMEOUT);
        assert_eq!(
            lines.try_iter().collect::<Vec<_>>(),
            [large.len(), large.len(), 4]
        );
        assert_eq!(report.try_recv().ok(), None, "each is counted once");
    }
}
