//! One backoff for all connections of one login.
//!
//! As long as connections open, it has no effect. After the first failure, all callers get an error at once, without a
//! try, until 1, 2, 4 … 60 s have passed; then the next caller makes one try. Callers that retry on their own
//! (settlements, renewals, steps) therefore need no backoff of their own.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::debug;

/// The longest wait, before jitter.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// The backoff of one login at one address.
#[derive(Debug)]
pub(super) struct Backoff {
    login: String,
    reach: watch::Sender<Reach>,
}

/// The reachability of a server: whether connections to it open.
#[derive(Debug, Clone, Default)]
pub struct Reach {
    /// The failure; `None` if the last connection opened, or none was tried.
    away: Option<Away>,
}

/// A server that cannot be connected to.
#[derive(Debug, Clone)]
pub struct Away {
    /// The error of the last try.
    pub why: String,
    /// The time of the first failure.
    pub since: Instant,
    /// The number of consecutive failed tries.
    pub failures: u32,
    /// The time of the next try; `None` while one is in progress.
    next_at: Option<Instant>,
}

impl Reach {
    /// The failure; `None` if the last connection opened, or none was tried.
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
pub enum OpenError<E> {
    /// Not tried: the backoff has not passed.
    #[error("{}", .0.why)]
    Away(Away),
    /// The connection was tried, and the try failed.
    #[error("{0}")]
    Failed(E),
    /// The connection was tried, without a response in time.
    #[error("no response within {} s", .0.as_secs())]
    Silent(Duration),
}

/// A try that continues whether or not a caller waits for its end.
#[derive(Debug)]
pub(super) struct Try<T, E> {
    started: Instant,
    task: JoinHandle<Result<T, OpenError<E>>>,
}

impl<T, E> Try<T, E> {
    pub(super) fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    pub(super) fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Its result. Must not be called again after it has returned.
    pub(super) async fn end(&mut self) -> Result<T, OpenError<E>> {
        match (&mut self.task).await {
            Ok(opened) => opened,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime is shutting down, and this task with it.
                Err(_) => std::future::pending().await,
            },
        }
    }
}

impl Backoff {
    pub(super) fn new(login: &str) -> Self {
        Self {
            login: login.to_owned(),
            reach: watch::Sender::default(),
        }
    }

    /// Watches whether connections open.
    pub(super) fn reach(&self) -> watch::Receiver<Reach> {
        self.reach.subscribe()
    }

    /// Opens a connection, unless the backoff has not passed.
    pub(super) async fn open<T, E>(
        self: &Arc<Self>,
        timeout: Duration,
        opening: impl Future<Output = Result<T, E>> + Send + 'static,
        describe: impl FnOnce(&E) -> String + Send + 'static,
    ) -> Result<T, OpenError<E>>
    where
        T: Send + 'static,
        E: fmt::Display + Send + 'static,
    {
        self.start(timeout, opening, describe)?.end().await
    }

    /// Starts to open a connection, unless the backoff has not passed. The try continues even if no caller waits for
    /// its end: whether the server is reached does not depend on the timeout of one caller.
    pub(super) fn start<T, E>(
        self: &Arc<Self>,
        timeout: Duration,
        opening: impl Future<Output = Result<T, E>> + Send + 'static,
        describe: impl FnOnce(&E) -> String + Send + 'static,
    ) -> Result<Try<T, E>, OpenError<E>>
    where
        T: Send + 'static,
        E: fmt::Display + Send + 'static,
    {
        let turn = self.turn().map_err(OpenError::Away)?;
        let started = Instant::now();
        let task = tokio::spawn(async move {
            let opened = match tokio::time::timeout(timeout, opening).await {
                Ok(opened) => opened.map_err(OpenError::Failed),
                Err(_) => Err(OpenError::Silent(timeout)),
            };
            match &opened {
                Ok(_) => turn.succeeded(),
                Err(OpenError::Failed(error)) => turn.failed(describe(error)),
                Err(not) => turn.failed(not.to_string()),
            }
            opened
        });
        Ok(Try { started, task })
    }

    /// Waits until the server is reached or the backoff has passed.
    pub(super) async fn ready(&self) {
        let mut reach = self.reach.subscribe();
        loop {
            let next_at = match reach.borrow_and_update().away() {
                None => return,
                Some(away) if away.is_time() => return,
                Some(away) => away.next_at,
            };
            // `changed` cannot fail, because the sender is in `self`.
            match next_at {
                Some(at) => {
                    let _ = tokio::time::timeout_at(at.into(), reach.changed()).await;
                }
                None => _ = reach.changed().await,
            }
        }
    }

    /// True if the last try failed.
    pub(super) fn is_away(&self) -> bool {
        self.reach.borrow().away().is_some()
    }

    /// Ends the wait for the next try. Also ends the wait for a try in progress: the server may be back, even if it
    /// does not respond to that try.
    pub(super) fn try_now(&self) {
        self.reach.send_if_modified(|reach| {
            let away = reach.away.as_mut();
            away.map(|away| away.next_at = Some(Instant::now()))
                .is_some()
        });
    }

    /// Ends the wait for the next try, and starts over: another login has reached the server. A failure of that try is
    /// followed by the shortest wait.
    pub(super) fn start_over(&self) {
        self.reach.send_if_modified(|reach| {
            let away = reach.away.as_mut();
            away.map(|away| (away.next_at, away.failures) = (Some(Instant::now()), 0))
                .is_some()
        });
    }

    fn turn(self: &Arc<Self>) -> Result<Turn, Away> {
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
            // Waiters need to see only the end of the try.
            false
        });
        Ok(Turn {
            backoff: self.clone(),
            failures: turn?,
            succeeded: false,
            why: "the try was cancelled".into(),
        })
    }
}

/// One try. If it is dropped before it succeeds, it has failed.
struct Turn {
    backoff: Arc<Backoff>,
    /// The number of consecutive failed tries before this one.
    failures: u32,
    succeeded: bool,
    why: String,
}

impl Turn {
    fn succeeded(mut self) {
        self.succeeded = true;
    }

    fn failed(mut self, why: String) {
        self.why = why;
    }

    fn log(&self, failures: u32, counted: bool) {
        let (login, why) = (&self.backoff.login, &self.why);
        debug!(failures, counted, login, why, "a connection did not open");
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let backoff = self.backoff.clone();
        backoff.reach.send_if_modified(|reach| {
            let failures = reach.away().map_or(0, |away| away.failures);
            match self.succeeded {
                true => reach.away.take().is_some(),
                // Several concurrent failures count as one.
                false if failures != self.failures => {
                    self.log(failures, false);
                    false
                }
                false => {
                    let failures = failures + 1;
                    self.log(failures, true);
                    let now = Instant::now();
                    reach.away = Some(Away {
                        why: std::mem::take(&mut self.why),
                        since: reach.away().map_or(now, |away| away.since),
                        failures,
                        next_at: Some(now + self::backoff(failures - 1, rand::random())),
                    });
                    true
                }
            }
        });
    }
}

/// The wait after this many consecutive failures: 1, 2, 4 … 60 s, with jitter of up to one half. `random` is uniform in
/// `0.0..1.0`. The jitter keeps hosts that lose a server together from reconnecting together.
pub fn backoff(failures: u32, random: f64) -> Duration {
    Duration::from_secs(1 << failures.min(6))
        .min(WAIT_MAX)
        .mul_f64(0.5 + 0.5 * random)
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    async fn fails(backoff: &Arc<Backoff>) -> Result<(), OpenError<&'static str>> {
        let failing = ready(Err::<(), _>("refused"));
        let describe = |why: &&str| (*why).to_string();
        backoff.open(TIMEOUT, failing, describe).await
    }

    fn away(backoff: &Backoff) -> Option<Away> {
        backoff.reach().borrow().away().cloned()
    }

    /// Changes the time of the next try, and returns what it was.
    fn next_at(backoff: &Backoff, at: Instant) -> Instant {
        let mut away = away(backoff).expect("it is away");
        let before = away.next_at.replace(at);
        backoff.reach.send_modify(|reach| reach.away = Some(away));
        before.expect("no try is in progress")
    }

    #[test]
    fn backoff_doubles_from_one_to_sixty_seconds() {
        let waits: Vec<u64> = (0..8).map(|n| backoff(n, 1.0).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(backoff(3, 0.0), Duration::from_secs(4));
    }

    #[tokio::test]
    async fn one_caller_tries_after_the_backoff_and_the_others_fail_at_once() {
        let backoff = Arc::new(Backoff::new("rouse"));
        assert!(matches!(
            fails(&backoff).await,
            Err(OpenError::Failed("refused"))
        ));
        // Not before the end of the backoff, however slow this test is.
        let soon = next_at(&backoff, Instant::now() + Duration::from_secs(3600));
        let Err(OpenError::Away(away_now)) = fails(&backoff).await else {
            panic!("it is not time");
        };
        assert_eq!((away_now.failures, away_now.why.as_str()), (1, "refused"));
        next_at(&backoff, soon);
        backoff.ready().await;
        // During a try, other callers fail at once.
        let trying = backoff.turn();
        assert!(matches!(fails(&backoff).await, Err(OpenError::Away(_))));
        drop(trying);
        assert_eq!(away(&backoff).map(|away| away.failures), Some(2));
        backoff.ready().await;
        let opening = ready(Ok::<_, &str>(()));
        let opened = backoff.open(TIMEOUT, opening, |_| String::new()).await;
        assert!(opened.is_ok() && away(&backoff).is_none());
    }

    #[tokio::test]
    async fn try_now_skips_the_backoff() {
        let backoff = Arc::new(Backoff::new("rouse"));
        for _ in 0..6 {
            backoff.try_now();
            assert!(matches!(fails(&backoff).await, Err(OpenError::Failed(_))));
        }
        assert_eq!(away(&backoff).map(|away| away.failures), Some(6));
        assert!(matches!(fails(&backoff).await, Err(OpenError::Away(_))));
    }

    #[tokio::test]
    async fn a_backoff_that_starts_over_has_the_shortest_wait_again() {
        let backoff = Arc::new(Backoff::new("rouse"));
        let since = |backoff: &Backoff| away(backoff).expect("it is away").since;
        let _ = fails(&backoff).await;
        let first = since(&backoff);
        for _ in 0..5 {
            backoff.try_now();
            let _ = fails(&backoff).await;
        }
        backoff.start_over();
        assert!(matches!(fails(&backoff).await, Err(OpenError::Failed(_))));
        let away_now = away(&backoff).expect("it is away");
        assert_eq!((away_now.failures, away_now.since), (1, first));
        let wait = away_now.next_at.expect("no try is in progress") - Instant::now();
        assert!(wait <= Duration::from_secs(1), "{wait:?}");
    }

    #[tokio::test]
    async fn a_try_that_was_in_progress_does_not_lengthen_a_backoff_that_starts_over() {
        let backoff = Arc::new(Backoff::new("rouse"));
        let _ = fails(&backoff).await;
        backoff.try_now();
        let hangs = backoff.turn().expect("it is time");
        backoff.start_over();
        drop(hangs);
        let away_now = away(&backoff).expect("it is away");
        assert!(away_now.failures == 0 && away_now.is_time());
    }

    #[tokio::test]
    async fn try_now_does_not_wait_for_a_try_that_gets_no_response() {
        let backoff = Arc::new(Backoff::new("rouse"));
        let _ = fails(&backoff).await;
        backoff.try_now();
        let hangs = backoff.turn().expect("it is time");
        assert!(matches!(fails(&backoff).await, Err(OpenError::Away(_))));
        backoff.try_now();
        let opening = ready(Ok::<_, &str>(()));
        let opened = backoff.open(TIMEOUT, opening, |_| String::new()).await;
        assert!(opened.is_ok());
        drop(hangs);
        assert!(
            away(&backoff).is_none(),
            "the server was reached after that try started"
        );
    }

    #[tokio::test]
    async fn concurrent_failures_count_once() {
        let backoff = Arc::new(Backoff::new("rouse"));
        let tries = [backoff.turn(), backoff.turn(), backoff.turn()];
        drop(tries);
        assert_eq!(away(&backoff).map(|away| away.failures), Some(1));
    }

    #[tokio::test]
    async fn a_try_continues_without_its_caller() {
        let backoff = Arc::new(Backoff::new("rouse"));
        let _ = fails(&backoff).await;
        backoff.ready().await;
        let (response, answered) = tokio::sync::oneshot::channel::<()>();
        let opening = backoff.open(TIMEOUT, answered, |_| String::new());
        assert!(
            tokio::time::timeout(Duration::from_millis(1), opening)
                .await
                .is_err(),
            "the caller gives up"
        );
        assert!(matches!(fails(&backoff).await, Err(OpenError::Away(_))));
        response.send(()).expect("the try continues");
        let mut reach = backoff.reach();
        reach
            .wait_for(|reach| reach.away().is_none())
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn a_try_without_a_response_fails() {
        let backoff = Arc::new(Backoff::new("rouse"));
        let opening = pending::<Result<(), &str>>();
        let opened = backoff.open(Duration::from_millis(1), opening, |_| String::new());
        assert!(matches!(opened.await, Err(OpenError::Silent(_))));
        let away_now = away(&backoff).expect("it is away");
        assert!(away_now.why.starts_with("no response"), "{}", away_now.why);
    }

    #[tokio::test]
    async fn a_success_wakes_all_waiters() {
        let backoff = Arc::new(Backoff::new("rouse"));
        let early = backoff.turn();
        let _ = fails(&backoff).await;
        next_at(&backoff, Instant::now() + Duration::from_secs(3600));
        let waits = tokio::spawn({
            let mut reach = backoff.reach();
            async move { reach.wait_for(|reach| reach.away().is_none()).await.is_ok() }
        });
        let recovery = async {
            let _ = tokio::join!(backoff.ready(), async { early.map(Turn::succeeded) });
        };
        tokio::time::timeout(Duration::from_secs(20), recovery)
            .await
            .expect("the waiters wake up");
        assert!(waits.await.unwrap());
    }
}
