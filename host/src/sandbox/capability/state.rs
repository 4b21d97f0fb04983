//! `rouse:handler/state`: the values that a handler keeps between its jobs, for each tenant.

mod handler;

pub(in crate::sandbox) use self::handler::HandlerState;
use self::handler::Refusal;
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::rouse::handler::state::{Entry, Host, StateError};
use crate::sandbox::{AbortHandle, Expected};

/// Runs a call on the state, unless the attempt has to stop before it is done.
async fn unless_aborted<T>(
    abort: AbortHandle,
    call: impl Future<Output = Result<T, Refusal>>,
) -> Result<T, Refusal> {
    tokio::select! {
        biased;
        () = abort.aborted() => Err(Refusal::Aborted),
        done = call => done,
    }
}

impl AttemptState {
    fn for_guest<T>(&mut self, done: Result<T, Refusal>) -> Result<T, StateError> {
        done.map_err(|refusal| match refusal {
            Refusal::Aborted => StateError::Aborted,
            Refusal::Refused(why) => StateError::Refused(why),
            Refusal::NotGranted => {
                let denial = self.handler_state.denial();
                let why = denial.lines().next().unwrap_or_default().to_owned();
                self.denial = Some(denial);
                StateError::NotGranted(why)
            }
        })
    }
}

impl Host for AttemptState {
    async fn get(&mut self, key: String) -> wasmtime::Result<Result<Option<Entry>, StateError>> {
        self.meter.count_host_call();
        let abort = self.abort.clone();
        let done = unless_aborted(abort, self.handler_state.get(&key)).await;
        Ok(self.for_guest(done))
    }

    async fn keys(
        &mut self,
        prefix: String,
        after: Option<String>,
    ) -> wasmtime::Result<Result<Vec<String>, StateError>> {
        self.meter.count_host_call();
        let abort = self.abort.clone();
        let page = self.handler_state.keys(&prefix, after.as_deref());
        let done = unless_aborted(abort, page).await;
        Ok(self.for_guest(done))
    }

    async fn set(
        &mut self,
        key: String,
        value: Vec<u8>,
    ) -> wasmtime::Result<Result<(), StateError>> {
        self.meter.count_host_call();
        let abort = self.abort.clone();
        let set = self.handler_state.set(&key, &value, Expected::Anything);
        let done = unless_aborted(abort, set).await;
        Ok(self.for_guest(done.map(drop)))
    }

    async fn compare_and_set(
        &mut self,
        key: String,
        version: Option<i64>,
        value: Vec<u8>,
    ) -> wasmtime::Result<Result<bool, StateError>> {
        self.meter.count_host_call();
        let abort = self.abort.clone();
        let expected = match version {
            None | Some(0) => Expected::Nothing,
            Some(version) => Expected::Version(version),
        };
        let set = self.handler_state.set(&key, &value, expected);
        let done = unless_aborted(abort, set).await;
        Ok(self.for_guest(done))
    }

    async fn delete(&mut self, key: String) -> wasmtime::Result<Result<bool, StateError>> {
        self.meter.count_host_call();
        let abort = self.abort.clone();
        let done = unless_aborted(abort, self.handler_state.delete(&key)).await;
        Ok(self.for_guest(done))
    }
}
