//! Ownership of handler names: a module that declares another module's name gets none of that name's grants, at any time.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use rouse::sandbox::{
    Catalog, Grant, Grants, HandlerSet, Limits, Mode, ModuleBinding, Sandbox, Secret, SecretGrant,
    Secrets, Settings, SigningKey, StateQuota,
};
use serde_json::{Value, json};

use crate::compiling::{compiler_that, compiler_that_waits};
use crate::sandbox_guest::{bound, echo, guest, refusal, returns, version};
use crate::support::worker::{PATIENCE, ended, enqueue};
use crate::support::{
    Host, TestDb, command, folder_of, rouse_binary, rouse_without_database, scratch,
};

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
        let is_it = |file: &PathBuf| file.extension().is_some_and(|end| end == "json");
        files.find(is_it).expect("the kept names")
    }

    /// A host that has loaded the folder.
    async fn start(&self) -> Catalog {
        let sandbox = Sandbox::start(self.settings.clone()).expect("a sandbox");
        let catalog = Catalog::start(sandbox, &self.folder).await.unwrap();
        catalog.tried().await;
        catalog
    }
}

/// The file that serves a handler.
fn server(set: &HandlerSet, handler: &str) -> Option<String> {
    Some(set.get(handler)?.module.file.clone())
}

/// Waits until a file is refused for this reason, and returns the lines that would allow it.
async fn until_refused(catalog: &Catalog, file: &str, why: &str) -> String {
    let is = |set: &HandlerSet| refusal(set, file).is_some_and(|said| said.contains(why));
    let waits = catalog.until(is);
    let set = tokio::time::timeout(PATIENCE, waits).await;
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
        let printed = until_refused(&catalog, file, &format!("as {other} had")).await;
        assert_eq!(printed, lines("mail.send", file));
    }
    // Neither file gets the name while the other is missing for a moment: it may be in an upgrade.
    machine.remove("mail.wasm");
    catalog.until(|set| set.names().is_empty()).await;
    machine.put("mail.wasm", echo("mail.send", "2"));
    until_refused(&catalog, "mail.wasm", "as 0.wasm had").await;
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

/// A host whose kept names cannot be read does not start as if it had none.
#[tokio::test]
async fn a_start_is_refused_if_the_kept_names_are_unusable() {
    let machine = Machine::new(Settings::default());
    machine.put("mail.wasm", echo("mail.send", "1"));
    drop(machine.start().await);
    machine.put("0.wasm", echo("mail.send", "evil"));
    let kept = machine.kept_names();
    let text = fs::read(&kept).unwrap();
    let elsewhere = kept.with_extension("elsewhere");
    let mode = |mode: u32| {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        fs::set_permissions(&kept, mode).unwrap();
    };
    let cases: [(&str, &dyn Fn()); 6] = [
        ("EOF while parsing", &|| fs::write(&kept, "").unwrap()),
        ("EOF while parsing", &|| {
            fs::write(&kept, &text[..text.len() - 1]).unwrap();
        }),
        ("missing field", &|| fs::write(&kept, "{}").unwrap()),
        ("others may write to it", &|| mode(0o666)),
        ("it is a link", &|| {
            fs::rename(&kept, &elsewhere).unwrap();
            std::os::unix::fs::symlink(&elsewhere, &kept).unwrap();
        }),
        ("more than", &|| {
            let file = fs::File::options().write(true).open(&kept).unwrap();
            file.set_len((64 << 20) + 1).unwrap();
        }),
    ];
    for (why, damage) in cases {
        damage();
        let sandbox = Sandbox::start(machine.settings.clone()).unwrap();
        let started = Catalog::start(sandbox, &machine.folder).await;
        let Err(error) = started else {
            panic!(
                "{why}: it starts, and has {:?}",
                machine.start().await.current()
            );
        };
        let printed = format!("{error:#}");
        assert!(printed.contains(why), "{why}: {printed}");
        assert!(printed.contains(&kept.display().to_string()), "{printed}");
        assert!(printed.contains("remove it"), "{printed}");
        fs::remove_file(&kept).unwrap();
        fs::write(&kept, &text).unwrap();
        mode(0o600);
    }
    let set = machine.start().await.current();
    assert_eq!(server(&set, "mail.send").as_deref(), Some("mail.wasm"));
}

/// The handlers folder is a link to the present release.
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
    // However the path is spelled.
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
        // With `mail.send`, the first twenty of these files have as many names as a host keeps.
        let count = if file == 0 { 999 } else { 1_000 };
        let names: Vec<Value> = (0..count)
            .map(|n| json!({ "name": format!("f{file}.n{n}") }))
            .collect();
        let manifest = json!({ "handlers": names }).to_string();
        machine.put(&format!("f{file:02}.wasm"), guest(&manifest, "unreachable"));
    };
    // A folder serves fewer handlers at a time.
    let until = async |serves: usize, refused: usize| {
        let is = |set: &HandlerSet| set.handlers.len() == serves && set.refused.len() == refused;
        tokio::time::timeout(PATIENCE * 5, catalog.until(is)).await
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
        set.refused[0].why.contains("20000 names"),
        "{:?}",
        set.refused
    );
    let lines = set.refused[0].lines.as_deref().unwrap_or_default();
    assert!(lines.contains("\nmodule = \"f"), "{lines}");
    drop(catalog);

    // No file takes another's name even when the owner's file is gone.
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
    until_refused(&catalog, "new-2.wasm", "20000 names").await;
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
fn rich(table: &str) -> Settings {
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
fn has(set: &HandlerSet, handler: &str) -> (Vec<&'static str>, Vec<&'static str>) {
    let handler = set.get(handler).expect("a served handler");
    let withheld = handler.withheld.iter().map(|it| it.what);
    (handler.granted(), withheld.collect())
}

const ALL: [&str; 4] = ["files", "secrets", "sign", "state"];

#[tokio::test]
async fn a_pattern_grants_secrets_state_and_directories_only_to_bound_modules() {
    let nothing: [&str; 0] = [];
    for table in ["mail.*", "*"] {
        // No name conflict is needed for this.
        let machine = Machine::new(rich(table));
        machine.put("evil.wasm", echo("mail.evil", "1"));
        machine.put("mail.wasm", echo("mail.send", "1"));
        let set = machine.start().await.current();
        for name in ["mail.evil", "mail.send"] {
            let (granted, withheld) = has(&set, name);
            assert_eq!(granted, nothing, "{table} {name}");
            assert_eq!(withheld, ["dirs", "secrets", "state"], "{table} {name}");
        }
        let withheld = &set.get("mail.send").unwrap().withheld;
        assert_eq!(withheld[0].lines, lines(table, "mail.wasm"));

        // When bound, the grants belong to the module, and so do the names.
        let machine = Machine::new(Settings {
            modules: bound(table, "mail.wasm"),
            ..rich(table)
        });
        machine.put("evil.wasm", echo("mail.evil", "1"));
        machine.put("mail.wasm", echo("mail.send", "1"));
        let catalog = machine.start().await;
        let set = catalog.current();
        assert_eq!(has(&set, "mail.send"), (ALL.into(), vec![]), "{table}");
        assert_eq!(set.names(), ["mail.send"], "{table}");
        let printed = until_refused(&catalog, "evil.wasm", "binds to mail.wasm").await;
        assert_eq!(printed, lines("mail.evil", "evil.wasm"));
    }
    // A wide table for one module grants nothing to another, even if the operator gives the other one a name.
    let modules: BTreeMap<String, Vec<ModuleBinding>> =
        [bound("*", "mail.wasm"), bound("guest.*", "guest.wasm")]
            .into_iter()
            .flatten()
            .collect();
    let machine = Machine::new(Settings {
        modules,
        ..rich("*")
    });
    machine.put("guest.wasm", echo("guest.run", "1"));
    let set = machine.start().await.current();
    assert_eq!(has(&set, "guest.run"), (vec![], vec![]));
}

#[tokio::test]
async fn secrets_of_one_handler_need_a_binding_except_in_development() {
    let machine = Machine::new(rich("mail.send"));
    machine.put("mail.wasm", echo("mail.send", "1"));
    let set = machine.start().await.current();
    assert_eq!(
        has(&set, "mail.send"),
        (vec!["files", "state"], vec!["secrets"])
    );
    for settings in [
        Settings {
            is_dev: true,
            ..rich("mail.send")
        },
        Settings {
            modules: bound("mail.send", "mail.wasm"),
            ..rich("mail.send")
        },
        Settings {
            modules: bound("mail.*", "mail.wasm"),
            ..rich("mail.send")
        },
    ] {
        let machine = Machine::new(settings);
        machine.put("mail.wasm", echo("mail.send", "1"));
        let set = machine.start().await.current();
        assert_eq!(has(&set, "mail.send"), (ALL.into(), vec![]));
        assert!(set.get("mail.send").unwrap().bound_by.is_some() != machine.settings.is_dev);
    }
}

#[tokio::test]
async fn on_a_first_start_a_name_with_files_or_state_waits_until_all_modules_were_tried() {
    let go_on = scratch("go-on").join("go-on");
    let mut machine = Machine::new(rich("mail.send"));
    machine.settings.compiler = Some(compiler_that_waits("slow-1", &go_on));
    machine.settings.compilations_max = 2;
    machine.put("0.wasm", echo("mail.send", "evil"));
    machine.put("mail.wasm", echo("mail.send", "slow-1"));
    machine.put("other.wasm", echo("test.other", "1"));
    let sandbox = Sandbox::start(machine.settings.clone()).unwrap();
    let catalog = Catalog::start(sandbox, &machine.folder).await.unwrap();
    // The last of the three is loaded, and so is the first; the second may have the name too.
    let set = catalog.until(|set| set.get("test.other").is_some()).await;
    assert_eq!(set.loading, ["mail.wasm"]);
    assert_eq!(set.names(), ["test.other"]);
    fs::write(go_on, "").unwrap();
    until_refused(&catalog, "mail.wasm", "as 0.wasm had").await;
    assert_eq!(catalog.current().names(), ["test.other"]);
}

/// The last file that is still being compiled is removed: all others were tried.
#[tokio::test]
async fn a_start_ends_when_the_last_file_being_loaded_is_removed() {
    let go_on = scratch("go-on").join("go-on");
    let mut machine = Machine::new(rich("mail.send"));
    machine.settings.compiler = Some(compiler_that_waits("slow-1", &go_on));
    machine.settings.compilations_max = 2;
    machine.put("0.wasm", echo("test.other", "slow-1"));
    machine.put("mail.wasm", echo("mail.send", "1"));
    machine.put("quick.wasm", echo("test.quick", "1"));
    let sandbox = Sandbox::start(machine.settings.clone()).unwrap();
    let catalog = Catalog::start(sandbox, &machine.folder).await.unwrap();
    let set = catalog.until(|set| set.get("test.quick").is_some()).await;
    assert_eq!(set.names(), ["test.quick"]);
    machine.remove("0.wasm");
    catalog.until(|set| set.loading.is_empty()).await;
    fs::write(go_on, "").unwrap();
    let serves = catalog.until(|set| set.get("mail.send").is_some());
    let served = tokio::time::timeout(PATIENCE, serves).await;
    served.expect("mail.send is served once loading is over");
}

/// A file that failed to load for a transient reason may have the name too.
#[tokio::test]
async fn a_start_is_not_over_while_a_file_awaits_a_retry() {
    let mut machine = Machine::new(rich("mail.send"));
    machine.settings.compiler = Some(compiler_that(&format!(
        "head -c 16 > {at}.$$.head; head -c $(od -An -tu8 -N8 {at}.$$.head) > {at}.$$.module\n\
         if grep -qa unlucky-1 {at}.$$.module; then exit 3; fi\n\
         cat {at}.$$.head {at}.$$.module > {at}.$$; exec {rouse} \"$@\" < {at}.$$",
        at = scratch("handed-on").join("at").display(),
        rouse = rouse_binary().display(),
    )));
    machine.put("0.wasm", echo("mail.send", "evil"));
    machine.put("mail.wasm", echo("mail.send", "unlucky-1"));
    machine.put("other.wasm", echo("test.other", "1"));
    let catalog = machine.start().await;
    until_refused(&catalog, "mail.wasm", "it is tried again after 60 s").await;
    catalog.until(|set| set.get("test.other").is_some()).await;
    assert_eq!(catalog.current().names(), ["test.other"]);
    // It is replaced by a file that compiles before the start is over.
    machine.put("mail.wasm", echo("mail.send", "1"));
    until_refused(&catalog, "mail.wasm", "as 0.wasm had").await;
    assert_eq!(catalog.current().names(), ["test.other"]);
}

#[tokio::test]
async fn an_older_signed_module_is_not_served_again() {
    let key: SigningKey = SigningKey::random().parse().unwrap();
    let machine = Machine::new(Settings {
        modules: [("mail.*".to_owned(), vec![ModuleBinding::Key(key.public())])].into(),
        versions_min: [("mail.send".to_owned(), "2.0.0".parse().unwrap())].into(),
        ..rich("mail.*")
    });
    let [old, new] = ["1.9.0", "2.0.0"].map(|version| echo("mail.send", version));
    machine.put("mail-2.wasm.sig", key.sign(&new));
    machine.put("mail-2.wasm", &new);
    let catalog = machine.start().await;
    assert_eq!(has(&catalog.current(), "mail.send").0, ALL);

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
    // The refusal asks for the signature, not for a weaker binding.
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
    assert_eq!(has(&set, "mail.send").0, ALL);
}

#[tokio::test]
async fn a_restarted_host_gives_no_job_to_a_module_that_declares_anothers_name() {
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
    host.line(PATIENCE, |line| line.contains("modules loaded"));
    let put = |file: &str, module: Vec<u8>| {
        fs::write(folder.join("handlers-wasm").join(file), module).unwrap();
    };
    put("0.wasm", returns("mail.send", "\"evil\""));
    host.line(PATIENCE, |line| {
        line.contains("0.wasm") && line.contains("put module = \"0.wasm\" under")
    });
    host.kill();
    let job = enqueue(&client, "mail.send", json!({})).await;
    let _host = serve();
    assert_eq!(ended(&client, job).await.result, Some(json!("mail")));
}

#[test]
fn the_commands_show_the_owner_of_a_name_and_the_lines_that_bind_it() {
    let config = "[secrets.KEY]\nfile = \"key\"\n\
                  [[handlers.\"mail.*\".secrets]]\nname = \"KEY\"\nsign = true\n";
    let (mail, evil) = (echo("mail.send", "1"), echo("mail.send", "evil"));
    let folder = folder_of(config, &[("mail.wasm", &mail), ("0.wasm", &evil)]);
    fs::write(folder.join("key"), "correct horse battery").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::set_permissions(folder.join("key"), mode).unwrap();
    let listed = rouse_without_database(&["handlers"], &folder);
    listed.exits(1);
    listed.says("refused 0.wasm: it has the handler `mail.send`, which mail.wasm had");
    listed.says("    [handlers.\"mail.send\"]\n    module = \"mail.wasm\"\n");

    // The lines as printed, appended to the file.
    let pasted = format!("{config}{}\n", lines("mail.send", "mail.wasm"));
    fs::write(folder.join("rouse.toml"), &pasted).unwrap();
    let listed = rouse_without_database(&["handlers", "--json"], &folder);
    let listed = listed.exits(1).json();
    assert_eq!(listed["handlers"][0]["file"], "mail.wasm");
    assert_eq!(
        listed["handlers"][0]["bound_by"],
        "[handlers.\"mail.send\"]"
    );
    assert_eq!(
        listed["refused"][0]["lines"],
        json!(lines("mail.send", "0.wasm"))
    );
    assert!(
        listed["warnings"][0].as_str().is_some_and(
            |said| said.contains("[handlers.\"mail.*\"] grants secrets without naming")
        ),
        "{listed}"
    );

    fs::remove_file(folder.join("handlers-wasm/0.wasm")).unwrap();
    let show = ["handlers", "show", "mail.send", "--folder", "handlers-wasm"];
    let shown = rouse_without_database(&show, &folder);
    shown.exits(0);
    shown.says("withheld, because its table is not bound to a module");
    shown.says("[handlers.\"mail.*\"]\nmodule = \"mail.wasm\"");
    let text = shown.text();
    let row = |key: &str| {
        let mut rows = text
            .lines()
            .filter(|line| line.trim_start().starts_with(key));
        rows.next().unwrap_or_default().to_owned()
    };
    assert!(row("owner").contains("mail.wasm"), "{text}");
    assert!(
        row("bound_by").contains("[handlers.\"mail.send\"]"),
        "{text}"
    );

    // If the table exists, the remark says so; then the grant is added.
    let bound = pasted.replace(
        "[[handlers.\"mail.*\".secrets]]",
        "[handlers.\"mail.*\"]\nmodule = \"mail.wasm\"\n[[handlers.\"mail.*\".secrets]]",
    );
    fs::write(folder.join("rouse.toml"), bound).unwrap();
    let mut json_of = show.to_vec();
    json_of.push("--json");
    let shown = rouse_without_database(&json_of, &folder);
    let manifest: Value = shown.exits(0).json()["manifest"].clone();
    assert_eq!(manifest["withheld"], json!([]));
    assert_eq!(manifest["granted"], json!(["sign:KEY"]));
}

#[tokio::test]
async fn a_job_denied_a_withheld_secret_or_state_gets_the_lines_that_bind_it() {
    let guests = fs::read(crate::http_out::guest_folder().join(crate::http_out::MODULE)).unwrap();
    let config = "[secrets.KEY]\nenv = \"PATH\"\n\
                  [[handlers.\"test.http.*\".secrets]]\nname = \"KEY\"\nsign = true\n\
                  [handlers.\"test.state.*\".state]\n";
    let folder = folder_of(config, &[("test_guests.wasm", guests)]);
    for (handler, payload, table) in [
        (
            "test.http.secret",
            r#"{"secrets": ["KEY"], "requests": []}"#,
            "test.http.*",
        ),
        (
            "test.state.one",
            r#"{"calls": [{"get": "k"}]}"#,
            "test.state.*",
        ),
    ] {
        let ran = rouse_without_database(
            &["invoke", handler, payload, "--handlers", "handlers-wasm"],
            &folder,
        );
        ran.exits(1).says("therefore to none");
        ran.says(&lines(table, "test_guests.wasm"));
    }
}
