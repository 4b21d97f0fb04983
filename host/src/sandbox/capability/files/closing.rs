//! Closes files on threads that may block. A close may wait for the disk: a network file system sends what was written,
//! and the last close of a removed file frees its space. So nothing that keeps a file open is dropped on a thread for
//! guests, not even with the instance.

use std::ops::{Deref, DerefMut};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

use super::disk::Disk;
use crate::job::AbortReason;
use crate::sandbox::AbortHandle;

/// Something that keeps a file open. It is dropped on a thread that may block.
pub(super) struct OnDisk<T: Send + 'static> {
    /// `None` only while this is dropped.
    value: Option<T>,
    /// `None` if the drop closes nothing.
    disk: Option<Disk>,
}

impl<T: Send + 'static> OnDisk<T> {
    pub(super) fn new(value: T, disk: Disk) -> Self {
        Self {
            value: Some(value),
            disk: Some(disk),
        }
    }

    /// For a directory that the host holds open itself, so that no drop here closes it.
    pub(super) fn held_by_host(value: T) -> Self {
        Self {
            value: Some(value),
            disk: None,
        }
    }
}

impl<T: Send + 'static> Deref for OnDisk<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("only drop takes the value")
    }
}

impl<T: Send + 'static> DerefMut for OnDisk<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("only drop takes the value")
    }
}

impl<T: Send + 'static> Drop for OnDisk<T> {
    fn drop(&mut self) {
        if let (Some(value), Some(disk)) = (self.value.take(), &self.disk) {
            disk.close(value);
        }
    }
}

/// Counts the files of an attempt that are being closed, or wait for a thread that closes them.
#[derive(Clone, Default)]
pub(in crate::sandbox) struct Closings(Arc<Pending>);

#[derive(Default)]
struct Pending {
    count: AtomicUsize,
    none: Notify,
}

/// One file that is being closed, until this is dropped.
pub(super) struct Closing(Closings);

impl Closings {
    pub(super) fn start(&self) -> Closing {
        self.0.count.fetch_add(1, Ordering::Relaxed);
        Closing(self.clone())
    }

    /// Waits until all files are closed that the attempt no longer uses.
    pub(super) async fn ended(&self) {
        loop {
            let mut none = pin!(self.0.none.notified());
            // Registers the waiter now, so that a close between the check and the await is not missed.
            none.as_mut().enable();
            if self.0.count.load(Ordering::Acquire) == 0 {
                return;
            }
            none.await;
        }
    }

    /// Like [`ended`](Self::ended), until the attempt is stopped; then returns the reason for that.
    pub(in crate::sandbox) async fn ended_or_stopped(
        &self,
        abort: &AbortHandle,
    ) -> Option<AbortReason> {
        tokio::select! {
            biased;
            () = self.ended() => None,
            reason = abort.hard_stopped() => Some(reason),
        }
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        let Closings(pending) = &self.0;
        if pending.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            pending.none.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn an_attempt_waits_for_its_files_to_be_closed_until_it_is_stopped() {
        let (closings, abort) = (Closings::default(), AbortHandle::new());
        assert_eq!(closings.ended_or_stopped(&abort).await, None);
        let closing = closings.start();
        let other = closings.start();
        let (stopped, ()) = tokio::join!(closings.ended_or_stopped(&abort), async {
            drop(closing);
            abort.abort(AbortReason::TimedOut, Duration::ZERO);
        });
        assert_eq!(stopped, Some(AbortReason::TimedOut), "one is not closed");
        let ((), ()) = tokio::join!(closings.ended(), async { drop(other) });
        assert_eq!(closings.ended_or_stopped(&abort).await, None);
    }
}
