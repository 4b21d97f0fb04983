//! `rouse wit` writes the contract, for authors in any language.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use wit_parser::Resolve;

use crate::support::{rouse_without_database, scratch};

/// All files in a folder, by their paths relative to it.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(folder).unwrap().to_str().unwrap();
            all.insert(name.to_owned(), fs::read(&path).unwrap());
        }
    }
    all
}

fn contract() -> BTreeMap<String, Vec<u8>> {
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../sdk/wit"))
}

#[test]
fn the_contract_is_written_completely_and_parses_as_one_package() {
    let folder = scratch("wit");
    let ran = rouse_without_database(&["wit"], &folder);
    ran.exits(0)
        .prints("wit: 7 files written, 0 unchanged; the world is rouse:handler/module");
    assert_eq!(files(&folder.join("wit")), contract());

    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_dir(folder.join("wit")).expect("a package");
    resolve
        .select_world(&[package], Some("module"))
        .expect("the world");

    let ran = rouse_without_database(&["wit", "wit"], &folder);
    ran.exits(0).prints("wit: 0 files written, 7 unchanged");
}

#[test]
fn changed_files_are_replaced_only_with_force_and_other_files_stay() {
    let folder = scratch("wit");
    let contract_dir = folder.join("deep/contract");
    rouse_without_database(&["wit", "deep/contract"], &folder).exits(0);
    fs::write(contract_dir.join("deps/io/poll.wit"), "changed").unwrap();
    fs::remove_file(contract_dir.join("rouse.wit")).unwrap();
    fs::write(contract_dir.join("notes.md"), "mine").unwrap();

    let ran = rouse_without_database(&["wit", "deep/contract"], &folder);
    ran.exits(1)
        .prints("deep/contract/deps/io/poll.wit exists and differs")
        .prints("--force");
    assert!(
        !contract_dir.join("rouse.wit").exists(),
        "nothing is written"
    );

    let ran = rouse_without_database(&["wit", "deep/contract", "--force"], &folder);
    ran.exits(0).prints("2 files written, 5 unchanged");
    let mut written = files(&contract_dir);
    assert_eq!(written.remove("notes.md").as_deref(), Some(&b"mine"[..]));
    assert_eq!(written, contract());
}

#[test]
fn a_folder_that_cannot_be_written_is_named() {
    let folder = scratch("wit");
    fs::write(folder.join("file"), "").unwrap();
    let ran = rouse_without_database(&["wit", "file/wit"], &folder);
    ran.exits(1).prints("read file/wit/rouse.wit");
    std::os::unix::fs::symlink("/dev/null/nowhere", folder.join("link")).unwrap();
    let ran = rouse_without_database(&["wit", "link"], &folder);
    ran.exits(1).prints("link");
}

#[test]
fn its_help_explains_how_to_use_the_contract() {
    let ran = rouse_without_database(&["wit", "--help"], &scratch("wit"));
    insta::assert_snapshot!(ran.exits(0).stdout);
}
