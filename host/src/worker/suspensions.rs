//! Signals, calls and parents of jobs, read and recorded in Postgres behind the fence of the running job.

use std::collections::HashMap;
use std::time::SystemTime;

use super::journal::AttemptJournal;
use crate::job::{ParentEnd, ReturnedCall};
use crate::sandbox::{JournalFuture, WaitStore};

impl WaitStore for AttemptJournal {
    fn take_signal<'a>(
        &'a self,
        step: &'a str,
        name: &'a str,
        until: Option<SystemTime>,
    ) -> JournalFuture<'a, Result<Option<Vec<u8>>, String>> {
        let store = &self.shared.store;
        Box::pin(self.call(&self.shared.calls.steps, move || {
            store.take_signal(self.id, self.fence, step, name, until)
        }))
    }

    fn returned_calls<'a>(
        &'a self,
        steps: &'a [String],
        bytes_max: usize,
    ) -> JournalFuture<'a, Result<HashMap<String, ReturnedCall>, String>> {
        let store = &self.shared.store;
        Box::pin(self.call(&self.shared.calls.steps, move || {
            store.returned_calls(self.id, self.fence, steps, bytes_max)
        }))
    }

    fn parents<'a>(
        &'a self,
        after: Option<&'a str>,
    ) -> JournalFuture<'a, Result<Vec<ParentEnd>, String>> {
        let store = &self.shared.store;
        Box::pin(self.call(&self.shared.calls.steps, move || {
            store.parent_ends(self.id, self.fence, after)
        }))
    }
}
