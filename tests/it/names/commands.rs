//! Commands that show the owners of names and print the lines that bind them.

use std::fs;

use serde_json::{Value, json};

use super::lines;
use crate::sandbox_guest::echo;
use crate::support::{folder_of, rouse_without_database, show_handler};

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
    listed.prints("refused 0.wasm: it has the handler `mail.send`, which mail.wasm had");
    listed.prints("    [handlers.\"mail.send\"]\n    module = \"mail.wasm\"\n");

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
            |warning| warning.contains("[handlers.\"mail.*\"] grants secrets without naming")
        ),
        "{listed}"
    );

    fs::remove_file(folder.join("handlers-wasm/0.wasm")).unwrap();
    let shown = show_handler("mail.send", &folder, &[]);
    shown.exits(0);
    shown.prints("withheld, because its table is not bound to a module");
    shown.prints("[handlers.\"mail.*\"]\nmodule = \"mail.wasm\"");
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

    // If the table exists, the remark mentions it; then the grant is added.
    let bound = pasted.replace(
        "[[handlers.\"mail.*\".secrets]]",
        "[handlers.\"mail.*\"]\nmodule = \"mail.wasm\"\n[[handlers.\"mail.*\".secrets]]",
    );
    fs::write(folder.join("rouse.toml"), bound).unwrap();
    let shown = show_handler("mail.send", &folder, &["--json"]);
    let manifest: Value = shown.exits(0).json()["manifest"].clone();
    assert_eq!(manifest["withheld"], json!([]));
    assert_eq!(manifest["granted"], json!(["sign:KEY"]));
}
