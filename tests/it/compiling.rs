//! Modules are compiled in a child process with limits, and no failure of the child affects the host.

mod line_tables;

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rouse::sandbox::{Catalog, HandlerSet, Sandbox, Settings};
use serde_json::json;

use crate::sandbox_guest::{Handlers, TIMEOUT, echo, guest_that, refusal, small_settings, version};
use crate::support::worker::{TestWorker, ended, enqueue};
use crate::support::{
    CommandOutput, Host, TestDb, command_without_database, folder_of, rouse_binary, scratch,
};

/// A sandbox for one test.
fn sandbox(settings: Settings) -> Arc<Sandbox> {
    Sandbox::start(settings).expect("a sandbox")
}

fn limited(cpu_secs: u64, memory_bytes: usize) -> Settings {
    Settings {
        compile_cpu_max: Duration::from_secs(cpu_secs),
        compile_memory_bytes_max: memory_bytes,
        compilations_max: 2,
        ..small_settings()
    }
}

/// Functions with tables that jump to the end of any of the enclosing blocks, each of which passes on a thousand
/// values: the compiler's work grows with the product of all these numbers, but the size of the file does not.
fn bomb(functions: usize, tables: usize, depth: usize) -> Vec<u8> {
    const VALUES: usize = 1000;
    let values = "i64 ".repeat(VALUES);
    let get_all: String = (0..VALUES).map(|n| format!("local.get {n} ")).collect();
    let targets: String = (0..depth).map(|n| format!("{n} ")).collect();
    let open = "block (type $t) ".repeat(depth);
    let close = "end ".repeat(depth);
    let table = format!("{open} local.get 0 i32.wrap_i64 br_table {targets} {close}");
    let function = format!("(func (type $t) {get_all} {})", table.repeat(tables));
    let text = format!(
        "(component (core module $bomb (type $t (func (param {values}) (result {values}))) {})
          (core instance (instantiate $bomb)))",
        function.repeat(functions)
    );
    wat::parse_str(text).expect("the bomb is WebAssembly text")
}

/// A module whose compilation takes longer than a first try may (5 s of CPU time). In the tests' profile, a quarter of
/// these functions took 13 s on one machine and less than 5 s on another.
pub(crate) fn bomb_of_time() -> Vec<u8> {
    bomb(240, 1, 150)
}

/// A module of 80 KB whose compilation takes more than 12 GiB.
fn bomb_of_memory() -> Vec<u8> {
    bomb(1, 40, 400)
}

/// A program that acts as a misbehaving compiler. A shell writes the file: if this process had it open for writing
/// while another test starts a child, it could not be executed.
pub(crate) fn compiler_that(does: &str) -> PathBuf {
    let path = scratch("compiler").join("compiler");
    let script = format!("#!/bin/sh\n{does}\n");
    let written = Command::new("sh")
        .args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""])
        .args([path.as_os_str(), script.as_ref()])
        .status();
    assert!(written.expect("a shell").success());
    path
}

/// The response of a compiler that refuses a module: the refusal, the length of the reason, and the reason.
fn refusing(why: &str) -> String {
    assert!(why.len() < 64);
    let zeros = "\\0".repeat(7);
    format!("printf 'R\\0012\\{:o}{zeros}{why}'", why.len())
}

/// A compiler that, before it compiles a module with this word in it, waits until a file exists; and that file, which
/// does not exist yet. Each compiler process compiles one module: the wrapper passes on the input that it has already
/// read.
pub(crate) fn compiler_that_waits(word: &str) -> (PathBuf, PathBuf) {
    let dir = scratch("handed-on");
    let unblock = dir.join("unblock");
    let compiler = compiler_that(&format!(
        "at={dir}/$$\n\
         head -c 16 > $at.head\n\
         head -c $(od -An -tu8 -N8 $at.head) > $at.module\n\
         if grep -qa {word} $at.module; then while [ ! -e {unblock} ]; do sleep 0.02; done; fi\n\
         cat $at.head $at.module > $at\n\
         exec {rouse} \"$@\" < $at",
        dir = dir.display(),
        unblock = unblock.display(),
        rouse = rouse_binary().display(),
    ));
    (compiler, unblock)
}

fn with_compiler(compiler: PathBuf) -> Settings {
    Settings {
        compiler: Some(compiler),
        ..limited(1, 64 << 20)
    }
}

#[tokio::test]
async fn a_module_that_takes_too_long_to_compile_is_refused_and_the_others_serve() {
    let bomb = bomb_of_time();
    let sandbox = sandbox(limited(1, 2 << 30));
    let handlers = Handlers::on(
        sandbox,
        &[("bomb.wasm", &bomb), ("echo.wasm", &echo("test.echo", "1"))],
    )
    .await;
    let why = handlers.refusal("bomb.wasm");
    assert!(
        why.contains("more than 1 s of CPU time") && why.contains("compile_cpu"),
        "{why}"
    );
    handlers.handler("test.echo");
}

#[tokio::test]
async fn a_module_that_takes_too_much_memory_to_compile_is_refused_and_the_others_serve() {
    let sandbox = sandbox(limited(60, 512 << 20));
    let handlers = Handlers::on(
        sandbox,
        &[
            ("bomb.wasm", &bomb_of_memory()),
            ("echo.wasm", &echo("test.echo", "1")),
        ],
    )
    .await;
    let why = handlers.refusal("bomb.wasm");
    assert!(
        why.contains("more than 512 MiB of memory") && why.contains("compile_memory_mb"),
        "{why}"
    );
    handlers.handler("test.echo");
}

#[tokio::test]
async fn other_modules_start_to_serve_while_one_is_being_compiled() {
    let (compiler, unblock) = compiler_that_waits("test.slow");
    let mut settings = limited(60, 2 << 30);
    settings.compiler = Some(compiler);
    let handlers = Handlers::on(sandbox(settings), &[]).await;
    handlers.catalog.watch();
    handlers.write("a-slow.wasm", &echo("test.slow", "1"));
    handlers.write("echo.wasm", &echo("test.echo", "1"));
    handlers
        .until("the other one serves", |set| set.get("test.echo").is_some())
        .await;
    assert!(handlers.catalog.current().get("test.slow").is_none());
    // If the file changes in the meantime, the new version serves in the end.
    handlers.write("a-slow.wasm", &echo("test.slow", "2"));
    fs::write(unblock, "").unwrap();
    handlers
        .until("the slow one serves", |set| {
            version(set, "test.slow").as_deref() == Some("2")
        })
        .await;
    assert!(handlers.catalog.current().refused.is_empty());
}

#[tokio::test]
async fn other_modules_run_jobs_while_one_is_being_compiled_at_the_start() {
    let db = TestDb::new().await;
    let (compiler, unblock) = compiler_that_waits("test.slow");
    let mut settings = limited(60, 2 << 30);
    settings.compiler = Some(compiler);
    let sandbox = sandbox(settings);
    let folder = scratch("handlers");
    fs::write(folder.join("a-slow.wasm"), echo("test.slow", "1")).unwrap();
    fs::write(folder.join("echo.wasm"), echo("test.echo", "1")).unwrap();
    let catalog = Catalog::start(sandbox.clone(), &folder).await;
    let catalog = Arc::new(catalog.expect("a folder"));
    let worker = TestWorker::start_in(&db, Default::default(), sandbox, catalog.clone());

    let client = db.client().await;
    let slow = enqueue(&client, "test.slow", json!(1)).await;
    let job = enqueue(&client, "test.echo", json!(2)).await;
    assert_eq!(ended(&client, job).await.result, Some(json!(2)));
    let handlers = catalog.current();
    assert_eq!(handlers.loading, ["a-slow.wasm"]);
    assert!(handlers.get("test.slow").is_none() && handlers.refused.is_empty());

    fs::write(unblock, "").unwrap();
    assert_eq!(ended(&client, slow).await.result, Some(json!(1)));
    assert!(!catalog.current().is_loading());
    worker.drain().await;
}

#[tokio::test]
async fn a_compile_bomb_yields_to_the_other_modules_and_is_retried_after_them() {
    let mut settings = limited(60, 2 << 30);
    settings.compilations_max = 1;
    let folder = scratch("handlers");
    fs::write(folder.join("a-bomb.wasm"), bomb_of_time()).unwrap();
    fs::write(folder.join("b-bomb.wasm"), bomb(240, 1, 149)).unwrap();
    fs::write(folder.join("echo.wasm"), echo("test.echo", "1")).unwrap();
    let catalog = Catalog::start(sandbox(settings), &folder).await.unwrap();
    let handlers = catalog.tried().await;
    assert!(handlers.get("test.echo").is_some());
    assert!(handlers.refused.is_empty(), "{:?}", handlers.refused);
    assert_eq!(handlers.slow, ["a-bomb.wasm", "b-bomb.wasm"]);

    // One of the bombs now occupies the only place, and a module that arrives later does not wait for it.
    fs::write(folder.join("later.wasm"), echo("test.later", "1")).unwrap();
    let handlers = catalog.until(|set| set.get("test.later").is_some()).await;
    assert_eq!(handlers.slow, ["a-bomb.wasm", "b-bomb.wasm"]);
    // Each file was read once per started try, and each bomb has had at most one compiler of its own.
    assert!(catalog.loads().files_read() <= 5, "{:?}", catalog.loads());
}

#[tokio::test]
async fn modules_that_wait_in_describe_yield_to_the_other_modules() {
    let mut settings = limited(60, 2 << 30);
    settings.compilations_max = 1;
    let waits = guest_that("(call $wait_for_abort) unreachable", "", "unreachable");
    let folder = scratch("handlers");
    fs::write(folder.join("a-waits.wasm"), &waits).unwrap();
    fs::write(folder.join("b-waits.wasm"), &waits).unwrap();
    fs::write(folder.join("echo.wasm"), echo("test.echo", "1")).unwrap();
    let catalog = Catalog::start(sandbox(settings), &folder).await.unwrap();
    let handlers = catalog.tried().await;
    assert!(handlers.get("test.echo").is_some());
    assert!(handlers.refused.is_empty(), "{:?}", handlers.refused);
    assert_eq!(handlers.slow, ["a-waits.wasm", "b-waits.wasm"]);

    // One of them is now waiting again, for 15 s.
    fs::write(folder.join("later.wasm"), echo("test.later", "1")).unwrap();
    let handlers = catalog.until(|set| set.get("test.later").is_some()).await;
    assert_eq!(handlers.slow, ["a-waits.wasm", "b-waits.wasm"]);
}

#[tokio::test]
async fn each_file_is_read_once_and_one_compiler_handles_many_modules() {
    let settings = limited(60, 2 << 30);
    let places = settings.compilations_max as u64;
    let folder = scratch("handlers");
    for n in 0..40 {
        let module = echo(&format!("test.echo-{n}"), "1");
        fs::write(folder.join(format!("{n}.wasm")), module).unwrap();
    }
    let catalog = Catalog::start(sandbox(settings), &folder).await.unwrap();
    let handlers = catalog.tried().await;
    assert_eq!(handlers.handlers.len(), 40, "{:?}", handlers.refused);
    let loads = catalog.loads();
    assert_eq!((loads.files_read(), loads.modules_compiled()), (40, 40));
    assert!(loads.compilers_started() <= places, "{loads:?}");

    // Known files are not read again, no matter how often the folder is scanned.
    fs::write(folder.join("40.wasm"), echo("test.echo-40", "1")).unwrap();
    catalog.until(|set| set.get("test.echo-40").is_some()).await;
    assert_eq!((loads.files_read(), loads.modules_compiled()), (41, 41));
    fs::rename(folder.join("40.wasm"), folder.join("41.wasm")).unwrap();
    let has_moved = |set: &HandlerSet| {
        let handler = set.get("test.echo-40").expect("a served handler");
        handler.module.file == "41.wasm"
    };
    catalog.until(has_moved).await;
    assert_eq!((loads.files_read(), loads.modules_compiled()), (42, 41));
}

#[tokio::test]
async fn a_module_that_crashes_a_shared_compiler_is_retried_in_its_own() {
    let mut settings = limited(60, 512 << 20);
    settings.compilations_max = 1;
    let sandbox = sandbox(settings);
    let handlers = Handlers::on(
        sandbox,
        &[
            ("a.wasm", &echo("test.a", "1")),
            ("b.wasm", &bomb_of_memory()),
            ("c.wasm", &echo("test.c", "1")),
        ],
    )
    .await;
    assert_eq!(handlers.catalog.current().names(), ["test.a", "test.c"]);
    let why = handlers.refusal("b.wasm");
    assert!(why.contains("more than 512 MiB of memory"), "{why}");
    let loads = handlers.catalog.loads();
    assert_eq!((loads.files_read(), loads.modules_compiled()), (4, 4));
}

#[tokio::test]
async fn a_refusal_reports_the_compilers_reason() {
    let sandbox = sandbox(with_compiler(compiler_that(&refusing(
        "it is not to my liking",
    ))));
    let handlers = Handlers::on(sandbox, &[("echo.wasm", &echo("test.echo", "1"))]).await;
    assert_eq!(handlers.refusal("echo.wasm"), "it is not to my liking");
}

#[tokio::test]
async fn a_failed_compiler_is_distinguished_from_a_bad_module_and_retried() {
    for (does, words) in [
        ("exec sleep 60", "the compiler did not finish within 10 s"),
        ("kill -9 $$", "the compiler ended with signal: 9"),
        ("echo this is not code", "output that is not code"),
        (
            "echo so it is >&2; exit 1",
            "the compiler ended with exit status: 1: so it is",
        ),
        (
            "echo no pipe >&2; exit 4",
            "it could not be compiled: no pipe",
        ),
    ] {
        let sandbox = sandbox(with_compiler(compiler_that(does)));
        let handlers = Handlers::on(sandbox, &[("echo.wasm", &echo("test.echo", "1"))]).await;
        let why = handlers.refusal("echo.wasm");
        assert!(why.contains(words), "{does}: {why}");
        assert!(why.ends_with("it is retried after 60 s"), "{does}: {why}");
    }
    let sandbox = sandbox(with_compiler("/nowhere/rouse".into()));
    let handlers = Handlers::on(sandbox, &[("echo.wasm", &echo("test.echo", "1"))]).await;
    let why = handlers.refusal("echo.wasm");
    assert!(
        why.contains("the compiler /nowhere/rouse could not be started"),
        "{why}"
    );
}

#[tokio::test]
async fn a_module_that_makes_the_compiler_fail_is_refused_permanently() {
    for (does, words) in [
        (
            "echo thread main panicked >&2; exit 101",
            "it made the compiler panic",
        ),
        (
            "printf 'C\\0012\\377\\377\\377\\377\\0\\0\\0\\0'; exec sleep 60",
            "it compiles to more than 64 MiB of machine code",
        ),
        ("kill -SEGV $$", "it made the compiler crash (signal: 11"),
        (
            "echo memory allocation of 5 bytes failed >&2; kill -ABRT $$",
            "more than 64 MiB of memory",
        ),
    ] {
        let sandbox = sandbox(with_compiler(compiler_that(does)));
        let handlers = Handlers::on(sandbox, &[("echo.wasm", &echo("test.echo", "1"))]).await;
        let why = handlers.refusal("echo.wasm");
        assert!(
            why.contains(words) && !why.contains("tried again"),
            "{does}: {why}"
        );
    }
}

#[tokio::test]
async fn the_last_good_version_serves_if_the_compiler_of_the_next_one_is_killed() {
    // The compiler compiles the first module and no later module.
    let scratch = scratch("once");
    let pid = scratch.join("pid");
    let compiler = compiler_that(&format!(
        "[ -e {seen} ] || {{ : > {seen}; exec {rouse} \"$@\"; }}\necho $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 60",
        seen = scratch.join("seen").display(),
        rouse = rouse_binary().display(),
        pid = pid.display(),
    ));
    let mut settings = limited(60, 2 << 30);
    settings.compiler = Some(compiler);
    let handlers = Handlers::on(sandbox(settings), &[("echo.wasm", &echo("test.echo", "1"))]).await;
    handlers.catalog.watch();
    handlers.write("echo.wasm", &echo("test.echo", "2"));

    until("its compiler runs", || pid.exists()).await;
    let number = fs::read_to_string(&pid).unwrap();
    let killed = Command::new("kill").args(["-9", number.trim()]).status();
    assert!(killed.unwrap().success());
    handlers
        .until("version 2 is refused", |set| {
            refusal(set, "echo.wasm").is_some()
        })
        .await;
    assert!(handlers.refusal("echo.wasm").contains("signal: 9"));
    let set = handlers.catalog.current();
    assert_eq!(version(&set, "test.echo").as_deref(), Some("1"));
    assert!(set.refused[0].last_good_serves);
}

#[tokio::test]
async fn a_compiler_does_not_inherit_the_hosts_environment() {
    let seen = scratch("environment").join("seen");
    let compiler = compiler_that(&format!("/usr/bin/env > {}; exit 3", seen.display()));
    let sandbox = sandbox(with_compiler(compiler));
    Handlers::on(sandbox, &[("echo.wasm", &echo("test.echo", "1"))]).await;
    let seen = fs::read_to_string(seen).unwrap();
    // The variables that the host sets, and the shell's own.
    let own = [
        "RAYON_NUM_THREADS=",
        "GLIBC_TUNABLES=glibc.malloc.trim_threshold=",
        "PWD=",
        "OLDPWD=",
        "SHLVL=",
        "_=",
    ];
    for line in seen.lines() {
        assert!(own.iter().any(|name| line.starts_with(name)), "{line}");
    }
    assert!(seen.contains("PWD=/\n"), "{seen}");
}

#[tokio::test]
async fn a_compiler_dies_with_its_host() {
    let folder = scratch("bomb");
    fs::create_dir(folder.join("handlers-wasm")).unwrap();
    fs::write(folder.join("handlers-wasm/bomb.wasm"), bomb_of_time()).unwrap();
    let mut command = Command::new(rouse_binary());
    command
        .arg("handlers")
        .current_dir(&folder)
        .env("ROUSE_CACHE_DIR", folder.join("cache"));
    let host = Host::spawn(command);
    let host_pid = host.pid();
    let mut compiler = None;
    until("its compiler runs", || {
        compiler = child_of(host_pid);
        compiler.is_some()
    })
    .await;
    let compiler = compiler.unwrap();
    host.signal(libc::SIGKILL);
    until("the compiler is gone", || {
        !Path::new("/proc").join(compiler.to_string()).exists()
    })
    .await;
    let (status, _) = host.exit(TIMEOUT);
    assert_eq!(status.signal(), Some(libc::SIGKILL));
}

/// The compiler that this process has started and that has already limited itself.
fn child_of(parent: u32) -> Option<u32> {
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        // The limits come first: CPU time is the last one that it sets.
        let limits = fs::read_to_string(entry.path().join("limits")).ok()?;
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let is_child = status.contains(&format!("\nPPid:\t{parent}\n"));
        let is_limited = limits
            .lines()
            .any(|line| line.starts_with("Max cpu time") && !line.contains("unlimited"));
        if is_child && is_limited {
            assert!(status.contains("\nNoNewPrivs:\t1\n"), "{status}");
            for limit in ["Max open files", "Max processes", "Max file size"] {
                let line = limits.lines().find_map(|line| line.strip_prefix(limit));
                let values: Vec<&str> = line.unwrap_or("").split_whitespace().take(2).collect();
                assert_eq!(values, ["0", "0"], "{limit}: {limits}");
            }
        }
        (is_child && is_limited).then_some(pid)
    })
}

#[test]
fn a_compiler_starts_only_for_a_host_and_is_hidden_from_the_help() {
    let help = Command::new(rouse_binary()).arg("--help").output().unwrap();
    assert!(!String::from_utf8_lossy(&help.stdout).contains("compile-module"));
    let output = Command::new(rouse_binary())
        .args([
            "compile-module",
            "--host",
            "1",
            "--cpu-secs",
            "1",
            "--memory-bytes",
            "1000000000",
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "the compiler cannot limit itself: its host has ended\n"
    );
}

async fn until(condition: &str, mut is: impl FnMut() -> bool) {
    let reached = tokio::time::timeout(TIMEOUT, async {
        while !is() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(reached.await.is_ok(), "not reached: {condition}");
}

/// The program that loads this test binary, and `rouse`.
fn dynamic_loader() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut paths = maps.split_whitespace();
    let loader = paths.find(|path| path.contains("/ld-"));
    PathBuf::from(loader.expect("the test binary has a dynamic loader"))
}

#[test]
fn a_compiler_that_ends_before_it_has_read_its_module_does_not_end_the_command() {
    // More than a pipe holds (64 KiB).
    let mut module = b"\0asm\x0d\0\x01\0".to_vec();
    module.resize(200 << 10, 0);
    let folder = folder_of("", &[("large.wasm", &module)]);
    // A host starts the file of its own process as the compiler. Here this is the loader, which finds no program named
    // `compile-module`.
    let run = |args: &[&str]| {
        let rouse = command_without_database(args, &folder);
        let mut command = Command::new(dynamic_loader());
        command
            .arg(rouse.get_program())
            .args(rouse.get_args())
            .envs(
                rouse
                    .get_envs()
                    .filter_map(|(name, value)| Some((name, value?))),
            )
            .env_remove("DATABASE_URL")
            .env_remove("ROUSE_LOG")
            .current_dir(&folder);
        CommandOutput::run(&mut command)
    };
    let words = "it could not be compiled: the compiler ended with";
    run(&["handlers"]).exits(1).prints(words);
    run(&["invoke", "no.such"]).exits(3).prints(words);
}

#[test]
fn the_list_of_handlers_ends_quietly_if_its_reader_has_gone() {
    let folder = folder_of("", &[("echo.wasm", &echo("test.echo", "1"))]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = command_without_database(&["handlers"], &folder);
    let ran = command.stdout(writer).output().unwrap();
    assert_eq!(ran.status.signal(), Some(libc::SIGPIPE), "{ran:?}");
    assert!(ran.stderr.is_empty(), "{ran:?}");
}
