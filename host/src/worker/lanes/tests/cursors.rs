//! Cursors of lanes, and how sweeps move them.

use super::*;

#[test]
fn a_restart_does_not_reset_the_turn_from_which_overdue_jobs_are_queried() {
    let mut lanes = serving(vec![
        lane(1, 10, Priority::High),
        lane(2, 20, Priority::Low),
    ]);
    let after = |lanes: &mut Lanes, after| lanes.behind(after)[0].after;
    assert_eq!(after(&mut lanes, After::Reached), i64::MIN);
    lanes.advance(LaneId(20), 7);
    lanes.restart();
    assert_eq!(after(&mut lanes, After::Reached), 7);
    assert_eq!(after(&mut lanes, After::Recent), i64::MIN, "from the start");
}

#[test]
fn a_sweep_rewinds_to_the_cursor_two_sweeps_ago_and_a_restart_to_the_start() {
    let mut lanes = serving(vec![lane(1, 10, Priority::Normal)]);
    lanes.advance(LaneId(10), 100);
    lanes.rewind(&none_paused());
    lanes.advance(LaneId(10), 200);
    lanes.rewind(&none_paused());
    assert_eq!(
        order(&mut lanes),
        [(10, i64::MIN)],
        "there are not yet two earlier sweeps"
    );
    lanes.advance(LaneId(10), 300);
    lanes.rewind(&none_paused());
    assert_eq!(order(&mut lanes), [(10, 100)]);
    lanes.restart();
    assert_eq!(order(&mut lanes), [(10, i64::MIN)]);
}

#[test]
fn without_jobs_the_cursor_settles_at_the_last_turn_reached() {
    let mut lanes = serving(vec![lane(1, 10, Priority::Normal)]);
    let sweep = |lanes: &mut Lanes| {
        lanes.mark_all_empty();
        lanes.rewind(&none_paused());
        order(lanes)[0].1
    };
    lanes.advance(LaneId(10), 100);
    let swept: Vec<i64> = (0..6).map(|_| sweep(&mut lanes)).collect();
    let start = i64::MIN;
    assert_eq!(swept, [start, start, 100, 100, 100, 100]);
    lanes.restart();
    let swept: Vec<i64> = (0..6).map(|_| sweep(&mut lanes)).collect();
    assert_eq!(swept, [100; 6]);
}

#[test]
fn the_cursor_of_a_lane_that_was_not_read_does_not_move_forward() {
    let mut lanes = serving(vec![lane(1, 10, Priority::Normal)]);
    lanes.mark_all_empty();
    for turn in [100, 200, 300] {
        lanes.advance(LaneId(10), turn);
        lanes.rewind(&none_paused());
    }
    assert_eq!(order(&mut lanes), [(10, 100)]);
    // Its queue is paused.
    for _ in 0..6 {
        lanes.rewind(&paused());
        assert_eq!(order(&mut lanes), [(10, 100)]);
    }
    // Since then, a transaction has ended late.
    lanes.restart();
    lanes.rewind(&paused());
    assert_eq!(order(&mut lanes), [(10, i64::MIN)]);
    // It is read now, but had jobs: the queue was paused again before the claim.
    let empty = found_empty(&lanes, &[10], none_paused());
    lanes.mark_all_empty();
    lanes.swept(&empty, 1000);
    assert_eq!(order(&mut lanes), [(10, i64::MIN)]);
}

#[test]
fn a_pause_of_one_queue_does_not_keep_the_cursors_of_the_others_at_the_start() {
    let mut lanes = Lanes::default();
    let other = Lane {
        queue: "other".into(),
        ..lane(2, 20, Priority::Normal)
    };
    lanes.learn(vec![lane(1, 10, Priority::Normal), other]);
    lanes.serve(|_| Some(SERVED));
    lanes.advance(LaneId(10), 100);
    lanes.advance(LaneId(20), 200);
    lanes.restart();
    lanes.mark_all_empty();
    let empty = found_empty(&lanes, &[], paused());
    lanes.swept(&empty, 1000);
    assert_eq!(order(&mut lanes), [(10, i64::MIN), (20, 1000)]);
    for _ in 0..3 {
        lanes.rewind(&paused());
    }
    assert_eq!(order(&mut lanes), [(10, i64::MIN), (20, 1000)]);
}

#[test]
fn a_lane_that_is_served_again_is_read_from_its_start_for_two_sweeps() {
    let mut lanes = serving(vec![lane(1, 10, Priority::Normal)]);
    for turn in [100, 200, 300] {
        lanes.advance(LaneId(10), turn);
        lanes.rewind(&none_paused());
    }
    assert_eq!(order(&mut lanes), [(10, 100)]);
    lanes.serve(|_| None);
    lanes.serve(|_| Some(SERVED));
    // Since then, jobs may have been committed, and rows may be locked now.
    for start in [i64::MIN, i64::MIN, 400] {
        lanes.advance(LaneId(10), 400);
        lanes.rewind(&none_paused());
        assert_eq!(order(&mut lanes), [(10, start)]);
    }
}

#[test]
fn after_a_restart_no_sweep_moves_the_cursor_forward_in_a_lane_with_jobs() {
    let mut lanes = serving(vec![lane(1, 10, Priority::Normal)]);
    for turn in [1_000, 2_000, 3_000] {
        lanes.advance(LaneId(10), turn);
        lanes.rewind(&none_paused());
    }
    lanes.restart();
    // A claim of some jobs that were committed late.
    lanes.advance(LaneId(10), 50);
    lanes.rewind(&none_paused());
    assert_eq!(order(&mut lanes), [(10, 50)]);
    lanes.advance(LaneId(10), 60);
    lanes.rewind(&none_paused());
    assert_eq!(order(&mut lanes), [(10, 60)]);
    lanes.rewind(&none_paused());
    assert_eq!(order(&mut lanes), [(10, 50)], "two sweeps ago");
    lanes.restart();
    // The restart finds no jobs in it.
    lanes.mark_all_empty();
    lanes.rewind(&none_paused());
    assert_eq!(order(&mut lanes), [(10, 60)]);
}

#[test]
fn a_sweep_moves_the_cursor_forward_only_in_lanes_that_it_found_empty() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 20, Priority::Normal),
        lane(3, 30, Priority::Normal),
    ]);
    lanes.serve(|lane| (lane.id != LaneId(30)).then_some(SERVED));
    lanes.mark_all_empty();
    lanes.mark_active(LaneId(20));
    let empty = found_empty(&lanes, &[20], none_paused());
    lanes.swept(&empty, 500);
    assert_eq!(
        order(&mut lanes),
        [(10, 500), (20, i64::MIN)],
        "a probe goes first"
    );
    lanes.advance(LaneId(10), 700);
    let empty = found_empty(&lanes, &[20], none_paused());
    lanes.swept(&empty, 600);
    assert_eq!(order(&mut lanes)[0], (10, 700), "it never moves backwards");
    lanes.serve(|_| Some(SERVED));
    assert!(
        order(&mut lanes).contains(&(30, i64::MIN)),
        "this lane has not been read"
    );
    lanes.restart();
    assert!(
        order(&mut lanes).contains(&(10, i64::MIN)),
        "a restart reads everything"
    );
    lanes.forget();
    lanes.mark_all_empty();
    let empty = found_empty(&lanes, &[], none_paused());
    lanes.swept(&empty, i64::MIN);
    assert!(
        order(&mut lanes).contains(&(10, i64::MIN)),
        "nothing is known about another database"
    );
}

#[test]
fn a_sweep_does_not_skip_the_jobs_of_a_key_at_its_limit() {
    let mut lanes = Lanes::default();
    lanes.set_fair(one_at_a_time());
    lanes.learn(vec![lane(1, 10, Priority::Normal)]);
    lanes.serve(|_| Some(SERVED));
    let orders = lanes.orders(After::Cursor, WANTED);
    lanes.claimed(&orders, &[job(10, 100)], &[], false);
    // The limit is reached, so the next claim takes nothing, although the peek has found jobs.
    let orders = lanes.orders(After::Cursor, WANTED);
    lanes.claimed(&orders, &[], &[], false);
    let empty = found_empty(&lanes, &[10], none_paused());
    lanes.swept(&empty, 500);
    assert_eq!(order(&mut lanes), [(10, 100)]);
}

#[test]
fn a_sweep_changes_the_cursors_of_empty_lanes_and_not_their_order() {
    let mut lanes = serving(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 20, Priority::Normal),
    ]);
    lanes.mark_all_empty();
    lanes.advance(LaneId(10), 7);
    lanes.advance(LaneId(20), 5);
    lanes.restart();
    assert_eq!(order(&mut lanes), [(20, i64::MIN), (10, i64::MIN)]);
    lanes.advance(LaneId(20), 6);
    lanes.rewind(&none_paused());
    assert_eq!(order(&mut lanes), [(20, i64::MIN), (10, i64::MIN)]);
    lanes.advance(LaneId(20), 8);
    assert_eq!(order(&mut lanes), [(10, i64::MIN), (20, 8)]);
}

#[test]
fn the_recent_cursor_lags_two_look_backs_behind() {
    let mut lanes = serving(vec![lane(1, 10, Priority::Normal)]);
    let recent = |lanes: &mut Lanes| lanes.orders(After::Recent, WANTED)[0].after;
    for (turn, before) in [(100, i64::MIN), (200, i64::MIN), (300, 100), (400, 200)] {
        lanes.advance(LaneId(10), turn);
        assert_eq!(recent(&mut lanes), before, "at turn {turn}");
        assert_eq!(lanes.idle().len(), 0, "it has jobs");
        assert_eq!(order(&mut lanes), [(10, turn)]);
        lanes.look_back();
    }
    lanes.restart();
    assert_eq!(recent(&mut lanes), i64::MIN);
    lanes.undo_restart();
    assert_eq!(recent(&mut lanes), 300, "it was not answered");
    lanes.restart();
    lanes.mark_all_empty();
    let empty = found_empty(&lanes, &[], none_paused());
    lanes.swept(&empty, i64::MIN);
    assert_eq!(recent(&mut lanes), 300, "the sweep has found everything");
    lanes.forget();
    let empty = found_empty(&lanes, &[], none_paused());
    lanes.swept(&empty, i64::MIN);
    assert_eq!(recent(&mut lanes), i64::MIN);
}
