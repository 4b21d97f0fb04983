//! Reports the usage of running attempts for `rouse top`: every few seconds, and only of long attempts.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::reach::warn_unless_unreachable;

/// The interval between reports. Usage is only displayed, so it may be a few seconds old; a thousand attempts that run
/// for hours cost two hundred small updates a second.
const EVERY: Duration = Duration::from_secs(5);

/// Attempts that have run for less than this are not reported.
const RUNS_FOR: Duration = Duration::from_secs(2);

/// Reports usage until the worker ends. A worker that runs only short attempts sends nothing.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    let mut reported = 0;
    loop {
        tokio::time::sleep(EVERY).await;
        let running = shared.leases.usage(RUNS_FOR);
        if running.is_empty() && reported == 0 {
            continue;
        }
        let _permit = shared.calls.patient.acquire().await;
        match shared.store.report_usage(&running).await {
            Ok(()) => reported = running.len(),
            // The attempts are lost, and so are their rows.
            Err(error) if shared.has_incarnation_ended(&error) => reported = 0,
            Err(error) => warn_unless_unreachable!(
                error,
                "could not report the usage of running attempts; trying again in 5 s"
            ),
        }
    }
}
