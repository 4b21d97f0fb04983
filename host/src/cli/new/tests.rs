use std::process::Command;

use tempfile::TempDir;

use super::*;

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_new_crate_tests_natively_and_builds_a_module_as_it_stands() {
    let parent = TempDir::new().unwrap();
    let folder = new("send-email", parent.path(), None).unwrap();
    assert_eq!(folder, parent.path().join("send-email"));
    assert_eq!(names_in(parent.path()), ["send-email"]);

    // The versions that this repository has locked, which need no network access.
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    fs::copy(repository.join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
    // Kept between runs, in a folder that other tests and builds do not lock.
    let this_test = std::env::current_exe().unwrap();
    let target = this_test.ancestors().nth(3).unwrap().join("new-crate");
    let cargo = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO"))
            .args(arguments)
            .current_dir(&folder)
            .env("CARGO_TARGET_DIR", &target)
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "cargo {arguments:?}: {out}\n{err}");
        out
    };
    let out = cargo(&["test", "--quiet"]);
    assert!(out.contains("1 passed"), "{out}");
    cargo(&["build", "--release", "--target", "wasm32-wasip2"]);
    let module = target.join("wasm32-wasip2/release/send_email.wasm");
    assert!(fs::read(module).unwrap().starts_with(b"\0asm\x0d\0\x01\0"));
}

#[test]
fn the_readme_names_the_file_and_the_handler() {
    let parent = TempDir::new().unwrap();
    let folder = new("send_an-email", parent.path(), None).unwrap();
    let readme = fs::read_to_string(folder.join("README.md")).unwrap();
    assert!(readme.contains("release/send_an_email.wasm"), "{readme}");
    assert!(
        readme.contains("rouse.enqueue('send_an-email', '{\"name\": \"Ada\"}')"),
        "{readme}"
    );
    for (path, _) in FILES {
        let text = fs::read_to_string(folder.join(path)).unwrap();
        assert!(
            !text.contains("{name}") && !text.contains("{sdk}"),
            "{text}"
        );
    }
}

#[test]
fn a_bad_name_is_refused_with_a_good_one() {
    let parent = TempDir::new().unwrap();
    let long = "a".repeat(65);
    let bad = [
        "",
        "Email",
        "1st",
        "-a",
        "a-",
        "a--b",
        "a b",
        "email.send",
        "../a",
        "a/b",
        "é",
        &long,
    ];
    for name in bad {
        let error = new(name, parent.path(), None).unwrap_err().to_string();
        assert!(
            error.contains("for instance `send-email`"),
            "{name}: {error}"
        );
    }
    for name in ["match", "serde", "rouse_sdk", "test"] {
        let error = new(name, parent.path(), None).unwrap_err().to_string();
        assert!(error.contains("taken"), "{name}: {error}");
    }
    assert!(names_in(parent.path()).is_empty());
}

#[test]
fn an_existing_folder_is_not_changed() {
    let parent = TempDir::new().unwrap();
    fs::create_dir(parent.path().join("mine")).unwrap();
    let error = new("mine", parent.path(), None).unwrap_err().to_string();
    assert!(error.contains("already exists"), "{error}");
    assert!(names_in(&parent.path().join("mine")).is_empty());
}

#[test]
fn nothing_is_left_behind_if_writing_fails() {
    let parent = TempDir::new().unwrap();
    let missing = parent.path().join("missing");
    let error = new("mine", &missing, None).unwrap_err();
    assert!(
        format!("{error:#}").contains("cannot write the crate mine"),
        "{error:#}"
    );
    assert!(names_in(parent.path()).is_empty());
}

#[test]
fn without_a_checkout_the_crate_depends_on_the_git_repository_and_not_on_an_unpublished_version() {
    let dependency = sdk_dependency(None, Path::new("/nowhere/sdk")).unwrap();
    let manifest = FILES[0].1.replace("{sdk}", &dependency);
    let manifest: toml::Table = manifest.parse().unwrap();
    let expected = toml::Value::from("https://github.com/rouse-jobs/rouse");
    assert_eq!(
        manifest["dependencies"]["rouse-sdk"],
        toml::Value::Table([("git".to_owned(), expected)].into_iter().collect())
    );
}

#[test]
fn a_folder_that_is_not_the_sdk_is_refused() {
    let parent = TempDir::new().unwrap();
    let other = parent.path().join("other");
    let error = new("mine", parent.path(), Some(&other)).unwrap_err();
    assert!(error.to_string().contains("there is no SDK at"), "{error}");
    fs::create_dir(&other).unwrap();
    let error = new("mine", parent.path(), Some(&other)).unwrap_err();
    assert!(error.to_string().contains("is not the SDK"), "{error}");
    assert_eq!(names_in(parent.path()), ["other"]);
}
