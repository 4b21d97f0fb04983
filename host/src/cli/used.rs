//! Warns of queues and handlers that no lane has, which are probably misspelt. Lanes are removed a day after their last
//! job.

use super::nearest::{did_you_mean, nearest};
use super::text::plain;
use crate::store::{Store, StoreError};
use crate::telemetry;

/// Warns on standard error if no lane has this queue.
///
/// # Errors
/// If the query fails.
pub(super) async fn warn_of_unused_queue(store: &Store, queue: &str) -> Result<(), StoreError> {
    warn("into queue", queue, store.used_queues().await?);
    Ok(())
}

/// Warns on standard error if no lane has this handler.
///
/// # Errors
/// If the query fails.
pub(super) async fn warn_of_unused_handler(store: &Store, handler: &str) -> Result<(), StoreError> {
    warn("for handler", handler, store.used_handlers().await?);
    Ok(())
}

/// A login that may not see lanes gets no warning.
fn warn(of: &str, name: &str, used: Option<Vec<String>>) {
    let Some(used) = used.filter(|used| !used.iter().any(|used| used == name)) else {
        return;
    };
    let hint = match nearest(name, used.iter().map(String::as_str)) {
        None => "; is its name correct?".to_owned(),
        name => did_you_mean(name),
    };
    telemetry::line(&format!(
        "rouse: nothing was enqueued recently {of} {}{hint}",
        plain(name)
    ));
}
