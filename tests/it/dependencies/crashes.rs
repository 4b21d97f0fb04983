//! The server crashes between two statements of a release.

use std::process::Command;
use std::time::{Duration, Instant};

use rouse::job::Outcome;
use rouse::postgres::Server;
use rouse::store::connect::Connector;
use rouse::store::{Locked, Settlement, Store, WorkerKey};
use serde_json::json;
use tokio::time::sleep;
use tokio_postgres::{Client, NoTls};

use super::{enqueue_after, failed, ok, settle_ready, waits_for};
use crate::support::claims::{claim, settlement};
use crate::support::database::{migrate, registration};
use crate::support::worker::{TIMEOUT, enqueue, show, until_true};
use crate::support::{connect, postgres_settings, scratch};

/// Counts the statements that change a table of Rouse. After statement number `at` (0: never), the transaction waits
/// for the lock that the test holds. The counter is a setting of the transaction.
const HALT: &str = "
    CREATE TABLE public.halt (at integer);
    INSERT INTO public.halt VALUES (0);
    GRANT SELECT ON public.halt TO PUBLIC;
    CREATE FUNCTION public.halt() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        number integer := coalesce(nullif(current_setting('test.statements', true), ''), '0')::integer + 1;
    BEGIN
        PERFORM set_config('test.statements', number::text, true);
        IF number = (SELECT h.at FROM public.halt AS h) THEN
            PERFORM pg_advisory_lock(42);
        END IF;
        RETURN NULL;
    END $$;
    DO $$ DECLARE of_rouse regclass; BEGIN
        FOR of_rouse IN SELECT c.oid FROM pg_class AS c
            WHERE c.relnamespace = 'rouse'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
        LOOP
            EXECUTE format('CREATE TRIGGER halt AFTER INSERT OR UPDATE OR DELETE ON %s EXECUTE FUNCTION public.halt()', of_rouse);
        END LOOP;
    END $$";

const HALTED: &str = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event = 'advisory')";

/// A server that crashes, and a worker whose connections it cuts.
struct Crashing {
    url: String,
    store: Store,
    /// Stopped when dropped; the next run removes its files.
    _server: Server,
}

impl Crashing {
    async fn start() -> Self {
        let settings = postgres_settings(scratch("crashes").join("pg"));
        let server = tokio::task::spawn_blocking(move || Server::start(&settings));
        let server = server.await.unwrap().expect("a server");
        let url = server.url("postgres");
        migrate(&url).await.unwrap();
        connect(&url).await.batch_execute(HALT).await.unwrap();
        let connector = Connector::from_url(&url, &|_| None).unwrap();
        let store = Store::new(&connector, 4);
        let registration = registration("w-1", WorkerKey::random());
        store.register(&registration).await.unwrap();
        Self {
            url,
            store,
            _server: server,
        }
    }

    /// Connects as soon as the server accepts connections again.
    async fn client(&self) -> Client {
        let started = Instant::now();
        loop {
            match tokio_postgres::connect(&self.url, NoTls).await {
                Ok((client, connection)) => {
                    tokio::spawn(connection);
                    return client;
                }
                Err(error) => assert!(started.elapsed() < TIMEOUT, "{error}"),
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Retries until the server responds.
    async fn retry<T, E: std::fmt::Display>(
        &self,
        mut action: impl AsyncFnMut() -> Result<T, E>,
    ) -> T {
        drop(self.client().await);
        let started = Instant::now();
        loop {
            match action().await {
                Ok(done) => return done,
                Err(error) => assert!(started.elapsed() < TIMEOUT, "{error}"),
            }
        }
    }

    /// Makes the server crash after statement number `at` of the action. False if the action has fewer statements.
    async fn crash_after<T, E>(&self, at: i32, action: impl Future<Output = Result<T, E>>) -> bool {
        let (holder, watcher) = (self.client().await, self.client().await);
        holder
            .batch_execute("SELECT pg_advisory_lock(42)")
            .await
            .unwrap();
        let set = "UPDATE public.halt SET at = $1";
        // Committed with a flush, so that earlier claims are not lost.
        watcher.execute(set, &[&at]).await.unwrap();
        let has_halted = tokio::select! {
            ended = action => {
                assert!(ended.is_ok(), "it was not halted");
                false
            }
            () = until_true(&watcher, HALTED) => true,
        };
        if has_halted {
            let sql = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'advisory'";
            let pid: i32 = watcher.query_one(sql, &[]).await.unwrap().get(0);
            let kill = Command::new("kill").args(["-9", &pid.to_string()]).status();
            assert!(
                kill.unwrap().success(),
                "a session of this server is killed"
            );
            let started = Instant::now();
            while !watcher.is_closed() {
                assert!(started.elapsed() < TIMEOUT, "the server ends all sessions");
                sleep(Duration::from_millis(5)).await;
            }
        }
        let client = self.client().await;
        client.execute(set, &[&0]).await.unwrap();
        has_halted
    }
}

/// A parent, which is claimed, and jobs that wait for it.
struct Graph {
    batch: [Settlement; 1],
    parent: i64,
    /// It is cancelled if the parent fails, and so is the grandchild.
    child: i64,
    /// It runs in any case.
    other: i64,
    grandchild: i64,
}

impl Graph {
    async fn claimed(crashing: &Crashing, client: &Client, outcome: Outcome) -> Self {
        let parent = enqueue(client, "x", json!("parent")).await;
        let after =
            |job: i64, on_failure: &str| json!({"p": {"job": job, "on_failure": on_failure}});
        let child = enqueue_after(client, "x", after(parent, "cancel")).await;
        let other = enqueue_after(client, "x", after(parent, "run")).await;
        let grandchild = enqueue_after(client, "x", after(child, "cancel")).await;
        let jobs = claim(&crashing.store, 10).await;
        assert_eq!(jobs.len(), 1, "only the parent is ready");
        Self {
            batch: [settlement(&jobs[0], outcome)],
            parent,
            child,
            other,
            grandchild,
        }
    }

    /// Asserts that nothing has been released yet.
    async fn waits(&self, client: &Client) {
        assert_eq!(show(client, self.parent).await.state, "running");
        for id in [self.child, self.other] {
            assert_eq!(waits_for(client, id).await, Some(vec![self.parent]));
        }
    }

    /// Runs what is released, and checks that each job has ended once, as it should.
    async fn ends(self, store: &Store, client: &Client, has_succeeded: bool) {
        while store.continue_releases().await.unwrap() {}
        let released = match has_succeeded {
            true => vec![self.child, self.other],
            false => vec![self.other],
        };
        let outcomes = vec![ok(); released.len()];
        assert_eq!(settle_ready(store, &outcomes).await.0, released);
        if has_succeeded {
            assert_eq!(settle_ready(store, &[ok()]).await.0, [self.grandchild]);
        }
        let all = vec![self.parent, self.child, self.other, self.grandchild];
        let sql = "SELECT array_agg(f.state::text ORDER BY f.id) FROM rouse.finished AS f WHERE f.id = ANY ($1)";
        let states: Vec<String> = client.query_one(sql, &[&all]).await.unwrap().get(0);
        match has_succeeded {
            true => assert_eq!(states, ["succeeded"; 4]),
            false => assert_eq!(states, ["failed", "cancelled", "succeeded", "cancelled"]),
        }
        let sql = "SELECT count(*) FROM rouse.record WHERE event = 'cancelled' AND job = ANY ($1)";
        let records: i64 = client.query_one(sql, &[&all]).await.unwrap().get(0);
        assert_eq!(records, if has_succeeded { 0 } else { 2 });
        until_true(
            client,
            "SELECT NOT EXISTS (SELECT FROM rouse.pending_release) AND NOT EXISTS (SELECT FROM rouse.dependency)",
        )
        .await;
    }
}

#[tokio::test]
async fn a_release_happens_once_wherever_the_server_crashes() {
    let crashing = Crashing::start().await;
    let store = &crashing.store;
    for outcome in [ok(), failed()] {
        let has_succeeded = matches!(outcome, Outcome::Succeeded(_));
        let mut crashes = 0;
        loop {
            let client = crashing.client().await;
            let graph = Graph::claimed(&crashing, &client, outcome.clone()).await;
            let settle = store.settle(&graph.batch, Locked::Wait);
            let has_crashed = crashing.crash_after(crashes + 1, settle).await;
            let client = crashing.client().await;
            if has_crashed {
                graph.waits(&client).await;
                let settle = async || store.settle(&graph.batch, Locked::Wait).await;
                assert_eq!(crashing.retry(settle).await.accepted.len(), 1);
                crashes += 1;
            }
            graph.ends(store, &client, has_succeeded).await;
            if !has_crashed {
                break;
            }
        }
        // The history, the job, the dependencies, the released jobs; and more if the parent has failed.
        assert!(crashes >= 4, "{crashes} statements");
    }
}

#[tokio::test]
async fn a_release_is_continued_once_wherever_the_server_crashes() {
    let crashing = Crashing::start().await;
    let store = &crashing.store;
    let mut crashes = 0;
    loop {
        let client = crashing.client().await;
        let graph = Graph::claimed(&crashing, &client, failed()).await;
        let settled = store.settle(&graph.batch, Locked::Wait).await.unwrap();
        assert!(settled.has_releases, "that of the grandchild");
        let has_crashed = crashing
            .crash_after(crashes + 1, store.continue_releases())
            .await;
        let client = crashing.client().await;
        if has_crashed {
            assert_eq!(show(&client, graph.grandchild).await.state, "queued");
            crashing
                .retry(async || store.continue_releases().await)
                .await;
            crashes += 1;
        }
        graph.ends(store, &client, false).await;
        if !has_crashed {
            break;
        }
    }
    // The record, the job, its history, its dependencies, the pending release.
    assert!(crashes >= 4, "{crashes} statements");
}
