//! Exemplars of metrics, as Prometheus stores them.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{TRACE, Traced, producer};
use crate::support::collector::Behaviour;
use crate::support::worker::{TIMEOUT, ended};
use crate::support::{Host, TestDb, free_port, scratch, skip};

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_stores_the_traces_of_attempts_as_exemplars() {
    if Command::new("prometheus")
        .arg("--version")
        .output()
        .is_err()
    {
        skip("there is no prometheus on this machine (apt-get install prometheus)");
        return;
    }
    let db = TestDb::new().await;
    let client = db.client().await;
    let (host, own) = (free_port(), free_port());
    let traced = Traced::start_at(&db, Behaviour::Accept, &format!("127.0.0.1:{host}"), &[]).await;
    let sql = "SELECT rouse.enqueue('noop', '{\"n\": 1}', trace => $1)";
    let id: i64 = client.query_one(sql, &[&producer()]).await.unwrap().get(0);
    ended(&client, id).await;

    let folder = scratch("prometheus");
    let config = folder.join("prometheus.yml");
    let scrapes = format!(
        "scrape_configs:\n- job_name: rouse\n  scrape_interval: 1s\n  scrape_timeout: 1s\n\
         \x20 static_configs:\n  - targets: ['127.0.0.1:{host}']\n"
    );
    std::fs::write(&config, scrapes).unwrap();
    let mut command = Command::new("prometheus");
    command
        .arg(format!("--config.file={}", config.display()))
        .arg(format!(
            "--storage.tsdb.path={}",
            folder.join("data").display()
        ))
        .arg(format!("--web.listen-address=127.0.0.1:{own}"))
        .arg("--enable-feature=exemplar-storage");
    let prometheus = Host::spawn(command);
    let until = Instant::now() + TIMEOUT;
    let until_there = async |query: &str, list: &str| {
        loop {
            // Until then, Prometheus is still starting, or has not scraped yet.
            let found = fetch(own, query).await.unwrap_or_default();
            let list = found.pointer(list).and_then(Value::as_array);
            if list.is_some_and(|it| !it.is_empty()) {
                break found;
            }
            assert!(Instant::now() < until, "{found}\n{}", prometheus.output());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let exemplars =
        "/api/v1/query_exemplars?query=rouse_attempt_seconds_bucket&start=0&end=9999999999";
    let found = until_there(exemplars, "/data").await;
    let series = &found["data"][0];
    assert_eq!(series["seriesLabels"]["handler"], "noop", "{found}");
    assert_eq!(
        series["exemplars"][0]["labels"]["trace_id"], TRACE,
        "{found}"
    );
    // The names of counters are the same in both formats. Prometheus stores the samples of a scrape after its
    // exemplars.
    let attempts = "/api/v1/query?query=rouse_attempts_total";
    let count = until_there(attempts, "/data/result").await;
    let metric = &count["data"]["result"][0];
    assert_eq!(metric["metric"]["handler"], "noop", "{count}");
    prometheus.signal(libc::SIGTERM);
    prometheus.exit(TIMEOUT);
    traced.stop();
}

/// The JSON response of the program on this port.
async fn fetch(port: u16, path: &str) -> Option<Value> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.ok()?;
    serde_json::from_str(text.split_once("\r\n\r\n")?.1).ok()
}
