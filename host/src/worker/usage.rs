//! What attempts use while they run, for `rouse top`: told once every few seconds, and only of those that run for long.

use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::reach::warn_unless_unreachable;

/// A person looks at it. A thousand attempts that run for hours cost two hundred small updates a second.
const EVERY: Duration = Duration::from_secs(5);

/// Of an attempt that ends sooner nobody hears before its end.
const RUNS_FOR: Duration = Duration::from_secs(2);

/// Tells what the attempts have used, for as long as the worker lives. A worker that runs only short ones says nothing.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    let mut told = 0;
    loop {
        tokio::time::sleep(EVERY).await;
        let running = shared.leases.used(RUNS_FOR);
        if running.is_empty() && told == 0 {
            continue;
        }
        let _turn = shared.calls.patient.acquire().await;
        match shared.store.report_usage(&running).await {
            Ok(()) => told = running.len(),
            // This life is over, and its attempts with it.
            Err(error) if shared.doubted(&error) => told = 0,
            Err(error) => warn_unless_unreachable!(
                error,
                "could not tell what the running attempts have used"
            ),
        }
    }
}
