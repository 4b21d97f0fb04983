//! The state of a handler, natively: typed, shared by its jobs, and not to be lost where two change it at once.

use rouse_sdk::{AbortReason, TestCtx};

#[test]
fn what_one_job_keeps_the_next_one_finds() {
    let ctx = TestCtx::new();
    assert_eq!(ctx.state().get::<u32>("cursor").unwrap(), None);
    ctx.state().set("cursor", &7_u32).unwrap();
    ctx.state().set("token", "abc").unwrap();
    ctx.state().set_bytes("raw", [0, 255]).unwrap();

    let next = ctx.next_job();
    assert_eq!((next.job().id, next.job().attempt), (2, 1));
    assert_eq!(next.state().get::<u32>("cursor").unwrap(), Some(7));
    assert_eq!(next.state().get_bytes("raw").unwrap(), Some(vec![0, 255]));
    assert_eq!(next.state().keys("").unwrap(), ["cursor", "raw", "token"]);
    assert_eq!(next.state().keys("t").unwrap(), ["token"]);
    assert!(next.state().delete("token").unwrap());
    assert!(!ctx.next_attempt().state().delete("token").unwrap());
    // Another handler, or another tenant.
    assert!(TestCtx::new().state().keys("").unwrap().is_empty());
}

#[test]
fn an_update_that_another_attempt_came_before_is_made_again() {
    let one = TestCtx::new();
    let other = one.next_job();
    let mut seen = Vec::new();
    let sum = one.state().update("n", |n: Option<u32>| {
        if seen.is_empty() {
            other.state().set("n", &10_u32)?;
        }
        seen.push(n);
        Ok(n.unwrap_or(0) + 1)
    });
    assert_eq!((sum.unwrap(), seen), (11, vec![None, Some(10)]));
    assert_eq!(other.state().get::<u32>("n").unwrap(), Some(11));
}

#[test]
fn what_does_not_fit_any_more_says_under_which_key_it_is() {
    let ctx = TestCtx::new();
    ctx.state().set("n", "text").unwrap();
    let error = ctx.state().get::<u32>("n").unwrap_err();
    assert_eq!(error.kind, "state-changed");
    assert!(error.message.contains("the key n"), "{error}");
}

#[test]
fn after_the_abort_nothing_is_read_or_kept() {
    let ctx = TestCtx::new();
    ctx.fire_abort(AbortReason::Cancelled);
    let state = ctx.state();
    assert_eq!(state.get::<u32>("n").unwrap_err().kind, "aborted");
    assert_eq!(state.set("n", &1).unwrap_err().kind, "aborted");
    assert_eq!(state.keys("").unwrap_err().kind, "aborted");
    assert_eq!(state.delete("n").unwrap_err().kind, "aborted");
}
