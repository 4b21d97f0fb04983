//! Writes to the database what modules declare: their gates (`declared_gates.rs`) and their schedules.
//!
//! Every host reports in its capabilities which schedules its operator allows. All hosts decide about schedules from
//! the reports of all live workers, so it does not matter which of them acts.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::Shared;
use super::declared_gates::DeclaredGates;
use super::reach::warn_unless_unreachable;
use crate::job::declared::{Change, change};
use crate::store::StoreError;
use crate::store::connect::backoff;

/// The interval of further looks: another host may have ended.
const LOOK_EVERY: Duration = Duration::from_secs(300);

/// Looks when it starts, after each change to this host's capabilities, and periodically, until the worker ends.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    let mut gates = DeclaredGates::default();
    let mut failures = 0;
    loop {
        let mut has_failed = false;
        if let Err(error) = gates.send(&shared).await {
            has_failed = true;
            warn_unless_unreachable!(
                error,
                "cannot set the gates that modules declare; trying again"
            );
        }
        if shared.settings.schedules
            && let Err(error) = look(&shared).await
        {
            has_failed = true;
            warn_unless_unreachable!(
                error,
                "cannot create the schedules that modules declare; trying again"
            );
        }
        failures = if has_failed { failures + 1 } else { 0 };
        let wait = match failures {
            0 => LOOK_EVERY,
            // Until the gates are set, jobs of these handlers start without them.
            _ => backoff(failures - 1, rand::random()),
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = shared.capabilities_sent.notified() => {}
        }
    }
}

async fn look(shared: &Shared) -> Result<(), StoreError> {
    let _permit = shared.calls.patient.acquire().await;
    for listed in shared.store.module_schedules().await? {
        let handler = &listed.handler;
        let done = match change(&listed.workers, listed.current.as_ref()) {
            Change::Keep => continue,
            Change::Put(wanted) => {
                let schedule = format!("{} {}", wanted.schedule.cron, wanted.schedule.time_zone);
                let put = shared.store.put_module_schedule(handler, &wanted).await;
                // Another host may have acted first, a login may have a schedule of this name, or the worker that
                // declares it may have ended in the meantime.
                if let Ok("unchanged" | "foreign" | "undeclared") = put.as_deref() {
                    continue;
                }
                put.map(|done| format!("{done}: {schedule}"))
            }
            Change::Delete => {
                let deleted = shared.store.delete_module_schedule(handler).await;
                deleted.map(|_| "deleted".to_owned())
            }
        };
        match done {
            Ok(done) => info!(handler, done, "changed the schedule that a module declares"),
            Err(error) if error.is_transient() || error.is_incarnation_ended() => {
                return Err(error);
            }
            // If the database refuses one, the others are still created.
            Err(error) => {
                warn!(handler, %error, "the schedule that a module declares cannot be created; trying again in 5 minutes")
            }
        }
    }
    Ok(())
}
