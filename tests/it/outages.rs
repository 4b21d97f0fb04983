//! A database that is read-only, has moved, or is full: hosts survive it and report it clearly.

use std::path::{Path, PathBuf};
use std::process::Command;

use rouse::postgres::Server;
use rouse::store::connect::Connector;
use rouse::store::{Store, WorkerKey};
use serde_json::json;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use crate::invoke_http::{TOKEN, post};
use crate::support::database::{migrate, registration};
use crate::support::worker::{TIMEOUT, ended, enqueue, guests_dir, show, until, until_true};
use crate::support::{
    Host, TestDb, command, connect, cut_all_others, folder, free_port, postgres_settings, scratch,
    skip,
};

/// A real host with a few handlers, which loads quickly.
pub(crate) fn serve(url: &str) -> Host {
    serve_at(url, "off")
}

/// Like [`serve`], with an HTTP port at this address.
fn serve_at(url: &str, http: &str) -> Host {
    let folder = scratch("outages");
    for guest in ["noop.wasm", "test_guests.wasm"] {
        std::fs::copy(guests_dir().join(guest), folder.join(guest)).expect("a guest");
    }
    let folder = folder.to_str().expect("a path").to_owned();
    let args = ["serve", "--http", http, "--handlers", &folder];
    let variables = [("DATABASE_URL", url), ("ROUSE_INVOKE_TOKEN", TOKEN)];
    let host = Host::rouse(&args, &variables);
    host.line(TIMEOUT, |line| line.contains("worker started"));
    // Each module serves as soon as it is loaded.
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    host
}

#[tokio::test]
async fn a_host_waits_while_its_database_is_read_only() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let host = serve(&db.url());
    let running = enqueue(&client, "test.sleep", json!({"ms": 1500})).await;
    until(&client, running, |job| job.state == "running").await;
    let waiting = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, waiting).await;
    // Like a standby that has not been promoted yet.
    set_read_only(&client, "on").await;
    let waiting = enqueue(&client, "noop", json!({"n": 2})).await;
    cut_all_others(&client).await;
    host.line(TIMEOUT, |line| {
        line.contains("read-only transaction") && line.contains("trying again")
    });
    client
        .batch_execute(
            "SET default_transaction_read_only = off;
             DO $$ BEGIN EXECUTE format('ALTER DATABASE %I RESET default_transaction_read_only', current_database()); END $$",
        )
        .await
        .unwrap();
    cut_all_others(&client).await;
    for id in [running, waiting] {
        let job = ended(&client, id).await;
        assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    }
    host.stop();
}

/// Makes new sessions of this session's database read-only, or writable again.
async fn set_read_only(client: &Client, to: &str) {
    let sql = format!(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = {to}', current_database()); END $$"
    );
    client.batch_execute(&sql).await.unwrap();
}

#[tokio::test]
async fn a_session_that_may_not_write_is_not_used_again() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.store());
    set_read_only(&client, "on").await;
    let worker = registration("w", WorkerKey::random());
    let error = store.register(&worker).await.unwrap_err();
    assert_eq!(error.code(), Some(&SqlState::READ_ONLY_SQL_TRANSACTION));
    set_read_only(&client, "off").await;
    store.register(&worker).await.expect("a new session");
}

#[tokio::test]
async fn of_several_addresses_the_one_that_accepts_writes_is_used() {
    let db = TestDb::new().await;
    let primary = db.address();
    let settings = postgres_settings(scratch("standby").join("pg"));
    let standby = tokio::task::spawn_blocking(move || Server::start(&settings))
        .await
        .unwrap()
        .expect("a server");
    let name = &primary.database;
    let admin = connect(&standby.url("postgres")).await;
    let create = format!("CREATE DATABASE {name}");
    admin.batch_execute(&create).await.unwrap();
    set_read_only(&connect(&standby.url(name)).await, "on").await;
    let both = format!(
        "host={},{} user={} dbname={name}",
        standby.socket_dir().display(),
        primary.directory.display(),
        primary.user
    );
    let is_read_only = async |url: &str| -> bool {
        let connector = Connector::from_url(url, &|_| None).unwrap();
        let client = connector.client().await.unwrap();
        let sql = "SELECT current_setting('transaction_read_only')::boolean";
        client.query_one(sql, &[]).await.unwrap().get(0)
    };
    assert!(!is_read_only(&both).await);
    let any = format!("{both} target_session_attrs=any");
    assert!(is_read_only(&any).await, "the setting is kept");
    let connector = Connector::from_url(&both, &|_| None).unwrap();
    let worker = registration("w", WorkerKey::random());
    let registered = Store::new(&connector, 1).register(&worker).await;
    registered.expect("the pool reaches the primary too");
    drop(admin);
    tokio::task::spawn_blocking(move || drop(standby))
        .await
        .unwrap();
}

/// Starts a server on this data directory and port.
async fn server(data_dir: &Path, port: u16) -> Server {
    let mut settings = postgres_settings(data_dir);
    settings.port = Some(port);
    tokio::task::spawn_blocking(move || Server::start(&settings))
        .await
        .unwrap()
        .expect("a server")
}

#[tokio::test]
async fn a_host_finds_its_database_at_another_address() {
    let (data_dir, first, second) = (scratch("failover").join("pg"), free_port(), free_port());
    let before = server(&data_dir, first).await;
    let url = before.tcp_url("postgres").expect("a server with a port");
    let client = connect(&url).await;
    migrate(&url).await.unwrap();
    // Both addresses, as an operator would list a primary and its standby.
    let both = url.replace(
        &format!("127.0.0.1:{first}"),
        &format!("127.0.0.1:{first},127.0.0.1:{second}"),
    );
    assert_ne!(both, url);
    let host = serve(&both);
    let done = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, done).await;
    let running = enqueue(&client, "test.sleep", json!({"ms": 2000})).await;
    // Started, not only claimed: if the response to a claim is lost, the job waits for the end of its lease.
    host.line(TIMEOUT, |line| {
        line.contains(&format!("job.id={running} ")) && line.contains("asleep")
    });

    tokio::task::spawn_blocking(move || drop(before))
        .await
        .unwrap();
    host.line(TIMEOUT, |line| {
        line.contains("the database is unreachable; trying again")
    });
    let after = server(&data_dir, second).await;
    let client = connect(&after.tcp_url("postgres").expect("a server with a port")).await;
    host.line(TIMEOUT, |line| {
        line.contains("the database is reachable again")
    });
    // The attempt continued in the meantime: its lease was valid for a minute.
    let job = ended(&client, running).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    let next = enqueue(&client, "noop", json!({"n": 2})).await;
    assert_eq!(ended(&client, next).await.state, "succeeded");
    host.stop();
    tokio::task::spawn_blocking(move || drop(after))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_host_serves_invocations_while_its_database_is_away() {
    let data_dir = scratch("away").join("pg");
    let server = server(&data_dir, free_port()).await;
    let url = server.tcp_url("postgres").expect("a server with a port");
    migrate(&url).await.unwrap();
    let address = format!("127.0.0.1:{}", free_port());
    let host = serve_at(&url, &address);
    tokio::task::spawn_blocking(move || drop(server))
        .await
        .unwrap();
    host.line(TIMEOUT, |line| {
        line.contains("the database is unreachable; trying again")
    });
    let response = post(address.parse().unwrap(), "noop", "{\"n\": 7}").await;
    assert_eq!((response.status, response.body), (200, json!({"n": 7})));
}

#[tokio::test]
async fn a_drain_reports_that_its_database_is_away_and_resumes_when_it_is_back() {
    let (data_dir, port) = (scratch("away").join("pg"), free_port());
    let before = server(&data_dir, port).await;
    let url = before.tcp_url("postgres").expect("a server with a port");
    let client = connect(&url).await;
    migrate(&url).await.unwrap();
    let folder = folder("", &["test_guests.wasm"]);
    let running = enqueue(&client, "test.sleep", json!({"ms": 20_000})).await;
    let args = ["queue", "drain", "default", "--json"];
    let drain = Host::spawn(command(&url, &args, &folder));
    // Started, not only claimed: if a claim has not started when the server goes away, the job waits for the end of its
    // lease.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.running)").await;
    assert_eq!(show(&client, running).await.state, "running");
    tokio::task::spawn_blocking(move || drop(before))
        .await
        .unwrap();
    drain.line(TIMEOUT, |line| {
        line.contains("queue default: cannot count the jobs that are left")
    });
    let after = server(&data_dir, port).await;
    let (status, output) = drain.exit(TIMEOUT);
    assert_eq!(status.code(), Some(0), "{output}");
    assert!(output.contains("\"succeeded\":1"), "{output}");
    tokio::task::spawn_blocking(move || drop(after))
        .await
        .unwrap();
}

/// A small file system for one test; unmounted when dropped.
struct Small(PathBuf);

impl Small {
    /// `None` if this user may not mount.
    fn mount(mebibytes: u32) -> Option<Self> {
        let dir = scratch("small");
        let size = format!("size={mebibytes}m,mode=777");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(&dir)
            .output();
        if !mounted.is_ok_and(|done| done.status.success()) {
            skip("this user may not mount a small file system");
            return None;
        }
        Some(Self(dir))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily: the server may still have files open there.
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

#[tokio::test]
async fn a_full_database_refuses_writes_and_hosts_resume_when_space_is_freed() {
    let Some(small) = Small::mount(40) else {
        return;
    };
    let data_dir = scratch("full").join("pg");
    let settings = postgres_settings(&data_dir);
    let server = tokio::task::spawn_blocking(move || Server::start(&settings))
        .await
        .unwrap()
        .expect("a server");
    // The server's user makes its own folder there, since it must be the owner. A program that ends before it has read
    // all input breaks the pipe.
    let admin = connect(&server.url("postgres")).await;
    let place = small.0.join("space");
    admin
        .batch_execute(&format!(
            "COPY (SELECT) TO PROGRAM 'cat > /dev/null; mkdir -m 700 {0}'",
            place.display()
        ))
        .await
        .unwrap();
    admin
        .batch_execute(&format!(
            "CREATE TABLESPACE small LOCATION '{}'",
            place.display()
        ))
        .await
        .unwrap();
    admin
        .batch_execute("CREATE DATABASE small TABLESPACE small")
        .await
        .unwrap();
    let url = server.url("small");
    let client = connect(&url).await;
    migrate(&url).await.unwrap();
    let host = serve(&url);
    let done = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, done).await;
    // While the host is stopped: enqueue jobs whose ends need space, then fill the disk.
    host.signal(libc::SIGSTOP);
    let mut accepted = Vec::new();
    for n in 0..200 {
        let payload = json!({"n": n, "pad": "y".repeat(1900)});
        accepted.push(enqueue(&client, "noop", payload).await);
    }
    client
        .batch_execute(
            "CREATE TABLE filler (page text); ALTER TABLE filler ALTER page SET STORAGE PLAIN",
        )
        .await
        .unwrap();
    let no_room = |error: tokio_postgres::Error| {
        assert!(format!("{error:?}").contains("No space left"), "{error:?}");
    };
    for rows in [64, 1] {
        let fill =
            format!("INSERT INTO filler SELECT repeat('x', 7000) FROM generate_series(1, {rows})");
        loop {
            if let Err(error) = client.batch_execute(&fill).await {
                break no_room(error);
            }
        }
    }
    // The producer gets the error, at the latest when the last page of the table is also full.
    loop {
        let payload = json!({"pad": "y".repeat(1900)});
        match client
            .query_one("SELECT rouse.enqueue('noop', $1)", &[&payload])
            .await
        {
            Ok(row) => accepted.push(row.get(0)),
            Err(error) => break no_room(error),
        }
    }
    host.signal(libc::SIGCONT);
    host.line(TIMEOUT, |line| line.contains("No space left"));
    client.batch_execute("DROP TABLE filler").await.unwrap();
    for id in accepted {
        let job = ended(&client, id).await;
        assert_eq!(job.state, "succeeded", "{:?}", show(&client, id).await);
    }
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    host.stop();
    drop(client);
    tokio::task::spawn_blocking(move || drop(server))
        .await
        .unwrap();
}
