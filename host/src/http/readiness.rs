//! Whether this host can run jobs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;

/// Whether this host can run jobs. The worker writes it, `/readyz` reads it; copies are the same one.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<Mutex<Checks>>);

#[derive(Debug)]
struct Checks {
    /// None: well. Some: why not.
    database: Option<String>,
    handlers: Option<String>,
    stopping: bool,
}

impl Default for Checks {
    fn default() -> Self {
        Self {
            database: Some("not connected yet".into()),
            handlers: Some("not loaded yet".into()),
            stopping: false,
        }
    }
}

/// What `/readyz` answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// True where all of the others are well.
    pub ready: bool,
    /// `ok`, or why the database cannot be used.
    pub database: String,
    /// `ok`, or why no handler can be run.
    pub handlers: String,
    /// True once the host has been told to stop.
    pub stopping: bool,
}

impl Readiness {
    /// The database can be reached and is migrated.
    pub fn database_is_well(&self) {
        self.lock().database = None;
    }

    /// The database cannot be used, and why.
    pub fn database_fails(&self, why: impl Into<String>) {
        self.lock().database = Some(why.into());
    }

    /// Handlers are loaded.
    pub fn handlers_are_loaded(&self) {
        self.lock().handlers = None;
    }

    /// There is no handler to run, and why.
    pub fn handlers_are_missing(&self, why: impl Into<String>) {
        self.lock().handlers = Some(why.into());
    }

    /// The host was told to stop. This is for good.
    pub fn stopping(&self) {
        self.lock().stopping = true;
    }

    /// How it stands.
    pub fn report(&self) -> Report {
        let checks = self.lock();
        let word = |why: &Option<String>| why.clone().unwrap_or_else(|| "ok".into());
        Report {
            ready: checks.database.is_none() && checks.handlers.is_none() && !checks.stopping,
            database: word(&checks.database),
            handlers: word(&checks.handlers),
            stopping: checks.stopping,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Checks> {
        // Each write is one assignment, so a panic elsewhere leaves nothing half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::Readiness;

    #[test]
    fn a_host_is_ready_only_while_database_and_handlers_are_well_and_it_is_not_stopping() {
        let readiness = Readiness::default();
        assert!(!readiness.report().ready);
        readiness.database_is_well();
        assert!(!readiness.report().ready);
        readiness.handlers_are_loaded();
        assert!(readiness.report().ready);
        readiness.database_fails("connection refused");
        let report = readiness.report();
        assert!(!report.ready);
        assert_eq!(report.database, "connection refused");
        readiness.database_is_well();
        readiness.stopping();
        assert!(!readiness.report().ready);
    }
}
