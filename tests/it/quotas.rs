//! Directories with a quota: however a guest fills them, they stay within it.

use std::sync::Arc;

use rouse::job::RunEnd;
use rouse::sandbox::{AbortHandle, Grant, Grants, Limits, Mode, Quota, Sandbox, Settings};
use tempfile::TempDir;
use tokio::time::timeout;

use crate::sandbox_guest::{Handlers, TIMEOUT, guest_of_wasip1, job, manifest};
use crate::support::{attempt, rouse_binary};

const BYTES_MAX: u64 = 1 << 20;
const FILES_MAX: u64 = 20;

/// WASI's error code for a full disk.
const NO_SPACE: u8 = 51;

const IMPORTS: &str = r#"
    (import "wasi_snapshot_preview1" "path_open" (func $path_open
        (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_write" (func $fd_write
        (param i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_pwrite" (func $fd_pwrite
        (param i32 i32 i32 i64 i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_close" (func $fd_close (param i32) (result i32)))
    (import "wasi_snapshot_preview1" "fd_filestat_set_size" (func $set_size
        (param i32 i64) (result i32)))
    (import "wasi_snapshot_preview1" "path_unlink_file" (func $unlink
        (param i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "path_rename" (func $rename
        (param i32 i32 i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "path_link" (func $link
        (param i32 i32 i32 i32 i32 i32 i32) (result i32)))
    (import "wasi_snapshot_preview1" "path_create_directory" (func $mkdir
        (param i32 i32 i32) (result i32)))"#;

/// Locals, and the name of a file: four letters at address 300, the first taken from the payload. Buffers for writing
/// are 64 KiB long, from address 65536.
const BEGIN: &str = r#"
    (local $errno i32) (local $round i32)
    (i32.store (i32.const 300) (i32.const 0x30303061)) ;; "a000"
    (i32.store8 (i32.const 300) (i32.load8_u (local.get $payload)))
    (i32.store (i32.const 320) (i32.const 65536))
    (i32.store (i32.const 324) (i32.const 65536))"#;

/// Returns the last error as one byte.
const END: &str = r#"
    (i32.store8 (i32.const 400) (local.get $errno))
    (call $return_ok (i32.const 400) (i32.const 1))"#;

/// Opens the file, which is created if missing; its descriptor is then at address 340.
const OPEN: &str = r#"(call $path_open (i32.const 3) (i32.const 0) (i32.const 300) (i32.const 4)
    (i32.const 1) (i64.const 0x400042) (i64.const 0) (i32.const 0) (i32.const 340))"#;

/// Appends one buffer to the file.
const WRITE: &str =
    "(call $fd_write (i32.load (i32.const 340)) (i32.const 320) (i32.const 1) (i32.const 344))";

/// Gives the file the next name: three digits of 32 values each.
const NEXT_NAME: &str = r#"
    (local.set $round (i32.add (local.get $round) (i32.const 1)))
    (i32.store8 (i32.const 301) (i32.add (i32.const 48) (i32.and (local.get $round) (i32.const 31))))
    (i32.store8 (i32.const 302) (i32.add (i32.const 48) (i32.and (i32.shr_u (local.get $round) (i32.const 5)) (i32.const 31))))
    (i32.store8 (i32.const 303) (i32.add (i32.const 48) (i32.and (i32.shr_u (local.get $round) (i32.const 10)) (i32.const 31))))"#;

/// A directory with a quota, and a handler with this body that may write to it.
struct Full {
    dir: TempDir,
    sandbox: Arc<Sandbox>,
    handlers: Handlers,
}

impl Full {
    async fn with(body: &str) -> Self {
        let dir = TempDir::new().expect("a directory");
        let other = dir.path().join("other");
        let quota = dir.path().join("quota");
        std::fs::create_dir(&other).unwrap();
        std::fs::create_dir(&quota).unwrap();
        let grant = |dir: &std::path::Path, at: &str, quota| Grant {
            handler: "test.it".into(),
            dir: dir.into(),
            at: at.into(),
            mode: Mode::ReadWrite,
            quota,
        };
        let limits = Quota {
            bytes_max: BYTES_MAX,
            files_max: FILES_MAX,
        };
        let settings = Settings {
            attempts_max: 4,
            limits: Limits {
                memory_bytes: 16 << 20,
                ..Limits::default()
            },
            grants: Grants(vec![
                grant(&quota, "/quota", Some(limits)),
                grant(&other, "/other", None),
            ]),
            compiler: Some(rouse_binary()),
            ..Settings::default()
        };
        let sandbox = Sandbox::start(settings).expect("a sandbox");
        let body = format!("{BEGIN}{body}{END}");
        let guest = guest_of_wasip1(IMPORTS, &manifest("test.it", "1"), &body);
        let handlers = Handlers::on(sandbox.clone(), &[("guest.wasm", &guest)]).await;
        Self {
            dir,
            sandbox,
            handlers,
        }
    }

    /// Runs the handler, and returns its last error.
    async fn run(&self, payload: &str) -> u8 {
        let handler = self.handlers.handler("test.it");
        let running = attempt(&self.sandbox, &handler, job(payload), AbortHandle::new());
        match timeout(TIMEOUT, running)
            .await
            .expect("the end of the run")
            .end
        {
            RunEnd::Returned(bytes) => bytes[0],
            end => panic!("expected a result, got {end:?}"),
        }
    }

    /// Bytes and files in the directory.
    fn size(&self) -> (u64, u64) {
        let entries = std::fs::read_dir(self.dir.path().join("quota")).unwrap();
        entries.fold((0, 0), |(bytes, files), entry| {
            let about = entry.unwrap().metadata().unwrap();
            (bytes + about.len(), files + 1)
        })
    }
}

/// Repeats this until it fails, at most a million times.
fn until_failure(step: &str) -> String {
    format!(
        "(loop $again {step}
            (br_if $again (i32.and (i32.eqz (local.get $errno)) (i32.lt_u (local.get $round) (i32.const 1000000)))))"
    )
}

#[tokio::test]
async fn appending_to_a_file_fills_no_more_than_the_quota() {
    let append = until_failure(&format!("(local.set $errno {WRITE})"));
    let full = Full::with(&format!("(drop {OPEN}){append}")).await;
    assert_eq!(full.run("a").await, NO_SPACE);
    assert_eq!(full.size(), (BYTES_MAX, 1));
    // Files that exist when an attempt starts count.
    assert_eq!(full.run("b").await, NO_SPACE);
    assert_eq!(full.size(), (BYTES_MAX, 2));
}

#[tokio::test]
async fn concurrent_attempts_share_the_quota() {
    let append = until_failure(&format!("(local.set $errno {WRITE})"));
    let full = Full::with(&format!("(drop {OPEN}){append}")).await;
    let (first, second) = tokio::join!(full.run("a"), full.run("b"));
    assert_eq!((first, second), (NO_SPACE, NO_SPACE));
    // The bytes that the other attempt was writing at the end may have been counted twice.
    let (bytes, files) = full.size();
    assert!(
        (BYTES_MAX - 2 * 65_536..=BYTES_MAX).contains(&bytes),
        "{bytes}"
    );
    assert_eq!(files, 2);
}

#[tokio::test]
async fn no_other_way_to_grow_a_file_exceeds_the_quota() {
    for (grow, bytes) in [
        // Set to a terabyte, and to one byte more than fits.
        ("(call $set_size (i32.load (i32.const 340)) (i64.const 0x10000000000))", 0),
        ("(call $set_size (i32.load (i32.const 340)) (i64.const 0x100001))", 0),
        // Written to far beyond its end.
        (
            "(call $fd_pwrite (i32.load (i32.const 340)) (i32.const 320) (i32.const 1) (i64.const 0x100000) (i32.const 344))",
            0,
        ),
        (
            "(i32.or (call $set_size (i32.load (i32.const 340)) (i64.const 0x100000))
                (call $fd_pwrite (i32.load (i32.const 340)) (i32.const 320) (i32.const 1) (i64.const 0xfffff) (i32.const 344)))",
            BYTES_MAX,
        ),
    ] {
        let full = Full::with(&format!("(drop {OPEN})(local.set $errno {grow})")).await;
        assert_eq!(full.run("a").await, NO_SPACE, "{grow}");
        assert_eq!(full.size(), (bytes, 1), "{grow}");
    }
}

#[tokio::test]
async fn empty_files_and_directories_are_counted() {
    let mkdir = "(call $mkdir (i32.const 3) (i32.const 300) (i32.const 4))";
    let touch = format!("(local.set $errno {OPEN})");
    let close = "(drop (call $fd_close (i32.load (i32.const 340))))";
    let make = until_failure(&format!("{NEXT_NAME}{touch}{close}"));
    let full = Full::with(&make).await;
    assert_eq!(full.run("a").await, NO_SPACE);
    assert_eq!(full.size(), (0, FILES_MAX));

    let make = until_failure(&format!("{NEXT_NAME}(local.set $errno {mkdir})"));
    let full = Full::with(&make).await;
    assert_eq!(full.run("a").await, NO_SPACE);
    assert_eq!(full.size().1, FILES_MAX);
}

#[tokio::test]
async fn a_removed_file_that_is_still_open_counts_against_the_quota() {
    // Each file is written to, and removed without being closed: ten times 640 KiB would be too much.
    let unlink = "(drop (call $unlink (i32.const 3) (i32.const 300) (i32.const 4)))";
    let write = format!("(local.set $errno {WRITE})").repeat(10);
    let hoard = until_failure(&format!("{NEXT_NAME}(drop {OPEN}){write}{unlink}"));
    let report = "(local.set $errno (i32.add (local.get $errno) (local.get $round)))";
    let full = Full::with(&format!("{hoard}{report}")).await;
    assert_eq!(full.run("a").await, NO_SPACE + 2);
    assert_eq!(full.size(), (0, 0));
}

#[tokio::test]
async fn removing_or_truncating_files_frees_the_quota() {
    let unlink = "(drop (call $unlink (i32.const 3) (i32.const 300) (i32.const 4)))";
    let close = "(drop (call $fd_close (i32.load (i32.const 340))))";
    let write = format!("(local.set $errno (i32.or (local.get $errno) {WRITE}))").repeat(15);
    let cut = "(drop (call $set_size (i32.load (i32.const 340)) (i64.const 0)))";
    let again = |step: &str| {
        format!(
            "(loop $again {NEXT_NAME}(drop {OPEN}){write}{step}{close}
                (br_if $again (i32.lt_u (local.get $round) (i32.const 12))))"
        )
    };
    for step in [unlink, cut] {
        let full = Full::with(&again(step)).await;
        assert_eq!(full.run("a").await, 0, "{step}");
        assert_eq!(full.size().0, 0, "{step}");
    }
}

#[tokio::test]
async fn a_file_of_another_directory_cannot_be_renamed_or_linked_into_the_quota() {
    // From directory 4, which has no quota.
    let open = OPEN.replace("(i32.const 3) (i32.const 0)", "(i32.const 4) (i32.const 0)");
    let rename = "(call $rename (i32.const 4) (i32.const 300) (i32.const 4) (i32.const 3) (i32.const 300) (i32.const 4))";
    let link = "(call $link (i32.const 4) (i32.const 0) (i32.const 300) (i32.const 4) (i32.const 3) (i32.const 300) (i32.const 4))";
    for (way, errno) in [(rename, 75), (link, 58)] {
        let full = Full::with(&format!("(drop {open})(local.set $errno {way})")).await;
        assert_eq!(full.run("a").await, errno, "{way}");
        assert_eq!(full.size(), (0, 0));
    }
}
