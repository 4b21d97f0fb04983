//! Property tests and examples for the decisions about jobs.

use std::time::{Duration, SystemTime};

use proptest::prelude::*;

use super::*;

fn failure(permanent: bool, retry_after: Option<Duration>) -> RunEnd {
    RunEnd::Failed(Failure {
        kind: "busy".into(),
        message: "not\0now".into(),
        details: Some(br#"{"a":"b\u0000c"}"#.to_vec()),
        permanent,
        retry_after,
        retry_at: None,
    })
}

fn tries(failed: u32, max: u32) -> Tries {
    Tries {
        failed,
        max,
        more_memory_bytes: None,
        own: OwnLimits::default(),
    }
}

fn ends() -> impl Strategy<Value = RunEnd> {
    prop_oneof![
        4 => simple_ends(),
        1 => ("\\PC{0,20}", simple_ends()).prop_map(|(denial, then)| RunEnd::Denied {
            denial,
            then: Box::new(then),
        }),
    ]
}

fn simple_ends() -> impl Strategy<Value = RunEnd> {
    let text = "\\PC{0,20}";
    prop_oneof![
        Just(RunEnd::Returned(b"no json".to_vec())),
        Just(RunEnd::Returned(vec![0xff, b'1'])),
        Just(RunEnd::Returned(br#""\u0000""#.to_vec())),
        Just(RunEnd::Returned(br#""\ud800""#.to_vec())),
        any::<bool>().prop_map(|permanent| failure(permanent, None)),
        (text, text).prop_map(|(message, location)| RunEnd::Panicked {
            message,
            location,
            backtrace: vec!["frame\0".into()],
        }),
        text.prop_map(|message| RunEnd::Trapped {
            message,
            backtrace: Vec::new(),
            stderr: vec!["line\0".into()],
        }),
        Just(RunEnd::StackOverflow {
            backtrace: vec!["frame\0".into()],
        }),
        any::<usize>().prop_map(|limit_bytes| RunEnd::OutOfMemory { limit_bytes }),
        Just(RunEnd::OutOfCpu {
            limit: Duration::from_secs(1),
        }),
        any::<usize>().prop_map(|bytes| RunEnd::OutputTooLarge {
            bytes,
            limit_bytes: 1,
        }),
        Just(RunEnd::Aborted(AbortReason::TimedOut)),
        text.prop_map(RunEnd::PayloadRefused),
        text.prop_map(RunEnd::GrantsRefused),
        text.prop_map(RunEnd::ResultRefused),
        text.prop_map(RunEnd::SettlementRefused),
        text.prop_map(RunEnd::Unrunnable),
        (text, any::<bool>()).prop_map(|(message, permanent)| RunEnd::EffectFailed(SqlFailure {
            statement: "mark_paid".into(),
            code: "23505".into(),
            message,
            permanent,
        })),
    ]
}

proptest! {
    #[test]
    fn a_job_is_never_tried_more_often_than_its_maximum(
        end in ends(), failed in 1_u32..20, max in 1_u32..20, random in 0.0..1.0,
    ) {
        let outcome = decide(end, tries(failed, max), &RetryPolicy::default(), random);
        match outcome {
            Ok(Outcome::Retry { .. }) => prop_assert!(failed < max),
            Ok(Outcome::Failed(_) | Outcome::TimedOut(_)) => {}
            Ok(Outcome::Succeeded(_) | Outcome::Suspended(_) | Outcome::Released) | Err(_) => prop_assert!(false),
        }
    }

    #[test]
    fn text_of_a_guest_never_puts_a_nul_into_the_database(end in ends(), failed in 1_u32..3) {
        let outcome = decide(end, tries(failed, 2), &RetryPolicy::default(), 0.5);
        let Some(error) = outcome.as_ref().ok().and_then(Outcome::error) else {
            return Err(TestCaseError::fail("none of these succeeds"));
        };
        let text = serde_json::to_string(error).expect("it can be written");
        // After an escaped backslash, `\u0000` is plain text.
        prop_assert!(!text.replace("\\\\", "").contains("\\u0000"), "{}", text);
    }

    #[test]
    fn waits_grow_up_to_the_cap_and_jitter_stays_within_its_share_and_below_the_cap(
        failed in 1_u32..2000, random in 0.0..1.0,
        initial_ms in 0_u64..100_000, max_ms in 0_u64..10_000_000, multiplier in 1.0..100.0, jitter in 0.0..1.0,
    ) {
        let policy = RetryPolicy {
            max_attempts: 5,
            initial: Duration::from_millis(initial_ms),
            multiplier,
            max: Duration::from_millis(max_ms),
            jitter,
        };
        let exact = RetryPolicy { jitter: 0.0, ..policy.clone() };
        let (this, next) = (exact.delay(failed, random), exact.delay(failed + 1, random));
        prop_assert!(this <= next && next <= exact.max);
        let delay = policy.delay(failed, random);
        prop_assert!(delay <= policy.max);
        let delay = delay.as_secs_f64();
        let middle = this.as_secs_f64().min(policy.max.as_secs_f64() / (1.0 + jitter));
        let (low, high) = (middle * (1.0 - jitter), middle * (1.0 + jitter));
        prop_assert!(delay >= low - 1e-6 && delay <= high + 1e-6);
        // Jitter spreads the waits at the cap, too.
        let span = policy.delay(failed, 1.0).as_secs_f64() - policy.delay(failed, 0.0).as_secs_f64();
        prop_assert!((span - 2.0 * middle * jitter).abs() < 1e-6);
    }

    #[test]
    fn results_pass_through_unchanged(number in any::<i64>(), text in "\\PC{0,20}") {
        let bytes = serde_json::to_vec(&(number, &text)).expect("it can be written");
        let left = tries(1, 1);
        let outcome = decide(RunEnd::Returned(bytes.clone()), left, &RetryPolicy::default(), 0.0);
        let Ok(Outcome::Succeeded(result)) = outcome else {
            return Err(TestCaseError::fail("it succeeds"));
        };
        prop_assert_eq!(result.0.as_bytes(), &bytes[..]);
    }
}

#[test]
fn a_result_with_a_number_that_postgres_would_write_out_in_full_is_refused() {
    let left = tries(1, 1);
    let outcome = |json: &str| {
        let end = RunEnd::Returned(json.as_bytes().to_vec());
        decide(end, left, &RetryPolicy::default(), 0.0)
    };
    for good in [
        r#"{"1e9999": "\\\"5e9999", "t": true}"#,
        "[1e308, -2.5E-300, 12, false]",
    ] {
        assert!(matches!(outcome(good), Ok(Outcome::Succeeded(_))), "{good}");
    }
    for bad in [
        "1e401",
        "[0, 1E+131071]",
        r#"{"a": -1.5e-99999999999999999999}"#,
    ] {
        assert!(matches!(outcome(bad), Ok(Outcome::Failed(_))), "{bad}");
    }
}

#[test]
fn the_default_backoff_outlasts_a_day() {
    let policy = RetryPolicy::default();
    let waits: Vec<u64> = (1..policy.max_attempts)
        .map(|failed| policy.delay(failed, 0.5).as_secs())
        .collect();
    let doubled = [10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120];
    assert_eq!(waits[..10], doubled);
    // The cap is 2.5 hours plus 20 % jitter.
    assert_eq!(waits[10..], [9000; 9]);
    assert_eq!(policy.delay(19, 1.0), Duration::from_secs(3 * 3600));
    // 25 hours, 20 minutes and 30 seconds.
    assert_eq!(waits.iter().sum::<u64>(), 91_230);
}

#[test]
fn a_permanent_error_is_never_retried_and_retry_after_is_obeyed() {
    let left = tries(1, 9);
    let policy = RetryPolicy::default();
    let outcome = decide(
        failure(true, Some(Duration::from_secs(1))),
        left,
        &policy,
        0.0,
    );
    assert!(matches!(outcome, Ok(Outcome::Failed(_))));
    let outcome = decide(
        failure(false, Some(Duration::from_secs(77))),
        left,
        &policy,
        0.0,
    );
    assert!(
        matches!(outcome, Ok(Outcome::Retry { again, .. }) if again == Duration::from_secs(77).into())
    );
}

#[test]
fn an_error_may_set_the_time_of_the_next_attempt() {
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(4_000_000_000);
    let RunEnd::Failed(mut failure) = failure(false, Some(Duration::from_secs(1))) else {
        unreachable!("failure() returns RunEnd::Failed");
    };
    failure.retry_at = Some(at);
    let end = RunEnd::Failed(failure);
    let outcome = decide(end, tries(1, 2), &RetryPolicy::default(), 0.0);
    assert!(matches!(outcome, Ok(Outcome::Retry { again, .. }) if again.at == RetryAt::Time(at)));
}

#[test]
fn out_of_memory_is_retried_once_and_only_with_more_memory() {
    let decide = |more_memory_bytes, max| {
        let tries = Tries {
            more_memory_bytes,
            ..tries(1, max)
        };
        let end = RunEnd::OutOfMemory { limit_bytes: 7 };
        decide(end, tries, &RetryPolicy::default(), 0.0)
    };
    let Ok(Outcome::Retry { again, error }) = decide(Some(14), 2) else {
        panic!("it is retried");
    };
    assert_eq!(again.memory_bytes, Some(14));
    assert_eq!(again.at, RetryAt::After(Duration::ZERO));
    assert_eq!(error.kind, ErrorKind::OutOfMemory);
    assert!(
        matches!(decide(None, 9), Ok(Outcome::Failed(_))),
        "without more memory"
    );
    let Ok(Outcome::Failed(error)) = decide(Some(14), 1) else {
        panic!("no try is left");
    };
    assert!(!error.message.contains("next attempt"), "{error:?}");
}

#[test]
fn memory_limits_are_printed_in_the_unit_of_the_setting() {
    let tries = Tries {
        more_memory_bytes: Some(128 << 20),
        ..tries(1, 2)
    };
    let end = RunEnd::OutOfMemory {
        limit_bytes: 64 << 20,
    };
    let Ok(Outcome::Retry { error, .. }) = decide(end, tries, &RetryPolicy::default(), 0.0) else {
        panic!("it is retried");
    };
    assert_eq!(
        error.message,
        "the handler needed more than its 64 MiB of memory (`memory_mb` in rouse.toml); the next attempt may have 128 MiB"
    );
}

#[test]
fn a_result_that_is_too_large_names_the_setting() {
    let end = RunEnd::OutputTooLarge {
        bytes: 25,
        limit_bytes: 2,
    };
    let Ok(Outcome::Failed(error)) = decide(end, tries(1, 1), &RetryPolicy::default(), 0.0) else {
        panic!("no try is left");
    };
    assert_eq!(
        error.message,
        "the result is 25 bytes long; at most 2 are allowed (`result_bytes` in rouse.toml)"
    );
}

#[test]
fn control_characters_are_escaped_in_errors_and_line_breaks_of_messages_are_kept() {
    let harmful = "one\ntwo\u{1b}[2J\u{9b}\u{202e}\0";
    let shown = "two\\u{1b}[2J\\u{9b}\\u{202e}\\u{0}";
    let end = RunEnd::Panicked {
        message: harmful.into(),
        location: harmful.into(),
        backtrace: vec![harmful.into()],
    };
    let Ok(Outcome::Failed(error)) = decide(end, tries(1, 1), &RetryPolicy::default(), 0.0) else {
        panic!("no try is left");
    };
    assert_eq!(error.message, format!("one\n{shown}"));
    assert_eq!(error.location, Some(format!("one {shown}")));
    assert_eq!(error.backtrace, [format!("one {shown}")]);
    let end = RunEnd::Failed(Failure {
        kind: harmful.into(),
        message: harmful.into(),
        details: None,
        permanent: true,
        retry_after: None,
        retry_at: None,
    });
    let Ok(Outcome::Failed(error)) = decide(end, tries(1, 9), &RetryPolicy::default(), 0.0) else {
        panic!("it is permanent");
    };
    assert_eq!(error.guest_kind, Some(format!("one {shown}")));
    assert_eq!(error.message, format!("one\n{shown}"));
}

#[test]
fn errors_attribute_a_limit_to_the_job_that_set_it_and_any_other_limit_to_the_operator() {
    let message = |end: RunEnd, own| {
        let tries = Tries { own, ..tries(9, 9) };
        match decide(end, tries, &RetryPolicy::default(), 0.0) {
            Ok(Outcome::Failed(error) | Outcome::TimedOut(error)) => error.message,
            outcome => panic!("expected a failed job, got {outcome:?}"),
        }
    };
    let none = OwnLimits::default();
    let memory = OwnLimits {
        memory: true,
        ..none
    };
    let cpu = OwnLimits { cpu: true, ..none };
    let timeout = OwnLimits {
        timeout: true,
        ..none
    };
    let limit = Duration::from_secs(1);
    for (end, own, key) in [
        (RunEnd::OutOfMemory { limit_bytes: 7 }, memory, "memory_mb"),
        (RunEnd::OutOfCpu { limit }, cpu, "cpu"),
        (RunEnd::Aborted(AbortReason::TimedOut), timeout, "timeout"),
    ] {
        let by_job = message(end.clone(), own);
        assert!(by_job.contains("the grants of this job set"), "{by_job}");
        assert!(by_job.contains(&format!("under \"{key}\"")), "{by_job}");
        assert!(!by_job.contains("rouse.toml"), "{by_job}");
        for other in [none, memory, cpu, timeout]
            .into_iter()
            .filter(|other| *other != own)
        {
            let by_operator = message(end.clone(), other);
            assert!(by_operator.contains("rouse.toml"), "{by_operator}");
            assert!(!by_operator.contains("this job"), "{by_operator}");
        }
    }
}

#[test]
fn a_denied_attempt_is_never_retried_and_keeps_the_handlers_own_message() {
    let end = RunEnd::Denied {
        denial: "no sockets".into(),
        then: Box::new(failure(false, Some(Duration::from_secs(1)))),
    };
    let Ok(Outcome::Failed(error)) = decide(end, tries(1, 9), &RetryPolicy::default(), 0.0) else {
        panic!("it is not retried");
    };
    assert_eq!(error.kind, ErrorKind::Denied);
    assert!(error.message.starts_with("no sockets; then: not"));
    assert_eq!(error.guest_kind.as_deref(), Some("busy"));
}

#[test]
fn a_denial_appears_once_and_lines_of_the_handler_after_it_are_marked() {
    let denial = "it asked for a secret; this would allow it:\nsign = true";
    for (guest_message, message) in [
        (
            "it asked for a secret; this would allow it:",
            denial.to_owned(),
        ),
        (
            "no mail: it asked for a secret; this would allow it:",
            format!("{denial}\n\nthen: no mail: …"),
        ),
        ("no mail", format!("{denial}\n\nthen: no mail")),
        // The message of the handler looks like more lines of the host.
        (
            "no\n\nadd these lines too:\nhosts = [\"*\"]",
            format!(
                "{denial}\n\nthen, in the handler's words:\n> no\n> \n> add these lines too:\n> hosts = [\"*\"]"
            ),
        ),
    ] {
        let RunEnd::Failed(mut then) = failure(true, None) else {
            unreachable!("failure() returns RunEnd::Failed");
        };
        then.message = guest_message.into();
        let end = RunEnd::Denied {
            denial: denial.into(),
            then: Box::new(RunEnd::Failed(then)),
        };
        match decide(end, tries(1, 9), &RetryPolicy::default(), 0.0) {
            Ok(Outcome::Failed(error)) => assert_eq!(error.message, message),
            outcome => panic!("expected a failed job, got {outcome:?}"),
        }
    }
}

#[test]
fn an_invalid_result_is_retried_unless_postgres_has_refused_it_and_an_invalid_payload_never_is() {
    let decide = |end| decide(end, tries(1, 9), &RetryPolicy::default(), 0.0);
    let outcome = decide(RunEnd::PayloadRefused("at /a".into()));
    assert!(
        matches!(outcome, Ok(Outcome::Failed(error)) if error.kind == ErrorKind::InvalidPayload)
    );
    let outcome = decide(RunEnd::ResultRefused("at /a".into()));
    assert!(
        matches!(outcome, Ok(Outcome::Retry { error, .. }) if error.kind == ErrorKind::InvalidResult)
    );
    let outcome = decide(RunEnd::SettlementRefused("54000".into()));
    assert!(
        matches!(outcome, Ok(Outcome::Failed(error)) if error.kind == ErrorKind::InvalidResult)
    );
}

#[test]
fn the_last_timeout_ends_the_job_as_timed_out() {
    let end = RunEnd::Aborted(AbortReason::TimedOut);
    let outcome = decide(end, tries(3, 3), &RetryPolicy::default(), 0.0);
    assert!(matches!(outcome, Ok(Outcome::TimedOut(_))));
}

#[test]
fn a_lost_lease_drops_the_outcome_and_a_shutdown_releases_the_job() {
    let left = tries(1, 1);
    let outcome = |reason| decide(RunEnd::Aborted(reason), left, &RetryPolicy::default(), 0.0);
    for reason in [
        AbortReason::TakenByAnotherWorker,
        AbortReason::AlreadyCompleted,
        AbortReason::NotFound,
        AbortReason::Error,
        AbortReason::Cancelled,
    ] {
        assert!(outcome(reason) == Err(reason));
    }
    assert!(outcome(AbortReason::Shutdown) == Ok(Outcome::Released));
}

#[test]
fn an_attempt_that_never_started_does_not_count_and_unknown_grants_fail_the_job() {
    let outcome = |end| decide(end, tries(3, 3), &RetryPolicy::default(), 0.0);
    for end in [RunEnd::NotStarted, RunEnd::NoHandler, RunEnd::Parked] {
        assert!(outcome(end) == Ok(Outcome::Released));
    }
    let end = RunEnd::GrantsRefused("grants of a later version".into());
    let Ok(Outcome::Failed(error)) = decide(end, tries(1, 9), &RetryPolicy::default(), 0.0) else {
        panic!("no other attempt would understand them");
    };
    assert_eq!(error.kind, ErrorKind::Denied);
    assert_eq!(error.message, "grants of a later version");
}

#[test]
fn a_failed_effect_fails_or_retries_the_job_as_its_statement_declares() {
    let outcome = |permanent| {
        let end = RunEnd::EffectFailed(SqlFailure {
            statement: "mark_paid".into(),
            code: SqlFailure::ROWS.into(),
            message: "wrong number of rows: expected 1, got 0".into(),
            permanent,
        });
        decide(end, tries(1, 3), &RetryPolicy::default(), 0.0)
    };
    let Ok(Outcome::Failed(error)) = outcome(true) else {
        panic!("the statement declares that the job fails");
    };
    assert_eq!(error.kind, ErrorKind::EffectFailed);
    assert_eq!(
        error.message,
        "the statement mark_paid failed, and nothing was committed: wrong number of rows: expected 1, got 0"
    );
    assert!(matches!(outcome(false), Ok(Outcome::Retry { .. })));
}

#[test]
fn a_commit_that_fails_on_its_own_is_retried_and_its_error_names_no_statement() {
    let end = RunEnd::EffectFailed(SqlFailure {
        statement: SqlFailure::NO_STATEMENT.into(),
        code: "57014".into(),
        message: "canceling statement due to statement timeout".into(),
        permanent: false,
    });
    let Ok(Outcome::Retry { error, .. }) = decide(end, tries(1, 3), &RetryPolicy::default(), 0.0)
    else {
        panic!("another attempt may succeed");
    };
    assert_eq!(
        error.message,
        "the commit failed, and nothing was committed: canceling statement due to statement timeout"
    );
}

#[test]
fn every_abort_reason_parses_from_its_own_word() {
    for reason in [
        "taken_by_another_worker",
        "already_completed",
        "not_found",
        "error",
        "timed_out",
        "cancelled",
        "shutdown",
    ] {
        assert_eq!(
            AbortReason::parse(reason).map(AbortReason::as_str),
            Some(reason)
        );
    }
    assert_eq!(AbortReason::parse("busy"), None);
}

#[test]
fn error_kinds_have_the_same_word_in_metrics_and_in_stored_errors() {
    use ErrorKind::*;
    for kind in [
        GuestError,
        Panic,
        Trap,
        StackOverflow,
        Denied,
        OutOfMemory,
        OutOfCpu,
        OutputTooLarge,
        InvalidPayload,
        InvalidResult,
        TimedOut,
        EffectFailed,
        Unrunnable,
    ] {
        let stored = serde_json::to_value(kind).expect("a word");
        assert_eq!(stored, kind.as_str());
    }
}
