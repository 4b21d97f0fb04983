//! Ends jobs whose job timeout is over.
//!
//! Any host does it, whether or not it serves the job: when the next deadline that it knows of passes, and every 15 s
//! (`Intervals::deadlines`). The looks of an idle host also notice that a new one has passed. The task of `releases.rs`
//! would not do: it acts only on request.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Shared;
use super::events;
use super::reach::warn_unless_unreachable;
use super::window::Window;
use crate::store::StoreError;

/// The shortest wait between two calls: with many deadlines, each host handles those of this time at once.
const PAUSE: Duration = Duration::from_millis(250);

/// The wait after an error.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Enforces deadlines until the worker ends.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    let every = shared.settings.intervals.deadlines;
    let mut window = Window::default();
    loop {
        let wait = match enforce(&shared, &mut window).await {
            Ok(next_in) => next_in.map_or(every, |next_in| next_in.min(every)),
            Err(error) => {
                if !shared.is_incarnation_over(&error) {
                    warn_unless_unreachable!(
                        error,
                        "cannot end jobs whose job timeout is over; trying again in a second"
                    );
                }
                RETRY_AFTER
            }
        };
        // Hosts take turns rather than call together.
        let pause = PAUSE.mul_f64(rand::random_range(1.0..2.0));
        tokio::time::sleep(pause).await;
        tokio::select! {
            () = tokio::time::sleep(wait.saturating_sub(pause)) => {}
            () = shared.deadlines.notified() => {}
        }
    }
}

/// Handles all deadlines that have passed. Returns the time until the next one passes, if there is one.
async fn enforce(shared: &Shared, window: &mut Window) -> Result<Option<Duration>, StoreError> {
    loop {
        let began = Instant::now();
        let within = window.within(began);
        let enforced = shared.store.enforce_deadlines(within).await?;
        for missed in &enforced.ended {
            events::missed_deadline(&shared.settings.worker_id, missed);
        }
        if enforced.handled > 0 {
            // Their ends may have left jobs that wait for them, also those that a limited login does not see.
            shared.releases.notify_one();
        }
        if enforced.handled == 0 {
            window.found_nothing(began, within);
            return Ok(enforced.next_in);
        }
    }
}
