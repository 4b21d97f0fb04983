//! Machine code is cached between starts, and only code that is intact, ours and compiled from this module is used.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use rouse::job::RunEnd;
use rouse::sandbox::{AbortHandle, CodeFrom, Digest, Sandbox, Settings};

use crate::sandbox_guest::{Handlers, echo, job, small_settings};
use crate::support::{attempt, rouse_binary, scratch, skip};

fn sandbox(cache_dir: &Path) -> Arc<Sandbox> {
    let settings = Settings {
        cache_dir: Some(cache_dir.into()),
        ..small_settings()
    };
    Sandbox::start(settings).expect("a sandbox")
}

/// The origin of this handler's code on a freshly started host; the handler also runs once.
async fn start(cache_dir: &Path, module: &[u8]) -> CodeFrom {
    let sandbox = sandbox(cache_dir);
    let handlers = Handlers::on(sandbox.clone(), &[("echo.wasm", module)]).await;
    let handler = handlers.handler("test.echo");
    let run = attempt(&sandbox, &handler, job("1"), AbortHandle::new()).await;
    assert_eq!(run.end, RunEnd::Returned(b"1".into()));
    handler.module.code
}

fn entries(cache_dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(cache_dir).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[tokio::test]
async fn a_second_start_uses_cached_code_and_compiles_a_changed_module() {
    let cache = scratch("cache").join("code");
    let module = echo("test.echo", "1");
    assert_eq!(start(&cache, &module).await, CodeFrom::Compiler);
    assert_eq!(start(&cache, &module).await, CodeFrom::Cache);
    assert_eq!(
        start(&cache, &echo("test.echo", "2")).await,
        CodeFrom::Compiler
    );
    assert_eq!(entries(&cache).len(), 2);
    assert_eq!(start(&cache, &module).await, CodeFrom::Cache);
}

#[tokio::test]
async fn damaged_code_is_compiled_again_and_replaced() {
    let cache = scratch("cache").join("code");
    let module = echo("test.echo", "1");
    start(&cache, &module).await;
    let entry = entries(&cache).remove(0);
    let good = fs::read(&entry).unwrap();
    let mut damaged = good.clone();
    damaged[good.len() / 2] ^= 1;
    for bad in [&damaged[..], &good[..good.len() - 1], b""] {
        fs::write(&entry, bad).unwrap();
        assert_eq!(start(&cache, &module).await, CodeFrom::Compiler);
        assert_eq!(start(&cache, &module).await, CodeFrom::Cache);
    }
}

#[tokio::test]
async fn intact_code_that_wasmtime_rejects_is_compiled_again() {
    let cache = scratch("cache").join("code");
    let module = echo("test.echo", "1");
    start(&cache, &module).await;
    let entry = entries(&cache).remove(0);
    // Framed like a cache entry, but with contents that are not machine code.
    let name = entry.file_name().unwrap().to_str().unwrap();
    let digest = Digest::compute(format!("{name}\0from a later wasmtime").as_bytes()).to_string();
    let digest = (0..64)
        .step_by(2)
        .map(|at| u8::from_str_radix(&digest[at..at + 2], 16).unwrap());
    let mut bytes = fs::read(&entry).unwrap()[..16].to_vec();
    bytes.extend(digest);
    bytes.extend(b"from a later wasmtime");
    fs::write(&entry, bytes).unwrap();
    assert_eq!(start(&cache, &module).await, CodeFrom::Compiler);
    assert_eq!(start(&cache, &module).await, CodeFrom::Cache);
}

#[tokio::test]
async fn code_written_by_another_user_is_not_used() {
    let cache = scratch("cache").join("code");
    let module = echo("test.echo", "1");
    start(&cache, &module).await;
    let entry = entries(&cache).remove(0);
    // The rule itself is tested in `cache.rs`, without root.
    if let Err(error) = std::os::unix::fs::chown(&entry, Some(65534), None) {
        return skip(&format!("only root can give files away: {error}"));
    }
    assert_eq!(start(&cache, &module).await, CodeFrom::Compiler);
    assert_eq!(start(&cache, &module).await, CodeFrom::Cache);
}

#[tokio::test]
async fn hosts_that_start_simultaneously_share_a_cache() {
    let cache = scratch("cache").join("code");
    let modules: Vec<_> = (0..4)
        .map(|n| (format!("{n}.wasm"), echo(&format!("test.echo-{n}"), "1")))
        .collect();
    let files: Vec<(&str, &[u8])> = modules
        .iter()
        .map(|(name, bytes)| (&**name, &**bytes))
        .collect();
    let hosts = [sandbox(&cache), sandbox(&cache), sandbox(&cache)];
    let [a, b, c] = hosts.map(|sandbox| Handlers::on(sandbox, &files));
    for handlers in <[Handlers; 3]>::from(tokio::join!(a, b, c)) {
        assert_eq!(handlers.catalog.current().handlers.len(), 4);
    }
    assert_eq!(entries(&cache).len(), 4, "{:?}", entries(&cache));
    let handlers = Handlers::on(sandbox(&cache), &files).await;
    for handler in handlers.catalog.current().handlers.values() {
        assert_eq!(
            handler.module.code,
            CodeFrom::Cache,
            "{}",
            handler.module.file
        );
    }
}

#[tokio::test]
async fn modules_are_compiled_without_a_trusted_cache() {
    let file = scratch("cache").join("code");
    fs::write(&file, "no directory").unwrap();
    let module = echo("test.echo", "1");
    assert_eq!(start(&file, &module).await, CodeFrom::Compiler);
    assert_eq!(start(&file, &module).await, CodeFrom::Compiler);
}

#[test]
fn the_commands_cache_code_in_the_directory_set_by_the_environment_or_rouse_toml() {
    let folder = scratch("cache");
    fs::create_dir(folder.join("handlers-wasm")).unwrap();
    fs::write(
        folder.join("handlers-wasm/echo.wasm"),
        echo("test.echo", "1"),
    )
    .unwrap();
    let handlers = || {
        let output = Command::new(rouse_binary())
            .arg("handlers")
            .current_dir(&folder)
            .env("ROUSE_CACHE_DIR", folder.join("environment"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    fs::write(folder.join("rouse.toml"), "cache_dir = \"off\"").unwrap();
    handlers();
    assert!(!folder.join("environment").exists());
    fs::write(folder.join("rouse.toml"), "cache_dir = \"written\"").unwrap();
    handlers();
    assert!(!folder.join("environment").exists());
    assert_eq!(entries(&folder.join("written")).len(), 1);
    fs::write(folder.join("rouse.toml"), "").unwrap();
    handlers();
    assert_eq!(entries(&folder.join("environment")).len(), 1);
}
