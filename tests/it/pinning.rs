//! With pinned modules, a host serves only modules that an operator has listed or signed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use rouse::sandbox::{Digest, Pin, Sandbox, Settings, SigningKey};

use crate::sandbox_guest::{Handlers, echo, refusal, small_settings, version};
use crate::support::{folder_of, rouse_binary, scratch};

fn sandbox(pin: Pin) -> Arc<Sandbox> {
    let settings = Settings {
        pin,
        ..small_settings()
    };
    Sandbox::start(settings).expect("a sandbox")
}

fn locked(lock: &Path) -> Arc<Sandbox> {
    sandbox(Pin {
        lock: Some(lock.into()),
        ..Pin::default()
    })
}

fn trusting(keys: &[&SigningKey]) -> Arc<Sandbox> {
    sandbox(Pin {
        trusted_keys: keys.iter().map(|key| key.public()).collect(),
        ..Pin::default()
    })
}

fn new_key() -> SigningKey {
    SigningKey::random().parse().unwrap()
}

fn line(module: &[u8], file: &str) -> String {
    format!("{}  {file}\n", Digest::compute(module))
}

/// Replaces a file atomically.
fn put(path: &Path, bytes: impl AsRef<[u8]>) {
    let temporary = path.with_extension("new");
    fs::write(&temporary, bytes).unwrap();
    fs::rename(temporary, path).unwrap();
}

#[tokio::test]
async fn only_listed_modules_serve_and_a_refusal_shows_the_line_that_allows_the_module() {
    let (good, other) = (echo("test.echo", "1"), echo("test.other", "1"));
    let lock = scratch("lock").join("handlers.lock");
    // Under another name: only the digest counts.
    fs::write(&lock, line(&good, "before-it-was-renamed.wasm")).unwrap();
    let handlers = Handlers::on(
        locked(&lock),
        &[("echo.wasm", &good), ("other.wasm", &other)],
    )
    .await;
    handlers.handler("test.echo");
    let why = handlers.refusal("other.wasm");
    assert!(
        why.contains("is not listed in") && why.contains("rouse handlers lock"),
        "{why}"
    );
    assert!(
        why.ends_with(line(&other, "other.wasm").trim_end()),
        "{why}"
    );
}

#[tokio::test]
async fn no_module_starts_to_serve_without_a_readable_lock() {
    let good = echo("test.echo", "1");
    let lock = scratch("lock").join("handlers.lock");
    let handlers = Handlers::on(locked(&lock), &[("echo.wasm", &good)]).await;
    assert!(handlers.refusal("echo.wasm").contains("it does not exist"));
    fs::write(&lock, format!("{}rubbish\n", line(&good, "echo.wasm"))).unwrap();
    let handlers = Handlers::on(locked(&lock), &[("echo.wasm", &good)]).await;
    assert!(handlers.refusal("echo.wasm").contains("line 2"));
}

#[tokio::test]
async fn modules_start_to_serve_when_the_lock_lists_them_and_the_last_listed_version_serves_until_then()
 {
    let versions = [echo("test.echo", "1"), echo("test.echo", "2")];
    let lock = scratch("lock").join("handlers.lock");
    fs::write(&lock, line(&versions[0], "echo.wasm")).unwrap();
    let handlers = Handlers::on(locked(&lock), &[("echo.wasm", &versions[0])]).await;
    handlers.catalog.watch();
    put(&handlers.path("echo.wasm"), &versions[1]);
    handlers
        .until("version 2 is refused", |set| {
            refusal(set, "echo.wasm").is_some()
        })
        .await;
    let set = handlers.catalog.current();
    assert_eq!(version(&set, "test.echo").as_deref(), Some("1"));
    assert!(set.refused[0].last_good_serves);

    put(&lock, line(&versions[1], "echo.wasm"));
    handlers
        .until("version 2 serves", |set| {
            version(set, "test.echo").as_deref() == Some("2")
        })
        .await;
    assert!(handlers.catalog.current().refused.is_empty());

    // Without its line, the module continues to serve, with a warning: the files of one deployment arrive one after
    // another.
    put(&lock, line(&versions[0], "echo.wasm"));
    handlers
        .until("the file is refused with a warning", |set| {
            refusal(set, "echo.wasm").is_some()
        })
        .await;
    let set = handlers.catalog.current();
    assert_eq!(version(&set, "test.echo").as_deref(), Some("2"));
    put(&lock, line(&versions[1], "echo.wasm"));
    handlers
        .until("no file is refused", |set| set.refused.is_empty())
        .await;
}

#[tokio::test]
async fn a_module_needs_a_signature_by_one_of_the_trusted_keys() {
    let (ours, theirs, foreign) = (new_key(), new_key(), new_key());
    let module = |n: u32| echo(&format!("test.echo-{n}"), "1");
    let files: Vec<(String, Vec<u8>)> = [
        ("1.wasm", module(1)),
        ("1.wasm.sig", ours.sign(&module(1)).into()),
        ("2.wasm", module(2)),
        ("2.wasm.sig", (theirs.sign(&module(2)) + "\n").into()),
        ("3.wasm", module(3)),
        ("4.wasm", module(4)),
        ("4.wasm.sig", foreign.sign(&module(4)).into()),
        ("5.wasm", module(5)),
        ("5.wasm.sig", ours.sign(&module(1)).into()),
        ("6.wasm", module(6)),
        ("6.wasm.sig", vec![0xff; 88]),
    ]
    .map(|(name, bytes)| (name.to_string(), bytes))
    .into();
    let files: Vec<(&str, &[u8])> = files
        .iter()
        .map(|(name, bytes)| (&**name, &**bytes))
        .collect();
    let handlers = Handlers::on(trusting(&[&ours, &theirs]), &files).await;
    assert_eq!(
        handlers.catalog.current().names(),
        ["test.echo-1", "test.echo-2"]
    );
    for (file, words) in [
        ("3.wasm", "it has no signature 3.wasm.sig"),
        ("4.wasm", "was not made with one of the trusted_keys"),
        ("5.wasm", "was not made with one of the trusted_keys"),
        ("6.wasm", "6.wasm.sig cannot be read"),
    ] {
        let why = handlers.refusal(file);
        assert!(why.contains(words), "{file}: {why}");
    }
}

#[tokio::test]
async fn a_signed_module_with_one_changed_byte_is_refused_and_the_signed_one_keeps_serving() {
    let key = new_key();
    let good = echo("test.echo", "1");
    let signature = key.sign(&good);
    let handlers = Handlers::on(
        trusting(&[&key]),
        &[
            ("echo.wasm", &good),
            ("echo.wasm.sig", signature.as_bytes()),
        ],
    )
    .await;
    handlers.catalog.watch();
    let module = handlers.handler("test.echo").module.clone();
    // Change the version: the module would be valid, but differs from the signed one.
    let at = good
        .windows(7)
        .position(|bytes| bytes == b"version")
        .unwrap()
        + 10;
    let mut changed = good.clone();
    assert_eq!(changed[at], b'1');
    changed[at] = b'2';
    put(&handlers.path("echo.wasm"), &changed);
    handlers
        .until("it is refused", |set| refusal(set, "echo.wasm").is_some())
        .await;
    let why = handlers.refusal("echo.wasm");
    assert!(why.contains("was changed after it was signed"), "{why}");
    assert!(Arc::ptr_eq(&module, &handlers.handler("test.echo").module));
}

#[tokio::test]
async fn a_module_starts_to_serve_when_its_signature_arrives() {
    let key = new_key();
    let module = echo("test.echo", "1");
    let handlers = Handlers::on(trusting(&[&key]), &[("echo.wasm", &module)]).await;
    handlers.catalog.watch();
    assert!(handlers.refusal("echo.wasm").contains("no signature"));
    put(&handlers.path("echo.wasm.sig"), key.sign(&module));
    handlers
        .until("it serves", |set| {
            set.get("test.echo").is_some() && set.refused.is_empty()
        })
        .await;
}

#[tokio::test]
async fn a_constantly_replaced_file_never_serves_an_unlisted_version() {
    let (good, bad) = (echo("test.echo", "good"), echo("test.echo", "bad"));
    let lock = scratch("lock").join("handlers.lock");
    fs::write(&lock, line(&good, "echo.wasm")).unwrap();
    let handlers = Handlers::on(locked(&lock), &[("echo.wasm", &bad)]).await;
    handlers.catalog.watch();
    let path = handlers.path("echo.wasm");
    let swapper = tokio::task::spawn_blocking(move || {
        for n in 0..300 {
            put(&path, if n % 2 == 0 { &good } else { &bad });
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        put(&path, &good);
    });
    let mut changed = handlers.catalog.changed();
    loop {
        let set = handlers.catalog.current();
        let version = version(&set, "test.echo");
        assert_ne!(version.as_deref(), Some("bad"));
        if swapper.is_finished() && version.is_some() {
            break;
        }
        // The end of the replacements does not change the catalog.
        let _ = tokio::time::timeout(std::time::Duration::from_millis(50), changed.changed()).await;
    }
    swapper.await.unwrap();
}

/// A folder with a module, in which `rouse …` runs.
struct Deployment(PathBuf);

impl Deployment {
    fn new(config: &str) -> Self {
        let module = echo("test.echo", "1");
        Self(folder_of(config, &[("echo.wasm", module)]))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(rouse_binary());
        command
            .args(args)
            .current_dir(&self.0)
            .env("ROUSE_CACHE_DIR", self.path("cache"));
        command.output().unwrap()
    }

    /// The output of the command, which must exit with this code.
    #[track_caller]
    fn exits_with(&self, code: i32, args: &[&str]) -> String {
        let output = self.run(args);
        let text =
            String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
        text
    }
}

#[test]
fn handlers_lock_lists_a_folder_in_the_format_of_sha256sum() {
    let deployment = Deployment::new("pin = \"lock\"");
    assert!(
        deployment
            .exits_with(1, &["handlers"])
            .contains("it does not exist")
    );
    let output = deployment.exits_with(0, &["handlers", "lock"]);
    assert!(
        output.contains("new ") && output.contains("handlers.lock: 1 module\n"),
        "{output}"
    );
    assert!(!output.contains("pin = "), "{output}");
    assert!(
        deployment
            .exits_with(0, &["handlers"])
            .contains("test.echo")
    );

    let check = Command::new("sha256sum")
        .args(["-c", "../handlers.lock"])
        .current_dir(deployment.path("handlers-wasm"))
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&check.stdout),
        "echo.wasm: OK\n",
        "{check:?}"
    );

    fs::write(
        deployment.path("handlers-wasm/echo.wasm"),
        echo("test.echo", "2"),
    )
    .unwrap();
    fs::write(
        deployment.path("handlers-wasm/new.wasm"),
        echo("test.new", "1"),
    )
    .unwrap();
    assert!(
        deployment
            .exits_with(1, &["handlers"])
            .contains("is not listed in")
    );
    let output = deployment.exits_with(0, &["handlers", "lock"]);
    assert!(
        output.contains("changed ") && output.contains("2 modules"),
        "{output}"
    );
    // A file name that would forge an additional line.
    let lock = fs::read(deployment.path("handlers.lock")).unwrap();
    let line = format!("\n{}  evil.wasm", Digest::compute(b"evil"));
    let evil = deployment.path("handlers-wasm").join(format!("a{line}"));
    fs::write(&evil, echo("test.evil", "1")).unwrap();
    for command in [&["handlers", "lock"][..], &["handlers"]] {
        let output = deployment.exits_with(1, command);
        assert!(
            output.contains("a\\u{a}") && output.contains("its name has control characters"),
            "{output}"
        );
        assert!(!output.contains(&line), "{output}");
    }
    assert_eq!(fs::read(deployment.path("handlers.lock")).unwrap(), lock);
    fs::remove_file(evil).unwrap();
    fs::remove_file(deployment.path("handlers-wasm/new.wasm")).unwrap();
    assert!(
        deployment
            .exits_with(0, &["handlers", "lock"])
            .contains("removed ")
    );
    assert!(
        deployment
            .exits_with(1, &["handlers", "lock", "--handlers", "nowhere"])
            .contains("nowhere")
    );
}

#[test]
fn a_key_is_made_once_and_hosts_trust_its_signatures() {
    let deployment = Deployment::new("");
    let trusted = deployment.exits_with(0, &["handlers", "keygen", "key"]);
    assert!(trusted.starts_with("trusted_keys = [\""), "{trusted}");
    assert!(
        deployment
            .exits_with(1, &["handlers", "keygen", "key"])
            .contains("create the key file key")
    );
    fs::write(deployment.path("rouse.toml"), &trusted).unwrap();
    assert!(
        deployment
            .exits_with(1, &["handlers"])
            .contains("no signature")
    );

    let module = "handlers-wasm/echo.wasm";
    let output = deployment.exits_with(0, &["handlers", "sign", "--key", "key", module]);
    assert_eq!(output, "handlers-wasm/echo.wasm.sig\n");
    assert!(
        deployment
            .exits_with(0, &["handlers"])
            .contains("test.echo")
    );

    let chmod = Command::new("chmod")
        .arg("644")
        .arg(deployment.path("key"))
        .status();
    assert!(chmod.unwrap().success());
    let output = deployment.exits_with(1, &["handlers", "sign", "--key", "key", module]);
    assert!(output.contains("chmod 600"), "{output}");
    fs::write(deployment.path("rouse.toml"), "trusted_keys = [\"no key\"]").unwrap();
    assert!(
        deployment
            .exits_with(1, &["handlers"])
            .contains("it is not a key")
    );
    fs::write(deployment.path("rouse.toml"), "pin = \"look\"").unwrap();
    assert!(deployment.exits_with(1, &["handlers"]).contains("lock"));
}
