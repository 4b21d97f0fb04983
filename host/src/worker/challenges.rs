//! Proves to operators that this worker has what it has registered.
//!
//! A registration is only what a worker says of itself. Challenged, it calls the module's `describe` in a throwaway
//! instance, and hashes the nonce with the bytes of the module's file, which only who has that file can do. Whoever asks and
//! has the file too compares the hash.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use tokio::sync::Notify;
use tracing::info;

use super::Shared;
use super::reach::warn_unless_unreachable;
use crate::store::{Challenge, StoreError};

/// Rung where somebody asks.
#[derive(Default)]
pub(super) struct Challenges(Notify);

impl Challenges {
    /// There may be a challenge.
    pub(super) fn ring(&self) {
        self.0.notify_one();
    }
}

/// Answers for as long as the worker lives.
pub(super) async fn answer_forever(shared: Arc<Shared>) {
    loop {
        shared.presence.challenges.0.notified().await;
        if let Err(error) = answer_all(&shared).await {
            warn_unless_unreachable!(
                error,
                "cannot answer a challenge; whoever asked waits in vain"
            );
        }
    }
}

/// A worker that hears no notifications looks after each heartbeat.
pub(super) fn look_where_deaf(shared: &Shared) {
    if !shared.listener.connected.load(Ordering::Relaxed) {
        shared.presence.challenges.ring();
    }
}

async fn answer_all(shared: &Shared) -> Result<(), StoreError> {
    loop {
        let asked = shared.store.challenges().await?;
        if asked.is_empty() {
            return Ok(());
        }
        let mut failed = None;
        for challenge in asked {
            let answer = answer_to(shared, &challenge).await;
            info!(handler = challenge.handler, %answer, "challenged");
            let told = shared.store.answer_challenge(&challenge.nonce, &answer);
            // Whoever has asked for another handler does not wait in vain too.
            if let Err(error) = told.await {
                failed = Some(error);
            }
        }
        // Asked again, it would be the same challenges.
        if let Some(error) = failed {
            return Err(error);
        }
    }
}

/// `{"has": true, "version": …, "sha256": …, "grants": […], "proof": …}`, or `why` not. `proof` is the
/// [proof](crate::sandbox::Digest::proof) that the worker has the file; where there is none, `unproven` says why.
async fn answer_to(shared: &Shared, challenge: &Challenge) -> Value {
    let handlers = shared.catalog.current();
    let Some(handler) = handlers.get(&challenge.handler) else {
        return json!({"has": false, "why": "the worker does not have this handler"});
    };
    let mut answer = json!({
        "has": true,
        "version": handler.manifest.version,
        "sha256": handler.module.digest.to_string(),
        "grants": handler.granted(),
    });
    if let Err(why) = shared.sandbox.verify(handler).await {
        answer["has"] = json!(false);
        answer["why"] = json!(format!("the module cannot be run any more: {why}"));
        return answer;
    }
    let proof = {
        let (catalog, module) = (shared.catalog.clone(), handler.module.clone());
        let bytes_max = shared.sandbox.settings().module_bytes_max;
        let nonce = challenge.nonce.clone();
        tokio::task::spawn_blocking(move || catalog.prove(&module, &nonce, bytes_max)).await
    };
    match proof.unwrap_or_else(|error| Err(format!("its file could not be read: {error}"))) {
        Ok(proof) => answer["proof"] = json!(proof.to_string()),
        Err(why) => answer["unproven"] = json!(why),
    }
    answer
}
