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
    let mut fairness = Fairness::default();
    fairness.watch("mail", "tenant");
    fairness.selected("mail", &"a".into(), 3, false);
    fairness.selected("mail", &"b".into(), 2, true);
    // "c" and "d" have had no turn yet, so they have no entry.
    fairness.deferred(CLASS, "mail", &["a".into()].into(), &turns);
    fairness.selected("other", &"a".into(), 1, false);
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
    fairness.selected("mail", &"a".into(), 1, false);
    fairness.retain(|queue| queue != "mail");
    assert_eq!(fairness.report(&turns), []);
}

#[test]
fn keys_beyond_the_limits_are_counted_together() {
    let keys: Vec<String> = (0..KEYS_MAX + 50).map(|key| key.to_string()).collect();
    let turns = turns(&keys);
    let mut fairness = Fairness::default();
    fairness.watch("mail", "tenant");
    for key in &keys {
        fairness.selected("mail", &key.as_str().into(), 1, false);
    }
    fairness.deferred(CLASS, "mail", &HashSet::new(), &turns);
    let report = fairness.report(&turns);
    assert_eq!(report[0].keys.len(), KEYS_MAX + 1);
    assert_eq!(report[0].keys[0], entry(None, 50, 50, 0, None));
    // A queue that is divided in another way makes room.
    fairness.watch("mail", "source");
    let long = "x".repeat(KEY_BYTES_MAX / 2);
    for end in ["1", "2", "3"] {
        fairness.selected("mail", &format!("{long}{end}").into(), 1, false);
    }
    let report = fairness.report(&turns);
    assert_eq!(report[0].keys.len(), 2, "the others are too long");
    assert_eq!(report[0].keys[0].selected, 2);
}
