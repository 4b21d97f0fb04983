use metrics_exporter_prometheus::PrometheusBuilder;

use super::*;
use crate::job::LaneId;
use crate::worker::turns::Place;

const CLASS: Class = [1, 0];

/// The turns of these keys of queue `mail`, one lane each.
fn turns(keys: &[String]) -> Turns {
    let mut turns = Turns::default();
    for (lane, key) in keys.iter().enumerate() {
        let place = Place {
            class: CLASS,
            queue: "mail".into(),
            key: key.as_str().into(),
            share: 2.0,
        };
        turns.insert(LaneId(i64::try_from(lane).unwrap()), place);
    }
    turns
}

fn entry(
    key: Option<&str>,
    selected: u64,
    deferred: u64,
    promotions: u64,
    deficit: Option<f64>,
) -> FairKeyStats {
    FairKeyStats {
        key: key.map(str::to_owned),
        selected,
        deferred,
        promotions,
        deficit,
    }
}

#[test]
fn selected_deferred_and_promoted_jobs_are_counted_by_key() {
    let turns = turns(&["a", "b", "c", "d"].map(String::from));
    let now = Instant::now();
    let mut fairness = Fairness::default();
    fairness.watch("mail", "tenant");
    fairness.selected("mail", &"a".into(), 3, false, &turns, now);
    fairness.selected("mail", &"b".into(), 2, true, &turns, now);
    // "c" and "d" have had no turn yet, so they have no entry.
    fairness.deferred(CLASS, "mail", &["a".into()].into(), &turns);
    fairness.selected("other", &"a".into(), 1, false, &turns, now);
    let report = fairness.report(&turns);
    assert_eq!(report.len(), 1, "the other queue is not watched");
    assert_eq!(
        (report[0].queue.as_str(), report[0].promotions),
        ("mail", 2)
    );
    assert_eq!(
        report[0].keys,
        [
            entry(None, 0, 2, 0, None),
            entry(Some("a"), 3, 0, 0, Some(2.0)),
            entry(Some("b"), 2, 1, 2, Some(2.0)),
        ]
    );
    fairness.watch("mail", "tenant");
    assert_eq!(fairness.report(&turns)[0].keys.len(), 3, "it goes on");
    fairness.watch("mail", "source");
    assert_eq!(fairness.report(&turns), [], "other keys");
    fairness.selected("mail", &"a".into(), 1, false, &turns, now);
    fairness.retain(|queue| queue != "mail");
    assert_eq!(fairness.report(&turns), []);
}

/// A series stays on the page of metrics, so it must not keep the value of a key that is no longer counted.
#[test]
fn a_queue_that_is_no_longer_divided_by_its_keys_has_no_deficits_in_the_metrics() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let page = recorder.handle();
    metrics::with_local_recorder(&recorder, || {
        let turns = turns(&["a", "b"].map(String::from));
        let now = Instant::now();
        let mut fairness = Fairness::default();
        let shows = |dimension: &str, key: &str, deficit: u32| {
            let line = format!(
                "rouse_fair_deficit{{queue=\"mail\",dimension=\"{dimension}\",key=\"{key}\"}} {deficit}\n"
            );
            let page = page.render();
            assert!(page.contains(&line), "{line} is missing: {page}");
        };
        fairness.watch("mail", "tenant");
        fairness.selected("mail", &"a".into(), 1, false, &turns, now);
        fairness.report(&turns);
        shows("tenant", "a", 2);
        fairness.watch("mail", "source");
        shows("tenant", "a", 0);
        fairness.selected("mail", &"b".into(), 1, false, &turns, now);
        fairness.report(&turns);
        shows("source", "b", 2);
        fairness.retain(|queue| queue != "mail");
        shows("source", "b", 0);
    });
}

#[test]
fn keys_beyond_the_limits_are_counted_together() {
    let keys: Vec<String> = (0..KEYS_MAX + 50).map(|key| key.to_string()).collect();
    let turns = turns(&keys);
    let now = Instant::now();
    let mut fairness = Fairness::default();
    fairness.watch("mail", "tenant");
    for key in &keys {
        fairness.selected("mail", &key.as_str().into(), 1, false, &turns, now);
    }
    fairness.deferred(CLASS, "mail", &HashSet::new(), &turns);
    let report = fairness.report(&turns);
    assert_eq!(report[0].keys.len(), KEYS_MAX + 1);
    assert_eq!(report[0].keys[0], entry(None, 50, 50, 0, None));
    // A queue that is divided in another way makes room.
    fairness.watch("mail", "source");
    let long = "x".repeat(KEY_BYTES_MAX / 2);
    for end in ["1", "2", "3"] {
        let key = format!("{long}{end}").into();
        fairness.selected("mail", &key, 1, false, &turns, now);
    }
    let report = fairness.report(&turns);
    assert_eq!(report[0].keys.len(), 2, "the others are too long");
    assert_eq!(report[0].keys[0].selected, 2);
}

#[test]
fn a_key_that_was_idle_for_an_hour_makes_room_and_is_counted_with_the_others() {
    let names: Vec<String> = (0..KEYS_MAX).map(|key| key.to_string()).collect();
    // The first key has jobs, but is not selected.
    let turns = turns(&names[..1]);
    let start = Instant::now();
    let mut fairness = Fairness::default();
    fairness.watch("mail", "tenant");
    for name in &names {
        fairness.selected("mail", &name.as_str().into(), 1, true, &turns, start);
    }
    let mut select = |key: &str, at| {
        fairness.selected("mail", &key.into(), 1, false, &turns, at);
        let mut report = fairness.report(&turns);
        report.pop().expect("the queue has keys")
    };
    let named = |report: &FairQueueStats, key: &str| {
        let mut keys = report.keys.iter();
        keys.any(|stats| stats.key.as_deref() == Some(key))
    };
    let almost = start + IDLE_AFTER - SEARCH_EVERY;
    assert!(named(&select("7", almost), "7"));
    assert!(!named(&select("new", almost), "new"), "none is idle yet");
    let report = select("new", start + IDLE_AFTER);
    assert!(["0", "7", "new"].iter().all(|key| named(&report, key)));
    // All keys except "0" and "7" have been removed, with their counts and with the first job of "new".
    let gone = u64::try_from(KEYS_MAX - 2).unwrap();
    assert_eq!(report.keys.len(), 4);
    assert_eq!(report.keys[0], entry(None, gone + 1, 0, gone, None));
    assert_eq!(report.promotions, gone + 2, "the sum stays the same");
}

#[test]
fn the_last_key_of_a_queue_does_not_make_room() {
    let turns = turns(&[]);
    let start = Instant::now();
    let mut fairness = Fairness::default();
    fairness.watch("mail", "tenant");
    fairness.watch("videos", "tenant");
    fairness.selected("videos", &"a".into(), 1, false, &turns, start);
    for key in 1..KEYS_MAX {
        fairness.selected("mail", &key.to_string().into(), 1, false, &turns, start);
    }
    let later = start + IDLE_AFTER;
    fairness.selected("mail", &"new".into(), 1, false, &turns, later);
    let report = fairness.report(&turns);
    assert_eq!(report[1].keys, [entry(Some("a"), 1, 0, 0, Some(0.0))]);
}

#[test]
fn the_metrics_name_at_most_the_maximum_number_of_keys() {
    let turns = turns(&[]);
    let mut now = Instant::now();
    let mut fairness = Fairness::default();
    fairness.watch("mail", "tenant");
    for key in 0..SHOWN_MAX + 2 * KEYS_MAX {
        if key % KEYS_MAX == 0 {
            now += IDLE_AFTER;
        }
        fairness.selected("mail", &key.to_string().into(), 1, false, &turns, now);
    }
    assert_eq!(fairness.shown.len(), SHOWN_MAX);
    let late = (SHOWN_MAX + KEYS_MAX).to_string();
    let known = &fairness.queues["mail"].keys[late.as_str()];
    assert_eq!(known.shown_as(&late), OTHERS);
}
