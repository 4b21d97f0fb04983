//! Effects of an attempt that has lost its job, seen from outside: requests, files, state and secrets.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::proxy::Proxy;
use crate::support::web::web;
use crate::support::worker::{TIMEOUT, cancel, enqueue, guests_dir, until};
use crate::support::{Host, TestDb, scratch};

const SECRET: &str = "s3cret-of-the-effects";
/// The log message of the loss.
const LOSS_LOGGED: &str = "lease lost; aborting the attempt";
/// Effects already in progress when the loss becomes known may arrive (docs/explanation/reliability.md); the guest does
/// one thing at a time.
const IN_PROGRESS_MAX: usize = 1;

/// A job whose first attempt produces effects endlessly.
struct Trial {
    folder: PathBuf,
    path: String,
    id: i64,
}

/// The numbers of effects of its first attempt that were seen.
#[derive(Debug, Clone, Copy)]
struct Seen {
    requests: usize,
    lines: usize,
}

impl Trial {
    /// Enqueues the job, once this host has loaded its modules: on a busy machine, it could otherwise miss the renewals
    /// of a short lease. Returns the trial and the host.
    async fn start(client: &Client, url: &str, keeps: bool) -> (Self, Host) {
        let folder = scratch("revoked");
        std::fs::create_dir(folder.join("out")).unwrap();
        let config = format!(
            "[handlers.\"test.effects\"]\n\
             module = \"test_guests.wasm\"\nlease = \"2s\"\n\
             dirs = [{{ dir = \"out\", at = \"/out\", mode = \"read-write\" }}]\n\
             secrets = [{{ name = \"KEY\", hosts = [\"localhost\"], headers = [\"authorization\"] }}]\n\
             [[handlers.\"test.effects\".http]]\n\
             hosts = [\"localhost\"]\nschemes = [\"http\"]\nports = [{}]\nprivate = true\n\
             [handlers.\"test.effects\".limits]\nhttp_requests = 1000000\nstate_calls = 1000000\n\
             [handlers.\"test.effects\".state]\n\
             [secrets.KEY]\nenv = \"KEY\"\n",
            web().plain
        );
        std::fs::write(folder.join("rouse.toml"), config).unwrap();
        let host = Self::host_in(&folder, url);
        host.line(TIMEOUT, |line| line.contains("modules loaded"));
        let path = format!("/revoked/{}", folder.file_name().unwrap().display());
        let payload = json!({
            "url": format!("http://localhost:{}{path}", web().plain),
            "file": "/out/effects",
            "keeps": keeps,
        });
        let id = enqueue(client, "test.effects", payload).await;
        (Self { folder, path, id }, host)
    }

    fn host_in(folder: &Path, url: &str) -> Host {
        let config = folder.join("rouse.toml");
        let guests = guests_dir();
        let args = [
            "serve",
            "--http",
            "off",
            "--slots",
            "1",
            "--handlers",
            guests.to_str().unwrap(),
            "--config",
            config.to_str().unwrap(),
        ];
        let log = ("ROUSE_LOG", "info,rouse::job=debug");
        Host::rouse(&args, &[("DATABASE_URL", url), ("KEY", SECRET), log])
    }

    /// The requests of an attempt; the server records the head and the body of each.
    fn requests(&self, attempt: i32) -> Vec<Value> {
        let all = web().seen(&format!("{}/{attempt}/", self.path));
        all.into_iter()
            .filter(|one| one["whole"].is_null())
            .collect()
    }

    fn seen(&self) -> Seen {
        let file = std::fs::read_to_string(self.folder.join("out/effects")).unwrap_or_default();
        Seen {
            requests: self.requests(1).len(),
            lines: file.lines().filter(|line| line.starts_with("1 ")).count(),
        }
    }

    /// Waits until each effect was seen a few times, the secret included.
    async fn until_effects_repeat(&self) {
        let repeating = async {
            while self.seen().requests < 3 || self.seen().lines < 3 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, repeating)
            .await
            .expect("effects of the attempt");
        let request = &self.requests(1)[0];
        assert!(request.to_string().contains(SECRET), "{request}");
    }

    /// Stops the host and all its attempts, and asserts that after `since` no effect came except those in progress.
    fn assert_no_further_effects(&self, host: Host, since: Seen) {
        let output = host.stop();
        let now = self.seen();
        assert!(
            now.requests <= since.requests + IN_PROGRESS_MAX
                && now.lines <= since.lines + IN_PROGRESS_MAX,
            "{since:?}, then {now:?}\n{output}"
        );
    }
}

async fn last_state(client: &Client) -> Value {
    let sql =
        "SELECT convert_from(value, 'UTF8')::jsonb FROM rouse.handler_state WHERE key = 'last'";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Freezes the host of the first attempt until another attempt has ended elsewhere.
async fn freeze_until_taken_over(keeps: bool) {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (trial, frozen) = Trial::start(&client, &db.url(), keeps).await;
    trial.until_effects_repeat().await;
    frozen.signal(libc::SIGSTOP);
    let other = Trial::host_in(&trial.folder, &db.url());
    let job = until(&client, trial.id, |job| job.state == "succeeded").await;
    // The second attempt, unless it lost its short lease on a slow machine.
    let last = job.attempt;
    assert_eq!(trial.requests(last).len(), 1, "{job:?}");
    let since = trial.seen();
    frozen.signal(libc::SIGCONT);
    trial.assert_no_further_effects(frozen, since);
    if keeps {
        assert_eq!(
            last_state(&client).await,
            json!([last, 0]),
            "the state kept by the last attempt"
        );
    }
    drop(other);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_frozen_until_another_worker_took_its_job_sends_and_writes_nothing_more() {
    freeze_until_taken_over(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_frozen_until_another_worker_took_its_job_changes_no_state() {
    freeze_until_taken_over(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_attempt_has_no_further_effects_once_its_host_knows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (trial, host) = Trial::start(&client, &db.url(), false).await;
    trial.until_effects_repeat().await;
    assert!(cancel(&client, trial.id).await);
    host.line(TIMEOUT, |line| line.contains(LOSS_LOGGED));
    let since = trial.seen();
    trial.assert_no_further_effects(host, since);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_whose_lease_ended_during_an_outage_has_no_further_effects() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let (trial, host) = Trial::start(&client, proxy.url(), false).await;
    trial.until_effects_repeat().await;
    proxy.go_down();
    host.line(TIMEOUT, |line| line.contains(LOSS_LOGGED));
    let since = trial.seen();
    proxy.come_up();
    trial.assert_no_further_effects(host, since);
}
