//! The simulator (`tests/simulate`) agrees with hosts.

use rouse_simulate::{Class, Load, MS, SECOND, Scenario};

use crate::support::worker::until_true;

use super::{count, enqueue, fair, started, worker};

/// The share of tenant `a`, of weight 3, on a simulated host.
fn simulated() -> f64 {
    let class = |name: &str, weight| Class {
        name: name.to_owned(),
        tenants: 1,
        weight,
        load: Load::Backlog { jobs_each: 4000 },
        run_time: 5 * MS,
        gates: Vec::new(),
    };
    let mut scenario = Scenario::new("agreement", 1);
    scenario.slots = 2;
    scenario.classes = vec![class("a", 3.0), class("b", 1.0)];
    // About 600 jobs.
    scenario.until = Some(3 * SECOND / 2);
    let report = rouse_simulate::run(&scenario, |_| {});
    report.classes[0].jobs as f64 / report.jobs as f64
}

#[tokio::test]
async fn tenants_have_the_same_shares_on_a_host_and_in_the_simulator() {
    let (db, client) = fair(r#", weights => '{"a": 3}'"#).await;
    for tenant in ["a", "b"] {
        enqueue(&client, "mail", tenant, "test.sleep", 5, 4000).await;
    }
    let worker = worker(&db, 2).await;
    until_true(&client, "SELECT count(*) >= 600 FROM rouse.finished").await;
    worker.stop_now().await;
    let started = started(&client).await;
    let counts = count(&started[100..500]);
    let measured = counts["a"] as f64 / 400.0;
    let simulated = simulated();
    assert!(
        (measured / simulated - 1.0).abs() <= 0.05,
        "measured {measured}, simulated {simulated}"
    );
}
