//! Logs admin actions. They do not pass through a host, so the database keeps them in an outbox, and each is logged by
//! one host.

use super::reach::warn_unless_unreachable;
use super::{Shared, events};

/// The maximum number of rows in one statement.
const ROWS_MAX: usize = 1000;
/// The maximum number of statements for one heartbeat. Further actions wait for the next heartbeat.
const STATEMENTS_MAX: usize = 10;

/// Takes the actions out of the outbox and logs them.
pub(super) async fn log_all(shared: &Shared) {
    // A host that does not log these events leaves them to others, and only has old rows deleted.
    if !events::admin_actions_are_logged() {
        let _ = shared.store.take_audit_outbox(0).await;
        return;
    }
    for _ in 0..STATEMENTS_MAX {
        let actions = match shared.store.take_audit_outbox(ROWS_MAX).await {
            Ok(actions) => actions,
            Err(error) => {
                warn_unless_unreachable!(
                    error,
                    "cannot read the audit outbox; trying again with the next heartbeat"
                );
                return;
            }
        };
        for action in &actions {
            events::admin_action(&shared.settings.worker_id, action);
        }
        if actions.len() < ROWS_MAX {
            return;
        }
    }
}
