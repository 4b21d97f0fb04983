//! Throttles: how many jobs start in a period.

use rouse::store::{Leftover, Locked};

use crate::support::claims::{claim, result, settlement};
use crate::support::worker::{SESSION_WAITS, until_true};

use super::claims::{by_tenant, claim_at_once, counts};
use super::{enqueue, gate, number, set_gate};

#[tokio::test]
async fn no_more_jobs_of_a_key_start_in_any_period_than_its_rate() {
    let (db, client) =
        gate("'rate', 'throttle', handler => 'a', key => '{tenant}', max => 5, period => '1 hour'")
            .await;
    for tenant in ["x", "y"] {
        for _ in 0..20 {
            enqueue(&client, "a", &format!(", tenant => '{tenant}'")).await;
        }
    }
    let claimed = claim_at_once(&db).await;
    assert_eq!(by_tenant(&claimed), counts(&[("x", 5), ("y", 5)]));
    // The ends of these jobs do not let others start.
    for (store, jobs) in &claimed {
        for job in jobs {
            let done = settlement(job, result("1"));
            store.settle(&[&done], Locked::Wait).await.unwrap();
        }
    }
    assert!(by_tenant(&claim_at_once(&db).await).is_empty());
    // Two of the starts leave the period.
    let later = "UPDATE rouse.gate_key SET starts[1:2] = ARRAY[starts[1] - interval '1 hour', starts[2] - interval '1 hour'] WHERE key = 'x'";
    client.batch_execute(later).await.unwrap();
    assert_eq!(by_tenant(&claim_at_once(&db).await), counts(&[("x", 2)]));
    let starts = "SELECT sum(cardinality(starts))::bigint FROM rouse.gate_key";
    assert_eq!(
        number(&client, starts).await,
        10,
        "starts of earlier periods are forgotten"
    );
}

#[tokio::test]
async fn a_burst_may_start_at_once_and_then_as_many_as_the_rate_permits() {
    let (db, client) = gate("'rate', 'throttle', max => 60, period => '1 hour', burst => 10").await;
    for _ in 0..40 {
        enqueue(&client, "a", ", tenant => 't'").await;
    }
    assert_eq!(by_tenant(&claim_at_once(&db).await), counts(&[("t", 10)]));
    let passes = async |minutes: i32| {
        let later =
            format!("UPDATE rouse.gate_key SET until = until - interval '{minutes} minutes'");
        client.batch_execute(&later).await.unwrap();
    };
    passes(3).await;
    assert_eq!(by_tenant(&claim_at_once(&db).await), counts(&[("t", 3)]));
    passes(600).await;
    assert_eq!(
        by_tenant(&claim_at_once(&db).await),
        counts(&[("t", 10)]),
        "a long pause gives no more than one burst"
    );
}

#[tokio::test]
async fn a_new_rate_applies_to_the_starts_that_a_burst_has_used() {
    let (db, client) = gate("'rate', 'throttle', max => 10, period => '1 day', burst => 10").await;
    for _ in 0..40 {
        enqueue(&client, "a", ", tenant => 't'").await;
    }
    assert_eq!(by_tenant(&claim_at_once(&db).await), counts(&[("t", 10)]));
    // An empty bucket is full after a minute, not after a day.
    set_gate(
        &client,
        "'rate', 'throttle', max => 10, period => '1 minute', burst => 10",
    )
    .await;
    let rest = "SELECT (extract(epoch FROM until - clock_timestamp()))::bigint FROM rouse.gate_key";
    assert!((55..=60).contains(&number(&client, rest).await));
    // At 10 % of the rate, it takes ten minutes: nothing more starts at once.
    set_gate(
        &client,
        "'rate', 'throttle', max => 1, period => '1 minute', burst => 10",
    )
    .await;
    assert!((550..=600).contains(&number(&client, rest).await));
    assert_eq!(by_tenant(&claim_at_once(&db).await), counts(&[]));
    // With a smaller burst, an empty bucket is full earlier. It does not become full at once.
    set_gate(
        &client,
        "'rate', 'throttle', max => 1, period => '1 minute', burst => 3",
    )
    .await;
    assert!((150..=180).contains(&number(&client, rest).await));
    assert_eq!(by_tenant(&claim_at_once(&db).await), counts(&[]));
}

/// The claim has read the gate before the change, and then waits for the change.
#[tokio::test]
async fn a_claim_during_a_change_of_a_throttle_starts_no_more_than_the_new_one_permits() {
    let (db, client) = gate("'rate', 'throttle', max => 2, period => '1 day', burst => 2").await;
    for _ in 0..5 {
        enqueue(&client, "a", "").await;
    }
    let store = db.worker().await;
    assert_eq!(claim(&store, 1).await.len(), 1);
    let mut other = db.client().await;
    let changing = other.transaction().await.unwrap();
    // Starts that are not forgotten count as having just been made.
    let change = "SELECT rouse.set_gate('rate', 'throttle', max => 2, period => '1 day')";
    changing.query(change, &[]).await.unwrap();
    let claiming = {
        let store = store.clone();
        tokio::spawn(async move { claim(&store, 9).await.len() })
    };
    until_true(&client, SESSION_WAITS).await;
    changing.commit().await.unwrap();
    assert_eq!(claiming.await.unwrap(), 0);
    assert_eq!(claim(&store, 9).await.len(), 0);
}

/// The starts then lie in the future. Without a limit, they would count until the clock has caught up.
#[tokio::test]
async fn starts_count_for_two_periods_at_most_if_the_clock_is_set_back() {
    let (db, client) =
        gate("'rate', 'throttle', handler => 'a', max => 1, period => '1 minute'").await;
    for _ in 0..3 {
        enqueue(&client, "a", "").await;
    }
    let store = db.worker().await;
    assert_eq!(claim(&store, 9).await.len(), 1);
    let back = async |by: &str| {
        let sql = format!(
            "UPDATE rouse.gate_key SET starts = ARRAY(SELECT s.at + interval '{by}' FROM unnest(starts) AS s(at)), until = until + interval '{by}'"
        );
        client.batch_execute(&sql).await.unwrap();
    };
    back("30 seconds").await;
    assert_eq!(claim(&store, 9).await.len(), 0, "it still counts");
    back("1 hour").await;
    assert_eq!(claim(&store, 9).await.len(), 1);
    assert_eq!(claim(&store, 9).await.len(), 0, "the new start counts");
    let sql = "SELECT cardinality(starts)::bigint FROM rouse.gate_key";
    assert_eq!(number(&client, sql).await, 1, "the old one is forgotten");
}

/// The time at which the bucket is full then lies too far in the future. Without a limit, the key would be closed until
/// the clock has caught up.
#[tokio::test]
async fn a_bucket_is_full_if_the_clock_is_set_back_by_more_than_its_burst_takes() {
    // An empty bucket is full after two minutes.
    let (db, client) =
        gate("'rate', 'throttle', handler => 'a', max => 1, period => '1 minute', burst => 2")
            .await;
    for _ in 0..5 {
        enqueue(&client, "a", "").await;
    }
    let store = db.worker().await;
    assert_eq!(claim(&store, 9).await.len(), 2);
    let back = async |by: &str| {
        let sql = format!("UPDATE rouse.gate_key SET until = until + interval '{by}'");
        client.batch_execute(&sql).await.unwrap();
    };
    back("90 seconds").await;
    assert_eq!(claim(&store, 9).await.len(), 0, "it still counts");
    back("1 hour").await;
    assert_eq!(claim(&store, 1).await.len(), 1);
    let rest = "SELECT (extract(epoch FROM until - clock_timestamp()))::bigint FROM rouse.gate_key";
    let rest = number(&client, rest).await;
    assert!(
        (30..=60).contains(&rest),
        "only the new start counts: {rest}"
    );
    assert_eq!(claim(&store, 9).await.len(), 1);
    assert_eq!(claim(&store, 9).await.len(), 0, "the new starts count");
}

#[tokio::test]
async fn earlier_starts_count_for_a_longer_period() {
    let (db, client) = gate("'rate', 'throttle', max => 1, period => '1 minute'").await;
    let store = db.worker().await;
    for _ in 0..2 {
        enqueue(&client, "a", "").await;
    }
    assert_eq!(claim(&store, 2).await.len(), 1);
    set_gate(&client, "'rate', 'throttle', max => 1, period => '1 day'").await;
    // Has the same effect as if this time had passed.
    let later = "UPDATE rouse.gate_key SET starts = ARRAY[starts[1] - interval '2 minutes'], until = until - interval '2 minutes'";
    client.batch_execute(later).await.unwrap();
    let deletion = store.delete_leftovers(Leftover::GateKeys, None);
    assert_eq!(deletion.await.unwrap().deleted, 0);
    assert_eq!(claim(&store, 2).await.len(), 0);
}
