//! The state of handlers, stored in Postgres behind the fence of the running job.

use super::journal::AttemptJournal;
use crate::sandbox::{Expected, Keep, Kept, StateKeeper, Waiting, Wrote};
use crate::store::{NotMine, StateOf, StateSet, StateWrite, StoreError};

impl AttemptJournal {
    fn state_of(&self) -> StateOf<'_> {
        StateOf {
            id: self.id,
            fence: self.fence,
            handler: &self.handler.manifest.name,
        }
    }

    /// Repeats a call until the database answers it. These calls have a limit of their own, so one that waits for a
    /// lock does not delay steps.
    async fn call<T, F>(&self, call: impl Fn() -> F) -> Result<T, String>
    where
        F: Future<Output = Result<Result<T, NotMine>, StoreError>>,
    {
        loop {
            let permit = self.shared.calls.state.acquire().await;
            let answer = call().await;
            drop(permit);
            match answer {
                Err(error) if error.is_about_data() => return Err(error.to_string()),
                answer => {
                    if let Some(answer) = self.answer(answer).await {
                        return Ok(answer);
                    }
                }
            }
        }
    }
}

impl StateKeeper for AttemptJournal {
    fn get<'a>(&'a self, key: &'a str) -> Waiting<'a, Result<Option<Kept>, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            let found = self.call(|| store.get_state(self.state_of(), key)).await?;
            Ok(found.map(|(value, version)| Kept { value, version }))
        })
    }

    fn keys<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        max: u32,
    ) -> Waiting<'a, Result<Vec<String>, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            self.call(|| store.state_keys(self.state_of(), prefix, after, max))
                .await
        })
    }

    fn set<'a>(&'a self, keep: Keep<'a>) -> Waiting<'a, Result<Wrote, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            let set = StateSet {
                key: keep.key,
                value: keep.value,
                // The same in every repetition: if an answer is lost, the database recognises the write by it.
                version: rand::random_range(1..=i64::MAX),
                expected: match keep.expected {
                    Expected::Anything => None,
                    Expected::Nothing => Some(0),
                    Expected::Version(version) => Some(version),
                },
                keys_max: keep.keys_max,
                bytes_max: keep.bytes_max,
            };
            loop {
                return Ok(
                    match self.call(|| store.set_state(self.state_of(), set)).await? {
                        StateWrite::Set => Wrote::Done,
                        StateWrite::Conflict => Wrote::Changed,
                        StateWrite::Again => continue,
                        StateWrite::TooManyKeys => Wrote::TooManyKeys,
                        StateWrite::TooManyBytes(others) => Wrote::TooManyBytes(others),
                    },
                );
            }
        })
    }

    fn delete<'a>(&'a self, key: &'a str) -> Waiting<'a, Result<bool, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            self.call(|| store.delete_state(self.state_of(), key)).await
        })
    }
}
