//! Logs admin actions. They do not pass through a host, so the database keeps them in an outbox until a host has logged
//! them. An action is logged at least once: it may be logged twice if the host dies before the database knows that it
//! was logged.

use super::reach::warn_unless_unreachable;
use super::{Shared, events};

/// The maximum number of rows in one statement.
const ROWS_MAX: usize = 1000;
/// The maximum number of statements for one heartbeat. Further actions wait for the next heartbeat.
const STATEMENTS_MAX: usize = 10;

/// Logs the actions in the outbox.
#[derive(Debug, Default)]
pub(super) struct AuditOutbox {
    /// The ids of the actions that this host has logged, and that may still be in the outbox.
    logged: Vec<i64>,
}

impl AuditOutbox {
    /// Logs the actions in the outbox, and then deletes them there.
    pub(super) async fn log_all(&mut self, shared: &Shared) {
        // A host that does not log these events leaves them to others, and only has old rows deleted.
        if !events::admin_actions_are_logged() {
            let _ = shared.store.take_audit_outbox(&[], 0).await;
            return;
        }
        for _ in 0..STATEMENTS_MAX {
            let taken = shared.store.take_audit_outbox(&self.logged, ROWS_MAX).await;
            let actions = match taken {
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
            // The next statement deletes them.
            self.logged = actions.iter().map(|action| action.id).collect();
            if self.logged.is_empty() {
                return;
            }
        }
    }
}
