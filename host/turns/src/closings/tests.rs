//! Closed lanes: the order in which they open, and what is forgotten.

use super::*;

type TestClosings = Closings<u32, &'static str, u32, u64>;

const CLASS: Class = [0, 0];

/// The other limits of a lane that is behind one limit.
fn none(_: u32) -> Vec<&'static str> {
    Vec::new()
}

/// Closes a lane, which is a member of its own.
fn close(closings: &mut TestClosings, lane: u32) {
    closings.close_until_end(lane, CLASS, &["limit"], &lane, true);
}

#[test]
fn an_end_opens_the_lanes_that_were_closed_first() {
    let mut closings = TestClosings::default();
    for lane in [3, 1, 2] {
        close(&mut closings, lane);
    }
    assert_eq!(closings.by_end(&"limit"), [1, 3]);
    assert!(closings.open(3) && !closings.open(3));
    assert_eq!(closings.by_end(&"limit"), [2, 1]);
    assert!(closings.by_end(&"other").is_empty());
    assert_eq!(closings.some(), [2, 1]);
    assert!(closings.open(1) && closings.open(2) && closings.is_empty());
    assert!(closings.some().is_empty() && !closings.wait_for_ends());
}

#[test]
fn a_lane_that_is_closed_for_a_time_opens_when_its_wait_ends() {
    let mut closings = TestClosings::default();
    closings.close_until(1, 20, true);
    closings.close_until(2, 10, false);
    assert_eq!(closings.with_jobs().collect::<Vec<_>>(), [1]);
    assert_eq!(closings.next_opening(), Some(10));
    assert_eq!(closings.due(9, none), [0; 0]);
    assert_eq!(closings.due(20, none), [2, 1]);
    closings.open(2);
    assert_eq!(closings.next_opening(), Some(20));
    assert!(closings.by_end(&"limit").is_empty(), "ends do not open it");
    closings.clear();
    assert_eq!(closings.next_opening(), None);
}

/// Serves the lane that goes first, one job at a time, and counts how often each member was served. The members have
/// these shares and numbers of lanes; a lane that is served closes after those that were not.
fn served(members: &[(f64, usize)], at_a_rate: bool, times: u64) -> Vec<u64> {
    let mut closings = TestClosings::default();
    let mut counts = vec![0; members.len()];
    // The member of each lane.
    let member_of: Vec<u32> = (0..)
        .zip(members)
        .flat_map(|(member, (_, lanes))| vec![member; *lanes])
        .collect();
    let close = |closings: &mut TestClosings, lane: u32, now: u64| {
        let member = member_of[lane as usize];
        match at_a_rate {
            true => closings.close_until_start(lane, CLASS, &"limit", now + 1, &member, true),
            false => closings.close_until_end(lane, CLASS, &["limit"], &member, true),
        }
    };
    for lane in (0..).take(member_of.len()) {
        close(&mut closings, lane, 0);
    }
    for now in 1..=times {
        let opened = match at_a_rate {
            true => closings.due(now, none),
            false => closings.by_end(&"limit"),
        };
        for lane in &opened {
            closings.open(*lane);
        }
        let first = *opened.last().expect("a lane");
        let member = member_of[first as usize];
        let index = member as usize;
        counts[index] += 1;
        closings.take(&["limit"], &member, 1.0 / members[index].0);
        let others = opened.iter().filter(|lane| **lane != first);
        for lane in others.chain([&first]) {
            close(&mut closings, *lane, now);
        }
    }
    counts
}

#[test]
fn lanes_behind_a_limit_are_served_by_their_shares() {
    for at_a_rate in [false, true] {
        assert_eq!(served(&[(1.0, 1); 5], at_a_rate, 200), [40; 5]);
        assert_eq!(served(&[(3.0, 1), (1.0, 1)], at_a_rate, 400), [300, 100]);
        let mut ten = [(1.0, 1); 10];
        ten[0].0 = 3.0;
        let counts = served(&ten, at_a_rate, 1200);
        assert_eq!((counts[0], counts[9]), (300, 100));
    }
}

#[test]
fn a_member_has_its_share_of_a_limit_however_many_lanes_it_has() {
    for at_a_rate in [false, true] {
        let counts = served(&[(1.0, 10), (1.0, 1)], at_a_rate, 2000);
        assert_eq!(counts, [1000, 1000]);
        let counts = served(&[(3.0, 2), (1.0, 7)], at_a_rate, 400);
        assert_eq!(counts, [300, 100]);
    }
}

#[test]
fn the_lanes_of_a_member_take_turns_and_leave_no_room_unused() {
    let mut closings = TestClosings::default();
    for lane in 1..=3 {
        closings.close_until_end(lane, CLASS, &["limit"], &7, true);
    }
    close(&mut closings, 9);
    assert_eq!(closings.waiting(&"limit"), 4);
    assert_eq!(closings.by_end(&"limit"), [9, 1], "one of each member");
    assert_eq!(closings.others(&"limit"), [3, 2, 9, 1], "then the others");
    // Usage by the member moves its waiting lanes back.
    assert!(closings.open(1));
    closings.take(&["limit"], &7, 1.0);
    closings.close_until_end(1, CLASS, &["limit"], &7, true);
    assert_eq!(closings.by_end(&"limit"), [2, 9]);
    closings.go_first(3);
    assert_eq!(closings.others(&"limit"), [1, 2, 9, 3]);
    for lane in [1, 2, 3, 9] {
        assert!(closings.open(lane));
    }
    assert!(closings.is_empty() && closings.waiting.is_empty());
}

/// Claims at different times report different times.
#[test]
fn lanes_of_a_rate_open_in_order_when_the_next_start_is_permitted() {
    let mut closings = TestClosings::default();
    let close = |closings: &mut TestClosings, lane: u32, at: u64| {
        closings.close_until_start(lane, CLASS, &"rate", at, &lane, true);
    };
    closings.take(&["rate"], &1, 1.0);
    for (lane, at) in [(1, 10), (2, 20), (3, 30), (4, 25)] {
        close(&mut closings, lane, at);
    }
    assert!(closings.wait_for_limits() && !closings.wait_for_ends());
    assert_eq!(
        closings.next_opening(),
        Some(25),
        "the last claim is the most accurate"
    );
    let due = closings.due(24, none);
    let before = (due, closings.others(&"rate"), closings.some());
    assert_eq!(before, Default::default());
    closings.go_first(4);
    assert_eq!(closings.due(25, none), [2, 4]);
    assert!(closings.open(2) && closings.open(4));
    // While there is room, the others follow.
    assert_eq!(closings.next_opening(), None);
    assert_eq!(closings.others(&"rate"), [1, 3]);
    assert_eq!(
        closings.some(),
        [1, 3],
        "the sweep, if their claim was lost"
    );
    close(&mut closings, 2, 40);
    for lane in [1, 2, 3] {
        assert!(closings.open(lane));
    }
    assert_eq!(closings.next_opening(), None, "nobody waits for it");
    close(&mut closings, 1, 50);
    closings.clear();
    assert!(closings.next_opening().is_none() && !closings.wait_for_limits());
}

#[test]
fn a_member_that_had_no_jobs_for_a_while_has_saved_nothing() {
    let mut closings = TestClosings::default();
    for _ in 0..1000 {
        closings.take(&["limit"], &1, 1.0);
    }
    for lane in [1, 2] {
        close(&mut closings, lane);
    }
    assert_eq!(closings.by_end(&"limit"), [1, 2]);
    closings.take(&["limit"], &2, 2.0);
    close(&mut closings, 2);
    assert_eq!(closings.by_end(&"limit"), [2, 1], "it has had its turns");
    closings.go_first(2);
    assert_eq!(closings.by_end(&"limit"), [1, 2]);
}

/// Each sweep calls `go_first` in this way.
#[test]
fn lanes_that_go_first_take_turns() {
    let mut closings = TestClosings::default();
    let mut counts = vec![0; 10];
    (0..10).for_each(|lane| close(&mut closings, lane));
    for _ in 0..100 {
        (0..10).for_each(|lane| closings.go_first(lane));
        let opened = closings.by_end(&"limit");
        let first = *opened.last().expect("a lane");
        counts[first as usize] += 1;
        closings.take(&["limit"], &first, 1.0);
        for lane in opened {
            closings.open(lane);
            if lane != first {
                close(&mut closings, lane);
            }
        }
        close(&mut closings, first);
    }
    assert!(counts.iter().all(|count| *count >= 5), "{counts:?}");
}

#[test]
fn members_that_are_no_longer_behind_a_limit_are_forgotten() {
    let mut closings: Closings<u32, u32, u32, u64> = Closings::default();
    // 10,000 tenants with two lanes each come and go, a hundred at a time.
    for tenants in 0..100 {
        let now = tenants * 100..(tenants + 1) * 100;
        for tenant in now.clone() {
            // The lanes are behind a limit of the tenant's own, and behind one that all tenants share.
            closings.take(&[tenant + 10, 7], &(2 * tenant), 1.0);
            closings.take(&[tenant + 10, 7], &(2 * tenant + 1), 2.0);
        }
        let own: Vec<u32> = now.clone().map(|tenant| tenant + 10).collect();
        let of_own = own.iter().zip(now.clone());
        let of_shared = now.clone().map(|tenant| (&7, tenant));
        let behind = of_own.chain(of_shared);
        closings.keep_members(behind.flat_map(|(limit, tenant)| {
            let members = [2 * tenant, 2 * tenant + 1];
            members.map(|member| (limit, member))
        }));
        assert_eq!(closings.shared_limits(), 101);
        assert_eq!(closings.shared[&7].had.len(), 200);
    }
    // The others keep their usage.
    assert_eq!(closings.had(&10_009, &19_998), 1_000_000);
    assert_eq!(closings.had(&10_009, &19_999), 2_000_000);
    assert_eq!(closings.had(&7, &19_999), 2_000_000);
    closings.keep_members([]);
    assert_eq!(closings.shared_limits(), 0);
}

#[test]
fn with_very_many_members_of_a_limit_all_start_again_together() {
    let mut closings: Closings<u32, u32, u32, u64> = Closings::default();
    for n in 0..40_000 {
        closings.take(&[7], &n, 1.0);
    }
    assert_eq!(closings.shared[&7].had(&0), 1_000_000, "like all others");
    assert!(closings.shared[&7].had.len() < 10_000);
}

/// Otherwise, every few of these lanes would need a claim that finds them closed.
#[test]
fn lanes_that_another_limit_is_known_to_keep_closed_move_there_without_a_claim() {
    let mut closings = TestClosings::default();
    let behind = |lane: u32| match lane {
        30.. => vec!["running"],
        _ => vec!["running", "rate"],
    };
    for lane in 1..=31 {
        closings.close_until_end(lane, CLASS, &["running"], &lane, true);
    }
    closings.go_first(20);
    // Nothing is known about the rate.
    closings.move_closed(&"running", &[], behind);
    assert_eq!(closings.waiting(&"running"), 31);
    closings.open(1);
    closings.close_until_start(1, CLASS, &"rate", 10, &1, true);
    closings.move_closed(&"running", &[], behind);
    assert_eq!(closings.waiting(&"running"), 2);
    assert_eq!(closings.by_end(&"running"), [31, 30]);
    assert_eq!(closings.waiting(&"rate"), 29);
    assert_eq!(closings.next_opening(), Some(10));
    // Until the rate lets the next job start, the lanes stay there, regardless of which limits are full.
    closings.move_closed(&"rate", &["running"], behind);
    assert_eq!(closings.waiting(&"rate"), 29);
    assert_eq!(closings.due(10, behind), [2, 20], "it still goes first");
    // One of them has taken up all the room.
    closings.open(20);
    closings.close_until_end(20, CLASS, &["running"], &20, true);
    closings.move_closed(&"rate", &["running"], behind);
    assert_eq!(
        (closings.waiting(&"running"), closings.waiting(&"rate")),
        (31, 0)
    );
    assert_eq!(
        closings.by_end(&"running"),
        [3, 2],
        "in the order of the first closing"
    );
    for lane in 1..=31 {
        assert!(closings.open(lane));
    }
    assert!(closings.is_empty() && closings.waiting.is_empty() && !closings.wait_for_ends());
}

/// A start for which no lane waits does not end a wait of the caller.
#[test]
fn the_next_start_of_a_limit_is_remembered_until_then_whether_or_not_a_lane_waits_for_it() {
    let mut closings = TestClosings::default();
    let behind = |_: u32| vec!["running", "rate"];
    close(&mut closings, 8);
    for lane in [1, 2] {
        closings.close_until_end(lane, CLASS, &["running"], &lane, true);
    }
    closings.note_start(&"rate", 20);
    closings.note_start(&"rate", 10);
    assert_eq!(closings.next_opening(), None);
    closings.move_closed(&"running", &[], behind);
    assert_eq!(
        closings.next_opening(),
        Some(10),
        "the last claim is the most accurate"
    );
    assert!(closings.by_end(&"running").is_empty());
    // The last lane that waits opens, because it is empty.
    for lane in [1, 2] {
        closings.open(lane);
        closings.close_until_end(lane, CLASS, &["running"], &lane, true);
    }
    assert_eq!(closings.next_opening(), None);
    closings.move_closed(&"running", &[], behind);
    assert_eq!(closings.waiting(&"rate"), 2);
    for lane in [1, 2] {
        closings.open(lane);
        closings.close_until_end(lane, CLASS, &["running"], &lane, true);
    }
    assert_eq!(closings.due(10, behind), [0; 0], "no lane waits for it");
    closings.move_closed(&"running", &[], behind);
    assert_eq!(closings.by_end(&"running"), [2, 1], "it permits a start");
    assert!(closings.starts.is_empty() && closings.starts_at.is_empty());
}

/// Otherwise they would go ahead of lanes that have jobs and have used the limit, and each would cost a claim.
#[test]
fn lanes_without_known_jobs_open_beside_the_others_and_do_not_count() {
    let mut closings = TestClosings::default();
    for lane in 1..=20 {
        closings.close_until_end(lane, CLASS, &["limit"], &lane, false);
    }
    assert!(!closings.wait_for_ends());
    close(&mut closings, 30);
    assert!(closings.wait_for_ends());
    assert_eq!(closings.by_end(&"limit"), [30]);
    assert!(!closings.is_closed(8) && closings.is_closed(9));
    // A job is announced.
    assert!(closings.note_jobs(9) && !closings.note_jobs(8));
    assert_eq!(closings.by_end(&"limit"), [30, 9], "it was closed before");
    assert!(!closings.is_closed(17) && closings.is_closed(18));
    closings.go_first(20);
    assert_eq!(closings.by_end(&"limit"), [9, 20], "it has overdue jobs");
    for lane in [9, 20, 30] {
        assert!(closings.open(lane));
    }
    assert!(closings.is_empty() && closings.waiting.is_empty() && !closings.wait_for_ends());
    // Without others, nothing else would open them.
    for lane in 1..=20 {
        closings.close_until_end(lane, CLASS, &["limit"], &lane, false);
    }
    assert!(closings.by_end(&"limit").is_empty() && closings.is_empty());
    closings.close_until_start(1, CLASS, &"rate", 10, &1, false);
    assert_eq!(closings.next_opening(), None);
    assert!(closings.note_jobs(1));
    assert_eq!(closings.next_opening(), Some(10));
    closings.close_until_start(1, CLASS, &"rate", 10, &1, false);
    assert_eq!(closings.due(10, none), [0; 0]);
    assert!(closings.is_empty());
}

#[test]
fn lanes_that_another_limit_now_keeps_closed_are_not_due() {
    let mut closings = TestClosings::default();
    let behind = |_: u32| vec!["rate", "other"];
    for lane in 1..=3 {
        closings.close_until_start(lane, CLASS, &"rate", 10, &lane, true);
    }
    closings.note_start(&"other", 10);
    assert_eq!(closings.due(9, behind), [0; 0]);
    closings.note_start(&"other", 15);
    assert_eq!(closings.due(10, behind), [0; 0]);
    assert_eq!(closings.next_opening(), Some(15));
    assert_eq!(closings.due(15, behind), [2, 1]);
    // Both at the same time.
    closings.note_start(&"other", 20);
    closings.note_start(&"rate", 20);
    assert_eq!(closings.due(20, behind), [2, 1]);
}
