//! Ownership of handler names: a module that declares another module's name gets none of that name's grants, at any
//! time.

mod commands;
mod grants;
mod starts;

use std::fs;
use std::path::PathBuf;

use rouse::sandbox::{
    Catalog, Grant, Grants, HandlerSet, Limits, Mode, ModuleBinding, Sandbox, Secret, SecretGrant,
    Secrets, Settings, SigningKey, StateQuota,
};
use serde_json::{Value, json};

use crate::sandbox_guest::{bound, echo, guest, refusal, returns, version};
use crate::support::worker::{TIMEOUT, ended, enqueue};
use crate::support::{Host, TestDb, command, folder_of, rouse_binary, scratch};

/// A folder of modules, and the state that a host keeps between starts.
struct Machine {
    folder: PathBuf,
    settings: Settings,
}

impl Machine {
    fn new(settings: Settings) -> Self {
        let settings = Settings {
            attempts_max: 2,
            limits: Limits {
                memory_bytes: 1 << 20,
                ..Limits::default()
            },
            compiler: Some(rouse_binary()),
            cache_dir: Some(scratch("cache").join("code")),
            ..settings
        };
        let folder = scratch("handlers");
        Self { folder, settings }
    }

    fn put(&self, file: &str, bytes: impl AsRef<[u8]>) {
        let temporary = self.folder.join(format!(".{file}"));
        fs::write(&temporary, bytes).unwrap();
        fs::rename(temporary, self.folder.join(file)).unwrap();
    }

    fn remove(&self, file: &str) {
        fs::remove_file(self.folder.join(file)).unwrap();
    }

    /// The file in which a host keeps the owners of names.
    fn kept_names(&self) -> PathBuf {
        let dir = fs::read_dir(self.settings.cache_dir.as_ref().unwrap()).unwrap();
        let mut files = dir.map(|file| file.unwrap().path());
        let is_json = |file: &PathBuf| file.extension().is_some_and(|end| end == "json");
        files.find(is_json).expect("the kept names")
    }

    /// A host that has loaded the folder.
    async fn start(&self) -> Catalog {
        let sandbox = Sandbox::start(self.settings.clone()).expect("a sandbox");
        let catalog = Catalog::start(sandbox, &self.folder).await.unwrap();
        catalog.tried().await;
        catalog
    }
}

/// Returns the file that serves a handler.
fn server(set: &HandlerSet, handler: &str) -> Option<String> {
    Some(set.get(handler)?.module.file.clone())
}

/// Waits until a file is refused for this reason, and returns the lines that would allow it.
async fn until_refused(catalog: &Catalog, file: &str, why: &str) -> String {
    let is_refused =
        |set: &HandlerSet| refusal(set, file).is_some_and(|reason| reason.contains(why));
    let waits = catalog.until(is_refused);
    let set = tokio::time::timeout(TIMEOUT, waits).await;
    let set = set.unwrap_or_else(|_| panic!("{file}, {why}: {:?}", catalog.current().refused));
    let refused = set.refused.iter().find(|refused| refused.file == file);
    refused.and_then(|it| it.lines.clone()).unwrap_or_default()
}

fn lines(handler: &str, file: &str) -> String {
    format!("[handlers.\"{handler}\"]\nmodule = \"{file}\"")
}

#[tokio::test]
async fn after_a_restart_the_first_file_by_name_cannot_take_anothers_handler_name() {
    let machine = Machine::new(Settings::default());
    machine.put("mail.wasm", echo("mail.send", "1"));
    drop(machine.start().await);
    machine.put("0.wasm", echo("mail.send", "evil"));
    for _ in 0..2 {
        let catalog = machine.start().await;
        let set = catalog.current();
        assert_eq!(server(&set, "mail.send").as_deref(), Some("mail.wasm"));
        let printed = until_refused(&catalog, "0.wasm", "which belongs to mail.wasm").await;
        assert_eq!(printed, lines("mail.send", "0.wasm"));
    }
}

#[tokio::test]
async fn a_first_start_gives_a_name_declared_by_two_files_to_neither() {
    let mut machine = Machine::new(Settings::default());
    machine.settings.cache_dir = None;
    let two = r#"{"handlers":[{"name":"mail.read"},{"name":"mail.send"}]}"#;
    machine.put("0.wasm", echo("mail.send", "evil"));
    machine.put("mail.wasm", guest(two, "unreachable"));
    let catalog = machine.start().await;
    let set = catalog.current();
    // The module's other handler is served.
    assert_eq!(set.names(), ["mail.read"]);
    for (file, other) in [("0.wasm", "mail.wasm"), ("mail.wasm", "0.wasm")] {
        let printed = until_refused(
            &catalog,
            file,
            &format!("which {other} had when a host started"),
        )
        .await;
        assert_eq!(printed, lines("mail.send", file));
    }
    // Neither file gets the name while the other is missing for a moment: it may be in an upgrade.
    machine.remove("mail.wasm");
    catalog.until(|set| set.names().is_empty()).await;
    machine.put("mail.wasm", echo("mail.send", "2"));
    until_refused(
        &catalog,
        "mail.wasm",
        "which 0.wasm had when a host started",
    )
    .await;
    assert!(catalog.current().names().is_empty());

    // The printed lines resolve the conflict.
    let bound = Machine {
        settings: Settings {
            modules: bound("mail.send", "mail.wasm"),
            ..machine.settings.clone()
        },
        folder: machine.folder.clone(),
    };
    let catalog = bound.start().await;
    let set = catalog.current();
    assert_eq!(server(&set, "mail.send").as_deref(), Some("mail.wasm"));
    until_refused(&catalog, "0.wasm", "binds to mail.wasm").await;
}

/// Even if the host remembers that another file owned the name, and that file still exists.
#[tokio::test]
async fn a_bound_name_is_served_although_another_file_owned_it() {
    let machine = Machine::new(Settings::default());
    machine.put("0.wasm", echo("mail.send", "evil"));
    drop(machine.start().await);
    machine.put("mail.wasm", echo("mail.send", "1"));
    let bound = Machine {
        settings: Settings {
            modules: bound("mail.send", "mail.wasm"),
            ..machine.settings.clone()
        },
        folder: machine.folder.clone(),
    };
    for _ in 0..2 {
        let catalog = bound.start().await;
        until_refused(&catalog, "0.wasm", "binds to mail.wasm").await;
        let set = catalog.current();
        assert_eq!(server(&set, "mail.send").as_deref(), Some("mail.wasm"));
    }
}

#[tokio::test]
async fn a_name_stays_reserved_for_its_file_during_an_upgrade_by_rm_and_cp() {
    let machine = Machine::new(Settings::default());
    machine.put("mail.wasm", echo("mail.send", "1"));
    let catalog = machine.start().await;
    machine.remove("mail.wasm");
    catalog.until(|set| set.names().is_empty()).await;
    machine.put("0.wasm", echo("mail.send", "evil"));
    let gone = "which belongs to mail.wasm, a file that is missing";
    let printed = until_refused(&catalog, "0.wasm", gone).await;
    assert_eq!(printed, lines("mail.send", "0.wasm"));
    // Restarting the host now does not help either.
    drop(catalog);
    let catalog = machine.start().await;
    until_refused(&catalog, "0.wasm", gone).await;
    assert!(catalog.current().names().is_empty());

    machine.put("mail.wasm", echo("mail.send", "2"));
    let is_back = |set: &HandlerSet| version(set, "mail.send").as_deref() == Some("2");
    let set = catalog.until(is_back).await;
    assert_eq!(server(&set, "mail.send").as_deref(), Some("mail.wasm"));
    until_refused(&catalog, "0.wasm", "which belongs to mail.wasm;").await;
}

#[tokio::test]
async fn a_copy_serves_for_a_missing_file_without_becoming_its_owner() {
    let machine = Machine::new(Settings::default());
    let module = echo("mail.send", "1");
    machine.put("mail.wasm", &module);
    let catalog = machine.start().await;
    machine.put("0.wasm", &module);
    until_refused(&catalog, "0.wasm", "which belongs to mail.wasm").await;
    machine.remove("mail.wasm");
    let set = catalog
        .until(|set| server(set, "mail.send").as_deref() == Some("0.wasm"))
        .await;
    assert_eq!(set.get("mail.send").unwrap().owner, "mail.wasm");

    // Different content under that file name is not the owner's.
    machine.put("0.wasm", echo("mail.send", "evil"));
    until_refused(&catalog, "0.wasm", "mail.wasm, a file that is missing").await;
    assert_eq!(
        version(&catalog.current(), "mail.send").as_deref(),
        Some("1")
    );
    machine.put("mail.wasm", echo("mail.send", "2"));
    let set = catalog
        .until(|set| version(set, "mail.send").as_deref() == Some("2"))
        .await;
    assert_eq!(server(&set, "mail.send").as_deref(), Some("mail.wasm"));
    assert_eq!(set.get("mail.send").unwrap().owner, "mail.wasm");
}

/// A version that adds a name, followed by the version before it: the name stays reserved for its file.
#[tokio::test]
async fn a_name_dropped_by_a_version_stays_with_its_file() {
    let machine = Machine::new(Settings::default());
    let two = r#"{"handlers":[{"name":"mail.read"},{"name":"mail.send"}]}"#;
    machine.put("mail.wasm", guest(two, "unreachable"));
    let catalog = machine.start().await;
    machine.put("0.wasm", echo("mail.send", "evil"));
    until_refused(&catalog, "0.wasm", "which belongs to mail.wasm").await;
    machine.put("mail.wasm", echo("mail.read", "1"));
    let dropped = "which belongs to mail.wasm, a file whose current version lacks it";
    let printed = until_refused(&catalog, "0.wasm", dropped).await;
    assert_eq!(printed, lines("mail.send", "0.wasm"));
    // Restarting the host now does not help either.
    drop(catalog);
    let catalog = machine.start().await;
    until_refused(&catalog, "0.wasm", dropped).await;
    assert_eq!(catalog.current().names(), ["mail.read"]);
    machine.put("mail.wasm", guest(two, "unreachable"));
    let set = catalog.until(|set| set.get("mail.send").is_some()).await;
    assert_eq!(server(&set, "mail.send").as_deref(), Some("mail.wasm"));

    // A table moves the name to another file.
    drop(catalog);
    machine.put("mail.wasm", echo("mail.read", "1"));
    let bound = Machine {
        settings: Settings {
            modules: bound("mail.send", "0.wasm"),
            ..machine.settings.clone()
        },
        folder: machine.folder.clone(),
    };
    let set = bound.start().await.current();
    assert_eq!(server(&set, "mail.send").as_deref(), Some("0.wasm"));
}

/// The handlers folder is a link to the current release.
#[tokio::test]
async fn a_new_release_behind_a_linked_folder_keeps_the_names() {
    let mut machine = Machine::new(Settings::default());
    let releases = scratch("releases");
    machine.folder = releases.join("modules");
    for (release, module) in [
        ("1/mail.wasm", echo("mail.send", "1")),
        ("2/0.wasm", echo("mail.send", "evil")),
    ] {
        fs::create_dir_all(releases.join(release).parent().unwrap()).unwrap();
        fs::write(releases.join(release), module).unwrap();
    }
    std::os::unix::fs::symlink("1", &machine.folder).unwrap();
    drop(machine.start().await);
    fs::remove_file(&machine.folder).unwrap();
    std::os::unix::fs::symlink("2", &machine.folder).unwrap();
    // Regardless of how the path is spelled.
    machine.folder = releases.join("./modules/");
    let catalog = machine.start().await;
    until_refused(&catalog, "0.wasm", "mail.wasm, a file that is missing").await;
    assert!(catalog.current().names().is_empty());
}

/// Untrusted modules with more names than a host keeps.
#[tokio::test]
async fn names_beyond_the_maximum_are_refused_and_known_ones_are_kept() {
    let machine = Machine::new(Settings::default());
    machine.put("mail.wasm", echo("mail.send", "1"));
    let catalog = machine.start().await;
    let put = |file: usize| {
        // Together with `mail.send`, the first twenty of these files have exactly as many names as a host keeps.
        let count = if file == 0 { 999 } else { 1_000 };
        let names: Vec<Value> = (0..count)
            .map(|n| json!({ "name": format!("f{file}.n{n}") }))
            .collect();
        let manifest = json!({ "handlers": names }).to_string();
        machine.put(&format!("f{file:02}.wasm"), guest(&manifest, "unreachable"));
    };
    // A folder cannot serve as many handlers at a time as a host keeps names.
    let until = async |serves: usize, refused: usize| {
        let is_complete =
            |set: &HandlerSet| set.handlers.len() == serves && set.refused.len() == refused;
        tokio::time::timeout(TIMEOUT * 5, catalog.until(is_complete)).await
    };
    for files in [0..8, 8..16] {
        let served = 1 + files
            .clone()
            .map(|file| if file == 0 { 999 } else { 1_000 })
            .sum::<usize>();
        files.clone().for_each(put);
        until(served, 0).await.expect("they are served");
        files.for_each(|file| machine.remove(&format!("f{file:02}.wasm")));
        until(1, 0).await.expect("they are gone");
    }
    (16..21).for_each(put);
    let set = until(4_001, 1).await;
    let set = set.unwrap_or_else(|_| panic!("{:?}", catalog.current().refused));
    assert!(
        set.refused[0].why.contains("20000 recorded names"),
        "{:?}",
        set.refused
    );
    let lines = set.refused[0].lines.as_deref().unwrap_or_default();
    assert!(lines.contains("\nmodule = \"f"), "{lines}");
    drop(catalog);

    // No file takes another's name even when the owner's file was removed.
    machine.remove("mail.wasm");
    machine.put("0.wasm", echo("mail.send", "evil"));
    let bound = Machine {
        settings: Settings {
            modules: bound("new.one", "new.wasm"),
            ..machine.settings.clone()
        },
        folder: machine.folder.clone(),
    };
    machine.put("new.wasm", echo("new.one", "1"));
    machine.put("new-2.wasm", echo("new.two", "1"));
    let catalog = bound.start().await;
    until_refused(&catalog, "0.wasm", "mail.wasm, a file that is missing").await;
    until_refused(&catalog, "new-2.wasm", "20000 recorded names").await;
    // A bound name is served anyway.
    let set = catalog.current();
    assert_eq!(server(&set, "new.one").as_deref(), Some("new.wasm"));
}

#[tokio::test]
async fn in_development_a_renamed_and_rebuilt_file_gets_its_names_at_once() {
    let machine = Machine::new(Settings {
        is_dev: true,
        ..Settings::default()
    });
    machine.put("mail.wasm", echo("mail.send", "1"));
    let catalog = machine.start().await;
    machine.remove("mail.wasm");
    machine.put("post.wasm", echo("mail.send", "2"));
    catalog
        .until(|set| server(set, "mail.send").as_deref() == Some("post.wasm"))
        .await;
    catalog.until(|set| set.refused.is_empty()).await;
}

/// A developer's session uses the folder and the cache directory of a running host.
#[tokio::test]
async fn modules_served_in_a_development_session_own_nothing_afterwards() {
    let machine = Machine::new(Settings::default());
    machine.put("mail.wasm", echo("mail.send", "1"));
    drop(machine.start().await);
    machine.remove("mail.wasm");
    machine.put("0.wasm", echo("mail.send", "evil"));
    let developer = Machine {
        settings: Settings {
            is_dev: true,
            ..machine.settings.clone()
        },
        folder: machine.folder.clone(),
    };
    let catalog = developer.start().await;
    assert_eq!(
        server(&catalog.current(), "mail.send").as_deref(),
        Some("0.wasm")
    );
    drop(catalog);
    let catalog = machine.start().await;
    until_refused(&catalog, "0.wasm", "belongs to mail.wasm").await;
    machine.put("mail.wasm", echo("mail.send", "2"));
    catalog
        .until(|set| server(set, "mail.send").as_deref() == Some("mail.wasm"))
        .await;
}

/// Secrets, a directory and state for handlers of this name or pattern.
fn with_grants(table: &str) -> Settings {
    Settings {
        secrets: Secrets([("KEY".into(), Secret::new("correct horse").unwrap())].into()),
        secret_grants: vec![SecretGrant {
            handler: table.into(),
            name: "KEY".into(),
            hosts: vec!["mail.example".parse().expect("a host")],
            headers: vec!["authorization".into()],
            body: false,
            sign: true,
        }],
        grants: Grants(vec![Grant {
            handler: table.into(),
            dir: scratch("data"),
            at: "/data".into(),
            mode: Mode::ReadWrite,
            quota: None,
        }]),
        state: [(table.to_owned(), StateQuota::default())].into(),
        ..Settings::default()
    }
}

/// The grants of a handler, and the grants that are withheld from it.
fn grants_of(set: &HandlerSet, handler: &str) -> (Vec<&'static str>, Vec<&'static str>) {
    let handler = set.get(handler).expect("a served handler");
    let withheld = handler.withheld.iter().map(|it| it.what);
    (handler.granted(), withheld.collect())
}

const ALL_GRANTS: [&str; 4] = ["files", "secrets", "sign", "state"];

#[tokio::test]
async fn an_older_signed_module_is_not_served_again() {
    let key: SigningKey = SigningKey::random().parse().unwrap();
    let machine = Machine::new(Settings {
        modules: [("mail.*".to_owned(), vec![ModuleBinding::Key(key.public())])].into(),
        versions_min: [("mail.send".to_owned(), "2.0.0".parse().unwrap())].into(),
        ..with_grants("mail.*")
    });
    let [old, new] = ["1.9.0", "2.0.0"].map(|version| echo("mail.send", version));
    machine.put("mail-2.wasm.sig", key.sign(&new));
    machine.put("mail-2.wasm", &new);
    let catalog = machine.start().await;
    assert_eq!(grants_of(&catalog.current(), "mail.send").0, ALL_GRANTS);

    machine.put("mail-2.wasm.sig", key.sign(&old));
    machine.put("mail-2.wasm", &old);
    until_refused(
        &catalog,
        "mail-2.wasm",
        "has the version 1.9.0, and version_min",
    )
    .await;
    let set = catalog.current();
    assert_eq!(version(&set, "mail.send").as_deref(), Some("2.0.0"));
    // The same holds for another file, and for a module without a signature.
    machine.put("0.wasm.sig", key.sign(&old));
    machine.put("0.wasm", &old);
    until_refused(&catalog, "0.wasm", "version_min").await;
    machine.put("1.wasm", echo("mail.send", "3.0.0"));
    // The refusal requires the signature, not a weaker binding.
    let unsigned = "1.wasm.sig, a signature by that key, is missing or does not match the file";
    let printed = until_refused(&catalog, "1.wasm", unsigned).await;
    assert_eq!(printed, "");

    // A name that is bound to a key follows the key to another file.
    let newest = echo("mail.send", "2.1.0");
    machine.remove("mail-2.wasm");
    catalog.until(|set| set.names().is_empty()).await;
    machine.put("mail-3.wasm.sig", key.sign(&newest));
    machine.put("mail-3.wasm", &newest);
    let set = catalog
        .until(|set| version(set, "mail.send").as_deref() == Some("2.1.0"))
        .await;
    assert_eq!(grants_of(&set, "mail.send").0, ALL_GRANTS);
}

#[tokio::test]
async fn a_restarted_host_does_not_give_jobs_to_a_module_that_declares_anothers_name() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder_of("", &[("mail.wasm", returns("mail.send", "\"mail\""))]);
    let url = db.url();
    let serve = || {
        let mut command = command(&url, &["serve", "--http", "off"], &folder);
        command.env("ROUSE_CACHE_DIR", folder.join("cache"));
        Host::spawn(command)
    };
    let host = serve();
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    let put = |file: &str, module: Vec<u8>| {
        fs::write(folder.join("handlers-wasm").join(file), module).unwrap();
    };
    put("0.wasm", returns("mail.send", "\"evil\""));
    host.line(TIMEOUT, |line| {
        line.contains("0.wasm") && line.contains("put module = \"0.wasm\" under")
    });
    host.kill();
    let job = enqueue(&client, "mail.send", json!({})).await;
    let _host = serve();
    assert_eq!(ended(&client, job).await.result, Some(json!("mail")));
}
