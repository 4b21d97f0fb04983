//! Granted directories.

use std::path::{Path, PathBuf};

use super::read;

#[test]
fn directories_are_relative_to_the_file() {
    let file = read(
        "[handlers.\"image.*\"]\nlease = \"30s\"\ndirs = [{ dir = \"photos\", at = \"/in\" }, { dir = \"/out\", at = \"/out\", mode = \"read-write\" }]",
    )
    .unwrap();
    let sandbox = file.sandbox(Path::new("/etc/rouse"), 4);
    let dirs: Vec<_> = sandbox
        .grants
        .0
        .iter()
        .map(|grant| grant.dir.clone())
        .collect();
    assert_eq!(
        dirs,
        [PathBuf::from("/etc/rouse/photos"), PathBuf::from("/out")]
    );
}

#[test]
fn a_directory_has_one_quota_and_a_handler_sees_one_directory_at_a_path() {
    let folder = tempfile::tempdir().unwrap();
    let at = |of: &str| folder.path().join(of).display().to_string();
    std::fs::create_dir(at("one")).unwrap();
    std::os::unix::fs::symlink(at("one"), at("same")).unwrap();
    let granted = |handler: &str, dir: &str, at: &str, more: &str| {
        format!("[[handlers.\"{handler}\".dirs]]\ndir = \"{dir}\"\nat = \"{at}\"\n{more}\n")
    };
    let one = |handler: &str, at_guest: &str, quota: &str| {
        let more = format!("mode = \"read-write\"\n{quota}");
        granted(handler, &at("one"), at_guest, &more)
    };
    let same = granted(
        "b",
        &at("same"),
        "/else",
        "mode = \"read-write\"\nbytes_max = 7",
    );

    let error = read(&(one("a.*", "/out", "bytes_max = 8") + &same)).unwrap_err();
    for part in [
        "handlers.\"a.*\".dirs at /out",
        "handlers.\"b\".dirs at /else",
        "quota",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(read(&(one("a", "/out", "") + &same)).is_err());
    assert!(read(&(one("a", "/out", "bytes_max = 7") + &same)).is_ok());
    // A read-only entry has no quota.
    let reads = granted("a", &at("one"), "/in", "");
    assert!(read(&(reads.clone() + &same)).is_ok());

    let two = granted("*", "two", "/in", "");
    let error = read(&(reads.clone() + &two)).unwrap_err();
    for part in ["handlers.\"*\".dirs", "handlers.\"a\".dirs", "/in"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(read(&(granted("a", "two", "/in", "") + &reads)).is_err());
    let writes = granted("*", &at("one"), "/in", "mode = \"read-write\"");
    assert!(read(&(reads.clone() + &writes)).is_err());
    let as_all = granted("*", &at("same"), "/in", "");
    assert!(read(&(reads.clone() + &as_all)).is_ok(), "the same twice");
    assert!(read(&(granted("b", "two", "/in", "") + &reads)).is_ok());
}

#[test]
fn no_directory_lies_in_another_that_handlers_may_change() {
    let folder = tempfile::tempdir().unwrap();
    let at = |of: &str| folder.path().join(of).display().to_string();
    std::fs::create_dir_all(at("work/in")).unwrap();
    std::os::unix::fs::symlink("/etc", at("work/link")).unwrap();
    let granted = |handler: &str, dir: &str, path: &str, mode: &str| {
        let dir = at(dir);
        format!(
            "[[handlers.\"{handler}\".dirs]]\ndir = \"{dir}\"\nat = \"{path}\"\nmode = \"{mode}\"\n"
        )
    };
    let outer = granted("a", "work", "/work", "read-write");
    for beneath in ["work/in", "work/later", "work/in/..", "work/link"] {
        for handler in ["a", "b"] {
            for mode in ["read", "read-write"] {
                let inner = granted(handler, beneath, "/in", mode);
                let error = read(&(outer.clone() + &inner)).unwrap_err();
                for part in [
                    &at("work"),
                    &at(beneath),
                    "at /work",
                    "at /in",
                    "do not contain",
                ] {
                    assert!(error.contains(part), "{part}: {error}");
                }
                // In either order.
                let error = read(&(inner + &granted("z", "work", "/work", "read-write")));
                assert!(error.unwrap_err().contains("do not contain"), "{beneath}");
            }
        }
    }
    let same = granted("b", "work", "/else", "read");
    assert!(read(&(outer.clone() + &same)).is_ok(), "the same directory");
    let sibling = granted("b", "workshop", "/in", "read-write");
    assert!(read(&(outer + &sibling)).is_ok());
    let reads = granted("a", "work", "/work", "read");
    let within = granted("b", "work/in", "/in", "read-write");
    assert!(
        read(&(reads + &within)).is_ok(),
        "no handler can replace it"
    );
}

#[test]
fn a_path_that_a_handler_sees_must_be_normalized() {
    let at = |at: &str| {
        read(&format!(
            "[handlers.x]\ndirs = [{{ dir = \"a\", at = {at:?} }}]"
        ))
    };
    for path in ["/", "/out", "/out/a.b", "/..out", "/ö"] {
        assert!(at(path).is_ok(), "{path}");
    }
    for path in [
        "",
        ".",
        "out",
        "../x",
        "//",
        "//out",
        "/out/",
        "/out//in",
        "/./out",
        "/out/../out",
        "/..",
    ] {
        let error = at(path).unwrap_err();
        assert!(error.contains(&format!("at = {path:?}")), "{error}");
        assert!(error.contains("like \"/photos\""), "{error}");
    }
}
