//! Granted requests and secrets. No error contains a secret.

use std::path::Path;

use super::read;
use crate::config::{Environment, File};
use crate::sandbox::HttpScheme;

#[test]
fn requests_and_secrets_are_granted_by_handler() {
    let file = read(
        "[secrets.KEY]\nenv = \"PATH\"\n[[handlers.\"mail.*\".http]]\nhosts = [\"api.example.com\", \"*.example.org\"]\n[handlers.\"mail.send\"]\nsecrets = [{ name = \"KEY\", hosts = [\"api.example.com\"], headers = [\"Authorization\"] }]",
    )
    .unwrap();
    let folder = Path::new("/etc/rouse");
    let sandbox = file.sandbox(folder, 4);
    let grant = &sandbox.http_grants[0];
    assert_eq!(grant.handler, "mail.*");
    assert_eq!(grant.schemes, [HttpScheme::Https]);
    assert!(!grant.private && grant.ports.is_empty() && grant.methods.is_empty());
    let grant = &sandbox.secret_grants[0];
    assert_eq!((grant.handler.as_str(), grant.body), ("mail.send", false));
    assert_eq!(grant.headers, ["authorization"]);
    let secrets = file.secrets(folder, Environment, None).unwrap();
    assert!(secrets.0.contains_key("KEY"));
    assert!(!format!("{secrets:?}").contains("/bin"));
    let secrets_of = |file: &File, of| file.secrets(folder, Environment, Some(of)).unwrap();
    assert_eq!(secrets_of(&file, "mail.send"), secrets);
    assert!(secrets_of(&file, "mail.read").0.is_empty());

    let file = read("[secrets.KEY]\nenv = \"ROUSE_NOBODY_SETS_THIS\"").unwrap();
    assert!(secrets_of(&file, "mail.send").0.is_empty());
    let error = file.secrets(folder, Environment, None).unwrap_err();
    let text = format!("{error:#}");
    assert!(
        text.contains("secrets.KEY") && text.contains("ROUSE_NOBODY_SETS_THIS"),
        "{text}"
    );
}

#[test]
fn a_secret_that_handlers_sign_with_needs_no_host_and_must_be_a_key() {
    let text = "[secrets.KEY]\nfile = \"key\"\n[handlers.\"http.deliver\"]\nsecrets = [{ name = \"KEY\", sign = true }]";
    let file = read(text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let grant = &file.sandbox(folder.path(), 4).secret_grants[0];
    assert!(grant.sign && grant.hosts.is_empty() && !grant.body);
    let secrets = |key: &str| {
        let path = folder.path().join("key");
        std::fs::write(&path, key).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, mode).unwrap();
        file.secrets(folder.path(), Environment, None)
    };
    assert!(secrets("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").is_ok());
    let error = format!("{:#}", secrets("whsec_no base64").unwrap_err());
    assert!(
        error.contains("secrets.KEY") && error.contains("base64"),
        "{error}"
    );
}

#[test]
fn invalid_hosts_are_refused_by_name_when_the_file_is_read() {
    let long = format!("{}.example", "a".repeat(64));
    let longest = [&*"a".repeat(63); 4].join(".");
    for host in [
        "a..b",
        ".a",
        "a.b..",
        "",
        ".",
        "*.",
        "*..a",
        "*.*.a",
        "a.*",
        "a.example/",
        "a.example:443",
        "https://a.example",
        "a.example ",
        "a.example?x",
        "-a.example",
        "a-.example",
        "ü.example",
        "[::1",
        "::1%eth0",
        "1.2.3",
        "0x7f.1",
        &long,
        &longest,
    ] {
        for text in [
            format!("[[handlers.x.http]]\nhosts = [\"b.example\", \"{host}\"]"),
            format!(
                "[secrets.K]\nenv = \"A\"\n[handlers.x]\nsecrets = [{{ name = \"K\", hosts = [\"{host}\"], body = true }}]"
            ),
        ] {
            let error = read(&text).expect_err(host);
            assert!(error.contains(&format!("the host {host:?}:")), "{error}");
        }
    }
}

#[test]
fn errors_never_contain_a_secret() {
    for text in [
        "[secrets.KEY]\nvalue = \"hunter2hunter2\"",
        "[secrets]\nKEY = { secret = \"hunter2hunter2\" }",
        "[secrets]\nKEY = [\"hunter2hunter2\"]",
        "[secrets]\nKEY = hunter2hunter2",
        "secrets = \"hunter2hunter2\"",
        "secrets.KEY = \"hunter2hunter2",
        "[secrets.KEY]\nenv = [\"hunter2hunter2\"]",
        "[handlers.x]\nsecrets = [{ name = \"KEY\", value = \"hunter2hunter2\" }]",
        "[handlers.x]\nsecrets = \"hunter2hunter2, expected\"",
        "[[handlers.x.secrets]]\nname = \"KEY\"\nvalue = \"hunter2hunter2\"",
    ] {
        let message = read(text).unwrap_err();
        assert!(!message.contains("hunter2"), "{text}: {message}");
        assert!(
            message.contains("line ") || message.contains("secrets."),
            "{text}: {message}"
        );
    }
}

#[test]
fn a_secret_in_the_file_itself_is_not_repeated() {
    let message = read("[secrets]\nAPI_KEY = \"hunter2hunter2\"").unwrap_err();
    let words =
        "secrets.API_KEY must name where the secret is read from, not contain the secret itself";
    assert!(message.contains(words), "{message}");
    assert!(!message.contains("hunter2"), "{message}");
}
