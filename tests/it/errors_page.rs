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
        (
            "set_gate('g', 'max_concurrent', max => 5, edge => 'leading')",
            "Leave out the settings",
        ),
        ("set_gate('g', 'singleton')", "For instance rouse.set_gate"),
        ("wait(ARRAY(SELECT generate_series(1, 10001)))", "at a time"),
    ] {
        let refused = refusal(&client, &format!("SELECT rouse.{call}")).await;
        assert!(refused.contains(hint), "{call}: {refused}");
    }
    // The gate lacks a setting.
    let refused = refusal(&client, "SELECT rouse.set_gate('g', 'singleton')").await;
    assert!(!refused.contains("Leave out"), "{refused}");
}
