//! Files that guests open and list: no directory content and no number of open files exhausts the host.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use rouse::job::RunEnd;
use rouse::sandbox::{AbortHandle, Grant, Grants, Limits, Mode, Sandbox, Settings};
use tempfile::TempDir;
use tokio::time::timeout;

use crate::sandbox_guest::{Handlers, TIMEOUT, guest_of_wasip1, job, manifest};
use crate::support::{Host, attempt, code_cache, rouse_binary};

const FILES_MAX: usize = 5;

/// WASI's error codes for a file that cannot be opened and for too many open files.
const NOT_SUPPORTED: u8 = 58;
const NO_MEMORY: u8 = 48;

const IMPORTS: &str = r#"
    (import "wasi_snapshot_preview1" "path_open" (func $path_open
        (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_close" (func $fd_close (param i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_readdir" (func $fd_readdir
        (param i32 i32 i32 i64 i32) (result i32)))
    (import "wasi_snapshot_preview1" "path_filestat_set_times" (func $set_times
        (param i32 i32 i32 i32 i64 i64 i32) (result i32)))"#;

/// A directory, and a handler with this body that may write to it.
struct Granted {
    dir: TempDir,
    sandbox: Arc<Sandbox>,
    handlers: Handlers,
}

impl Granted {
    async fn to(body: &str) -> Self {
        let dir = TempDir::new().expect("a directory");
        let settings = Settings {
            attempts_max: 2,
            limits: Limits {
                memory_bytes: 16 << 20,
                files: FILES_MAX,
                ..Limits::default()
            },
            grants: Grants(vec![Grant {
                handler: "test.it".into(),
                dir: dir.path().into(),
                at: "/dir".into(),
                mode: Mode::ReadWrite,
                quota: None,
            }]),
            compiler: Some(rouse_binary()),
            ..Settings::default()
        };
        let sandbox = Sandbox::start(settings).expect("a sandbox");
        let guest = guest_of_wasip1(IMPORTS, &manifest("test.it", "1"), body);
        let handlers = Handlers::on(sandbox.clone(), &[("guest.wasm", &guest)]).await;
        Self {
            dir,
            sandbox,
            handlers,
        }
    }

    fn at(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    /// Runs the handler and returns its result.
    async fn run(&self) -> Vec<u8> {
        let handler = self.handlers.handler("test.it");
        let running = attempt(&self.sandbox, &handler, job("{}"), AbortHandle::new());
        match timeout(TIMEOUT, running)
            .await
            .expect("the end of the run")
            .end
        {
            RunEnd::Returned(bytes) => bytes,
            end => panic!("expected a result, got {end:?}"),
        }
    }
}

fn make_pipe(at: &Path) {
    let made = Command::new("mkfifo").arg(at).status();
    assert!(made.expect("the system has mkfifo").success());
}

#[tokio::test]
async fn opening_a_pipe_or_a_socket_does_not_wait_for_its_other_end() {
    // Opened for reading, for writing, for both, and for setting its times.
    let open = |rights: u32| {
        format!(
            "(call $path_open (i32.const 3) (i32.const 1) (i32.const 300) (i32.const 4)
                (i32.const 0) (i64.const {rights}) (i64.const 0) (i32.const 0) (i32.const 340))"
        )
    };
    let set_times = "(call $set_times (i32.const 3) (i32.const 1) (i32.const 300) (i32.const 4)
        (i64.const 0) (i64.const 0) (i32.const 10))";
    let body = format!(
        r#"(i32.store (i32.const 300) (i32.const 0x65706970)) ;; "pipe"
        (i32.store8 (i32.const 400) {})
        (i32.store8 (i32.const 401) {})
        (i32.store8 (i32.const 402) {})
        (i32.store8 (i32.const 403) {set_times})
        (call $return_ok (i32.const 400) (i32.const 4))"#,
        open(2),
        open(64),
        open(66),
    );
    let granted = Granted::to(&body).await;
    make_pipe(&granted.at("pipe"));
    assert_eq!(granted.run().await, [NOT_SUPPORTED; 4]);
    // A link does not bypass the check.
    std::fs::rename(granted.at("pipe"), granted.at("else")).unwrap();
    std::os::unix::fs::symlink("else", granted.at("pipe")).unwrap();
    assert_eq!(granted.run().await, [NOT_SUPPORTED; 4]);
    std::fs::remove_file(granted.at("pipe")).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(granted.at("pipe")).unwrap();
    assert_eq!(granted.run().await, [NOT_SUPPORTED; 4]);
    drop(socket);
    // A regular file at the same path is opened.
    std::fs::remove_file(granted.at("pipe")).unwrap();
    std::fs::write(granted.at("pipe"), "").unwrap();
    assert_eq!(granted.run().await, [0; 4]);
}

#[tokio::test]
async fn an_attempt_has_no_more_files_open_than_its_limit() {
    // Opens `file` until that fails, closes the last one, and tries twice more; returns the count and the error of each
    // try.
    let open = "(call $path_open (i32.const 3) (i32.const 1) (i32.const 300) (i32.const 4)
        (i32.const 0) (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 340))";
    let body = format!(
        r#"(local $errno i32) (local $opened i32)
        (i32.store (i32.const 300) (i32.const 0x656c6966)) ;; "file"
        (loop $again
            (local.set $errno {open})
            (if (i32.eqz (local.get $errno)) (then
                (local.set $opened (i32.add (local.get $opened) (i32.const 1)))
                (br_if $again (i32.lt_u (local.get $opened) (i32.const 200))))))
        (i32.store8 (i32.const 400) (local.get $opened))
        (i32.store8 (i32.const 401) (local.get $errno))
        (drop (call $fd_close (i32.load (i32.const 340))))
        (i32.store8 (i32.const 402) {open})
        (i32.store8 (i32.const 403) {open})
        (call $return_ok (i32.const 400) (i32.const 4))"#
    );
    let granted = Granted::to(&body).await;
    std::fs::write(granted.at("file"), "").unwrap();
    let max = u8::try_from(FILES_MAX).unwrap();
    // The next attempt can open as many.
    for _ in 0..2 {
        assert_eq!(granted.run().await, [max, NO_MEMORY, 0, NO_MEMORY]);
    }
}

#[tokio::test]
async fn a_large_directory_is_listed_completely_in_small_batches() {
    const COUNT: u32 = 1_000;
    // Returns the bytes of all entries, and the first error.
    let body = r#"(local $errno i32)
        (local.set $errno (call $fd_readdir (i32.const 3) (i32.const 65536) (i32.const 65536) (i64.const 0) (i32.const 400)))
        (i32.store (i32.const 404) (local.get $errno))
        (call $return_ok (i32.const 400) (i32.const 8))"#;
    let granted = Granted::to(body).await;
    for n in 0..COUNT {
        std::fs::write(granted.at(&format!("{n:04}")), "").unwrap();
    }
    // An entry has a header of 24 bytes; `.` and `..` are listed too.
    let bytes = COUNT * (24 + 4) + (24 + 1) + (24 + 2);
    let [errno, found] = [0, bytes].map(u32::to_le_bytes);
    for _ in 0..2 {
        assert_eq!(granted.run().await, [found, errno].concat());
    }
}

#[test]
fn a_host_raises_its_limit_of_open_files_to_the_maximum() {
    let folder = TempDir::new().expect("a folder");
    std::fs::create_dir(folder.path().join("handlers-wasm")).unwrap();
    std::fs::write(folder.path().join("rouse.toml"), "queue = \"off\"").unwrap();
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -S -n 200 && exec \"$0\" \"$@\""])
        .arg(rouse_binary())
        .args(["serve", "--http", "127.0.0.1:0"])
        .env("ROUSE_CACHE_DIR", code_cache())
        .env_remove("DATABASE_URL")
        .env_remove("ROUSE_LOG")
        .env("ROUSE_INVOKE_TOKEN", crate::invoke_http::TOKEN)
        .current_dir(folder.path());
    let host = Host::spawn(command);
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", host.pid())).unwrap();
    let files = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))
        .expect("a line with the limit");
    let [soft, hard] = [0, 1].map(|at| files.split_whitespace().nth(at));
    assert_eq!(soft, hard, "{files}");
    assert_ne!(soft, Some("200"));
}
