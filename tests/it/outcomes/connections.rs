//! Outcomes whose settlement fails with its connection.

use std::time::{Duration, Instant};

use rouse::worker::Settings;
use serde_json::json;
use tokio::sync::watch;

use crate::outages::serve;
use crate::support::TestDb;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{TIMEOUT, TestWorker, catalog, ended, enqueue, lease, show};

use super::settings;

/// For example, a result so large that it ends the server process.
#[tokio::test]
async fn an_outcome_whose_settlement_always_cuts_its_connection_does_not_block_others_or_a_stop() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let settings = Settings {
        overrides: lease("test.echo", 3),
        ..settings()
    };
    let worker =
        TestWorker::start_through(proxy.store(), db.connector(), settings, catalog().await);
    let cutting = proxy.hold("cuts it", Side::Cut);
    let cut = enqueue(&client, "test.echo", json!("cuts it")).await;
    cutting.caught_times(3).await;
    let other = enqueue(&client, "test.echo", json!("arrives")).await;
    assert_eq!(ended(&client, other).await.state, "succeeded");
    assert_eq!(show(&client, cut).await.state, "running");
    tokio::time::timeout(TIMEOUT, worker.drain())
        .await
        .expect("the worker stops");
}

/// For example, a large result over a slow network: the host waits 15 s for a settlement, and its message never arrives
/// completely.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outcome_whose_settlement_never_arrives_does_not_block_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let worker =
        TestWorker::start_through(proxy.store(), db.connector(), settings(), catalog().await);
    let (caught, mut is_caught) = watch::channel(false);
    let holding = tokio::spawn(async move {
        let mut held = Vec::new();
        loop {
            let hold = proxy.hold("never arrives", Side::Statement);
            hold.caught().await;
            held.push(hold);
            caught.send_replace(true);
        }
    });
    let hanging = enqueue(&client, "test.echo", json!("never arrives")).await;
    is_caught.wait_for(|is_caught| *is_caught).await.unwrap();
    let other = enqueue(&client, "test.echo", json!("arrives")).await;
    assert_eq!(ended(&client, other).await.state, "succeeded");
    assert_eq!(show(&client, hanging).await.state, "running");
    holding.abort();
    let job = ended(&client, hanging).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outcome_whose_response_is_lost_with_its_connection_is_logged_as_unconfirmed() {
    let db = TestDb::new().await;
    let proxy = Proxy::start(&db).await;
    let client = db.client().await;
    let host = serve(proxy.url());
    let response = proxy.hold("rouse.settle(", Side::Response);
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    response.caught().await;
    // The database has written the outcome, but the host does not know this.
    assert_eq!(ended(&client, id).await.state, "succeeded");
    proxy.go_down();
    host.line(TIMEOUT, |line| line.contains("the database is unreachable"));
    proxy.come_up();
    let line = host.line(TIMEOUT, |line| {
        line.contains("outcome unconfirmed: the response to its settlement was lost")
    });
    assert!(line.contains(&format!("job.id={id} ")), "{line}");
    let job = show(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    drop(response);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_waits_five_seconds_for_an_unconfirmed_outcome_and_names_its_job() {
    let db = TestDb::new().await;
    let proxy = Proxy::start(&db).await;
    let client = db.client().await;
    let host = serve(proxy.url());
    let settling = proxy.hold("rouse.settle(", Side::Statement);
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    settling.caught().await;
    host.signal(libc::SIGTERM);
    host.line(TIMEOUT, |line| line.contains("stopping"));
    let signalled_at = Instant::now();
    let output = host.stop();
    // The host would wait 15 s for the settlement itself.
    assert!(signalled_at.elapsed() < Duration::from_secs(14), "{output}");
    let named = output
        .lines()
        .find(|line| line.contains("could not write the last outcomes in time"));
    assert!(
        named.is_some_and(|line| line.contains(&format!("job.ids=[{id}]"))),
        "{output}"
    );
    settling.release();
}
