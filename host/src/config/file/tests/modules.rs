//! Names that are bound to modules.

use crate::config::File;

#[test]
fn a_table_binds_its_names_to_one_module_or_to_several() {
    let folder = tempfile::tempdir().unwrap();
    let read = |text: &str| {
        let path = folder.path().join("rouse.toml");
        std::fs::write(&path, text).unwrap();
        File::read(Some(&path)).map(|(file, folder)| file.sandbox(&folder, 1))
    };
    let digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let settings = read(&format!(
        "[handlers.\"mail.send\"]\nmodule = \"mail.wasm\"\nversion_min = \"1.2.0\"\n\
         [handlers.\"mail.*\"]\nmodule = [\"mail.wasm\", \"sha256:{digest}\"]\n"
    ));
    let settings = settings.expect("a valid file");
    let bound = |name: &str| {
        let (_, to) = settings.bound(name).expect("it is bound");
        to.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(bound("mail.send"), ["mail.wasm"]);
    assert_eq!(
        bound("mail.read"),
        ["mail.wasm", &format!("sha256:{digest}")]
    );
    assert_eq!(settings.versions_min["mail.send"].to_string(), "1.2.0");
    for (line, words) in [
        ("module = \"mail\"", "does not name a module"),
        ("module = []", "or a list of these"),
        ("module = 7", "or a list of these"),
        ("module = [\"mail.wasm\", \"sha256:0\"]", "is not a sha256"),
        ("version_min = \"new\"", "is not a version such as"),
    ] {
        let error = read(&format!("[handlers.x]\n{line}\n")).expect_err("it is refused");
        assert!(error.to_string().contains(words), "{line}: {error}");
    }
}
