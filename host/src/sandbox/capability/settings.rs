//! `rouse:handler/settings`: what the operator has set for the handler in `rouse.toml`.

use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::rouse::handler::settings::Host;

impl Host for AttemptState {
    fn all(&mut self) -> wasmtime::Result<Vec<u8>> {
        self.meter.called();
        let settings = self.granted.settings.as_deref();
        Ok(settings.unwrap_or("{}").into())
    }
}
