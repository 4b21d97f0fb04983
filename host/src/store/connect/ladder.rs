//! When a server that is not reached is tried again: after 1, 2, 4 … 60 s (SPEC row A7), whoever wants a connection, and
//! one try at a time.
//!
//! While the server is reached, this is in nobody's way. From the first connection that cannot be opened on, whoever wants one
//! is told so at once until it is time for the next try. So what retries on its own (settling, renewing, steps) may ask as
//! often as it likes.

use std::future::Future;
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// The longest wait, before jitter.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// How a server is reached; one for each address.
#[derive(Debug)]
pub(super) struct Ladder {
    reach: watch::Sender<Reach>,
}

/// What is known of a server.
#[derive(Debug, Clone, Default)]
pub struct Reach {
    /// None: it is reached, as far as is known.
    away: Option<Away>,
}

/// A server that is not reached.
#[derive(Debug, Clone)]
pub struct Away {
    /// Why the last try did not work.
    pub why: String,
    /// When it was first not reached.
    pub since: Instant,
    /// Tries in a row.
    pub failures: u32,
    /// When to try again; none: somebody is trying.
    next_at: Option<Instant>,
}

impl Reach {
    /// None: the server is reached, as far as is known.
    pub fn away(&self) -> Option<&Away> {
        self.away.as_ref()
    }
}

impl Away {
    fn is_time(&self) -> bool {
        self.next_at.is_some_and(|at| Instant::now() >= at)
    }
}

/// Why a connection was not opened.
#[derive(Debug, thiserror::Error)]
pub enum NotOpened<E> {
    /// It is not time to try.
    #[error("{}", .0.why)]
    Away(Away),
    /// It was tried.
    #[error("{0}")]
    Failed(E),
}

impl Ladder {
    pub(super) fn new() -> Self {
        Self {
            reach: watch::Sender::default(),
        }
    }

    /// What is known of the server, now and later.
    pub(super) fn reach(&self) -> watch::Receiver<Reach> {
        self.reach.subscribe()
    }

    /// Opens a connection, unless it is known that the server is away, and not time to try.
    pub(super) async fn open<T, E>(
        &self,
        opening: impl Future<Output = Result<T, E>>,
        describe: impl FnOnce(&E) -> String,
    ) -> Result<T, NotOpened<E>> {
        let mut turn = self.turn().map_err(NotOpened::Away)?;
        match opening.await {
            Ok(opened) => {
                turn.worked = true;
                Ok(opened)
            }
            Err(error) => {
                turn.why = describe(&error);
                Err(NotOpened::Failed(error))
            }
        }
    }

    /// Waits until it makes sense to open a connection.
    pub(super) async fn ready(&self) {
        let mut reach = self.reach.subscribe();
        loop {
            let next_at = match reach.borrow_and_update().away() {
                None => return,
                Some(away) if away.is_time() => return,
                Some(away) => away.next_at,
            };
            // The sender is in `self`.
            match next_at {
                Some(at) => {
                    let _ = tokio::time::timeout_at(at.into(), reach.changed()).await;
                }
                None => _ = reach.changed().await,
            }
        }
    }

    /// Makes it time for the next try.
    pub(super) fn try_now(&self) {
        self.reach.send_if_modified(|reach| {
            let next_at = reach.away.as_mut().and_then(|away| away.next_at.as_mut());
            next_at.map(|at| *at = Instant::now()).is_some()
        });
    }

    fn turn(&self) -> Result<Turn<'_>, Away> {
        let mut turn = Ok(0);
        self.reach.send_if_modified(|reach| {
            if let Some(away) = &mut reach.away {
                turn = match away.is_time() {
                    true => {
                        away.next_at = None;
                        Ok(away.failures)
                    }
                    false => Err(away.clone()),
                };
            }
            // Nobody waits for a try to begin.
            false
        });
        Ok(Turn {
            ladder: self,
            failures: turn?,
            worked: false,
            why: "it was given up before there was an answer".into(),
        })
    }
}

/// One try; over when dropped.
struct Turn<'a> {
    ladder: &'a Ladder,
    /// How many failed before.
    failures: u32,
    worked: bool,
    why: String,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.ladder.reach.send_if_modified(|reach| {
            let failures = reach.away().map_or(0, |away| away.failures);
            match self.worked {
                true => reach.away.take().is_some(),
                // Of several that were under way at once, one counts.
                false if failures != self.failures => false,
                false => {
                    let now = Instant::now();
                    reach.away = Some(Away {
                        why: std::mem::take(&mut self.why),
                        since: reach.away().map_or(now, |away| away.since),
                        failures: failures + 1,
                        next_at: Some(now + wait(failures, rand::random())),
                    });
                    true
                }
            }
        });
    }
}

/// 1, 2, 4 … 60 s, of which a random half: `random` is uniform in `0.0..1.0`. So those who have lost a server together do
/// not come back together.
pub fn wait(failures: u32, random: f64) -> Duration {
    Duration::from_secs(1 << failures.min(6))
        .min(WAIT_MAX)
        .mul_f64(0.5 + 0.5 * random)
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    async fn fails(ladder: &Ladder) -> Result<(), NotOpened<&'static str>> {
        let failing = ready(Err::<(), _>("refused"));
        ladder.open(failing, |why| (*why).to_string()).await
    }

    fn away(ladder: &Ladder) -> Option<Away> {
        ladder.reach().borrow().away().cloned()
    }

    #[test]
    fn tries_come_after_one_two_four_and_at_most_sixty_seconds() {
        let waits: Vec<u64> = (0..8).map(|n| wait(n, 1.0).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(wait(3, 0.0), Duration::from_secs(4));
    }

    #[tokio::test]
    async fn a_server_that_is_away_is_not_tried_before_its_time_and_once_then() {
        let ladder = Ladder::new();
        assert!(matches!(
            fails(&ladder).await,
            Err(NotOpened::Failed("refused"))
        ));
        let Err(NotOpened::Away(told)) = fails(&ladder).await else {
            panic!("it is not time");
        };
        assert_eq!((told.failures, told.why.as_str()), (1, "refused"));
        ladder.ready().await;
        // One tries, the others are told that it is away.
        let trying = ladder.turn();
        assert!(matches!(fails(&ladder).await, Err(NotOpened::Away(_))));
        drop(trying);
        assert_eq!(away(&ladder).map(|away| away.failures), Some(2));
        ladder.ready().await;
        let opened = ladder
            .open(ready(Ok::<_, ()>(())), |()| String::new())
            .await;
        assert!(opened.is_ok() && away(&ladder).is_none());
    }

    #[tokio::test]
    async fn whoever_has_one_last_thing_to_say_does_not_wait() {
        let ladder = Ladder::new();
        for _ in 0..6 {
            ladder.try_now();
            assert!(matches!(fails(&ladder).await, Err(NotOpened::Failed(_))));
        }
        assert_eq!(away(&ladder).map(|away| away.failures), Some(6));
        assert!(matches!(fails(&ladder).await, Err(NotOpened::Away(_))));
    }

    #[tokio::test]
    async fn of_tries_that_were_under_way_at_once_one_counts() {
        let ladder = Ladder::new();
        let tries = [ladder.turn(), ladder.turn(), ladder.turn()];
        drop(tries);
        assert_eq!(away(&ladder).map(|away| away.failures), Some(1));
    }

    #[tokio::test]
    async fn a_try_that_is_given_up_has_failed() {
        let ladder = Ladder::new();
        let opening = ladder.open(pending::<Result<(), ()>>(), |()| String::new());
        let _ = tokio::time::timeout(Duration::from_millis(1), opening).await;
        let told = away(&ladder).expect("it is away");
        assert!(told.why.contains("given up"), "{}", told.why);
    }

    #[tokio::test]
    async fn who_waits_goes_on_as_soon_as_another_has_reached_it() {
        let ladder = Ladder::new();
        let early = ladder.turn();
        let _ = fails(&ladder).await;
        let far = away(&ladder).map(|away| Away {
            next_at: Some(Instant::now() + Duration::from_secs(3600)),
            ..away
        });
        ladder.reach.send_modify(|reach| reach.away = far);
        let waits = tokio::spawn({
            let mut reach = ladder.reach();
            async move { reach.wait_for(|reach| reach.away().is_none()).await.is_ok() }
        });
        let goes_on = async {
            let _ = tokio::join!(ladder.ready(), async {
                early.map(|mut turn| turn.worked = true)
            });
        };
        tokio::time::timeout(Duration::from_secs(20), goes_on)
            .await
            .expect("it goes on");
        assert!(waits.await.unwrap());
    }
}
