//! Grants that depend on the owner of a name: secrets, directories, state.

use std::collections::BTreeMap;
use std::fs;

use rouse::sandbox::{ModuleBinding, Settings};

use super::{ALL_GRANTS, Machine, grants_of, lines, until_refused, with_grants};
use crate::sandbox_guest::{bound, echo};
use crate::support::{folder_of, rouse_without_database};

#[tokio::test]
async fn a_pattern_grants_secrets_state_and_directories_only_to_bound_modules() {
    let nothing: [&str; 0] = [];
    for table in ["mail.*", "*"] {
        // The grants are withheld even if no other module claims the name.
        let machine = Machine::new(with_grants(table));
        machine.put("evil.wasm", echo("mail.evil", "1"));
        machine.put("mail.wasm", echo("mail.send", "1"));
        let set = machine.start().await.current();
        for name in ["mail.evil", "mail.send"] {
            let (granted, withheld) = grants_of(&set, name);
            assert_eq!(granted, nothing, "{table} {name}");
            assert_eq!(withheld, ["dirs", "secrets", "state"], "{table} {name}");
        }
        let withheld = &set.get("mail.send").unwrap().withheld;
        assert_eq!(withheld[0].lines, lines(table, "mail.wasm"));

        // With a binding, the grants belong to the module, and so do the names.
        let machine = Machine::new(Settings {
            modules: bound(table, "mail.wasm"),
            ..with_grants(table)
        });
        machine.put("evil.wasm", echo("mail.evil", "1"));
        machine.put("mail.wasm", echo("mail.send", "1"));
        let catalog = machine.start().await;
        let set = catalog.current();
        assert_eq!(
            grants_of(&set, "mail.send"),
            (ALL_GRANTS.into(), vec![]),
            "{table}"
        );
        assert_eq!(set.names(), ["mail.send"], "{table}");
        let printed = until_refused(&catalog, "evil.wasm", "binds to mail.wasm").await;
        assert_eq!(printed, lines("mail.evil", "evil.wasm"));
    }
    // A table for all names that is bound to one module grants nothing to another, even if the operator binds names to
    // the other one.
    let modules: BTreeMap<String, Vec<ModuleBinding>> =
        [bound("*", "mail.wasm"), bound("guest.*", "guest.wasm")]
            .into_iter()
            .flatten()
            .collect();
    let machine = Machine::new(Settings {
        modules,
        ..with_grants("*")
    });
    machine.put("guest.wasm", echo("guest.run", "1"));
    let set = machine.start().await.current();
    assert_eq!(grants_of(&set, "guest.run"), (vec![], vec![]));
}

#[tokio::test]
async fn secrets_of_one_handler_need_a_binding_except_in_development() {
    let machine = Machine::new(with_grants("mail.send"));
    machine.put("mail.wasm", echo("mail.send", "1"));
    let set = machine.start().await.current();
    assert_eq!(
        grants_of(&set, "mail.send"),
        (vec!["files", "state"], vec!["secrets"])
    );
    for settings in [
        Settings {
            is_dev: true,
            ..with_grants("mail.send")
        },
        Settings {
            modules: bound("mail.send", "mail.wasm"),
            ..with_grants("mail.send")
        },
        Settings {
            modules: bound("mail.*", "mail.wasm"),
            ..with_grants("mail.send")
        },
    ] {
        let machine = Machine::new(settings);
        machine.put("mail.wasm", echo("mail.send", "1"));
        let set = machine.start().await.current();
        assert_eq!(grants_of(&set, "mail.send"), (ALL_GRANTS.into(), vec![]));
        assert!(set.get("mail.send").unwrap().bound_by.is_some() != machine.settings.is_dev);
    }
}

#[tokio::test]
async fn a_job_that_is_denied_a_withheld_secret_or_state_gets_the_lines_that_bind_its_module() {
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
        ran.exits(1).prints("so no module gets it");
        ran.prints(&lines(table, "test_guests.wasm"));
    }
}
