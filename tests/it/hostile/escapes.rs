//! Guests that try to escape from the directory that they are granted.

use rouse::job::RunEnd;
use rouse::sandbox::{AbortHandle, Grant, Grants, Limits, Mode, Sandbox, Settings};

use super::{Case, Ends, run};
use crate::sandbox_guest::{Handlers, granted_dir, guest_of_wasip1, job, manifest};
use crate::support::{attempt, rouse_binary};

const OPEN: &str = r#"(import "wasi_snapshot_preview1" "path_open" (func $open
    (param i32 i32 i32 i32 i32 i64 i64 i32 i32) (result i32)))"#;

/// Writes the text to this address.
fn put(at: u32, text: &str) -> String {
    let bytes = text.bytes().zip(at..);
    bytes
        .map(|(byte, at)| format!("(i32.store8 (i32.const {at}) (i32.const {byte}))"))
        .collect()
}

/// A guest that returns `{}` if the call fails with an error, and traps if it succeeds.
fn refused(
    name: &'static str,
    guarantee: &'static str,
    items: &str,
    texts: &str,
    call: &str,
) -> Case {
    let body = format!(
        "{texts} (if (i32.eqz {call}) (then unreachable))
         (call $return_ok (local.get $payload) (local.get $payload_len))"
    );
    Case {
        name,
        guarantee,
        module: guest_of_wasip1(items, &manifest("test.files", "1"), &body),
        payload: "{}",
        ends: Ends::Returns("{}"),
    }
}

/// A guest that opens a path for reading, following links.
fn open_path(name: &'static str, guarantee: &'static str, path: &str) -> Case {
    let call = format!(
        "(call $open (i32.const 3) (i32.const 1) (i32.const 300) (i32.const {}) (i32.const 0) (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 1000))",
        path.len()
    );
    refused(name, guarantee, OPEN, &put(300, path), &call)
}

/// A guest that makes a call with two paths, the first of them in the granted directory.
fn two_paths(
    name: &'static str,
    guarantee: &'static str,
    import: &str,
    from: &str,
    to: &str,
    call: &str,
) -> Case {
    let call = call
        .replace(
            "$from",
            &format!("(i32.const 300) (i32.const {})", from.len()),
        )
        .replace("$to", &format!("(i32.const 600) (i32.const {})", to.len()));
    refused(
        name,
        guarantee,
        import,
        &format!("{}{}", put(300, from), put(600, to)),
        &call,
    )
}

#[tokio::test]
async fn no_path_leads_out_of_a_granted_directory() {
    let outside = tempfile::tempdir().expect("a directory");
    std::fs::write(outside.path().join("secret"), "secret").expect("a file");
    let inside = granted_dir().join("inside");
    std::fs::create_dir_all(&inside).expect("a directory");
    let symlink = r#"(import "wasi_snapshot_preview1" "path_symlink" (func $symlink (param i32 i32 i32 i32 i32) (result i32)))"#;
    let rename = r#"(import "wasi_snapshot_preview1" "path_rename" (func $rename (param i32 i32 i32 i32 i32 i32) (result i32)))"#;
    let link = r#"(import "wasi_snapshot_preview1" "path_link" (func $link (param i32 i32 i32 i32 i32 i32 i32) (result i32)))"#;
    let mkdir = r#"(import "wasi_snapshot_preview1" "path_create_directory" (func $mkdir (param i32 i32 i32) (result i32)))"#;
    let unlink = r#"(import "wasi_snapshot_preview1" "path_unlink_file" (func $unlink (param i32 i32 i32) (result i32)))"#;
    let readlink = r#"(import "wasi_snapshot_preview1" "path_readlink" (func $readlink (param i32 i32 i32 i32 i32 i32) (result i32)))"#;
    run(vec![
        open_path("an absolute path", "refused", "/etc/passwd"),
        open_path("the directory above", "refused", ".."),
        open_path("a path through the directory above", "refused", "../etc/passwd"),
        open_path("up, down and up again", "the end of the path counts", "inside/../../etc/passwd"),
        open_path("up with a trailing slash", "refused", "inside/../../"),
        open_path("a link that leads out", "links are followed only inside the directory", "out/passwd"),
        open_path("the link itself with a slash", "refused", "out/"),
        open_path("a file as a directory", "refused", "greeting.txt/"),
        open_path("a file as a directory above", "refused", "greeting.txt/../../etc/passwd"),
        open_path("a path with a NUL", "refused, not cut", "greeting.txt\0/../../etc/passwd"),
        open_path("a path of 100,000 characters", "refused", &"a/".repeat(50_000)),
        open_path("the process's own files", "refused", "../proc/self/environ"),
        open_path("an empty path", "refused", ""),
        two_paths(
            "a link to the outside",
            "absolute links cannot be made",
            symlink,
            "/etc",
            "inside/l1",
            "(call $symlink $from (i32.const 3) $to)",
        ),
        two_paths(
            "renaming to the outside",
            "refused",
            rename,
            "greeting.txt",
            "../stolen",
            "(call $rename (i32.const 3) $from (i32.const 3) $to)",
        ),
        two_paths(
            "renaming from the outside",
            "refused",
            rename,
            "out/passwd",
            "inside/stolen",
            "(call $rename (i32.const 3) $from (i32.const 3) $to)",
        ),
        two_paths(
            "a hard link to the outside",
            "refused",
            link,
            "out/passwd",
            "inside/stolen",
            "(call $link (i32.const 3) (i32.const 1) $from (i32.const 3) $to)",
        ),
        two_paths(
            "a directory outside",
            "refused",
            mkdir,
            "../made",
            "",
            "(call $mkdir (i32.const 3) $from)",
        ),
        two_paths(
            "deleting outside",
            "refused",
            unlink,
            "out/passwd",
            "",
            "(call $unlink (i32.const 3) $from)",
        ),
        two_paths(
            "reading a link outside",
            "refused",
            readlink,
            "../../proc/self/exe",
            "",
            "(call $readlink (i32.const 3) $from (i32.const 2000) (i32.const 500) (i32.const 1000))",
        ),
        refused(
            "a file descriptor that was not granted",
            "only granted directories have descriptors",
            r#"(import "wasi_snapshot_preview1" "fd_read" (func $read (param i32 i32 i32 i32) (result i32)))"#,
            "(i32.store (i32.const 300) (i32.const 400)) (i32.store (i32.const 304) (i32.const 64))",
            "(call $read (i32.const 5) (i32.const 300) (i32.const 1) (i32.const 1000))",
        ),
    ])
    .await;
    assert!(std::path::Path::new("/etc/passwd").exists());
    assert!(granted_dir().join("greeting.txt").exists());
    assert!(!granted_dir().join("../stolen").exists() && !granted_dir().join("../made").exists());
}

#[tokio::test]
async fn a_link_that_replaces_a_granted_directory_is_not_followed() {
    println!(
        "a link to the outside that replaces another grant: the directory opened at the start counts"
    );
    let folder = tempfile::tempdir().expect("a directory");
    let at = |name: &str| folder.path().join(name);
    std::fs::create_dir_all(at("work/in")).unwrap();
    std::fs::create_dir(at("outside")).unwrap();
    std::fs::write(at("work/in/mine"), "").unwrap();
    std::fs::write(at("outside/shadow"), "").unwrap();
    let grant = |handler: &str, dir: &str, mode| Grant {
        handler: handler.into(),
        dir: at(dir),
        at: "/dir".into(),
        mode,
        quota: None,
    };
    // No rouse.toml with these values is accepted: this tests the second line of defence.
    let settings = Settings {
        attempts_max: 2,
        limits: Limits {
            memory_bytes: 16 << 20,
            ..Limits::default()
        },
        grants: Grants(vec![
            grant("test.moves", "work", Mode::ReadWrite),
            grant("test.reads", "work/in", Mode::Read),
        ]),
        compiler: Some(rouse_binary()),
        ..Settings::default()
    };
    let sandbox = Sandbox::start(settings).expect("a sandbox");

    let moves_imports = r#"
        (import "wasi_snapshot_preview1" "path_rename" (func $rename (param i32 i32 i32 i32 i32 i32) (result i32)))
        (import "wasi_snapshot_preview1" "path_symlink" (func $symlink (param i32 i32 i32 i32 i32) (result i32)))"#;
    let moves = format!(
        "{}{}{}
         (if (call $rename (i32.const 3) (i32.const 300) (i32.const 2) (i32.const 3) (i32.const 400) (i32.const 5))
            (then unreachable))
         (if (call $symlink (i32.const 500) (i32.const 10) (i32.const 3) (i32.const 300) (i32.const 2))
            (then unreachable))
         (call $return_ok (local.get $payload) (local.get $payload_len))",
        put(300, "in"),
        put(400, "moved"),
        put(500, "../outside"),
    );
    let open = |at: u32, bytes: usize| {
        format!(
            "(call $open (i32.const 3) (i32.const 1) (i32.const {at}) (i32.const {bytes}) (i32.const 0) (i64.const 2) (i64.const 0) (i32.const 0) (i32.const 1000))"
        )
    };
    let reads = format!(
        "{}{}
         (if (i32.eqz {}) (then unreachable))
         (if {} (then unreachable))
         (call $return_ok (local.get $payload) (local.get $payload_len))",
        put(300, "shadow"),
        put(400, "mine"),
        open(300, 6),
        open(400, 4),
    );
    let moves = guest_of_wasip1(moves_imports, &manifest("test.moves", "1"), &moves);
    let reads = guest_of_wasip1(OPEN, &manifest("test.reads", "1"), &reads);
    let files = [
        ("moves.wasm", moves.as_slice()),
        ("reads.wasm", reads.as_slice()),
    ];
    let handlers = Handlers::on(sandbox.clone(), &files).await;
    for name in ["test.reads", "test.moves", "test.reads"] {
        let handler = handlers.handler(name);
        let run = attempt(&sandbox, &handler, job("{}"), AbortHandle::new()).await;
        assert_eq!(run.end, RunEnd::Returned(b"{}".into()), "{name}");
    }
    assert!(at("work/in/shadow").exists(), "the link leads to it");
}
