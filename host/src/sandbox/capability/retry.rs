//! `rouse:handler/retry`: when the next attempt is to be made.

use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::rouse::handler::retry::Host;

impl Host for AttemptState {
    fn at(&mut self, unix_ms: i64) -> wasmtime::Result<()> {
        self.meter.called();
        self.retry_at_ms = Some(unix_ms);
        Ok(())
    }
}
