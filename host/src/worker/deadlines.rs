//! Ends jobs whose job timeout has expired.
//!
//! Any host does this, whether or not it serves the job: when the next deadline that it knows of passes, and every 15 s
//! (`Intervals::deadlines`). The looks of an idle host also notice that another deadline has passed. The task in
//! `releases.rs` cannot do this: it acts only on request.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::Shared;
use super::events;
use super::reach::warn_unless_unreachable;
use crate::store::StoreError;

/// The shortest wait between two calls: with many deadlines, each host handles those that pass within this time
/// together.
const PAUSE: Duration = Duration::from_millis(250);

/// The time between two looks for all deadlines that have passed. The other looks leave out those that passed long
/// before the previous look: while a transaction is open all day, the index keeps entries for the deadlines that were
/// handled since then.
const ALL_EVERY: Duration = Duration::from_secs(600);

/// The margin before the previous look: a deadline that passed within it may not have been visible, because its
/// transaction was open.
const LATE: Duration = Duration::from_secs(60);

/// The wait after an error.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Enforces deadlines until the worker ends.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    let every = shared.settings.intervals.deadlines;
    let mut looks = Looks::default();
    loop {
        let wait = match enforce(&shared, &mut looks).await {
            Ok(next_in) => next_in.map_or(every, |next_in| next_in.min(every)),
            Err(error) => {
                if !shared.has_incarnation_ended(&error) {
                    warn_unless_unreachable!(
                        error,
                        "cannot end jobs whose job timeout has expired; trying again in a second"
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

/// The times of the looks that left nothing to handle.
#[derive(Debug, Default)]
struct Looks {
    /// The start of the last look for all deadlines.
    for_all: Option<Instant>,
    /// The time of the last look (database clock): after the machine was suspended, this is long ago.
    last: Option<SystemTime>,
}

impl Looks {
    /// A look considers only deadlines that passed after this time; `None`: all deadlines.
    fn since(&self, now: Instant) -> Option<SystemTime> {
        let (for_all, last) = (self.for_all?, self.last?);
        (now.duration_since(for_all) < ALL_EVERY).then(|| last - LATE)
    }

    /// Notes that a look that started at `now` has left nothing to handle. `at`: the same time by the database's clock.
    fn found_nothing(&mut self, now: Instant, at: SystemTime, since: Option<SystemTime>) {
        self.last = Some(at);
        if since.is_none() {
            self.for_all = Some(now);
        }
    }
}

/// Handles all deadlines that have passed. Returns the time until the next one passes, if there is one.
async fn enforce(shared: &Shared, looks: &mut Looks) -> Result<Option<Duration>, StoreError> {
    loop {
        let started_at = Instant::now();
        let since = looks.since(started_at);
        let enforced = shared.store.enforce_deadlines(since).await?;
        for missed in &enforced.ended {
            events::missed_deadline(&shared.settings.worker_id, missed);
        }
        if enforced.handled > 0 {
            // Jobs may wait for those that the call has ended, including those that a limited login cannot see.
            shared.releases.notify_one();
        }
        if enforced.handled == 0 {
            looks.found_nothing(started_at, enforced.looked_at, since);
            return Ok(enforced.next_in);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handled_deadlines_are_read_again_only_every_ten_minutes() {
        let start = Instant::now();
        let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds);
        let mut looks = Looks::default();
        assert_eq!(looks.since(start), None, "the first look is for all");
        looks.found_nothing(start, at(60), None);
        // The machine was suspended for an hour: its own clock stood still.
        let later = start + Duration::from_secs(15);
        assert_eq!(looks.since(later), Some(at(0)));
        looks.found_nothing(later, at(3660), looks.since(later));
        let before = start + ALL_EVERY - Duration::from_secs(1);
        assert_eq!(looks.since(before), Some(at(3600)));
        assert_eq!(looks.since(start + ALL_EVERY), None);
    }
}
