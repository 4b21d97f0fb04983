//! WebAssembly files in a folder become handlers, and the catalog follows changes to the folder.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt as _;
use std::time::{Duration, Instant};

use rouse::job::{AbortReason, RunEnd};
use rouse::sandbox::{AbortHandle, Catalog, HandlerSet};
use tempfile::TempDir;

use crate::sandbox_guest::{
    Handlers, echo, guest, guest_that, job, manifest, refusal, sandbox, version,
};
use crate::support::{
    CommandOutput, attempt, command_without_database, folder_of, rouse_without_database,
};

#[tokio::test]
async fn a_module_in_the_folder_is_served() {
    let handlers = Handlers::with(&[("echo.wasm", &echo("test.echo", "1.2.3"))]).await;
    let handler = handlers.handler("test.echo");
    assert_eq!(handler.manifest.version, "1.2.3");
    assert_eq!(handler.module.file, "echo.wasm");
    assert!(handlers.catalog.current().refused.is_empty());
    let run = attempt(&sandbox(), &handler, job(r#"{"a":1}"#), AbortHandle::new()).await;
    assert_eq!(run.end, RunEnd::Returned(br#"{"a":1}"#.into()));
}

#[tokio::test]
async fn each_broken_file_is_refused_by_name_and_the_others_serve() {
    let good = echo("test.echo", "1");
    let truncated = &good[..good.len() / 2];
    let foreign_import =
        wat::parse_str(r#"(module (import "env" "launch" (func)) (func (export "go") call 0))"#)
            .unwrap();
    let foreign_component =
        wat::parse_str(r#"(component (import "acme:rocket/launch@1.0.0" (instance)))"#).unwrap();
    let empty_component = wat::parse_str("(component)").unwrap();
    let files: [(&str, &[u8]); 9] = [
        ("echo.wasm", &good),
        ("empty.wasm", b""),
        ("text.wasm", b"not WebAssembly at all"),
        ("truncated.wasm", truncated),
        ("foreign-module.wasm", &foreign_import),
        ("foreign-component.wasm", &foreign_component),
        ("empty-component.wasm", &empty_component),
        ("compiled.cwasm", b"\x7fELF"),
        ("compiled.wasm", b"\x7fELF\x02\x01\x01"),
    ];
    let handlers = Handlers::with(&files).await;
    for (file, words) in [
        ("empty.wasm", "it is empty"),
        ("text.wasm", "it is not WebAssembly; a handler module is"),
        ("truncated.wasm", "it cannot be wrapped in a component"),
        ("foreign-module.wasm", "env"),
        (
            "foreign-component.wasm",
            "it does not export rouse:handler/handlers@0.1.0",
        ),
        (
            "empty-component.wasm",
            "it does not export rouse:handler/handlers@0.1.0",
        ),
        (
            "compiled.cwasm",
            "it is compiled code, which cannot be trusted",
        ),
        (
            "compiled.wasm",
            "it is compiled code, which cannot be trusted",
        ),
    ] {
        let why = handlers.refusal(file);
        assert!(why.contains(words), "{file}: {why}");
    }
    assert_eq!(handlers.catalog.current().refused.len(), 8);
    let run = attempt(
        &sandbox(),
        &handlers.handler("test.echo"),
        job("1"),
        AbortHandle::new(),
    )
    .await;
    assert_eq!(run.end, RunEnd::Returned(b"1".into()));
}

#[tokio::test]
async fn a_file_name_that_is_not_utf8_is_refused_and_does_not_hide_other_files() {
    let dir = TempDir::new().unwrap();
    for (name, handler) in [(b"\xfe.wasm", "test.one"), (b"\xff.wasm", "test.two")] {
        let path = dir.path().join(OsStr::from_bytes(name));
        fs::write(path, echo(handler, "1")).unwrap();
    }
    fs::write(dir.path().join("echo.wasm"), echo("test.echo", "1")).unwrap();
    let catalog = Catalog::open(sandbox(), dir.path()).await.unwrap();
    let set = catalog.current();
    for file in [r"\xfe.wasm", r"\xff.wasm"] {
        assert_eq!(
            refusal(&set, file).as_deref(),
            Some("its name is not UTF-8; rename it")
        );
    }
    assert!(set.get("test.echo").is_some());
}

#[tokio::test]
async fn other_files_in_the_folder_are_ignored() {
    let good = echo("test.echo", "1");
    let handlers = Handlers::with(&[
        ("echo.wasm", &good),
        (".echo.wasm.tmp.wasm", b"half"),
        ("echo.wasm.part", b"half"),
        ("README.md", b"handlers"),
    ])
    .await;
    fs::create_dir(handlers.path("folder.wasm")).unwrap();
    assert!(handlers.catalog.current().refused.is_empty());
    assert_eq!(handlers.catalog.current().handlers.len(), 1);
}

#[tokio::test]
async fn a_describe_that_loops_waits_traps_or_returns_garbage_is_refused_and_the_others_serve() {
    let loops = guest_that("(loop $ever (br $ever)) unreachable", "", "unreachable");
    let waits = guest_that("(call $wait_for_abort) unreachable", "", "unreachable");
    let traps = guest_that("unreachable", "", "unreachable");
    let panics = guest_that(
        "(call $panicked (i32.const 4096) (i32.const 4) (i32.const 4100) (i32.const 8)) unreachable",
        "oopslib.rs:7",
        "unreachable",
    );
    let greedy = guest_that(
        "(loop $ever (br_if $ever (i32.ne (i32.const -1) (memory.grow (i32.const 16))))) unreachable",
        "",
        "unreachable",
    );
    let rubbish = guest("no JSON", "unreachable");
    let bad_name = guest(&manifest("Bad Name", "1"), "unreachable");
    let handlers = Handlers::with(&[
        ("bad-name.wasm", &bad_name),
        ("greedy.wasm", &greedy),
        ("loops.wasm", &loops),
        ("panics.wasm", &panics),
        ("rubbish.wasm", &rubbish),
        ("traps.wasm", &traps),
        ("waits.wasm", &waits),
        ("zecho.wasm", &echo("test.echo", "1")),
    ])
    .await;
    // Reaching this point shows that none of them delayed the loading.
    for (file, words) in [
        ("bad-name.wasm", "Bad Name"),
        ("greedy.wasm", "more than 32 MiB"),
        ("loops.wasm", "more than 500 ms"),
        ("panics.wasm", "oops at lib.rs:7"),
        ("rubbish.wasm", "does not parse"),
        ("traps.wasm", "unreachable"),
        ("waits.wasm", "more than 15 s"),
    ] {
        let why = handlers.refusal(file);
        assert!(why.contains(words), "{file}: {why}");
    }
    handlers.handler("test.echo");
}

#[tokio::test]
async fn the_later_of_two_files_with_one_handler_name_is_refused_naming_both() {
    let handlers = Handlers::watched(&[("b.wasm", &echo("test.echo", "1"))]).await;
    // First by name, but later in time.
    handlers.write("a.wasm", &echo("test.echo", "2"));
    handlers
        .until("a.wasm is refused", |set| refusal(set, "a.wasm").is_some())
        .await;
    let why = handlers.refusal("a.wasm");
    assert!(why.contains("b.wasm") && why.contains("test.echo"), "{why}");
    assert_eq!(handlers.handler("test.echo").module.file, "b.wasm");
}

#[tokio::test]
async fn a_later_module_that_shares_one_handler_name_is_refused_as_a_whole() {
    let handlers = Handlers::watched(&[("a.wasm", &echo("test.echo", "1"))]).await;
    let two = r#"{"handlers":[{"name":"test.new"},{"name":"test.echo"}]}"#;
    handlers.write("b.wasm", &guest(two, "unreachable"));
    handlers
        .until("b.wasm is refused", |set| refusal(set, "b.wasm").is_some())
        .await;
    assert!(handlers.catalog.current().get("test.new").is_none());
    assert!(handlers.refusal("b.wasm").contains("test.echo"));
}

#[tokio::test]
async fn changes_to_the_folder_are_noticed_within_a_second() {
    let handlers = Handlers::watched(&[]).await;
    let noticed = async |condition: &str, is: &dyn Fn(&HandlerSet) -> bool| {
        let started = Instant::now();
        handlers.until(condition, is).await;
        started.elapsed()
    };
    let mut took: [Vec<Duration>; 3] = Default::default();
    // The machine may pause during one of the rounds.
    for _ in 0..3 {
        handlers.write(
            "echo.wasm",
            b"no WebAssembly, so that nothing has to be compiled",
        );
        took[0].push(noticed("a new file", &|set| refusal(set, "echo.wasm").is_some()).await);
        handlers.write("echo.wasm", b"");
        let is_empty =
            |set: &HandlerSet| refusal(set, "echo.wasm").is_some_and(|why| why.contains("empty"));
        took[1].push(noticed("a change", &is_empty).await);
        fs::remove_file(handlers.path("echo.wasm")).unwrap();
        took[2].push(noticed("a removal", &|set| set.refused.is_empty()).await);
    }
    for mut rounds in took {
        rounds.sort_unstable();
        assert!(rounds[1] < Duration::from_secs(1), "{rounds:?}");
    }
}

#[tokio::test]
async fn a_new_file_starts_to_serve_and_a_removed_one_is_withdrawn() {
    let handlers = Handlers::watched(&[]).await;
    handlers.write("echo.wasm", &echo("test.echo", "1"));
    handlers
        .until("it serves", |set| set.get("test.echo").is_some())
        .await;
    fs::remove_file(handlers.path("echo.wasm")).unwrap();
    handlers
        .until("it is withdrawn", |set| set.get("test.echo").is_none())
        .await;
}

#[tokio::test]
async fn a_file_that_may_still_be_there_is_not_withdrawn() {
    let handlers = Handlers::watched(&[
        ("echo.wasm", &echo("test.echo", "1")),
        ("linked.wasm", &echo("test.linked", "1")),
    ])
    .await;
    // An error that even root gets, and that does not mean that the file was removed: the link's name is too long.
    std::os::unix::fs::symlink("x".repeat(300), handlers.path(".link")).unwrap();
    fs::hard_link(handlers.path("echo.wasm"), handlers.path(".echo")).unwrap();
    fs::rename(handlers.path(".link"), handlers.path("echo.wasm")).unwrap();
    handlers
        .until("it is refused", |set| refusal(set, "echo.wasm").is_some())
        .await;
    let why = handlers.refusal("echo.wasm");
    assert!(why.starts_with("it cannot be read: "), "{why}");
    handlers.handler("test.echo");
    handlers.handler("test.linked");
    // A link that leads nowhere does not count as a file.
    std::os::unix::fs::symlink("nowhere", handlers.path(".link")).unwrap();
    fs::rename(handlers.path(".link"), handlers.path("linked.wasm")).unwrap();
    handlers
        .until("it is withdrawn", |set| set.get("test.linked").is_none())
        .await;
    handlers.handler("test.echo");
    fs::rename(handlers.path(".echo"), handlers.path("echo.wasm")).unwrap();
    handlers
        .until("it is accepted", |set| set.refused.is_empty())
        .await;
    handlers.handler("test.echo");
}

#[tokio::test]
async fn a_replaced_module_takes_new_jobs_while_the_old_one_drains() {
    let waits = guest(
        &manifest("test.echo", "1"),
        "(call $wait_for_abort) (call $return_ok (local.get $payload) (local.get $payload_len))",
    );
    let handlers = Handlers::watched(&[("echo.wasm", &waits)]).await;
    let abort = AbortHandle::new();
    let old = attempt(
        &sandbox(),
        &handlers.handler("test.echo"),
        job("1"),
        abort.clone(),
    );

    handlers.write(".new", &echo("test.echo", "2"));
    fs::rename(handlers.path(".new"), handlers.path("echo.wasm")).unwrap();
    handlers
        .until("version 2 serves", |set| {
            version(set, "test.echo").as_deref() == Some("2")
        })
        .await;
    let new = attempt(
        &sandbox(),
        &handlers.handler("test.echo"),
        job("2"),
        AbortHandle::new(),
    )
    .await;
    assert_eq!(new.end, RunEnd::Returned(b"2".into()));

    // The old attempt has been running all the time, and continues until it is stopped.
    fs::remove_file(handlers.path("echo.wasm")).unwrap();
    handlers
        .until("it is withdrawn", |set| set.get("test.echo").is_none())
        .await;
    assert!(!old.is_finished());
    abort.abort(AbortReason::Shutdown, Duration::from_secs(5));
    assert_eq!(old.await.end, RunEnd::Aborted(AbortReason::Shutdown));
}

#[tokio::test]
async fn the_last_good_version_serves_while_a_broken_one_is_refused() {
    let handlers = Handlers::watched(&[("echo.wasm", &echo("test.echo", "1"))]).await;
    handlers.write("echo.wasm", b"\0asm rubbish");
    handlers
        .until("it is refused", |set| refusal(set, "echo.wasm").is_some())
        .await;
    let set = handlers.catalog.current();
    assert_eq!(version(&set, "test.echo").as_deref(), Some("1"));
    assert!(set.refused[0].last_good_serves);

    handlers.write("echo.wasm", &echo("test.echo", "2"));
    handlers
        .until("version 2 serves", |set| {
            version(set, "test.echo").as_deref() == Some("2")
        })
        .await;
    assert!(handlers.catalog.current().refused.is_empty());
}

#[tokio::test]
async fn restoring_the_serving_version_ends_the_refusal() {
    let good = echo("test.echo", "1");
    let handlers = Handlers::watched(&[("echo.wasm", &good)]).await;
    let module = handlers.handler("test.echo").module.clone();
    handlers.write("echo.wasm", b"broken");
    handlers
        .until("it is refused", |set| refusal(set, "echo.wasm").is_some())
        .await;
    handlers.write("echo.wasm", &good);
    handlers
        .until("it is accepted", |set| set.refused.is_empty())
        .await;
    // The very same module, not a recompiled one.
    assert!(std::sync::Arc::ptr_eq(
        &module,
        &handlers.handler("test.echo").module
    ));
}

#[tokio::test]
async fn a_partially_written_file_is_not_loaded() {
    let handlers = Handlers::watched(&[]).await;
    let bytes = echo("test.echo", "1");
    loop {
        let mut changed = handlers.catalog.changed();
        let mut file = fs::File::create(handlers.path("echo.wasm")).unwrap();
        let (mut written_at, mut quiet) = (Instant::now(), Duration::ZERO);
        // A slow writer that is never quiet for 200 ms.
        for piece in bytes.chunks(bytes.len() / 10 + 1) {
            quiet = quiet.max(written_at.elapsed());
            file.write_all(piece).unwrap();
            file.flush().unwrap();
            written_at = Instant::now();
            tokio::time::sleep(Duration::from_millis(40)).await;
        }
        drop(file);
        let mut refused = Vec::new();
        while handlers.catalog.current().get("test.echo").is_none() {
            changed.changed().await.unwrap();
            let set = handlers.catalog.current();
            refused.extend(set.refused.iter().map(|refused| refused.why.clone()));
        }
        if quiet < Duration::from_millis(150) {
            assert!(refused.is_empty(), "{refused:?}");
            return;
        }
        // This machine has paused, and the writer with it.
        fs::remove_file(handlers.path("echo.wasm")).unwrap();
        let is_gone = |set: &HandlerSet| set.get("test.echo").is_none();
        handlers.until("the file is gone", is_gone).await;
    }
}

#[tokio::test]
async fn a_file_that_is_replaced_atomically_is_never_missing() {
    let versions: Vec<Vec<u8>> = (0..2).map(|n| echo("test.echo", &n.to_string())).collect();
    let handlers = Handlers::watched(&[("echo.wasm", &versions[0])]).await;
    for swap in 1..=6 {
        let new = swap % 2;
        handlers.write(".new", &versions[new]);
        fs::rename(handlers.path(".new"), handlers.path("echo.wasm")).unwrap();
        let mut changed = handlers.catalog.changed();
        loop {
            let set = handlers.catalog.current();
            assert!(set.refused.is_empty(), "{:?}", set.refused);
            let now = version(&set, "test.echo").expect("a version that serves");
            if now == new.to_string() {
                break;
            }
            changed.changed().await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_renamed_file_continues_to_serve() {
    let handlers = Handlers::watched(&[("a.wasm", &echo("test.echo", "1"))]).await;
    fs::rename(handlers.path("a.wasm"), handlers.path("b.wasm")).unwrap();
    handlers
        .until("b.wasm serves", |set| {
            set.get("test.echo")
                .is_some_and(|handler| handler.module.file == "b.wasm")
        })
        .await;
    assert!(handlers.catalog.current().refused.is_empty());
}

#[tokio::test]
async fn a_missing_folder_is_an_error_that_names_the_remedy() {
    let error = Catalog::open(sandbox(), "/nowhere/handlers")
        .await
        .err()
        .expect("an error");
    let message = error.to_string();
    assert!(
        message.contains("/nowhere/handlers") && message.contains("--handlers"),
        "{message}"
    );
}

#[test]
fn a_manifest_with_unknown_keys_serves_with_a_warning() {
    let manifest =
        r#"{"handlers":[{"name":"a.one","timeout":"5s"},{"name":"a.two","max_attemps":3}]}"#;
    let folder = folder_of("", &[("a.wasm", guest(manifest, "unreachable"))]);
    let warning = "its manifest has keys that this host does not know and ignores: \
                   `timeout` of the handler `a.one`, `max_attemps` of the handler `a.two`";

    let mut command = command_without_database(&["handlers"], &folder);
    let ran = CommandOutput::run(command.env("ROUSE_LOG", "warn"));
    let listed = ran.exits(0).stdout.as_str();
    let line = format!("warning: a.wasm: {warning}");
    assert_eq!(listed.matches(&line).count(), 1, "{listed}");
    assert!(
        listed.contains("a.one") && listed.contains("a.two"),
        "{listed}"
    );
    // The warning is in the log of every host.
    assert!(
        ran.stderr.contains("WARN") && ran.stderr.contains(warning),
        "{}",
        ran.stderr
    );

    let ran = rouse_without_database(&["handlers", "--json"], &folder);
    let warnings = &ran.exits(0).json()["warnings"];
    assert_eq!(warnings, &serde_json::json!([format!("a.wasm: {warning}")]));
}
