//! Sets the gates that the modules of this host declare.
//!
//! If several hosts have different versions of a module, the host that loaded its version last decides. A host sends
//! the gates of a handler only when it starts and when they change, so hosts do not keep undoing each other's changes.

use std::collections::BTreeMap;

use tracing::{info, warn};

use super::Shared;
use crate::job::declared_gate::DeclaredGate;
use crate::store::StoreError;

/// The gates that this host has sent to the database, by handler.
#[derive(Default)]
pub(super) struct DeclaredGates(BTreeMap<String, Vec<DeclaredGate>>);

impl DeclaredGates {
    /// Sends the gates of handlers that have been loaded since the last call, and of those that failed then.
    pub(super) async fn send(&mut self, shared: &Shared) -> Result<(), StoreError> {
        let current = shared.catalog.current();
        self.0.retain(|name, _| current.get(name).is_some());
        let handlers = current.handlers.iter();
        let mut new: Vec<(&String, &[DeclaredGate])> = handlers
            .map(|(name, handler)| (name, handler.manifest.gates.as_slice()))
            .filter(|(name, gates)| self.0.get(*name).map(Vec::as_slice) != Some(*gates))
            .collect();
        if new.is_empty() {
            return Ok(());
        }
        let _permit = shared.calls.patient.acquire().await;
        // Most handlers never have gates.
        let with_gates = shared.store.handlers_with_declared_gates().await?;
        new.retain(|(name, gates)| {
            let nothing_to_do = gates.is_empty() && !with_gates.contains(*name);
            if nothing_to_do {
                self.0.insert((*name).clone(), Vec::new());
            }
            !nothing_to_do
        });
        for (handler, gates) in new {
            match shared.store.declare_gates(handler, gates).await {
                Ok(changed) => {
                    if changed {
                        info!(
                            handler,
                            gates = gates.len(),
                            "changed the gates that a module declares"
                        );
                    }
                    self.0.insert(handler.clone(), gates.to_vec());
                }
                Err(error)
                    if error.is_transient()
                        || error.is_incarnation_ended()
                        || error.is_locked() =>
                {
                    return Err(error);
                }
                // If the database refuses one, the others are still set.
                Err(error) => {
                    warn!(handler, %error, "the gates that a module declares cannot be set; trying again in 5 minutes");
                }
            }
        }
        Ok(())
    }
}
