//! `rouse:handler/retry`: when the next attempt is to be made.

use crate::sandbox::bindings::rouse::handler::retry::Host;
use crate::sandbox::state::AttemptState;

impl Host for AttemptState {
    fn at(&mut self, unix_ms: i64) -> wasmtime::Result<()> {
        self.meter.called();
        self.retry_at_ms = Some(unix_ms);
        Ok(())
    }
}
