//! `rouse dev` and `rouse postgres`: a private server without setup.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::database::connect;
use crate::support::worker::{TIMEOUT, ended, enqueue, guests_dir, until_true};
use crate::support::{Host, scratch};

#[tokio::test]
async fn dev_needs_no_setup_and_leaves_no_process_running() {
    let dir = scratch("dev");
    let data = dir.join("pg");
    let guests = guests_dir();
    let port = crate::support::free_port().to_string();
    let args = [
        "dev",
        "--json",
        "--data-dir",
        data.to_str().unwrap(),
        "--handlers",
        guests.to_str().unwrap(),
        "--pg-port",
        &port,
    ];
    let host = Host::rouse(&args, &[]);
    let ready = host.line(TIMEOUT, |line| line.contains("\"ready\""));
    let ready: Value = serde_json::from_str(&ready).unwrap();
    let client = connect(ready["url"].as_str().unwrap()).await;
    let id = enqueue(&client, "text.stats", json!({"text": "hello"})).await;
    let job = ended(&client, id).await;
    assert_eq!(job.result.unwrap()["words"], 1);
    // `rouse dev` publishes the contracts automatically.
    let published = "SELECT count(*) = 1 FROM rouse.contracts WHERE function = 'jobs.text_stats'";
    until_true(&client, published).await;
    client
        .query_one("SELECT jobs.text_stats('hello')", &[])
        .await
        .unwrap();
    let tcp = connect(ready["tcp_url"].as_str().unwrap()).await;
    tcp.query("SELECT rouse.enqueue('noop')", &[])
        .await
        .unwrap();
    assert!(
        ready["tcp_url"]
            .as_str()
            .unwrap()
            .contains(&format!("@127.0.0.1:{port}/"))
    );

    // The other commands find the server from its folder, without a URL.
    let show = Host::rouse(
        &["job", &id.to_string()],
        &[
            ("ROUSE_DATA_DIR", data.to_str().unwrap()),
            ("DATABASE_URL", ""),
        ],
    );
    let (status, output) = show.exit(TIMEOUT);
    assert!(status.success() && output.contains("succeeded"), "{output}");

    let postmaster: i32 = std::fs::read_to_string(data.join("cluster/postmaster.pid"))
        .unwrap()
        .lines()
        .next()
        .unwrap()
        .parse()
        .unwrap();
    host.signal(libc::SIGINT);
    let (status, output) = host.exit(TIMEOUT);
    assert!(status.success(), "{output}");
    assert!(
        !Path::new(&format!("/proc/{postmaster}")).exists(),
        "the server has stopped"
    );
}

#[tokio::test]
async fn dev_prints_a_call_that_works_as_printed() {
    let dir = scratch("dev-example");
    let handlers = dir.join("handlers");
    std::fs::create_dir(&handlers).unwrap();
    let greet = "greet.wasm";
    std::fs::copy(guests_dir().join(greet), handlers.join(greet)).unwrap();
    let (data, handlers) = (dir.join("pg"), handlers.to_str().unwrap());
    let data = data.to_str().unwrap();
    let host = Host::rouse(&["dev", "--data-dir", data, "--handlers", handlers], &[]);
    let url = host.line(TIMEOUT, |line| line.starts_with("postgres: "));
    host.line(TIMEOUT, |line| line.contains("1 handler from"));
    let call = host.line(TIMEOUT, |line| line.contains("SELECT rouse.enqueue("));
    let client = connect(url.trim_start_matches("postgres: ")).await;
    let id: i64 = client.query_one(call.trim(), &[]).await.unwrap().get(0);
    let job = ended(&client, id).await;
    assert_eq!(job.state, "succeeded", "{call}: {:?}", job.error);
    host.stop();
}

#[tokio::test]
async fn dev_lists_refused_modules_if_none_serves() {
    let dir = scratch("dev-refused");
    let handlers = dir.join("handlers");
    std::fs::create_dir(&handlers).unwrap();
    std::fs::write(handlers.join("broken.wasm"), "no wasm at all").unwrap();
    let (data, handlers) = (dir.join("pg"), handlers.to_str().unwrap());
    let data = data.to_str().unwrap();
    let host = Host::rouse(&["dev", "--data-dir", data, "--handlers", handlers], &[]);
    host.line(TIMEOUT, |line| line.trim() == "none: 1 file is refused");
    host.line(TIMEOUT, |line| {
        line.trim()
            .starts_with("refused broken.wasm: it is not WebAssembly")
    });
    host.stop();
}

#[tokio::test]
async fn dev_starts_again_after_a_kill_and_keeps_its_jobs() {
    let dir = scratch("dev-killed");
    let (data, guests) = (dir.join("pg"), guests_dir());
    let args = [
        "dev",
        "--json",
        "--data-dir",
        data.to_str().unwrap(),
        "--handlers",
        guests.to_str().unwrap(),
    ];
    let start = || {
        let host = Host::rouse(&args, &[]);
        let ready = host.line(TIMEOUT, |line| line.contains("\"ready\""));
        let ready: Value = serde_json::from_str(&ready).unwrap();
        (host, ready["url"].as_str().unwrap().to_string())
    };
    let (first, url) = start();
    let client = connect(&url).await;
    let row = client
        .query_one("SELECT rouse.enqueue('noop', '{\"n\": 3}', run_at => clock_timestamp() + interval '1 second')", &[])
        .await
        .unwrap();
    let id: i64 = row.get(0);
    first.kill();
    let (second, url) = start();
    let client = connect(&url).await;
    assert_eq!(ended(&client, id).await.result, Some(json!({"n": 3})));
    second.stop();
}

#[tokio::test]
async fn the_private_postgres_reports_that_its_server_has_ended() {
    let data = scratch("ends").join("pg");
    let host = Host::rouse(
        &["postgres", "--json", "--data-dir", data.to_str().unwrap()],
        &[],
    );
    host.line(TIMEOUT, |line| line.contains("\"ready\""));
    let pid = std::fs::read_to_string(data.join("cluster/postmaster.pid")).unwrap();
    let pid = pid.lines().next().unwrap();
    let sent = std::process::Command::new("kill")
        .args(["-INT", pid])
        .status();
    assert!(sent.unwrap().success());
    let (status, output) = host.exit(TIMEOUT);
    assert!(!status.success());
    assert!(
        output.contains("the private Postgres ended unexpectedly"),
        "{output}"
    );
}
