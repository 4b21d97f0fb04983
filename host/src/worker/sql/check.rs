//! Checks whether handlers can run their SQL statements now.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{MutexGuard as AsyncMutexGuard, Semaphore};

use super::super::Shared;
use super::super::successes::Waiting;
use super::{
    Fit, FitState, HandlerLogin, Statements, UNAVAILABLE_CHECK_EVERY, change, granted, show_parked,
};
use crate::sandbox::{GrantedSql, Handler};
use crate::store::{Login, Unfit};

/// How often parked handlers are checked again: an operator has to run a GRANT or a migration first.
const PARKED_CHECK_EVERY: Duration = Duration::from_secs(30);

/// How often the check of a handler that could not be checked is retried: the database may be reachable again.
const UNCHECKED_CHECK_EVERY: Duration = Duration::from_secs(1);

/// A login counts as unavailable once it has had no response for this long: a restart of the server, or a moment
/// without a free connection, does not matter.
const UNAVAILABLE_AFTER: Duration = Duration::from_secs(5);

/// The maximum number of logins that are checked at the same time. Each step of a check takes up to 15 s if the login
/// does not respond. If more logins than this do not respond, the others wait for them.
const LOGINS_AT_ONCE: usize = 16;

/// Checks the statements of all handlers when the worker starts and after each change to the handlers, and rechecks
/// those that do not fit at intervals, until the worker ends. Each login has checks of its own, so that one that does
/// not respond does not delay those of others.
pub(in crate::worker) async fn run_forever(shared: Arc<Shared>) {
    let permits = Semaphore::new(LOGINS_AT_ONCE);
    let mut checks = Vec::new();
    for (table, login) in &shared.sql.logins {
        checks.push(check_forever(&shared, table, login, &permits));
    }
    join_all(checks).await;
}

/// Checks the handlers of one login.
async fn check_forever(shared: &Shared, table: &str, login: &HandlerLogin, permits: &Semaphore) {
    let mut changes = shared.catalog.changed();
    loop {
        changes.mark_unchanged();
        let Next { wait, is_followed } = check_handlers(shared, table, login, permits).await;
        // A failure that was noted since is noted again: calls that have failed are retried.
        login.is_followed.store(is_followed, Ordering::Release);
        tokio::select! {
            () = async {
                match wait {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            } => {}
            () = login.is_due.notified() => {}
            changed = changes.changed() => if changed.is_err() {
                return;
            }
        }
    }
}

/// When the next check of a login is due, and why.
#[derive(Default)]
struct Next {
    /// The time until then; `None`: not before a change.
    wait: Option<Duration>,
    /// True if the login has had no response.
    is_followed: bool,
}

impl Next {
    fn within(&mut self, wait: Duration) {
        self.wait = Some(self.wait.map_or(wait, |earlier| earlier.min(wait)));
    }
}

/// The handlers of one login that are due for a check.
#[derive(Default)]
struct Due<'a> {
    /// The login has had no response, and is tried again for them.
    followed: Vec<Followed<'a>>,
    /// Their statements are not known to fit.
    unchecked: Vec<(&'a Arc<Handler>, &'a Arc<GrantedSql>)>,
}

/// A handler whose statements fit, and whose login has had no response.
struct Followed<'a> {
    name: &'a str,
    granted: &'a Arc<GrantedSql>,
    statements: &'a Arc<Statements>,
    /// True if it is known that the login is unavailable.
    is_unavailable: bool,
}

/// Checks the statements of this login's handlers that are not known to fit, and follows the login for those that fit.
async fn check_handlers(
    shared: &Shared,
    table: &str,
    login: &HandlerLogin,
    permits: &Semaphore,
) -> Next {
    let handlers = shared.catalog.current();
    let gone = |name: &String| handlers.get(name).is_none_or(|it| granted(it).is_none());
    let known = shared.sql.fits.load_full();
    let of_login = known.iter().filter(|(_, fit)| fit.granted.table == table);
    for (name, _) in of_login.filter(|(name, _)| gone(name)) {
        shared.sql.set(&shared.sql.changing(), name, None);
        show_parked(name, false);
    }
    let (mut next, mut due) = (Next::default(), Due::default());
    for (name, handler) in &handlers.handlers {
        let Some(granted) = granted(handler).filter(|granted| granted.table == table) else {
            continue;
        };
        match known.get(name).filter(|fit| fit.covers(granted)) {
            Some(Fit {
                granted,
                state: FitState::Fits(statements),
                ..
            }) => {
                let Some(unavailable) = statements.login.unavailable_for() else {
                    continue;
                };
                next.is_followed = true;
                next.within(UNAVAILABLE_CHECK_EVERY);
                if unavailable >= UNAVAILABLE_AFTER {
                    due.followed.push(Followed {
                        name,
                        granted,
                        statements,
                        is_unavailable: false,
                    });
                }
            }
            Some(Fit {
                granted,
                state: FitState::Unavailable(statements),
                ..
            }) => due.followed.push(Followed {
                name,
                granted,
                statements,
                is_unavailable: true,
            }),
            Some(Fit {
                state: FitState::Parked(_),
                checked_at,
                ..
            }) if checked_at.elapsed() < PARKED_CHECK_EVERY => {
                next.within(PARKED_CHECK_EVERY.saturating_sub(checked_at.elapsed()));
            }
            Some(_) | None => {
                // Its jobs wait until it has been checked, and the check may have to wait for those of other logins.
                show_parked(name, true);
                due.unchecked.push((handler, granted));
            }
        }
    }
    if !due.followed.is_empty() || !due.unchecked.is_empty() {
        // An error would mean that the semaphore was closed, which nothing does.
        let _permit = permits.acquire().await;
        check_due(shared, login, due, &mut next).await;
    }
    next
}

/// Tries the login of these handlers, if it has had no response, and checks the statements of those that have to be
/// checked. Once the login gives no response, the remaining handlers are not tried.
async fn check_due(shared: &Shared, login: &HandlerLogin, due: Due<'_>, next: &mut Next) {
    let mut responds = true;
    if let Some(first) = due.followed.first() {
        // Queries that were answered in the meantime do not count, because a standby answers them too.
        responds = first.statements.login.responds().await;
    }
    for followed in &due.followed {
        if followed.is_unavailable == responds {
            note_login(shared, followed, responds);
        }
        if !responds {
            next.is_followed = true;
            next.within(UNAVAILABLE_CHECK_EVERY);
        }
    }
    for (handler, granted) in due.unchecked {
        if !responds {
            next.within(UNCHECKED_CHECK_EVERY);
            let (name, changing) = (&handler.manifest.name, shared.sql.changing());
            let state = FitState::Unchecked("its login does not respond".into());
            change(shared, &changing, name, granted, state);
            continue;
        }
        match check(shared, login, handler, granted).await {
            FitState::Fits(_) => {}
            FitState::Parked(_) => next.within(PARKED_CHECK_EVERY),
            FitState::Unavailable(_) | FitState::Unchecked(_) => {
                next.within(UNCHECKED_CHECK_EVERY);
                responds &= login.opened(granted).unavailable_for().is_none();
            }
        }
    }
}

/// Notes that a login is unavailable, or that it responds again, unless the statements were checked since.
fn note_login(shared: &Shared, followed: &Followed<'_>, responds: bool) {
    let statements = followed.statements;
    let state = match responds {
        true => FitState::Fits(statements.clone()),
        false => FitState::Unavailable(statements.clone()),
    };
    let changing = shared.sql.changing();
    let now = shared.sql.statements(followed.name);
    if now.is_some_and(|now| Arc::ptr_eq(&now, statements)) {
        change(shared, &changing, followed.name, followed.granted, state);
    }
}

/// The result of checking a handler's statements again, after Postgres has refused one although they fitted before.
pub(in crate::worker) enum Rechecked {
    /// They no longer fit, or could not be checked: the handler's jobs wait.
    Waits,
    /// They fit, but the refused call was based on an earlier check: another one has come since, or the types of
    /// parameters have changed.
    FitsSince,
    /// They still fit as they did: the refusal has another reason.
    Fits,
}

/// Checks the statements of a handler again after Postgres has refused one of `used`. If another check has come first,
/// its result counts: several attempts may have met the same refusal, and the cause may be gone by now.
pub(in crate::worker) async fn recheck(
    shared: &Shared,
    handler: &Handler,
    used: &Arc<Statements>,
) -> Rechecked {
    // The handler from the catalog has no attenuation of a job.
    let handlers = shared.catalog.current();
    let Some(handler) = handlers.get(&handler.manifest.name) else {
        return Rechecked::Waits;
    };
    let Some(granted) = granted(handler) else {
        return Rechecked::Waits;
    };
    let Some(login) = shared.sql.logins.get(&granted.table) else {
        return Rechecked::Waits;
    };
    let checking = login.checking.lock().await;
    match shared.sql.statements(&handler.manifest.name) {
        None => return Rechecked::Waits,
        Some(now) if !Arc::ptr_eq(&now, used) => return Rechecked::FitsSince,
        Some(_) => {}
    }
    match check_alone(shared, login, handler, granted, &checking).await {
        FitState::Fits(now) if now.by_name != used.by_name => Rechecked::FitsSince,
        FitState::Fits(_) => Rechecked::Fits,
        FitState::Parked(_) | FitState::Unchecked(_) | FitState::Unavailable(_) => {
            // While all handlers of a login fit, its next check is not due before a change.
            login.is_due.notify_one();
            Rechecked::Waits
        }
    }
}

async fn check(
    shared: &Shared,
    login: &HandlerLogin,
    handler: &Handler,
    granted: &Arc<GrantedSql>,
) -> FitState {
    let checking = login.checking.lock().await;
    check_alone(shared, login, handler, granted, &checking).await
}

/// Checks the statements of a handler while no other check of its login runs.
async fn check_alone(
    shared: &Shared,
    login: &HandlerLogin,
    handler: &Handler,
    granted: &Arc<GrantedSql>,
    _checking: &AsyncMutexGuard<'_, ()>,
) -> FitState {
    let name = &handler.manifest.name;
    let before = shared.sql.statements(name);
    let waiting = before.and_then(|before| before.waiting_for(granted));
    let waiting = waiting.unwrap_or_else(|| Arc::new(Waiting::new()));
    let state = match check_statements(shared, login.opened(granted), granted, waiting).await {
        Ok(statements) => FitState::Fits(Arc::new(statements)),
        Err(Unfit::Mismatch(why)) => FitState::Parked(why.into()),
        Err(Unfit::Unchecked(why)) => FitState::Unchecked(why.into()),
    };
    change(shared, &shared.sql.changing(), name, granted, state.clone());
    state
}

async fn check_statements(
    shared: &Shared,
    login: &Login,
    granted: &Arc<GrantedSql>,
    waiting: Arc<Waiting>,
) -> Result<Statements, Unfit> {
    shared.store.check_login(login).await?;
    let mut by_name = HashMap::new();
    for statement in &granted.statements {
        let checked = login.check(statement, &granted.limits).await?;
        by_name.insert(statement.name.clone(), checked);
    }
    Ok(Statements {
        login: login.clone(),
        granted: granted.clone(),
        by_name,
        waiting,
    })
}
