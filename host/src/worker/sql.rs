//! The SQL statements of handlers on this host, and whether they fit the database.
//!
//! A handler with granted statements is served only after the database has accepted all of them in a session of the
//! handler's login. A handler whose statements do not fit is parked: its jobs wait, for another host or until the next
//! check. They also wait while the login does not answer. `effects.rs` runs the statements.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use futures_util::future::join_all;
use metrics::gauge;
use tokio::sync::{Mutex as AsyncMutex, MutexGuard as AsyncMutexGuard, Notify, Semaphore};
use tracing::{debug, info, warn};

use super::Shared;
use super::successes::Waiting;
use crate::sandbox::{GrantedSql, Handler};
use crate::store::connect::Connector;
use crate::store::{CheckedStatement, Login, Unfit};

/// How often parked handlers are checked again: an operator has to run a GRANT or a migration first.
const PARKED_CHECK_EVERY: Duration = Duration::from_secs(30);

/// How often the check of a handler that could not be checked is retried: the database may be reachable again.
const UNCHECKED_CHECK_EVERY: Duration = Duration::from_secs(1);

/// A login counts as unavailable once it has had no response for this long: a restart of the server, or a moment
/// without a free connection, does not matter.
const UNAVAILABLE_AFTER: Duration = Duration::from_secs(5);

/// How often a login that has had no response is checked.
const UNAVAILABLE_CHECK_EVERY: Duration = Duration::from_secs(1);

/// The maximum number of logins that are checked at the same time. A login that does not answer takes up to 15 s for
/// each step of a check; if there are more of these than this, the others wait for them.
const LOGINS_AT_ONCE: usize = 16;

/// The statements of all handlers of one worker.
pub(super) struct Sql {
    /// The logins, by the table of `rouse.toml` that names them.
    logins: BTreeMap<String, HandlerLogin>,
    /// The state by handler; handlers without granted statements are missing.
    fits: ArcSwap<HashMap<String, Fit>>,
    /// Incremented with each change to them.
    version: AtomicU64,
    /// Locked while `fits` changes.
    changing: Mutex<()>,
}

/// A login with which handlers run their statements.
struct HandlerLogin {
    connector: Connector,
    /// Its connections, once a handler has been checked.
    opened: OnceLock<Login>,
    /// Locked during a check: only one runs at a time.
    checking: AsyncMutex<()>,
    /// Notified when it has had no response, or may respond again.
    is_due: Notify,
    /// True if it has had no response, and is checked every second.
    is_followed: AtomicBool,
}

/// The state of the statements of a handler.
#[derive(Clone)]
struct Fit {
    granted: Arc<GrantedSql>,
    state: FitState,
    checked_at: Instant,
}

#[derive(Clone)]
enum FitState {
    /// All of them fit.
    Fits(Arc<Statements>),
    /// All of them fit, but the login is unavailable: successes wait for their commit, and no attempts start.
    Unavailable(Arc<Statements>),
    /// They have not been checked yet.
    Unchecked(Arc<str>),
    /// One of them does not fit, for this reason.
    Parked(Arc<str>),
}

/// The statements of a handler, which fit the database.
pub(super) struct Statements {
    pub(super) login: Login,
    granted: Arc<GrantedSql>,
    by_name: HashMap<String, CheckedStatement>,
    /// The attempts whose effects are to be committed.
    pub(super) waiting: Waiting,
}

impl Statements {
    /// The statement with this name that an attempt with these grants may run. `None` if it is not the one that the
    /// attempt's version of the module declares: the file of the module was replaced after the attempt had started, and
    /// the parameters are meant for the previous text.
    pub(super) fn declared_by(
        &self,
        granted: &Arc<GrantedSql>,
        name: &str,
    ) -> Option<&CheckedStatement> {
        let is_same = Arc::ptr_eq(&self.granted, granted)
            || self.granted.statement(name) == Some(granted.statement(name)?);
        self.by_name.get(name).filter(|_| is_same)
    }
}

impl Fit {
    /// What is known after this check. If the statements could not be checked, a handler that is parked stays so, for
    /// the reason that is known, and the next check is as due as it was.
    fn after(self, before: Option<&Self>) -> Self {
        match (&self.state, before) {
            (FitState::Unchecked(_), Some(before))
                if matches!(before.state, FitState::Parked(_)) && before.covers(&self.granted) =>
            {
                before.clone()
            }
            _ => self,
        }
    }

    /// True if it applies to these statements. A new version of the module with the same statements needs no new check.
    fn covers(&self, granted: &Arc<GrantedSql>) -> bool {
        // A job's attenuation removes statements from the grant, and changes nothing else.
        Arc::ptr_eq(&self.granted, granted)
            || self.granted.table == granted.table
                && granted
                    .statements
                    .iter()
                    .all(|it| self.granted.statement(&it.name) == Some(it))
    }
}

impl HandlerLogin {
    fn new(connector: Connector) -> Self {
        Self {
            connector,
            opened: OnceLock::new(),
            checking: AsyncMutex::default(),
            is_due: Notify::new(),
            is_followed: AtomicBool::new(false),
        }
    }

    /// The login with as many connections as the limits of its first handler allow.
    fn opened(&self, granted: &GrantedSql) -> &Login {
        self.opened.get_or_init(|| {
            let connections = usize::try_from(granted.limits.connections_max);
            Login::new(&self.connector, connections.unwrap_or(usize::MAX))
        })
    }
}

impl Sql {
    pub(super) fn new(logins: BTreeMap<String, Connector>) -> Self {
        let logins = logins.into_iter();
        Self {
            logins: logins
                .map(|(table, connector)| (table, HandlerLogin::new(connector)))
                .collect(),
            fits: ArcSwap::default(),
            version: AtomicU64::new(0),
            changing: Mutex::default(),
        }
    }

    /// Changes whenever [`is_parked`](Self::is_parked) may.
    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The statements of this handler. `None` if it has none, or if it is parked.
    pub(super) fn statements(&self, handler: &str) -> Option<Arc<Statements>> {
        match &self.fits.load().get(handler)?.state {
            FitState::Fits(statements) | FitState::Unavailable(statements) => {
                Some(statements.clone())
            }
            FitState::Unchecked(_) | FitState::Parked(_) => None,
        }
    }

    /// Waits until the login of this handler is unavailable.
    pub(super) async fn until_unavailable(&self, handler: &str) {
        let is_unavailable = || {
            let fits = self.fits.load();
            matches!(fits.get(handler), Some(fit) if matches!(fit.state, FitState::Unavailable(_)))
        };
        while !is_unavailable() {
            tokio::time::sleep(UNAVAILABLE_CHECK_EVERY).await;
        }
    }

    /// Notes that the login of this handler has had no response: it is followed until it has one.
    pub(super) fn follow_login(&self, handler: &Handler) {
        let table = handler.sql().map(|granted| &granted.table);
        if let Some(login) = table.and_then(|table| self.logins.get(table))
            && !login.is_followed.swap(true, Ordering::AcqRel)
        {
            login.is_due.notify_one();
        }
    }

    /// Tries all logins at once that had no response: the host's own login has reached the server again.
    pub(super) fn try_logins(&self) {
        for login in self.logins.values() {
            login.connector.start_over();
            login.is_due.notify_one();
        }
    }

    /// True if the jobs of this handler have to wait: its statements do not fit, or were not checked yet, or its login
    /// is unavailable.
    pub(super) fn is_parked(&self, handler: &Handler) -> bool {
        let Some(granted) = granted(handler) else {
            return false;
        };
        match self.fits.load().get(&handler.manifest.name) {
            Some(fit) if fit.covers(granted) => !matches!(fit.state, FitState::Fits(_)),
            Some(_) | None => true,
        }
    }

    /// Why this handler is parked; `None` if it is not.
    pub(super) fn parked_because(&self, handler: &Handler) -> Option<Arc<str>> {
        let table = &granted(handler)?.table;
        if !self.logins.contains_key(table) {
            let why = format!("[handlers.\"{table}\".sql] of rouse.toml names no login");
            return Some(why.into());
        }
        match &self.fits.load().get(&handler.manifest.name)?.state {
            FitState::Parked(why) => Some(why.clone()),
            FitState::Unavailable(_) => Some("its login does not answer".into()),
            // The cause, which may contain the address of the server, is logged.
            FitState::Unchecked(_) => Some("its SQL statements cannot be checked now".into()),
            FitState::Fits(_) => None,
        }
    }

    /// Locks the state of all handlers, so that no change to it is lost.
    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the state of a handler; `None` if it has no granted statements any more.
    fn set(&self, _changing: &MutexGuard<'_, ()>, handler: &str, fit: Option<Fit>) {
        let mut fits = HashMap::clone(&self.fits.load());
        match fit {
            Some(fit) => fits.insert(handler.to_owned(), fit),
            None => fits.remove(handler),
        };
        self.fits.store(Arc::new(fits));
        self.version.fetch_add(1, Ordering::Release);
    }
}

/// The granted statements; `None` if there are none.
fn granted(handler: &Handler) -> Option<&Arc<GrantedSql>> {
    handler
        .sql()
        .filter(|granted| !granted.statements.is_empty())
}

/// Checks the statements of all handlers when the worker starts and after each change to the handlers, and rechecks
/// those that do not fit at intervals, until the worker ends. Each login has checks of its own, so that one that does
/// not answer does not delay those of others.
pub(super) async fn run_forever(shared: Arc<Shared>) {
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
                // Its jobs wait until it was checked, and the check may have to wait for those of other logins.
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
            let state = FitState::Unchecked("its login does not answer".into());
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

/// What is known about the statements of a handler, one of which Postgres has refused although they fitted before.
pub(super) enum Rechecked {
    /// They no longer fit, or could not be checked: the handler's jobs wait.
    Waits,
    /// They fit, according to a check that came after the one on which the refused call was based.
    FitsSince,
    /// They still fit: the refusal has another reason.
    Fits,
}

/// Checks the statements of a handler again after Postgres has refused one of `used`. If another check has come first,
/// its result counts: several attempts may have met the same refusal, and the cause may be gone by now.
pub(super) async fn recheck(
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
    let state = match check_statements(shared, login.opened(granted), granted).await {
        Ok(statements) => FitState::Fits(Arc::new(statements)),
        Err(Unfit::Mismatch(why)) => FitState::Parked(why.into()),
        Err(Unfit::Unchecked(why)) => FitState::Unchecked(why.into()),
    };
    change(shared, &shared.sql.changing(), name, granted, state.clone());
    state
}

/// Notes what is now known about the statements of a handler.
fn change(
    shared: &Shared,
    changing: &MutexGuard<'_, ()>,
    name: &str,
    granted: &Arc<GrantedSql>,
    state: FitState,
) {
    let sql = &shared.sql;
    let before = sql.fits.load().get(name).cloned();
    let fit = Fit {
        granted: granted.clone(),
        state,
        checked_at: Instant::now(),
    };
    let fit = fit.after(before.as_ref());
    let before = before.map(|fit| fit.state);
    report(name, before.as_ref(), &fit.state);
    let was = before.map(|state| std::mem::discriminant(&state));
    let has_changed = was != Some(std::mem::discriminant(&fit.state));
    sql.set(changing, name, Some(fit));
    if has_changed {
        // The claimer chooses its lanes again, and the fleet learns which handlers are parked.
        shared.wakeups.notify(None);
        shared.presence.heartbeat_now.notify_one();
    }
}

async fn check_statements(
    shared: &Shared,
    login: &Login,
    granted: &Arc<GrantedSql>,
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
        waiting: Waiting::new(),
    })
}

/// Sets the metric of a handler: 1 while its jobs wait, for whatever reason.
fn show_parked(handler: &str, is_parked: bool) {
    gauge!("rouse_handler_parked", "handler" => handler.to_owned())
        .set(f64::from(u8::from(is_parked)));
}

/// Logs a change, and sets the metric.
fn report(handler: &str, before: Option<&FitState>, now: &FitState) {
    show_parked(handler, !matches!(now, FitState::Fits(_)));
    match (before, now) {
        (Some(FitState::Parked(before)), FitState::Parked(now)) if before == now => {}
        (_, FitState::Parked(why)) => {
            warn!(handler, error = %why, "the handler is parked: its SQL statements do not fit the database; its jobs wait, and it is checked again every 30 s");
        }
        (Some(FitState::Parked(_)), FitState::Fits(_)) => {
            info!(handler, "the handler is no longer parked");
        }
        (_, FitState::Unavailable(statements)) => {
            let login = statements.login.target();
            warn!(
                handler,
                login, "the login of the handler's SQL statements does not answer; its jobs wait"
            );
        }
        (Some(FitState::Unavailable(_)), FitState::Fits(_)) => {
            info!(
                handler,
                "the login of the handler's SQL statements answers again"
            );
        }
        (_, FitState::Unchecked(why)) => {
            debug!(handler, error = %why, "the SQL statements of the handler cannot be checked now; trying again in a second");
        }
        (_, FitState::Fits(_)) => debug!(
            handler,
            "the SQL statements of the handler fit the database"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::SqlLimits;

    fn fit(table: &str, state: FitState) -> Fit {
        Fit {
            granted: Arc::new(GrantedSql {
                table: table.into(),
                statements: Vec::new(),
                limits: SqlLimits::default(),
            }),
            state,
            checked_at: Instant::now(),
        }
    }

    #[test]
    fn a_parked_handler_stays_parked_for_the_same_reason_while_it_cannot_be_checked() {
        let parked_because = |fit: Fit| match fit.state {
            FitState::Parked(why) => Some(why.to_string()),
            FitState::Fits(_) | FitState::Unavailable(_) | FitState::Unchecked(_) => None,
        };
        let parked = fit("a", FitState::Parked("no right".into()));
        let unchecked = |table| fit(table, FitState::Unchecked("no response".into()));
        let after = unchecked("a").after(Some(&parked));
        assert_eq!(parked_because(after), Some("no right".to_owned()));
        let other_statements = unchecked("b").after(Some(&parked));
        assert_eq!(parked_because(other_statements), None);
        let still_unchecked = unchecked("a").after(Some(&unchecked("a")));
        assert_eq!(parked_because(still_unchecked), None);
        let newer = fit("a", FitState::Parked("no table".into())).after(Some(&parked));
        assert_eq!(parked_because(newer), Some("no table".to_owned()));
    }
}
