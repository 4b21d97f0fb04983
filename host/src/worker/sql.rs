//! Knows which handlers of this host may run: those whose SQL statements fit the database.
//!
//! A handler with granted statements is served only after the database has accepted all of them in a session of the
//! handler's login. A handler whose statements do not fit is parked: its jobs wait, for another host or until the next
//! check. They also wait while the login does not respond. `check` finds this out, and `effects.rs` runs the
//! statements.

mod check;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use metrics::gauge;
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tracing::{debug, info, warn};

use super::Shared;
use super::successes::Waiting;
use crate::sandbox::{GrantedSql, Handler};
use crate::store::connect::Connector;
use crate::store::{CheckedStatement, Login};

pub(super) use self::check::{Rechecked, recheck, run_forever};

/// How often a login that has had no response is checked.
const UNAVAILABLE_CHECK_EVERY: Duration = Duration::from_secs(1);

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

/// The cause to remove before a parked handler can run. It decides which remedy `rouse.why` names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ParkedCause {
    /// Its statements do not fit the database, or its login may not run them.
    Statements,
    /// Its login does not respond, or could not be used for a check yet.
    Login,
}

impl ParkedCause {
    /// The word that workers register.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Statements => "statements",
            Self::Login => "login",
        }
    }
}

/// The statements of a handler, which fit the database.
pub(super) struct Statements {
    pub(super) login: Login,
    granted: Arc<GrantedSql>,
    by_name: HashMap<String, CheckedStatement>,
    /// The attempts whose effects are to be committed.
    pub(super) waiting: Arc<Waiting>,
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

    /// The successes that wait for their commit, for another check of the same statements: a check does not make space
    /// for more of them. `None` if the statements have changed, because waiting successes may need one that no longer
    /// exists.
    fn waiting_for(&self, granted: &Arc<GrantedSql>) -> Option<Arc<Waiting>> {
        let is_same = Arc::ptr_eq(&self.granted, granted)
            || self.granted.table == granted.table && self.granted.statements == granted.statements;
        is_same.then(|| self.waiting.clone())
    }
}

impl Fit {
    /// The state after this check. If the statements could not be checked, a parked handler stays parked for the known
    /// reason, and its next check is due when it was before.
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
    pub(super) fn parked_because(&self, handler: &Handler) -> Option<(ParkedCause, Arc<str>)> {
        let table = &granted(handler)?.table;
        if !self.logins.contains_key(table) {
            let why = format!("[handlers.\"{table}\".sql] of rouse.toml has no login; set one");
            return Some((ParkedCause::Login, why.into()));
        }
        let (cause, why) = match &self.fits.load().get(&handler.manifest.name)?.state {
            FitState::Parked(why) => (ParkedCause::Statements, why.clone()),
            FitState::Unavailable(_) => (
                ParkedCause::Login,
                "the login of its SQL statements does not respond".into(),
            ),
            // The cause, which may contain the address of the server, is logged.
            FitState::Unchecked(_) => (
                ParkedCause::Login,
                "its SQL statements cannot be checked now".into(),
            ),
            FitState::Fits(_) => return None,
        };
        Some((cause, why))
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
                login, "the login of the handler's SQL statements does not respond; its jobs wait"
            );
        }
        (Some(FitState::Unavailable(_)), FitState::Fits(_)) => {
            info!(
                handler,
                "the login of the handler's SQL statements responds again"
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
    use crate::job::{OnError, SqlLimits, Statement};

    fn granted(table: &str) -> Arc<GrantedSql> {
        Arc::new(GrantedSql {
            table: table.into(),
            statements: Vec::new(),
            limits: SqlLimits::default(),
        })
    }

    fn fit(table: &str, state: FitState) -> Fit {
        Fit {
            granted: granted(table),
            state,
            checked_at: Instant::now(),
        }
    }

    #[tokio::test]
    async fn another_check_of_the_same_statements_makes_no_space_for_more_successes() {
        let connector = Connector::from_url("postgres://a@127.0.0.1:1/b", &|_| None).unwrap();
        let statements = Statements {
            login: Login::new(&connector, 1),
            granted: granted("a"),
            by_name: HashMap::new(),
            waiting: Arc::new(Waiting::new()),
        };
        let is_shared = |granted: &Arc<GrantedSql>| {
            let waiting = statements.waiting_for(granted);
            waiting.is_some_and(|waiting| Arc::ptr_eq(&waiting, &statements.waiting))
        };
        assert!(is_shared(&statements.granted) && is_shared(&granted("a")));
        assert!(!is_shared(&granted("b")));
        let mut more = GrantedSql::clone(&granted("a"));
        more.statements.push(Statement {
            name: "it".into(),
            sql: "SELECT 1".into(),
            rows: None,
            on_error: OnError::default(),
        });
        assert!(!is_shared(&Arc::new(more)));
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
