//! Handler state, natively: typed, shared by jobs, and safe under concurrent changes.

use rouse_sdk::{AbortReason, TestCtx};

#[test]
fn state_carries_over_to_the_next_job() {
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
fn an_update_is_repeated_after_a_concurrent_change() {
    let first = TestCtx::new();
    let other = first.next_job();
    let mut seen = Vec::new();
    let sum = first.state().update("n", |n: Option<u32>| {
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
fn a_value_that_no_longer_matches_is_reported_with_its_key() {
    let ctx = TestCtx::new();
    ctx.state().set("n", "text").unwrap();
    let error = ctx.state().get::<u32>("n").unwrap_err();
    assert_eq!(error.kind, "state_changed");
    assert!(error.message.contains("the key n"), "{error}");
}

#[test]
fn keys_that_the_host_refuses_are_refused() {
    let ctx = TestCtx::new();
    let state = ctx.state();
    let long = "ä".repeat(201);
    for key in ["", "a\nb", &long] {
        let errors = [
            state.get::<u32>(key).unwrap_err(),
            state.set(key, &1).unwrap_err(),
            state
                .update(key, |n: Option<u32>| Ok(n.unwrap_or(0)))
                .unwrap_err(),
            state.delete(key).unwrap_err(),
        ];
        for error in errors {
            assert_eq!((&*error.kind, error.permanent), ("state_refused", true));
            assert_eq!(
                error.message,
                "a key must have 1 to 200 printable characters"
            );
        }
    }
    assert_eq!(state.keys(&long).unwrap_err().kind, "state_refused");
    let longest = "ä".repeat(200);
    state.set(&longest, &1).unwrap();
    assert_eq!(state.keys("").unwrap(), [longest]);
}

#[test]
fn after_the_abort_nothing_is_read_or_stored() {
    let ctx = TestCtx::new();
    ctx.fire_abort(AbortReason::Cancelled);
    let state = ctx.state();
    assert_eq!(state.get::<u32>("n").unwrap_err().kind, "aborted");
    assert_eq!(state.set("n", &1).unwrap_err().kind, "aborted");
    assert_eq!(state.keys("").unwrap_err().kind, "aborted");
    assert_eq!(state.delete("n").unwrap_err().kind, "aborted");
}
