//! A handler's state in one attempt: its grant, and how much of its limits the attempt has used.

use std::sync::Arc;

use crate::sandbox::bindings::rouse::handler::state::Entry;
use crate::sandbox::grants::lines;
use crate::sandbox::{Expected, Journal, Limits, NewValue, StateQuota, StateStore, WriteOutcome};

/// The maximum length of a key, which people also read.
const KEY_CHARS_MAX: usize = 200;

/// The maximum number of keys in one page: at most a few hundred kilobytes.
const PAGE_KEYS_MAX: u32 = 200;

/// A handler's state in one attempt.
#[derive(Default)]
pub(in crate::sandbox) struct HandlerState {
    handler: Arc<str>,
    quota: Option<StateQuota>,
    /// The job's attenuation removes it.
    is_removed_by_job: bool,
    /// The lines of `rouse.toml` that would bind the table that grants state.
    unbound: Option<String>,
    journal: Option<Arc<dyn Journal>>,
    calls_max: usize,
    calls: usize,
    bytes_max: usize,
    bytes: usize,
}

/// Why a call was refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Aborted,
    NotGranted,
    Refused(String),
}

impl HandlerState {
    /// The handler's state, in the store of the journal.
    pub(in crate::sandbox) fn new(
        handler: Arc<str>,
        quota: Option<StateQuota>,
        is_removed_by_job: bool,
        unbound: Option<String>,
        limits: &Limits,
        journal: Option<Arc<dyn Journal>>,
    ) -> Self {
        Self {
            handler,
            quota,
            is_removed_by_job,
            unbound,
            journal,
            calls_max: limits.state_calls,
            calls: 0,
            bytes_max: limits.state_bytes,
            bytes: 0,
        }
    }

    /// Counts a call, and returns the quota.
    fn granted(&mut self) -> Result<StateQuota, Refusal> {
        let quota = self.quota.ok_or(Refusal::NotGranted)?;
        if self.calls >= self.calls_max {
            let max = self.calls_max;
            return Err(refused(format!(
                "an attempt may use its state at most {max} times (limits.state_calls in rouse.toml)"
            )));
        }
        self.calls += 1;
        Ok(quota)
    }

    fn store(&self) -> Result<&dyn StateStore, Refusal> {
        let store = self.journal.as_ref().and_then(|journal| journal.state());
        store.ok_or_else(|| {
            refused(
                "a handler that is invoked without the queue has no state; enqueue a job for it instead"
                    .into(),
            )
        })
    }

    /// Counts bytes that were read or will be written.
    fn count_bytes(&mut self, bytes: usize) -> Result<(), Refusal> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > self.bytes_max {
            let max = self.bytes_max;
            return Err(refused(format!(
                "an attempt may read and write at most {max} bytes of its state (limits.state_bytes in rouse.toml)"
            )));
        }
        Ok(())
    }

    pub(super) async fn get(&mut self, key: &str) -> Result<Option<Entry>, Refusal> {
        self.granted()?;
        check_key(key)?;
        let Some(stored) = self.store()?.get(key).await.map_err(refused)? else {
            return Ok(None);
        };
        self.count_bytes(stored.value.len())?;
        Ok(Some(Entry {
            value: stored.value,
            version: stored.version,
        }))
    }

    pub(super) async fn keys(
        &mut self,
        prefix: &str,
        after: Option<&str>,
    ) -> Result<Vec<String>, Refusal> {
        self.granted()?;
        if !prefix.is_empty() {
            check_key(prefix)?;
        }
        after.map_or(Ok(()), check_key)?;
        let page = self.store()?.keys(prefix, after, PAGE_KEYS_MAX).await;
        let page = page.map_err(refused)?;
        self.count_bytes(page.iter().map(String::len).sum())?;
        Ok(page)
    }

    /// Stores a value. Returns false if the precondition does not hold.
    pub(super) async fn set(
        &mut self,
        key: &str,
        value: &[u8],
        expected: Expected,
    ) -> Result<bool, Refusal> {
        let quota = self.granted()?;
        check_key(key)?;
        let (bytes, max) = (value.len(), quota.value_bytes_max);
        if bytes > max {
            return Err(refused(format!(
                "the value of the key {key} is {bytes} bytes long; at most {max} are allowed ({})",
                self.setting("value_bytes_max")
            )));
        }
        self.count_bytes(bytes)?;
        let new = NewValue {
            key,
            value,
            expected,
            keys_max: quota.keys_max,
            bytes_max: quota.bytes_max,
        };
        match self.store()?.set(new).await.map_err(refused)? {
            WriteOutcome::Done => Ok(true),
            WriteOutcome::Changed => Ok(false),
            WriteOutcome::TooManyKeys => Err(refused(format!(
                "the key {key} cannot be added: the state has the maximum of {} keys ({})",
                quota.keys_max,
                self.setting("keys_max")
            ))),
            WriteOutcome::TooManyBytes(others) => Err(refused(format!(
                "the key {key} with its value is {} bytes long, and the other keys are {others}; together at most {} are allowed ({})",
                key.len() + bytes,
                quota.bytes_max,
                self.setting("bytes_max")
            ))),
        }
    }

    pub(super) async fn delete(&mut self, key: &str) -> Result<bool, Refusal> {
        self.granted()?;
        check_key(key)?;
        self.store()?.delete(key).await.map_err(refused)
    }

    /// The name of a setting in rouse.toml.
    fn setting(&self, key: &str) -> String {
        format!("{key} of the state of {} in rouse.toml", self.handler)
    }

    /// The denial: what the handler tried, and the lines of rouse.toml that would allow it.
    pub(super) fn denial(&self) -> String {
        let handler = &self.handler;
        if self.is_removed_by_job {
            return format!(
                "the handler {handler} tried to use its state, which the grants of this job leave out (\"state\": false); enqueue it without that key"
            );
        }
        if let Some(lines) = &self.unbound {
            return format!(
                "the handler {handler} tried to use its state, which is granted in a table that does not name a module, so no module gets it; to grant it to the module that runs, add these lines to rouse.toml:\n{lines}{}",
                lines::how_to_bind(handler)
            );
        }
        format!(
            "the handler {handler} tried to use its state, which is not granted to it; to grant it, add these lines to rouse.toml:\n{}\n\n\
             Put them at the end of the file. Then restart the host, and run the job again with `rouse job retry ID`",
            lines::state(handler)
        )
    }
}

fn check_key(key: &str) -> Result<(), Refusal> {
    let chars = key.chars().count();
    if chars == 0 || chars > KEY_CHARS_MAX || key.chars().any(char::is_control) {
        return Err(refused(format!(
            "a key must have 1 to {KEY_CHARS_MAX} printable characters"
        )));
    }
    Ok(())
}

fn refused(why: String) -> Refusal {
    Refusal::Refused(why)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Mutex;

    use super::*;
    use crate::job::RecordedStep;
    use crate::sandbox::{JournalFuture, StoredValue};

    /// A store in memory, whose values always have the same version.
    #[derive(Default)]
    struct InMemory(Mutex<HashMap<String, Vec<u8>>>);

    impl StateStore for InMemory {
        fn get<'a>(
            &'a self,
            key: &'a str,
        ) -> JournalFuture<'a, Result<Option<StoredValue>, String>> {
            let value = self.0.lock().unwrap().get(key).cloned();
            Box::pin(async { Ok(value.map(|value| StoredValue { value, version: 1 })) })
        }

        fn keys<'a>(
            &'a self,
            _: &'a str,
            _: Option<&'a str>,
            _: u32,
        ) -> JournalFuture<'a, Result<Vec<String>, String>> {
            let keys = self.0.lock().unwrap().keys().cloned().collect();
            Box::pin(async { Ok(keys) })
        }

        fn set<'a>(&'a self, new: NewValue<'a>) -> JournalFuture<'a, Result<WriteOutcome, String>> {
            let (key, value) = (new.key.to_owned(), new.value.to_vec());
            self.0.lock().unwrap().insert(key, value);
            Box::pin(async { Ok(WriteOutcome::Done) })
        }

        fn delete<'a>(&'a self, key: &'a str) -> JournalFuture<'a, Result<bool, String>> {
            let there = self.0.lock().unwrap().remove(key).is_some();
            Box::pin(async move { Ok(there) })
        }
    }

    impl Journal for InMemory {
        fn recorded(&self) -> JournalFuture<'_, Arc<HashMap<String, RecordedStep>>> {
            Box::pin(async { Arc::default() })
        }

        fn result<'a>(&'a self, _: &'a str) -> JournalFuture<'a, Result<Vec<u8>, String>> {
            Box::pin(async { Err("no steps".into()) })
        }

        fn record<'a>(&'a self, _: &'a str, _: &'a [u8]) -> JournalFuture<'a, Result<(), String>> {
            Box::pin(async { Ok(()) })
        }

        fn progress(&self, _: u8, _: &str) {}

        fn state(&self) -> Option<&dyn StateStore> {
            Some(self)
        }
    }

    fn granted() -> HandlerState {
        HandlerState {
            handler: "x".into(),
            quota: Some(StateQuota {
                value_bytes_max: 8,
                ..StateQuota::default()
            }),
            journal: Some(Arc::new(InMemory::default())),
            calls_max: 5,
            bytes_max: 20,
            ..HandlerState::default()
        }
    }

    fn why<T: std::fmt::Debug>(done: Result<T, Refusal>) -> String {
        match done {
            Err(Refusal::Refused(why)) => why,
            other => panic!("expected a refusal, got {other:?}"),
        }
    }

    #[tokio::test]
    async fn limit_the_calls_and_bytes_of_an_attempt() {
        let mut state = granted();
        for _ in 0..2 {
            let set = state.set("k", b"12345678", Expected::Anything).await;
            assert_eq!(set, Ok(true));
        }
        let third = state.get("k").await;
        assert!(why(third.map(|_| ())).contains("20 bytes"));
        let mut state = granted();
        for _ in 0..5 {
            assert_eq!(state.delete("k").await, Ok(false));
        }
        assert!(why(state.delete("k").await).contains("at most 5 times"));
    }

    #[tokio::test]
    async fn refuse_invalid_keys_and_values_before_storing_them() {
        let long = "k".repeat(201);
        for key in ["", "a\0b", "\x1b[2J", "a\nb", &long] {
            for done in [
                granted().delete(key).await,
                granted().set(key, b"", Expected::Nothing).await,
            ] {
                assert!(why(done).contains("printable"), "{key:?}");
            }
        }
        assert!(why(granted().keys("a\0", None).await).contains("printable"));
        assert!(why(granted().keys("", Some("")).await).contains("printable"));
        let large = granted().set("k", b"123456789", Expected::Anything).await;
        assert!(why(large).contains("value_bytes_max of the state of x"));
    }

    #[tokio::test]
    async fn refuse_state_without_a_grant_or_without_a_queue() {
        let mut state = granted();
        state.quota = None;
        assert_eq!(state.delete("k").await, Err(Refusal::NotGranted));
        let denial = state.denial();
        assert!(denial.contains("[handlers.\"x\".state]\nkeys_max = 1000\n"));
        let mut state = granted();
        state.journal = None;
        assert!(why(state.delete("k").await).contains("invoked without the queue"));
    }
}
