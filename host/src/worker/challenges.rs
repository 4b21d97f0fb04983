//! Proves to operators that this worker has the handlers that it has registered.
//!
//! A registration alone proves nothing. A challenged worker calls the module's `describe` in a throwaway instance, and
//! hashes the nonce of the challenge with the bytes of the module's file, which is possible only with the file. An
//! operator who also has the file compares the hash.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use tokio::sync::Notify;
use tracing::info;

use super::Shared;
use super::reach::warn_unless_unreachable;
use crate::store::{Challenge, StoreError};

/// Signals that there may be a challenge.
#[derive(Default)]
pub(super) struct Challenges(Notify);

impl Challenges {
    pub(super) fn notify(&self) {
        self.0.notify_one();
    }
}

/// Answers challenges until the worker ends.
pub(super) async fn answer_forever(shared: Arc<Shared>) {
    loop {
        shared.presence.challenges.0.notified().await;
        if let Err(error) = answer_all(&shared).await {
            warn_unless_unreachable!(
                error,
                "cannot answer a challenge; its sender gets no response"
            );
        }
    }
}

/// Checks for challenges if the worker receives no notifications. Called after each heartbeat.
pub(super) fn check_without_notifications(shared: &Shared) {
    if !shared.listener.connected.load(Ordering::Relaxed) {
        shared.presence.challenges.notify();
    }
}

async fn answer_all(shared: &Shared) -> Result<(), StoreError> {
    loop {
        let challenges = shared.store.challenges().await?;
        if challenges.is_empty() {
            return Ok(());
        }
        let mut failed = None;
        for challenge in challenges {
            let answer = answer_to(shared, &challenge).await;
            info!(handler = challenge.handler, %answer, "answering a challenge");
            let sent = shared.store.answer_challenge(&challenge.nonce, &answer);
            // A failure must not keep the other challenges from being answered.
            if let Err(error) = sent.await {
                failed = Some(error);
            }
        }
        // The next query would return the same challenges.
        if let Some(error) = failed {
            return Err(error);
        }
    }
}

/// `{"has": true, "version": …, "sha256": …, "grants": […], "proof": …}`, or `{"has": false, "why": …}`. `proof` is the
/// [proof](crate::sandbox::Digest::proof) that the worker has the file; `unproven` replaces it if the file cannot be
/// read.
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
        answer["why"] = json!(format!("the module can no longer run: {why}"));
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
