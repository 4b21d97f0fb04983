//! During an outage of the server, all tasks of a host share one backoff, and the log has one warning.

use std::time::{Duration, Instant};

use rouse::store::Store;
use rouse::store::connect::{ConnectError, Connector};
use rouse::worker::Settings;
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::watch;

use crate::outages::serve;
use crate::support::TestDb;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{TIMEOUT, TestWorker, catalog, ended, enqueue, show, until_true};

/// The first three waits of the backoff at their shortest: half of 1, 2 and 4 s.
const THREE_WAITS: Duration = Duration::from_millis(3500);
/// Concurrent tries at the start of the outage, before the first one has failed.
const AT_ONCE_MAX: usize = 4;

/// Waits for the end of the third wait and checks the number of tries until then; returns the time from the first try
/// to the last.
async fn until_third_wait_ends(proxy: &Proxy) -> Duration {
    let tries = proxy.refused_after(THREE_WAITS).await;
    let last = tries.partition_point(|at| *at - tries[0] < THREE_WAITS);
    assert!(
        last < AT_ONCE_MAX + 3,
        "{} tries within {:?}",
        last + 1,
        tries[last] - tries[0]
    );
    tries[last] - tries[0]
}

// The proxy has to forward messages while the test waits for log lines.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_and_a_renewal_share_one_backoff() {
    let db = TestDb::new().await;
    let proxy = Proxy::start(&db).await;
    let client = db.client().await;
    let host = serve(proxy.url());
    let mut started = Vec::new();
    for ms in [20_000, 1_000] {
        let id = enqueue(&client, "test.sleep", json!({"ms": ms})).await;
        // Started, not only claimed: if the response to a claim is lost, the job waits for the end of its lease.
        let expected = format!("job.id={id} ");
        host.line(TIMEOUT, |line| {
            line.contains(&expected) && line.contains("asleep")
        });
        started.push(id);
    }
    proxy.go_down();
    host.line(TIMEOUT, |line| line.contains("the database is unreachable"));
    until_third_wait_ends(&proxy).await;
    proxy.come_up();
    host.line(TIMEOUT, |line| {
        line.contains("the database is reachable again")
    });
    for id in started {
        let job = ended(&client, id).await;
        assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    }
    let output = host.stop();
    let warned: Vec<&str> = output
        .lines()
        .filter(|line| line.contains("WARN"))
        // On a slow machine, the echo may arrive after its timeout, before the outage or after it.
        .filter(|line| !line.contains("notifications do not arrive"))
        .collect();
    assert_eq!(warned.len(), 1, "{warned:#?}");
}

#[tokio::test]
async fn jitter_spreads_the_reconnects_of_twenty_hosts() {
    const HOSTS: usize = 20;
    let db = TestDb::new().await;
    let client = db.client().await;
    let catalog = catalog().await;
    let mut hosts = Vec::new();
    for _ in 0..HOSTS {
        let proxy = Proxy::start(&db).await;
        let connector = proxy.connector();
        let store = Store::new(&connector, 2);
        let worker =
            TestWorker::start_through(store, connector, Settings::default(), catalog.clone());
        hosts.push((proxy, worker));
    }
    let all_listen = format!(
        "SELECT count(*) = {HOSTS} FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
    );
    until_true(&client, &all_listen).await;
    for (proxy, _) in &hosts {
        proxy.go_down();
    }
    // Measured from each host's own first try, which happens when the host first needs the database.
    let mut waited = Vec::new();
    for (proxy, _) in &hosts {
        waited.push(until_third_wait_ends(proxy).await);
    }
    let (shortest, longest) = (waited.iter().min().unwrap(), waited.iter().max().unwrap());
    assert!(
        *longest - *shortest > Duration::from_millis(500),
        "all hosts waited between {shortest:?} and {longest:?}"
    );
    for (proxy, _) in &hosts {
        proxy.come_up();
    }
    let job = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, job).await.state, "succeeded");
    for (_, worker) in hosts {
        worker.drain().await;
    }
}

#[tokio::test]
async fn a_worker_that_stops_unregisters_despite_the_backoff() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let connector = proxy.connector();
    let store = Store::new(&connector, 2);
    let worker = TestWorker::start_through(store, connector, Settings::default(), catalog().await);
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.worker)").await;
    proxy.go_down();
    // The next try is at least two seconds away.
    until_third_wait_ends(&proxy).await;
    proxy.come_up();
    worker.drain().await;
    let stopped = "SELECT bool_and(stopped_at IS NOT NULL) FROM rouse.worker";
    let row = client.query_one(stopped, &[]).await.unwrap();
    assert!(row.get::<_, bool>(0));
}

#[tokio::test]
async fn a_worker_that_stops_tries_every_five_seconds() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let connector = proxy.connector();
    let store = Store::new(&connector, 2);
    let worker = TestWorker::start_through(store, connector, Settings::default(), catalog().await);
    let id = enqueue(&client, "test.sleep", json!({"ms": 8000})).await;
    // Started, not only claimed: a claim that has not started is released, and the job would wait for another worker.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.running)").await;
    assert_eq!(show(&client, id).await.state, "running");
    proxy.go_down();
    // Half of 1, 2, 4 and 8 s: the next waits are at least 8 s.
    let before = proxy.refused_after(Duration::from_millis(7500)).await.len();
    let (_, stopping) = tokio::join!(worker.drain(), async {
        let tries = proxy.refused_until(|tries| tries.len() >= before + 5).await;
        proxy.come_up();
        let mut waits: Vec<Duration> = tries[before + 1..]
            .windows(2)
            .map(|two| two[1] - two[0])
            .collect();
        waits.sort_unstable();
        waits
    });
    // Most of them: the machine may pause during one.
    let median = stopping[stopping.len() / 2];
    assert!(median < Duration::from_secs(7), "{stopping:?}");
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
}

#[tokio::test]
async fn claims_continue_on_the_remaining_connections() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start_with_limit(&db, 1).await;
    let connector = proxy.connector();
    let store = Store::new(&connector, 2);
    // A notification would also end the wait.
    let settings = Settings {
        notify: false,
        ..Settings::default()
    };
    let worker = TestWorker::start_through(store, db.connector(), settings, catalog().await);
    // While the only connection is busy, a claim needs another one.
    let settling = proxy.hold("rouse.settle(", Side::Statement);
    enqueue(&client, "noop", json!({"n": 1})).await;
    settling.caught().await;
    let job = enqueue(&client, "noop", json!({"n": 2})).await;
    proxy.refused_until(|tries| !tries.is_empty()).await;
    // The next try is at least half a minute away.
    for _ in 0..7 {
        connector.try_now();
        assert!(connector.client().await.is_err());
    }
    settling.release();
    assert_eq!(ended(&client, job).await.state, "succeeded");
    let backs_off = connector.client().await;
    assert!(
        matches!(backs_off, Err(ConnectError::Away { .. })),
        "the claim waited for the backoff"
    );
    worker.drain().await;
}

#[tokio::test]
async fn a_listener_with_one_connection_of_two_backs_off() {
    /// The first four waits at their shortest.
    const FOUR_WAITS: Duration = Duration::from_millis(7500);
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start_with_limit(&db, 1).await;
    let worker = TestWorker::start_through(
        db.store(),
        proxy.connector(),
        Settings::default(),
        catalog().await,
    );
    let tries = proxy.refused_after(FOUR_WAITS).await;
    let soon = tries.partition_point(|at| *at - tries[0] < FOUR_WAITS);
    assert!(soon <= 4, "{soon} tries");
    let job = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, job).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_listener_whose_listen_gets_no_response_reconnects() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let url = format!("{}&connect_timeout=1", proxy.url());
    let connector = Connector::from_url(&url, &|_| None).unwrap();
    let held = proxy.hold("LISTEN rouse_wake", Side::Statement);
    let worker =
        TestWorker::start_through(db.store(), connector, Settings::default(), catalog().await);
    held.caught().await;
    // Only a listening worker falls asleep.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    held.release();
    worker.drain().await;
}

#[tokio::test]
async fn a_connection_attempt_abandoned_by_its_caller_serves_the_next_one() {
    let db = TestDb::new().await;
    loop {
        let started = Instant::now();
        let accepted = accepted_after_impatient_callers(&db).await;
        // An attempt of this age is not reused: a slow machine starts over.
        if started.elapsed() < Duration::from_secs(3) {
            assert_eq!(accepted, 1, "the try of the first caller");
            return;
        }
    }
}

/// The number of connections that a pool has tried to open after three callers have given up, and a fourth one got a
/// connection.
async fn accepted_after_impatient_callers(db: &TestDb) -> usize {
    let at = db.address();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (accepted, is_open) = (watch::Sender::new(0), watch::Sender::new(false));
    let (counted, gate) = (accepted.clone(), is_open.clone());
    let socket = at.directory.join(".s.PGSQL.5432");
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            counted.send_modify(|count| *count += 1);
            let (mut gate, socket) = (gate.subscribe(), socket.clone());
            tokio::spawn(async move {
                gate.wait_for(|is_open| *is_open).await.unwrap();
                let mut server = UnixStream::connect(socket).await.unwrap();
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    let url = format!(
        "postgres://{}@127.0.0.1:{port}/{}?sslmode=disable",
        at.user, at.database
    );
    let pool = Connector::from_url(&url, &|_| None).unwrap().pool(2);
    let mut connected = accepted.subscribe();
    for _ in 0..3 {
        let impatient = tokio::time::timeout(Duration::from_millis(50), pool.get());
        assert!(impatient.await.is_err(), "no connection is accepted yet");
        connected.wait_for(|count| *count > 0).await.unwrap();
    }
    is_open.send_replace(true);
    let client = pool.get().await.expect("a connection");
    client.query_typed("SELECT 1", &[]).await.unwrap();
    *accepted.borrow()
}
