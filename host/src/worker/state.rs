//! What a handler keeps between its jobs, in Postgres behind the fence of the job that it runs.

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

    /// Asks until the database has an answer. No more at once than so many, apart from the steps: who waits for a lock here holds up no step.
    async fn ask<T, F>(&self, ask: impl Fn() -> F) -> Result<T, String>
    where
        F: Future<Output = Result<Result<T, NotMine>, StoreError>>,
    {
        loop {
            let call = self.shared.calls.state.acquire().await;
            let answer = ask().await;
            drop(call);
            match answer {
                Err(error) if error.is_about_data() => return Err(error.to_string()),
                answer => {
                    if let Some(said) = self.answer(answer).await {
                        return Ok(said);
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
            let found = self.ask(|| store.get_state(self.state_of(), key)).await?;
            Ok(found.map(|(value, version)| Kept { value, version }))
        })
    }

    fn keys<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
        most: u32,
    ) -> Waiting<'a, Result<Vec<String>, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            self.ask(|| store.state_keys(self.state_of(), prefix, after, most))
                .await
        })
    }

    fn set<'a>(&'a self, keep: Keep<'a>) -> Waiting<'a, Result<Wrote, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            let set = StateSet {
                key: keep.key,
                value: keep.value,
                // The same however often it is asked for: where an answer is lost, the write is known again by it.
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
                    match self.ask(|| store.set_state(self.state_of(), set)).await? {
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
            self.ask(|| store.delete_state(self.state_of(), key)).await
        })
    }
}
