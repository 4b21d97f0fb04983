//! The state of handlers, stored in Postgres behind the fence of the running job.

use super::journal::AttemptJournal;
use crate::sandbox::{Expected, JournalFuture, NewValue, StateStore, StoredValue, WriteOutcome};
use crate::store::{NewStateValue, StateScope, StateWrite};

impl AttemptJournal {
    fn state_scope(&self) -> StateScope<'_> {
        StateScope {
            id: self.id,
            fence: self.fence,
            handler: &self.handler.manifest.name,
        }
    }
}

impl StateStore for AttemptJournal {
    fn get<'a>(&'a self, key: &'a str) -> JournalFuture<'a, Result<Option<StoredValue>, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            let found = self
                .call(&self.shared.calls.state, || {
                    store.read_state(self.state_scope(), key)
                })
                .await?;
            Ok(found.map(|(value, version)| StoredValue { value, version }))
        })
    }

    fn keys<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        max: u32,
    ) -> JournalFuture<'a, Result<Vec<String>, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            self.call(&self.shared.calls.state, || {
                store.state_keys(self.state_scope(), prefix, after, max)
            })
            .await
        })
    }

    fn set<'a>(&'a self, new: NewValue<'a>) -> JournalFuture<'a, Result<WriteOutcome, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            let set = NewStateValue {
                key: new.key,
                value: new.value,
                // The same in every retry: if a response is lost, the database recognises the write by it.
                version: rand::random_range(1..=i64::MAX),
                expected: match new.expected {
                    Expected::Anything => None,
                    Expected::Nothing => Some(0),
                    Expected::Version(version) => Some(version),
                },
                keys_max: new.keys_max,
                bytes_max: new.bytes_max,
            };
            loop {
                return Ok(
                    match self
                        .call(&self.shared.calls.state, || {
                            store.write_state(self.state_scope(), set)
                        })
                        .await?
                    {
                        StateWrite::Set => WriteOutcome::Done,
                        StateWrite::Conflict => WriteOutcome::Changed,
                        StateWrite::Again => continue,
                        StateWrite::TooManyKeys => WriteOutcome::TooManyKeys,
                        StateWrite::TooManyBytes(others) => WriteOutcome::TooManyBytes(others),
                    },
                );
            }
        })
    }

    fn delete<'a>(&'a self, key: &'a str) -> JournalFuture<'a, Result<bool, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            self.call(&self.shared.calls.state, || {
                store.erase_state(self.state_scope(), key)
            })
            .await
        })
    }
}
