//! The settings in effect for a handler, and warnings about settings that match no handler.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::sandbox_guest::{TIMEOUT, echo, guest};
use crate::support::{
    Host, command_without_database, folder_of, rouse_without_database, show_handler,
};

const CONFIG: &str = r#"
[limits]
memory_mb = 64
[handlers."my.*"]
timeout = "10m"
fine_clocks = true
[handlers."my.*".limits]
memory_mb = 16
[handlers."my.*".env]
LANG = "C"
[handlers."my.*".settings]
width = 320
[handlers."my.busy"]
max_attempts = 7
[handlers."my.busy".limits]
cpu = "2s"
[handlers."my.busy".state]
keys_max = 7
[[handlers."my.busy".http]]
hosts = ["127.0.0.1"]
schemes = ["http"]
ports = [9911]
methods = ["GET", "POST"]
[[handlers."my.*".http]]
hosts = ["127.0.0.1"]
"#;

#[tokio::test]
async fn settings_in_effect_are_shown_with_their_table() {
    let manifest = r#"{"handlers":[{"name":"my.busy","lease_ms":30000,"timeout_ms":1000}]}"#;
    let busy = guest(manifest, "(call $return_ok (i32.const 0) (i32.const 0))");
    let dir = folder_of(CONFIG, &[("busy.wasm", busy)]);

    let shown = show_handler("my.busy", &dir, &["--json"]).json();
    let manifest = &shown["manifest"];
    let from = |key: &str| manifest["from"][key].as_str().unwrap_or_default();
    for (pointer, value, key, table) in [
        (
            "/limits/memory_mb",
            16,
            "limits.memory_mb",
            "[handlers.\"my.*\".limits]",
        ),
        (
            "/limits/memory_retry_mb",
            32,
            "limits.memory_retry_mb",
            "2 × memory_mb of [handlers.\"my.*\".limits]",
        ),
        (
            "/limits/cpu_ms",
            2000,
            "limits.cpu",
            "[handlers.\"my.busy\".limits]",
        ),
        ("/limits/steps", 1000, "limits.steps", "default"),
        ("/timeout_ms", 600_000, "timeout", "[handlers.\"my.*\"]"),
        ("/max_attempts", 7, "max_attempts", "[handlers.\"my.busy\"]"),
        ("/lease_ms", 30_000, "lease", "module"),
        ("/grace_ms", 5000, "grace", "default"),
        ("/retry_initial_ms", 10_000, "retry_initial", "default"),
        (
            "/state/keys_max",
            7,
            "state.keys_max",
            "[handlers.\"my.busy\".state]",
        ),
        ("/state/bytes_max", 1 << 20, "state.bytes_max", "default"),
    ] {
        assert_eq!(manifest.pointer(pointer), Some(&json!(value)), "{pointer}");
        assert_eq!(from(key), table, "{key}");
    }
    assert_eq!(manifest["instances"], "fresh");
    assert_eq!(
        manifest["granted"],
        json!([
            "http:127.0.0.1",
            "env:LANG",
            "settings:width",
            "state",
            "fine_clocks"
        ])
    );
    // The two grants differ in their schemes.
    assert_eq!(manifest["grants"]["http"][0]["schemes"], json!(["https"]));
    assert_eq!(
        manifest["grants"]["http"][1],
        json!({
            "from": "[[handlers.\"my.busy\".http]]", "hosts": ["127.0.0.1"], "schemes": ["http"], "ports": [9911],
            "methods": ["GET", "POST"], "private": false,
        })
    );

    let text = show_handler("my.busy", &dir, &[]);
    let line = |part: &str| {
        let line = text.stdout.lines().find(|line| line.contains(part));
        line.unwrap_or_else(|| panic!("{part}: {}", text.stdout))
    };
    assert!(line("limits.memory_mb").contains("16"));
    assert!(line("limits.cpu").contains("\"2s\""));
    assert!(line("http://127.0.0.1:9911 GET,POST").contains("[[handlers.\"my.busy\".http]]"));
    assert!(line("https://127.0.0.1 with any method").contains("[[handlers.\"my.*\".http]]"));
    assert!(line("env:LANG").contains("[handlers.\"my.*\".env]"));
    assert!(line("settings:width").contains("[handlers.\"my.*\".settings]"));
    assert!(line("fine_clocks").contains("[handlers.\"my.*\"]"));
    assert_eq!(
        text.stdout.matches("fine_clocks").count(),
        1,
        "once, as a grant"
    );
    text.prints(
        "grants and settings as in rouse.toml; a host that was started with another --config",
    );

    std::fs::rename(dir.join("rouse.toml"), dir.join("other.toml")).unwrap();
    show_handler("my.busy", &dir, &[]).prints("grants and settings without any rouse.toml");
    let other = show_handler("my.busy", &dir, &["--config", "other.toml"]);
    other
        .exits(0)
        .prints("grants and settings as in other.toml");
}

#[tokio::test]
async fn the_example_on_the_page_has_the_effect_its_comments_describe() {
    let page = include_str!("../../docs/guides/handlers.md");
    let (_, section) = page.split_once("### Which table counts").unwrap();
    let (_, example) = section.split_once("```toml\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    let manifest = r#"{"handlers":[{"name":"my.busy"}]}"#;
    let busy = guest(manifest, "(call $return_ok (i32.const 0) (i32.const 0))");
    let dir = folder_of(example, &[("busy.wasm", busy)]);
    let shown = show_handler("my.busy", &dir, &["--json"]).json();
    let limits = &shown["manifest"]["limits"];
    let limits = ["memory_mb", "memory_retry_mb", "cpu_ms"].map(|key| limits[key].as_u64());
    assert_eq!(limits, [Some(16), Some(32), Some(2000)]);
    assert_eq!(
        shown["manifest"]["granted"],
        json!(["http:a.example", "http:b.example", "env:LANG"])
    );
}

/// Every limit, each set to a distinct value that is not the default.
const LIMITS: &str = r#"[limits]
memory_mb = 64
memory_retry_mb = 96
cpu = "2s"
result_bytes = 2001
log_bytes = 2002
log_lines_per_second = 2003
table_elements = 2004
hostcall_bytes = 70000
files = 2005
resources = 2006
handles = 2007
random_bytes = 2008
steps = 2009
step_bytes = 2010
steps_bytes = 2011
http_requests = 2012
http_bytes = 2013
http_body_bytes = 2014
state_calls = 2015
state_bytes = 2016
jobs = 2017
jobs_bytes = 2018
effects = 2019
effects_bytes = 2020
queries = 2021
"#;

#[tokio::test]
async fn every_limit_that_the_file_may_set_is_shown() {
    let manifest = r#"{"handlers":[{"name":"my.busy"}]}"#;
    let busy = guest(manifest, "(call $return_ok (i32.const 0) (i32.const 0))");
    let dir = folder_of("[limits]\nno_such = 1\n", &[("busy.wasm", busy)]);
    let refused = show_handler("my.busy", &dir, &[]).stderr;
    let (_, known) = refused
        .split_once("expected one of ")
        .unwrap_or_else(|| panic!("the keys are not named: {refused}"));
    let known: BTreeSet<&str> = known.split('`').skip(1).step_by(2).collect();
    let set = LIMITS.lines().filter_map(|line| line.split_once(" = "));
    let set: BTreeMap<&str, &str> = set.collect();
    assert!(
        known.iter().eq(set.keys()),
        "LIMITS does not contain all of {known:?}"
    );

    std::fs::write(dir.join("rouse.toml"), LIMITS).unwrap();
    let shown = show_handler("my.busy", &dir, &["--json"]).json();
    let manifest = &shown["manifest"];
    for (key, value) in &set {
        let (name, value) = match *key {
            "cpu" => ("cpu_ms", "2000"),
            key => (key, *value),
        };
        assert_eq!(manifest["limits"][name].to_string(), value, "{key}");
        let from = &manifest["from"][format!("limits.{key}")];
        assert_eq!(from, "[limits]", "{key}");
    }
    let limits = manifest["limits"].as_object().map(serde_json::Map::len);
    assert_eq!(limits, Some(set.len()));
}

#[tokio::test]
async fn settings_for_unknown_handlers_are_warned_of_once() {
    let config = "queue = \"off\"\n[sources]\ncron = \"no.such\"\n[handlers.\"*\"]\nlease = \"5s\"\n\
                  [handlers.\"mial.send\"]\nlease = \"5s\"\n[handlers.\"mail.*\"]\nlease = \"5s\"\n\
                  [handlers.\"mail.send\"]\ninstances = \"reuse\"\n";
    let dir = folder_of(config, &[("mail.wasm", echo("mail.send", "1"))]);
    let table = "[handlers.\"mial.send\"] in rouse.toml matches no handler";
    let source = "cron of [sources] in rouse.toml names no.such";
    let listed = rouse_without_database(&["handlers", "--json"], &dir);
    listed.exits(0).prints(table).prints(source);
    assert_eq!(
        listed.stderr.matches("in rouse.toml ").count(),
        2,
        "{}",
        listed.stderr
    );
    assert_eq!(
        listed.json()["handlers"][0]["name"],
        Value::from("mail.send")
    );

    let serve = ["serve", "--http", "127.0.0.1:0"];
    let mut serve = command_without_database(&serve, &dir);
    serve.env("ROUSE_INVOKE_TOKEN", crate::invoke_http::TOKEN);
    let host = Host::spawn(serve);
    host.line(TIMEOUT, |line| line.contains(source));
    host.line(TIMEOUT, |line| {
        line.contains("WARN") && line.contains("instances = \"reuse\"")
    });
    host.line(TIMEOUT, |line| line.contains("modules loaded"));

    // The folder changes: earlier warnings are not repeated, and new ones are logged.
    let handlers = dir.join("handlers-wasm");
    std::fs::write(handlers.join(".other"), echo("other", "1")).unwrap();
    std::fs::rename(handlers.join(".other"), handlers.join("other.wasm")).unwrap();
    host.line(TIMEOUT, |line| line.contains("other.wasm"));
    std::fs::remove_file(handlers.join("mail.wasm")).unwrap();
    for gone in ["mail.*", "mail.send"] {
        let table = format!("[handlers.\"{gone}\"] in rouse.toml matches no handler");
        host.line(TIMEOUT, |line| line.contains(&table));
    }
    let output = host.output();
    assert_eq!(output.matches(table).count(), 1, "{output}");
    assert_eq!(output.matches(source).count(), 1, "{output}");
    host.kill();
}

#[tokio::test]
async fn jitter_and_the_delay_between_jobs_can_be_set_like_other_settings() {
    let manifest = r#"{"handlers":[{"name":"my.busy","retry_jitter":0.5}]}"#;
    let busy = || guest(manifest, "(call $return_ok (i32.const 0) (i32.const 0))");
    let shown = |config: &str| {
        let dir = folder_of(config, &[("busy.wasm", busy())]);
        show_handler("my.busy", &dir, &["--json"])
    };
    let module = shown("").json();
    assert_eq!(module["manifest"]["retry_jitter"], 0.5);
    assert_eq!(module["manifest"]["from"]["retry_jitter"], "module");
    assert_eq!(module["manifest"]["job_delay_ms"], 0);
    let table = "[handlers.\"my.*\"]";
    let set = shown(&format!(
        "job_delay = \"1s\"\n{table}\nretry_jitter = 0\njob_delay = \"2s\"\n"
    ))
    .json();
    assert_eq!(set["manifest"]["retry_jitter"], 0.0);
    assert_eq!(set["manifest"]["from"]["retry_jitter"], table);
    assert_eq!(set["manifest"]["job_delay_ms"], 2000);
    assert_eq!(set["manifest"]["from"]["job_delay"], table);
    for (invalid, expected) in [
        ("retry_jitter = 1.5", "retry_jitter must be between 0 and 1"),
        (
            "job_delay = \"2h\"",
            "job_delay must be between 0s and 1h, not 2h",
        ),
    ] {
        shown(&format!("{table}\n{invalid}\n"))
            .exits(1)
            .prints(expected);
    }
}
