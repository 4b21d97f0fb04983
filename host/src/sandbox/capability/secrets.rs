//! `rouse:handler/secrets`: words that stand for secrets. What becomes of them, `http/secrets.rs` knows.

use crate::sandbox::bindings::rouse::handler::secrets::{Host, SecretError};
use crate::sandbox::state::AttemptState;

impl Host for AttemptState {
    fn get(&mut self, name: String) -> wasmtime::Result<Result<String, SecretError>> {
        self.meter.called();
        Ok(self.http.placeholder(&name).map_err(|denial| {
            let why = denial.lines().next().unwrap_or_default().to_owned();
            self.denial = Some(denial);
            SecretError::NotGranted(why)
        }))
    }
}
