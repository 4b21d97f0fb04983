//! The SQL statements of handlers on this host, and whether they fit the database.
//!
//! A handler with granted statements is served only after the database has accepted all of them in a session of the
//! handler's login. A handler whose statements do not fit is parked: its jobs wait, for another host or until the next
//! check. They also wait while the login does not answer. `effects.rs` runs the statements.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use metrics::gauge;
use tokio::sync::{Mutex, Notify};
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

/// How often logins are checked.
const UNAVAILABLE_CHECK_EVERY: Duration = Duration::from_secs(1);

/// The statements of all handlers of one worker.
pub(super) struct Sql {
    /// The logins, by the table of `rouse.toml` that names them.
    logins: BTreeMap<String, Connector>,
    /// Connections, by the same tables.
    opened: Mutex<HashMap<String, Login>>,
    /// The state by handler; handlers without granted statements are missing.
    fits: ArcSwap<HashMap<String, Fit>>,
    /// Incremented with each change to them.
    version: AtomicU64,
    /// Locked during a check: only one runs at a time.
    checking: Mutex<()>,
    /// Notified when a login has had no response.
    has_failed: Notify,
    /// True if a login has had no response, and is checked every second.
    are_followed: AtomicBool,
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
    pub(super) by_name: HashMap<String, CheckedStatement>,
    /// The attempts whose effects are to be committed.
    pub(super) waiting: Waiting,
}

impl Fit {
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

impl Sql {
    pub(super) fn new(logins: BTreeMap<String, Connector>) -> Self {
        Self {
            logins,
            opened: Mutex::default(),
            fits: ArcSwap::default(),
            version: AtomicU64::new(0),
            checking: Mutex::default(),
            has_failed: Notify::new(),
            are_followed: AtomicBool::new(false),
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

    /// Notes that a login has had no response: logins are followed until they have one.
    pub(super) fn follow_logins(&self) {
        if !self.are_followed.swap(true, Ordering::AcqRel) {
            self.has_failed.notify_one();
        }
    }

    /// Tries all logins at once that had no response: the host's own login has reached the server again.
    pub(super) fn try_logins(&self) {
        for connector in self.logins.values() {
            connector.start_over();
        }
        self.has_failed.notify_one();
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
    pub(super) fn parked_because(&self, handler: &str) -> Option<Arc<str>> {
        match &self.fits.load().get(handler)?.state {
            FitState::Parked(why) => Some(why.clone()),
            FitState::Unavailable(_) => Some("its login does not answer".into()),
            FitState::Fits(_) | FitState::Unchecked(_) => None,
        }
    }

    async fn login(&self, granted: &GrantedSql) -> Option<Login> {
        let connector = self.logins.get(&granted.table)?;
        let mut opened = self.opened.lock().await;
        let connections = usize::try_from(granted.limits.connections_max).unwrap_or(usize::MAX);
        let login = opened
            .entry(granted.table.clone())
            .or_insert_with(|| Login::new(connector, connections));
        Some(login.clone())
    }

    fn set(&self, handler: &str, fit: Option<Fit>) {
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
/// those that do not fit at intervals, until the worker ends.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    let mut changes = shared.catalog.changed();
    loop {
        changes.mark_unchanged();
        let wait = check_all(&shared).await;
        tokio::select! {
            () = async {
                match wait {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            } => {}
            () = shared.sql.has_failed.notified() => {}
            changed = changes.changed() => if changed.is_err() {
                return;
            }
        }
    }
}

/// Checks the statements that are not known to fit, and follows the logins of those that fit. Returns the time until
/// the next check; `None`: not before a change.
async fn check_all(shared: &Shared) -> Option<Duration> {
    let handlers = shared.catalog.current();
    let gone = |name: &String| handlers.get(name).is_none_or(|it| granted(it).is_none());
    let known = shared.sql.fits.load_full();
    for name in known.keys().filter(|name| gone(name)) {
        shared.sql.set(name, None);
        gauge!("rouse_handler_parked", "handler" => name.clone()).set(0.0);
    }
    let mut wait: Option<Duration> = None;
    let mut are_followed = false;
    for handler in handlers
        .names()
        .iter()
        .filter_map(|name| handlers.get(name))
    {
        let Some(granted) = granted(handler) else {
            continue;
        };
        let name = &handler.manifest.name;
        let again = match known.get(name).filter(|fit| fit.covers(granted)) {
            Some(Fit {
                granted,
                state: FitState::Fits(statements),
                ..
            }) => match statements.login.unavailable_for() {
                None => continue,
                Some(unavailable) => {
                    are_followed = true;
                    // Queries since then do not count, because a standby answers them too.
                    if unavailable >= UNAVAILABLE_AFTER && !statements.login.responds().await {
                        let state = FitState::Unavailable(statements.clone());
                        note_login(shared, name, granted, statements, state).await;
                    }
                    UNAVAILABLE_CHECK_EVERY
                }
            },
            Some(Fit {
                granted,
                state: FitState::Unavailable(statements),
                ..
            }) => {
                // Nothing else may be trying.
                if statements.login.responds().await {
                    let state = FitState::Fits(statements.clone());
                    note_login(shared, name, granted, statements, state).await;
                    continue;
                }
                are_followed = true;
                UNAVAILABLE_CHECK_EVERY
            }
            Some(Fit {
                state: FitState::Parked(_),
                checked_at,
                ..
            }) if checked_at.elapsed() < PARKED_CHECK_EVERY => {
                PARKED_CHECK_EVERY.saturating_sub(checked_at.elapsed())
            }
            Some(_) | None => match check(shared, handler, granted).await {
                FitState::Fits(_) => continue,
                FitState::Parked(_) => PARKED_CHECK_EVERY,
                FitState::Unavailable(_) | FitState::Unchecked(_) => UNCHECKED_CHECK_EVERY,
            },
        };
        wait = Some(wait.map_or(again, |wait| wait.min(again)));
    }
    // A failure that was noted since is noted again: calls that have failed are retried.
    shared
        .sql
        .are_followed
        .store(are_followed, Ordering::Release);
    wait
}

/// Notes that a login is unavailable, or that it responds again, unless the statements were checked since.
async fn note_login(
    shared: &Shared,
    name: &str,
    granted: &Arc<GrantedSql>,
    statements: &Arc<Statements>,
    state: FitState,
) {
    let _one_at_a_time = shared.sql.checking.lock().await;
    let now = shared.sql.statements(name);
    if now.is_some_and(|now| Arc::ptr_eq(&now, statements)) {
        change(shared, name, granted, state);
    }
}

/// Checks the statements of a handler again after Postgres has refused one of them, although they fitted before.
/// Returns true if the handler is parked now.
pub(super) async fn is_mismatch(shared: &Shared, handler: &Handler) -> bool {
    // The handler from the catalog has no attenuation of a job.
    let handlers = shared.catalog.current();
    let Some(handler) = handlers.get(&handler.manifest.name) else {
        return true;
    };
    match granted(handler) {
        Some(granted) => matches!(check(shared, handler, granted).await, FitState::Parked(_)),
        None => true,
    }
}

async fn check(shared: &Shared, handler: &Handler, granted: &Arc<GrantedSql>) -> FitState {
    let sql = &shared.sql;
    let _one_at_a_time = sql.checking.lock().await;
    let name = &handler.manifest.name;
    let state = match check_statements(shared, granted).await {
        Ok(statements) => FitState::Fits(Arc::new(statements)),
        Err(Unfit::Mismatch(why)) => FitState::Parked(why.into()),
        Err(Unfit::Unchecked(why)) => FitState::Unchecked(why.into()),
    };
    change(shared, name, granted, state.clone());
    state
}

/// Notes what is now known about the statements of a handler.
fn change(shared: &Shared, name: &str, granted: &Arc<GrantedSql>, state: FitState) {
    let sql = &shared.sql;
    let before = sql.fits.load().get(name).map(|fit| fit.state.clone());
    report(name, before.as_ref(), &state);
    let was = before.map(|state| std::mem::discriminant(&state));
    let has_changed = was != Some(std::mem::discriminant(&state));
    sql.set(
        name,
        Some(Fit {
            granted: granted.clone(),
            state,
            checked_at: Instant::now(),
        }),
    );
    if has_changed {
        // The claimer chooses its lanes again, and the fleet learns which handlers are parked.
        shared.wakeups.notify(None);
        shared.presence.heartbeat_now.notify_one();
    }
}

async fn check_statements(shared: &Shared, granted: &GrantedSql) -> Result<Statements, Unfit> {
    let Some(login) = shared.sql.login(granted).await else {
        return Err(Unfit::Mismatch(format!(
            "[handlers.\"{}\".sql] of rouse.toml names no login",
            granted.table
        )));
    };
    shared.store.check_login(&login).await?;
    let mut by_name = HashMap::new();
    for statement in &granted.statements {
        let checked = login.check(statement, &granted.limits).await?;
        by_name.insert(statement.name.clone(), checked);
    }
    Ok(Statements {
        login,
        by_name,
        waiting: Waiting::new(),
    })
}

/// Logs a change.
fn report(handler: &str, before: Option<&FitState>, now: &FitState) {
    let is_parked = matches!(now, FitState::Parked(_));
    gauge!("rouse_handler_parked", "handler" => handler.to_owned())
        .set(f64::from(u8::from(is_parked)));
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
