//! The rules and the dashboard of `examples/monitoring` fit the metrics, and the metrics fit Prometheus.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::skip;

const FILES: [&str; 3] = [
    "recording.rules.yml",
    "alerts.rules.yml",
    "grafana-dashboard.json",
];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/monitoring")
}

fn read(file: &str) -> String {
    std::fs::read_to_string(folder().join(file)).unwrap()
}

/// `promtool`, to be run in the folder. `None`, after a message, if it is not installed.
fn promtool(args: &[&str]) -> Option<Command> {
    if Command::new("promtool").arg("--version").output().is_err() {
        skip("there is no promtool on this machine (apt-get install prometheus)");
        return None;
    }
    let mut command = Command::new("promtool");
    command.args(args).current_dir(folder());
    Some(command)
}

fn assert_accepts(args: &[&str]) {
    let Some(mut command) = promtool(args) else {
        return;
    };
    let output = command.output().unwrap();
    assert!(output.status.success(), "promtool {args:?}: {output:?}");
}

#[test]
fn promtool_accepts_the_configuration_and_each_alert_fires_in_its_tests() {
    assert_accepts(&["check", "config", "prometheus.yml"]);
    assert_accepts(&["test", "rules", "rules_test.yml"]);
    let tests = read("rules_test.yml");
    for line in read("alerts.rules.yml").lines() {
        if let Some(name) = line.trim().strip_prefix("- alert: ") {
            let test = format!("alertname: {name}\n");
            let tested = tests.split(&test).skip(1);
            let mut fires = tested.map(|rest| rest.lines().nth(1).unwrap_or_default());
            assert!(
                fires.any(|line| line.trim() == "exp_alerts:"),
                "there is no test in which {name} fires"
            );
        }
    }
}

/// The names of Rouse's metrics in a text.
fn metrics(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
    words.filter(|word| word.starts_with("rouse_")).collect()
}

#[test]
fn rules_and_dashboard_use_metrics_of_the_reference_page() {
    let page = include_str!("../../docs/reference/metrics.md");
    let known = metrics(page);
    for file in FILES {
        let text = read(file);
        for name in metrics(&text) {
            let base = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|end| name.strip_suffix(end))
                .filter(|base| known.contains(base));
            assert!(base.is_some() || known.contains(name), "{file}: {name}");
        }
    }
    let guide = include_str!("../../docs/guides/monitoring.md");
    for line in read("alerts.rules.yml").lines() {
        if let Some(name) = line.trim().strip_prefix("- alert: ") {
            let row = format!("| `{name}` |");
            assert!(guide.contains(&row), "the guide does not explain {name}");
        }
    }
}

#[test]
fn the_dashboard_has_queries_in_each_panel_and_recorded_names_exist() {
    let dashboard: Value = serde_json::from_str(&read("grafana-dashboard.json")).unwrap();
    let rules = read("recording.rules.yml");
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<i64> = panels
        .iter()
        .filter_map(|panel| panel["id"].as_i64())
        .collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{}", panel["title"]);
        for target in targets {
            let query = target["expr"].as_str().unwrap();
            let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
            for recorded in words.filter(|word| word.contains(":rouse_")) {
                let record = format!("record: {recorded}\n");
                assert!(rules.contains(&record), "no rule records {recorded}");
            }
        }
    }
}

/// Names, units and help strings follow the rules of Prometheus, on the page of a host that has run a job.
#[tokio::test]
async fn promtool_accepts_the_metrics_page_of_a_host() {
    let Some(mut command) = promtool(&["check", "metrics"]) else {
        return;
    };
    let page = crate::observed::metrics_page().await;
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(page.as_bytes()).unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}
