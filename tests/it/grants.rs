//! Variables, settings and clocks of handlers: requested, granted and missing.

use std::sync::Arc;

use rouse::job::RunEnd;
use rouse::sandbox::{AbortHandle, Capability, Limits, Sandbox, Settings};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::http_out::Guests;
use crate::sandbox_guest::{Handlers, TIMEOUT, guest_of_wasip1, job, manifest};
use crate::support::{
    Host, attempt, command_without_database, folder, folder_of, rouse_binary,
    rouse_without_database, show_handler,
};

fn sandbox() -> Arc<Sandbox> {
    let settings = Settings {
        attempts_max: 4,
        limits: Limits {
            memory_bytes: 16 << 20,
            ..Limits::default()
        },
        env: [
            ("*".into(), [("WIDE".into(), "1".into())].into()),
            (
                "test.own".into(),
                [("GREETING".into(), "hello = you".into())].into(),
            ),
        ]
        .into(),
        handler_settings: [("test.own".into(), json!({"threshold": 3}))].into(),
        fine_clocks: [("test.own".into(), true)].into(),
        compiler: Some(rouse_binary()),
        ..Settings::default()
    };
    Sandbox::start(settings).expect("a sandbox")
}

/// The results of handlers with these names and this body.
async fn results_of(imports: &str, body: &str, names: &[&str]) -> Vec<String> {
    let sandbox = sandbox();
    let mut all = Vec::new();
    for name in names {
        let guest = guest_of_wasip1(imports, &manifest(name, "1"), body);
        let handlers = Handlers::on(sandbox.clone(), &[("guest.wasm", &guest)]).await;
        let running = attempt(
            &sandbox,
            &handlers.handler(name),
            job("{}"),
            AbortHandle::new(),
        );
        match timeout(TIMEOUT, running)
            .await
            .expect("the end of the run")
            .end
        {
            RunEnd::Returned(bytes) => all.push(String::from_utf8(bytes).expect("text")),
            end => panic!("expected a result, got {end:?}"),
        }
    }
    all
}

#[tokio::test]
async fn a_handler_sees_its_own_variables_and_none_of_the_hosts() {
    assert!(
        std::env::vars_os().count() > 0,
        "this process has variables"
    );
    let imports = r#"
        (import "wasi_snapshot_preview1" "environ_sizes_get" (func $sizes (param i32 i32) (result i32)))
        (import "wasi_snapshot_preview1" "environ_get" (func $environ (param i32 i32) (result i32)))"#;
    let body = "
        (drop (call $sizes (i32.const 300) (i32.const 304)))
        (drop (call $environ (i32.const 400) (i32.const 8192)))
        (call $return_ok (i32.const 8192) (i32.load (i32.const 304)))";
    // If several tables match, only one counts.
    assert_eq!(
        results_of(imports, body, &["test.own", "other"]).await,
        ["GREETING=hello = you\0", "WIDE=1\0"]
    );
}

#[tokio::test]
async fn a_handler_gets_its_own_settings() {
    let imports = r#"(import "rouse:handler/settings@0.1.0" "all" (func $all (param i32)))"#;
    let body = "
        (call $all (i32.const 300))
        (call $return_ok (i32.load (i32.const 300)) (i32.load (i32.const 304)))";
    assert_eq!(
        results_of(imports, body, &["test.own", "other"]).await,
        [r#"{"threshold":3}"#, "{}"]
    );
}

#[tokio::test]
async fn clocks_are_coarse_unless_fine_ones_are_granted() {
    let imports = r#"
        (import "wasi_snapshot_preview1" "clock_time_get" (func $now (param i32 i64 i32) (result i32)))
        (import "wasi_snapshot_preview1" "clock_res_get" (func $resolution (param i32 i32) (result i32)))"#;
    // Returns 1 if any of a thousand readings of either clock is not a whole millisecond; then the resolutions that the
    // clocks report.
    let body = "
        (local $left i32) (local $clock i32) (local $odd i32)
        (local.set $left (i32.const 1000))
        (loop $again
            (local.set $clock (i32.and (local.get $left) (i32.const 1)))
            (drop (call $now (local.get $clock) (i64.const 0) (i32.const 304)))
            (local.set $odd (i32.or (local.get $odd)
                (i64.ne (i64.const 0) (i64.rem_u (i64.load (i32.const 304)) (i64.const 1000000)))))
            (local.set $left (i32.sub (local.get $left) (i32.const 1)))
            (br_if $again (local.get $left)))
        (i32.store8 (i32.const 400) (i32.add (i32.const 48) (local.get $odd)))
        (drop (call $resolution (i32.const 1) (i32.const 304)))
        (i32.store8 (i32.const 401) (i32.add (i32.const 48) (i64.eq (i64.load (i32.const 304)) (i64.const 1000000))))
        (call $return_ok (i32.const 400) (i32.const 2))";
    assert_eq!(
        results_of(imports, body, &["other", "test.own"]).await,
        ["01", "10"]
    );
}

#[tokio::test]
async fn settings_and_variables_reach_a_handler_built_with_the_sdk() {
    let guests = Guests::start(Settings {
        env: [(
            "test.settings".into(),
            [("GREETING".into(), "hello".into())].into(),
        )]
        .into(),
        handler_settings: [("test.settings".into(), json!({"threshold": 3}))].into(),
        ..Settings::default()
    })
    .await;
    for (variable, value) in [("GREETING", json!("hello")), ("PATH", Value::Null)] {
        let RunEnd::Returned(bytes) = guests
            .run("test.settings", json!({"variable": variable}))
            .await
        else {
            panic!("the handler has all its grants");
        };
        let result: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(result, json!({"threshold": 3, "variable": value}));
    }
    let without = Guests::start(Settings::default()).await;
    let RunEnd::Failed(failure) = without.run("test.settings", json!({"variable": "A"})).await
    else {
        panic!("the handler needs settings");
    };
    assert_eq!(
        (&*failure.kind, failure.permanent),
        ("invalid_settings", true)
    );
    for part in ["`threshold`", "[handlers.\"test.settings\".settings]"] {
        assert!(failure.message.contains(part), "{}", failure.message);
    }
}

#[tokio::test]
async fn missing_grants_are_shown_with_the_lines_that_add_them() {
    let requesting = r#"{"handlers":[{"name":"mail.send","capabilities":["http:api.example.com","http:*.example.org",
        "secrets:KEY","dirs:/out:read-write","env:LANG","env:TZ","settings:threshold","fine_clocks","of-the-future"]}]}"#;
    let guest = guest_of_wasip1(
        "",
        requesting,
        "(call $return_ok (i32.const 0) (i32.const 0))",
    );
    let config = "[[handlers.\"*\".http]]\nhosts = [\"*.example.com\"]\n";
    let dir = folder_of(config, &[("mail.wasm", guest)]);

    let ran = show_handler("mail.send", &dir, &[]);
    ran.exits(0);
    let manifest = show_handler("mail.send", &dir, &["--json"]).json()["manifest"].take();
    assert_eq!(manifest["granted"], json!(["http:*.example.com"]));
    assert_eq!(manifest["requested"].as_array().map(Vec::len), Some(9));
    let missing = |manifest: &Value| -> Vec<String> {
        let missing = manifest["missing"].as_array().expect("a list");
        missing
            .iter()
            .map(|grant| grant["what"].as_str().expect("a word").to_owned())
            .collect()
    };
    let others = [
        "http:*.example.org",
        "secrets:KEY",
        "dirs:/out:read-write",
        "env:LANG",
        "env:TZ",
        "settings:threshold",
        "fine_clocks",
        "of-the-future",
    ];
    assert_eq!(missing(&manifest), others);

    // A host that has loaded all modules logs each missing grant once.
    std::fs::write(
        dir.join("off.toml"),
        "queue = \"off\"\n[[handlers.\"*\".http]]\nhosts = [\"*.example.com\"]\n",
    )
    .unwrap();
    let serve = ["serve", "--config", "off.toml", "--http", "127.0.0.1:0"];
    let mut serve = command_without_database(&serve, &dir);
    serve.env("ROUSE_INVOKE_TOKEN", crate::invoke_http::TOKEN);
    let host = Host::spawn(serve);
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    assert_eq!(
        host.output().matches("request grants").count(),
        1,
        "{}",
        host.output()
    );
    host.line(TIMEOUT, |line| {
        line.contains("`rouse handlers show mail.send --config off.toml`")
    });
    host.kill();

    // The printed lines can be pasted into the file as they are, except for values that only the operator knows.
    let (_, lines) = ran
        .stdout
        .split_once("replace each … with a value\n")
        .expect("the lines to copy");
    let toml = dir.join("rouse.toml");
    let text = std::fs::read_to_string(&toml).unwrap()
        + &lines.replace("hosts = [\"…\"]", "hosts = [\"a.example\"]")
        + "\n";
    std::fs::write(&toml, text).unwrap();
    let manifest = show_handler("mail.send", &dir, &["--json"]).json()["manifest"].take();
    assert_eq!(missing(&manifest), ["of-the-future"]);
    assert!(Capability::FineClocks.to_string() == manifest["granted"][7]);
}

#[tokio::test]
async fn printed_lines_say_if_they_cannot_be_appended_to_the_file() {
    let requesting = r#"{"handlers":[{"name":"mail.send","capabilities":["dirs:/out","env:LANG","settings:threshold","state"]}]}"#;
    let guest = guest_of_wasip1(
        "",
        requesting,
        "(call $return_ok (i32.const 0) (i32.const 0))",
    );
    let config = "[handlers.\"*\".settings]\nwide = true\n[handlers.\"mail.send\"]\n\
                  dirs = [{ dir = \"in\", at = \"/in\" }]\n[handlers.\"mail.send\".env]\nTZ = \"UTC\"\n";
    let dir = folder_of(config, &[("mail.wasm", guest)]);
    let ran = show_handler("mail.send", &dir, &[]);
    ran.exits(0);
    for remark in [
        "# handlers.\"mail.send\".dirs is already in the file, on line 4: add this at the start of its list\n{ dir = \"…\", at = \"/out\" },",
        "# handlers.\"mail.send\".env is already in the file, on line 5: add these lines to that table",
        "# this replaces all of [handlers.\"*\".settings] for mail.send: what it has is repeated here; put this at the end of the file\n\
         [handlers.\"mail.send\".settings]\nthreshold = \"…\"\nwide = true\n",
        "\n\n[handlers.\"mail.send\".state]\n",
    ] {
        assert!(ran.stdout.contains(remark), "{remark}: {}", ran.stdout);
    }
}

#[tokio::test]
async fn the_lines_printed_for_http_deliver_allow_it_to_sign() {
    let dir = folder("", &["http_deliver.wasm"]);
    let ran = show_handler("http.deliver", &dir, &[]);
    ran.exits(0);
    let lines = "[[handlers.\"http.deliver\".secrets]]\nname = \"…\"\nsign = true";
    assert!(ran.stdout.contains(lines), "{}", ran.stdout);
    // The lines bind the name to that module, so that no other module gets the grant.
    let binding = "[handlers.\"http.deliver\"]\nmodule = \"http_deliver.wasm\"";
    assert!(ran.stdout.contains(binding), "{}", ran.stdout);
    let config = "[secrets.KEY]\nfile = \"key\"\n[handlers.\"http.deliver\"]\nmodule = \"http_deliver.wasm\"\nsecrets = [{ name = \"KEY\", sign = true }]\n";
    std::fs::write(dir.join("rouse.toml"), config).unwrap();
    let manifest = show_handler("http.deliver", &dir, &["--json"]).json()["manifest"].take();
    assert_eq!(manifest["granted"], json!(["sign:KEY"]));
}

#[test]
fn a_missing_granted_directory_is_warned_of_once_per_grant() {
    let config = r#"
        queue = "off"
        [handlers."mail.*"]
        dirs = [{ dir = "nowhere", at = "/in" }]
        [handlers."mail.send"]
        dirs = [{ dir = "nowhere", at = "/out" }]
    "#;
    let dir = folder(config, &[]);
    let serve = ["serve", "--http", "127.0.0.1:0"];
    let mut serve = command_without_database(&serve, &dir);
    serve.env("ROUSE_INVOKE_TOKEN", crate::invoke_http::TOKEN);
    let host = Host::spawn(serve);
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    let output = host.output();
    let lines = output.lines().filter(|line| line.contains("nowhere"));
    let warnings: Vec<&str> = lines.filter(|line| line.contains("WARN")).collect();
    assert_eq!(warnings.len(), 2, "{output}");
    for (handler, at) in [("mail.*", "/in"), ("mail.send", "/out")] {
        let of_grant = |line: &&str| line.contains(handler) && line.contains(at);
        let warning = warnings.iter().find(|line| of_grant(line)).expect(handler);
        assert!(warning.contains("which cannot be opened"), "{warning}");
    }
    host.kill();
}

#[test]
fn rouse_handlers_fails_on_errors_that_keep_a_host_from_starting() {
    let login = "[handlers.\"mail.send\".sql]\nlogin = { env = \"ROUSE_TEST_LOGIN\" }\nstatements = [\"mark\"]\n";
    for (config, variables, wanted) in [
        (
            "",
            &[("ROUSE_UI_VIEWER_TOKEN", "")][..],
            "ROUSE_UI_VIEWER_TOKEN is set but empty",
        ),
        (
            "",
            &[("ROUSE_FAIR_SHARE", "mail")],
            "ROUSE_FAIR_SHARE must be",
        ),
        (
            "",
            &[
                ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"),
                ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ],
            "OTEL_EXPORTER_OTLP_PROTOCOL is",
        ),
        // The states of jobs also need the token.
        (
            "invoke_max = 0\n",
            &[("ROUSE_INVOKE_TOKEN", "")],
            "ROUSE_INVOKE_TOKEN is set but empty",
        ),
        (login, &[], "read the login of [handlers.\"mail.send\".sql]"),
        (
            "worker_key_file = \"rouse.toml\"\n",
            &[],
            "others may read the worker key",
        ),
    ] {
        let dir = folder(config, &[]);
        for args in [
            &["handlers"][..],
            &["serve", "--no-queue", "--http", "127.0.0.1:0"],
        ] {
            let mut command = command_without_database(args, &dir);
            command.env("ROUSE_INVOKE_TOKEN", crate::invoke_http::TOKEN);
            command.envs(variables.iter().copied());
            let (status, output) = Host::spawn(command).exit(TIMEOUT);
            assert!(!status.success(), "{args:?}: {output}");
            assert!(output.contains(wanted), "{args:?}: {output}");
        }
    }
    // The host creates a missing key; the check does not.
    let dir = folder("worker_key_file = \"key\"\n", &[]);
    rouse_without_database(&["handlers"], &dir).exits(0);
    assert!(!dir.join("key").exists());
}
