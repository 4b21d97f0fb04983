//! Whether this host can run jobs.

use std::{fmt, sync::Arc};

use serde::Serialize;

/// Computes the report for each request of `/readyz`. Nothing is cached, so nothing can go stale.
#[derive(Clone)]
pub struct Readiness(Arc<dyn Fn() -> Report + Send + Sync>);

/// The response of `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    ready: bool,
    database: String,
    handlers: String,
    stopping: bool,
}

impl Report {
    /// Ready if the database can be used, handlers can run, and the host is not stopping. The
    /// errors give the reasons.
    pub fn new(database: Result<(), String>, handlers: Result<(), String>, stopping: bool) -> Self {
        Self {
            ready: database.is_ok() && handlers.is_ok() && !stopping,
            database: word(database),
            handlers: word(handlers),
            stopping,
        }
    }

    /// The report of a host without a queue, which has no database either.
    pub fn without_queue(handlers: Result<(), String>, stopping: bool) -> Self {
        let mut report = Self::new(Ok(()), handlers, stopping);
        report.database = "not used".into();
        report
    }

    /// True if jobs can run.
    pub fn is_ready(&self) -> bool {
        self.ready
    }
}

impl Readiness {
    /// `report` must return at once, without a query to the database.
    pub fn new(report: impl Fn() -> Report + Send + Sync + 'static) -> Self {
        Self(Arc::new(report))
    }

    /// The current report.
    pub fn report(&self) -> Report {
        (self.0)()
    }
}

impl fmt::Debug for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Readiness").field(&self.report()).finish()
    }
}

fn word(check: Result<(), String>) -> String {
    match check {
        Ok(()) => "ok".into(),
        Err(why) => why,
    }
}

#[cfg(test)]
mod tests {
    use super::Report;

    #[test]
    fn a_host_is_ready_while_database_and_handlers_work_and_it_is_not_stopping() {
        let no = || Err("no".to_owned());
        assert!(Report::new(Ok(()), Ok(()), false).is_ready());
        assert!(!Report::new(no(), Ok(()), false).is_ready());
        assert!(!Report::new(Ok(()), no(), false).is_ready());
        assert!(!Report::new(Ok(()), Ok(()), true).is_ready());
    }

    #[test]
    fn a_host_without_a_queue_does_not_wait_for_a_database() {
        let report = Report::without_queue(Ok(()), false);
        assert!(report.is_ready());
        assert_eq!(report.database, "not used");
        assert!(!Report::without_queue(Err("none".into()), false).is_ready());
    }
}
