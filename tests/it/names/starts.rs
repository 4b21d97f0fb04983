//! Names while a host starts and its modules are still being loaded.

use std::fs;
use std::path::PathBuf;

use rouse::sandbox::{Catalog, HandlerSet, Sandbox, Settings};

use super::{Machine, server, until_refused, with_grants};
use crate::compiling::{compiler_that, compiler_that_waits};
use crate::sandbox_guest::echo;
use crate::support::worker::TIMEOUT;
use crate::support::{rouse_binary, scratch};

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
        ("other users can write to it", &|| mode(0o666)),
        ("it is a link", &|| {
            fs::rename(&kept, &elsewhere).unwrap();
            std::os::unix::fs::symlink(&elsewhere, &kept).unwrap();
        }),
        ("larger than", &|| {
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

/// A machine on which `mail.send` has grants and two modules are compiled at once. Its compiler waits with modules of
/// version slow-1 until the returned file exists.
fn with_slow_compiler() -> (Machine, PathBuf) {
    let (compiler, unblock) = compiler_that_waits("slow-1");
    let mut machine = Machine::new(with_grants("mail.send"));
    machine.settings.compiler = Some(compiler);
    machine.settings.compilations_max = 2;
    (machine, unblock)
}

#[tokio::test]
async fn on_a_first_start_a_name_with_files_or_state_waits_until_all_modules_were_tried() {
    let (machine, unblock) = with_slow_compiler();
    machine.put("0.wasm", echo("mail.send", "evil"));
    machine.put("mail.wasm", echo("mail.send", "slow-1"));
    machine.put("other.wasm", echo("test.other", "1"));
    let sandbox = Sandbox::start(machine.settings.clone()).unwrap();
    let catalog = Catalog::start(sandbox, &machine.folder).await.unwrap();
    // The last of the three is loaded, and so is the first; the second may also have the name.
    let are_loaded =
        |set: &HandlerSet| set.get("test.other").is_some() && set.loading == ["mail.wasm"];
    let set = catalog.until(are_loaded).await;
    assert_eq!(set.names(), ["test.other"]);
    fs::write(unblock, "").unwrap();
    until_refused(
        &catalog,
        "mail.wasm",
        "which 0.wasm had when a host started",
    )
    .await;
    assert_eq!(catalog.current().names(), ["test.other"]);
}

/// The last file that is still being compiled is removed: all others have been tried.
#[tokio::test]
async fn a_start_ends_when_the_last_file_being_loaded_is_removed() {
    let (machine, unblock) = with_slow_compiler();
    machine.put("0.wasm", echo("test.other", "slow-1"));
    machine.put("mail.wasm", echo("mail.send", "1"));
    machine.put("quick.wasm", echo("test.quick", "1"));
    let sandbox = Sandbox::start(machine.settings.clone()).unwrap();
    let catalog = Catalog::start(sandbox, &machine.folder).await.unwrap();
    let set = catalog.until(|set| set.get("test.quick").is_some()).await;
    assert_eq!(set.names(), ["test.quick"]);
    machine.remove("0.wasm");
    catalog.until(|set| set.loading.is_empty()).await;
    fs::write(unblock, "").unwrap();
    let serves = catalog.until(|set| set.get("mail.send").is_some());
    let served = tokio::time::timeout(TIMEOUT, serves).await;
    served.expect("mail.send is served once loading is over");
}

/// A file that failed to load for a transient reason may also have the name.
#[tokio::test]
async fn a_start_is_not_over_while_a_file_awaits_a_retry() {
    let mut machine = Machine::new(with_grants("mail.send"));
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
    until_refused(&catalog, "mail.wasm", "it is retried after 60 s").await;
    catalog.until(|set| set.get("test.other").is_some()).await;
    assert_eq!(catalog.current().names(), ["test.other"]);
    // The file is replaced by one that compiles before the start has ended.
    machine.put("mail.wasm", echo("mail.send", "1"));
    until_refused(
        &catalog,
        "mail.wasm",
        "which 0.wasm had when a host started",
    )
    .await;
    assert_eq!(catalog.current().names(), ["test.other"]);
}
