//! The page about errors: it guarantees a hint where the message does not contain the remedy.

use crate::support::TestDb;
use crate::support::database::refusal;

#[tokio::test]
async fn a_message_without_a_remedy_has_a_hint() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (call, hint) in [
        ("forget_worker('w')", "rouse.workers lists"),
        ("clear_timeouts('w')", "rouse.workers lists"),
        ("challenge('w', 'x')", "lists those that are"),
        ("challenge('w', 'X')", "lower-case words"),
        ("set_gate('g', 'singleton')", "Leave out the settings"),
        ("wait(ARRAY(SELECT generate_series(1, 10001)))", "at a time"),
    ] {
        let refused = refusal(&client, &format!("SELECT rouse.{call}")).await;
        assert!(refused.contains(hint), "{call}: {refused}");
    }
}
