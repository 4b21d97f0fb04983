use super::*;

fn at(text: &str) -> Timestamp {
    format!("2026-01-01T{text}Z").parse().expect(text)
}

/// A schedule whose due times up to midnight are handled.
fn schedule(overlap: Overlap, catch_up: CatchUp) -> Schedule {
    Schedule {
        name: "nightly".into(),
        overlap,
        catch_up,
        window: None,
        jitter: SignedDuration::ZERO,
        handled_until: at("00:00:00"),
        previous: None,
    }
}

fn due(expression: &str) -> Result<DueTimes, String> {
    DueTimes::parse(expression, "UTC")
}

/// What happens at the due times of every hour, as `hour action`.
fn hourly(schedule: &Schedule, now: &str) -> Vec<String> {
    let decision = fire(schedule, &due("0 * * * *"), at(now));
    shown(&decision)
}

fn shown(decision: &Decision) -> Vec<String> {
    let firings = decision.firings.iter();
    firings
        .map(|firing| format!("{} {:?}", firing.due_at.strftime("%H:%M"), firing.action))
        .collect()
}

#[test]
fn a_due_time_is_fired_once_it_is_reached_and_the_next_five_are_shown() {
    let of = schedule(Overlap::Skip, CatchUp::None);
    assert!(hourly(&of, "00:59:59.999999").is_empty());
    let decision = fire(&of, &due("0 * * * *"), at("01:00:00"));
    assert_eq!(shown(&decision), ["01:00 Enqueue"]);
    assert_eq!(decision.handled_until, at("01:00:00"));
    assert_eq!(decision.next_at, Some(at("02:00:00")));
    let hours = [2, 3, 4, 5, 6].map(|hour| at(&format!("{hour:02}:00:00")));
    assert_eq!(decision.upcoming, hours);
    assert_eq!(decision.error, None);
    // Not missed yet, almost a minute late.
    assert_eq!(hourly(&of, "01:00:59"), ["01:00 Enqueue"]);
}

#[test]
fn due_times_that_were_handled_before_the_clock_was_set_back_are_not_repeated() {
    let of = Schedule {
        handled_until: at("03:00:00"),
        ..schedule(Overlap::Allow, CatchUp::All)
    };
    let decision = fire(&of, &due("0 * * * *"), at("01:30:00"));
    assert!(decision.firings.is_empty(), "{:?}", shown(&decision));
    assert_eq!(decision.handled_until, at("03:00:00"));
    assert_eq!(decision.next_at, Some(at("04:00:00")));
}

#[test]
fn missed_due_times_are_caught_up_as_the_policy_says() {
    for (catch_up, expected) in [
        (CatchUp::None, vec!["03:00 Miss"]),
        (CatchUp::One, vec!["03:00 Enqueue"]),
        (
            CatchUp::All,
            vec!["01:00 Enqueue", "02:00 Enqueue", "03:00 Enqueue"],
        ),
    ] {
        let of = schedule(Overlap::Allow, catch_up);
        assert_eq!(hourly(&of, "03:30:00"), expected, "{catch_up:?}");
        assert!(hourly(&of, "00:30:00").is_empty());
    }
}

#[test]
fn a_due_time_that_is_not_missed_makes_one_catch_up_unnecessary() {
    for (catch_up, expected) in [
        (CatchUp::None, vec!["02:00 Miss", "03:00 Enqueue"]),
        (CatchUp::One, vec!["02:00 Miss", "03:00 Enqueue"]),
        (
            CatchUp::All,
            vec!["01:00 Enqueue", "02:00 Enqueue", "03:00 Enqueue"],
        ),
    ] {
        let of = schedule(Overlap::Allow, catch_up);
        assert_eq!(hourly(&of, "03:00:01"), expected, "{catch_up:?}");
    }
}

#[test]
fn due_times_older_than_the_window_are_missed() {
    for (catch_up, minutes, expected) in [
        (
            CatchUp::All,
            100,
            vec!["01:00 Miss", "02:00 Enqueue", "03:00 Enqueue"],
        ),
        (CatchUp::All, 10, vec!["03:00 Miss"]),
        (CatchUp::One, 100, vec!["03:00 Enqueue"]),
        (CatchUp::One, 10, vec!["03:00 Miss"]),
    ] {
        let of = Schedule {
            window: Some(SignedDuration::from_mins(minutes)),
            ..schedule(Overlap::Allow, catch_up)
        };
        assert_eq!(hourly(&of, "03:30:00"), expected, "{catch_up:?} {minutes}");
    }
    // A due time that is not missed does not depend on the window.
    let of = Schedule {
        window: Some(SignedDuration::from_secs(1)),
        ..schedule(Overlap::Allow, CatchUp::None)
    };
    assert_eq!(hourly(&of, "01:00:30"), ["01:00 Enqueue"]);
}

#[test]
fn many_due_times_are_handled_a_hundred_at_a_time() {
    let mut of = schedule(Overlap::Allow, CatchUp::All);
    let due = due("* * * * *");
    let now = at("04:00:30");
    let mut counts = Vec::new();
    loop {
        let decision = fire(&of, &due, now);
        counts.push(decision.firings.len());
        assert_eq!(decision.upcoming[0], at("04:01:00"));
        of.handled_until = decision.handled_until;
        if decision.next_at > Some(now) {
            break;
        }
        assert_eq!(
            decision.next_at,
            due.as_ref().unwrap().next_after(of.handled_until)
        );
    }
    assert_eq!(counts, [100, 100, 40]);
    assert_eq!(of.handled_until, now);
}

#[test]
fn the_previous_job_decides_by_the_overlap_policy() {
    let (waiting, running) = (Some(Previous::Waiting), Some(Previous::Running));
    for (overlap, previous, expected) in [
        (Overlap::Skip, None, Action::Enqueue),
        (Overlap::Skip, waiting, Action::Skip),
        (Overlap::Skip, running, Action::Skip),
        (Overlap::Queue, None, Action::Enqueue),
        (Overlap::Queue, waiting, Action::Skip),
        (Overlap::Queue, running, Action::Queue),
        (Overlap::Allow, None, Action::Enqueue),
        (Overlap::Allow, running, Action::Enqueue),
        (Overlap::Cancel, None, Action::Enqueue),
        (Overlap::Cancel, waiting, Action::Replace),
        (Overlap::Cancel, running, Action::Replace),
    ] {
        let of = Schedule {
            previous,
            ..schedule(overlap, CatchUp::None)
        };
        let decision = fire(&of, &due("0 * * * *"), at("01:00:01"));
        assert_eq!(
            decision.firings[0].action, expected,
            "{overlap:?} {previous:?}"
        );
    }
}

#[test]
fn due_times_that_are_handled_together_overlap_each_other() {
    for (overlap, expected) in [
        (Overlap::Skip, ["Enqueue", "Skip", "Skip"]),
        (Overlap::Queue, ["Enqueue", "Skip", "Skip"]),
        (Overlap::Allow, ["Enqueue", "Enqueue", "Enqueue"]),
        (Overlap::Cancel, ["Skip", "Skip", "Enqueue"]),
    ] {
        let found = hourly(&schedule(overlap, CatchUp::All), "03:30:00");
        let actions: Vec<&str> = found.iter().map(|firing| &firing[6..]).collect();
        assert_eq!(actions, expected, "{overlap:?}");
    }
}

#[test]
fn jitter_delays_a_job_by_an_amount_that_depends_on_name_and_due_time_only() {
    let of = Schedule {
        jitter: SignedDuration::from_mins(10),
        ..schedule(Overlap::Allow, CatchUp::All)
    };
    let run_at = |of: &Schedule, now: &str| fire(of, &due("0 * * * *"), at(now)).firings[0].run_at;
    let first = run_at(&of, "01:00:00").unwrap();
    assert_eq!(run_at(&of, "01:00:01"), Some(first));
    assert!(first > at("01:00:00") && first <= at("01:10:00"), "{first}");
    let other = Schedule {
        name: "other".into(),
        ..of.clone()
    };
    assert_ne!(run_at(&other, "01:00:00"), Some(first));
    // Once that time has passed, the job starts at once.
    assert_eq!(run_at(&of, "01:30:00"), None);
    for minute in 0..600 {
        let due_at = at("00:00:00") + SignedDuration::from_mins(minute);
        let delayed = jittered("x", due_at, SignedDuration::from_secs(5)).unwrap();
        assert!((0..=5_000).contains(&delayed.duration_since(due_at).as_millis()));
    }
}

#[test]
fn nothing_is_fired_twice_if_the_clock_goes_back() {
    let of = Schedule {
        handled_until: at("01:00:00.5"),
        ..schedule(Overlap::Allow, CatchUp::All)
    };
    let decision = fire(&of, &due("0 * * * *"), at("00:59:59"));
    assert_eq!(shown(&decision), [""; 0]);
    assert_eq!(decision.handled_until, of.handled_until);
    assert_eq!(decision.next_at, Some(at("02:00:00")));
    assert_eq!(
        shown(&fire(&of, &due("0 * * * *"), at("01:00:00"))),
        [""; 0]
    );
}

#[test]
fn an_invalid_expression_keeps_its_due_times_for_a_host_that_can_read_it() {
    let of = schedule(Overlap::Allow, CatchUp::All);
    let decision = fire(&of, &due("0 25 * * *"), at("03:00:00"));
    assert!(decision.error.unwrap().contains("is invalid"));
    assert_eq!(decision.next_at, Some(at("04:00:00")));
    assert_eq!(
        (decision.handled_until, decision.upcoming),
        (of.handled_until, vec![])
    );
    let never = fire(&of, &due("0 0 30 2 *"), at("03:00:00"));
    assert!(never.error.unwrap().contains("never due again"));
    assert_eq!(never.next_at, None);
}

#[test]
fn a_backfill_has_every_due_time_from_its_start_to_before_its_end() {
    let due = due("0 * * * *");
    let (times, is_last) = backfill(&due, at("01:00:00"), at("04:00:00"), None).unwrap();
    assert_eq!(times, ["01:00:00", "02:00:00", "03:00:00"].map(at));
    assert!(is_last);
    let rest = backfill(&due, at("01:00:00"), at("04:00:00"), Some(at("02:00:00")));
    assert_eq!(rest, Ok((vec![at("03:00:00")], true)));
    let none = backfill(&due, at("01:00:01"), at("02:00:00"), None);
    assert_eq!(none, Ok((vec![], true)));
}

#[test]
fn a_backfill_of_more_than_ten_thousand_due_times_is_refused() {
    let due = due("* * * * * *");
    let max = at("00:00:00") + SignedDuration::from_secs(10_000);
    let (times, is_last) = backfill(&due, at("00:00:00"), max, None).unwrap();
    assert_eq!((times.len(), is_last), (FIRED_MAX, false));
    let more = max + SignedDuration::from_secs(1);
    let error = backfill(&due, at("00:00:00"), more, None).unwrap_err();
    assert!(error.contains("more than 10000 due times"), "{error}");
    assert!(backfill(&Err("no".into()), at("00:00:00"), max, None).is_err());
}
