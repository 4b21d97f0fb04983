//! `rouse:handler/secrets`: placeholders for secrets, and signatures. `http/secrets.rs` replaces placeholders and
//! decides which handlers may sign.

use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::rouse::handler::secrets::{Host, SecretError};

impl Host for AttemptState {
    fn get(&mut self, name: String) -> wasmtime::Result<Result<String, SecretError>> {
        self.meter.count_host_call();
        let placeholder = self.http.placeholder(&name);
        Ok(placeholder.map_err(|denial| self.no_secret(denial)))
    }

    fn hmac_sha256(
        &mut self,
        name: String,
        message: Vec<u8>,
    ) -> wasmtime::Result<Result<Vec<u8>, SecretError>> {
        self.meter.count_host_call();
        let tag = self.http.sign(&name, &message);
        Ok(tag.map_err(|denial| self.no_secret(denial)))
    }
}

impl AttemptState {
    /// Records the denial; the guest gets its first line.
    fn no_secret(&mut self, denial: String) -> SecretError {
        let why = denial.lines().next().unwrap_or_default().to_owned();
        self.denial = Some(denial);
        SecretError::NotGranted(why)
    }
}
