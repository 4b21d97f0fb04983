//! `rouse dev` on the first day.

use std::os::unix::process::CommandExt as _;

use serde_json::{Value, json};

use crate::support::worker::{TIMEOUT, ended, enqueue};
use crate::support::{CommandOutput, Host, folder, on_terminal_until, scratch};

#[test]
fn handlers_show_uses_the_handlers_folder_of_a_running_dev() {
    let here = scratch("dev-here");
    let elsewhere = folder("[handlers.noop]\nmax_attempts = 17\n", &["noop.wasm"]);
    std::fs::rename(elsewhere.join("rouse.toml"), elsewhere.join("dev.toml")).unwrap();
    let (config, handlers) = (elsewhere.join("dev.toml"), elsewhere.join("handlers-wasm"));
    let rouse = |args: &[&str]| {
        let mut command = crate::support::command_without_database(args, &here);
        command.env_remove("ROUSE_DATA_DIR");
        command
    };
    let mut dev = rouse(&["dev", "--config"]);
    dev.arg(&config).arg("--handlers").arg(&handlers);
    // In a process group of its own, as in another terminal.
    dev.process_group(0);
    let dev = Host::spawn(dev);
    dev.line(TIMEOUT, |line| line.contains("worker started"));

    let shown = CommandOutput::run(&mut rouse(&["handlers", "show", "noop"]));
    shown
        .exits(0)
        .prints("with which the `rouse dev` here was started")
        .prints(config.to_str().unwrap())
        .prints("17");
    CommandOutput::run(&mut rouse(&["handlers"]))
        .exits(0)
        .prints("with the settings of the `rouse dev` here")
        .prints("17");
    // An explicit setting takes precedence.
    std::fs::write(
        here.join("own.toml"),
        "[handlers.noop]\nmax_attempts = 23\n",
    )
    .unwrap();
    let named = ["handlers", "show", "noop", "--config", "own.toml"];
    CommandOutput::run(&mut rouse(&named)).exits(0).prints("23");
    dev.stop();
    // The folder is no longer served.
    let gone = CommandOutput::run(&mut rouse(&["handlers"]));
    gone.exits(1).prints("there is no folder handlers-wasm");
}

#[test]
fn dev_keeps_a_summary_below_the_lines_of_jobs_on_a_terminal() {
    let folder = folder("", &["noop.wasm"]);
    let rouse = |args: &[&str]| {
        let mut command = crate::support::command_without_database(args, &folder);
        command.env_remove("ROUSE_DATA_DIR");
        command
    };
    let mut dev = rouse(&["dev", "--http", "off"]);
    dev.env("NO_COLOR", "1");
    let watched = std::thread::spawn(move || on_terminal_until(dev, "0 running · 1 succeeded"));
    let until = std::time::Instant::now() + TIMEOUT;
    // The command fails until the database runs.
    while !rouse(&["enqueue", "noop"])
        .output()
        .unwrap()
        .status
        .success()
    {
        assert!(std::time::Instant::now() < until);
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let written = watched.join().unwrap();
    let (_, below) = written
        .split_once("job 1  noop  succeeded")
        .expect("the line of the job");
    assert!(below.contains("0 running · 1 succeeded"), "{written}");
    assert!(written.contains("ready:"), "{written}");
}

#[test]
fn dev_continues_when_its_standard_output_cannot_be_written() {
    let folder = folder("", &["noop.wasm"]);
    let rouse = |args: &[&str]| {
        let mut command = crate::support::command_without_database(args, &folder);
        command.env_remove("ROUSE_DATA_DIR");
        command
    };
    let dev = rouse(&["dev", "--http", "off"]);
    // `Host` reads both streams of the shell; `rouse`, which replaces it, writes one of them elsewhere.
    let mut shell = std::process::Command::new("sh");
    shell
        .args(["-c", "exec \"$0\" \"$@\" >/dev/full"])
        .arg(dev.get_program())
        .args(dev.get_args())
        .current_dir(&folder);
    for (name, value) in dev.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let dev = Host::spawn(shell);
    dev.line(TIMEOUT, |line| line.contains("worker started"));
    let ran = CommandOutput::run(&mut rouse(&["enqueue", "noop", "--json"]));
    let id = ran.exits(0).json()["id"].to_string();
    CommandOutput::run(&mut rouse(&["job", &id, "--wait"]))
        .exits(0)
        .prints("succeeded");
    dev.stop();
}

#[tokio::test]
async fn dev_prints_the_progress_of_jobs() {
    let folder = folder(
        "[handlers.\"test.fail\"]\nmax_attempts = 2\nretry_initial = \"1ms\"\nretry_max = \"1ms\"\n",
        &["noop.wasm", "test_guests.wasm"],
    );
    for json in [false, true] {
        let mut args = vec!["dev", "--data-dir", "pg", "--http", "off"];
        args.extend(json.then_some("--json"));
        let mut command = crate::support::command_without_database(&args, &folder);
        command.env("ROUSE_LOG", "info,rouse::job=off");
        let dev = Host::spawn(command);
        let url = match json {
            true => {
                let ready = dev.line(TIMEOUT, |line| line.contains("\"ready\""));
                let ready: Value = serde_json::from_str(&ready).unwrap();
                ready["url"].as_str().unwrap().to_owned()
            }
            false => dev
                .line(TIMEOUT, |line| line.starts_with("postgres: "))
                .trim_start_matches("postgres: ")
                .to_owned(),
        };
        dev.line(TIMEOUT, |line| line.contains("worker started"));
        let client = crate::support::connect(&url).await;
        let done = enqueue(&client, "noop", json!({"n": 1})).await;
        let fails = enqueue(&client, "test.fail", json!({"as": "retryable"})).await;
        for id in [done, fails] {
            ended(&client, id).await;
        }
        let line = |id: i64, part: &str| {
            let of = |line: &str| match json {
                true => {
                    let event: Value = serde_json::from_str(line).unwrap_or_default();
                    event["event"] == "job" && event["id"] == id && line.contains(part)
                }
                false => line.starts_with(&format!("job {id}  ")) && line.contains(part),
            };
            dev.line(TIMEOUT, of)
        };
        match json {
            true => {
                let event: Value = serde_json::from_str(&line(done, "succeeded")).unwrap();
                assert_eq!(
                    (&event["handler"], &event["attempt"]),
                    (&json!("noop"), &json!(1))
                );
                assert!(event["duration_ms"].is_u64(), "{event}");
                let retried: Value = serde_json::from_str(&line(fails, "\"retried\"")).unwrap();
                assert!(retried["next_in_ms"].is_u64(), "{retried}");
                let failed: Value = serde_json::from_str(&line(fails, "\"failed\"")).unwrap();
                assert_eq!(failed["error"]["kind"], "guest_error", "{failed}");
            }
            false => {
                let ended = line(done, "noop  succeeded after ");
                let (_, unit) = ended.rsplit_once(' ').expect("a duration");
                assert!(["ms", "s"].contains(&unit), "{ended}");
                line(fails, "test.fail  failed after");
                line(fails, "attempt 1 of 2, next in ");
                line(fails, "attempt 2 of 2: guest_error: ");
            }
        }
        // A flood is reported with a few lines and with counts of the other jobs.
        let flood = "SELECT count(rouse.enqueue('noop')) FROM generate_series(1, 2000)";
        client.query(flood, &[]).await.unwrap();
        dev.line(TIMEOUT, |line| match json {
            true => line.contains("\"event\":\"jobs\"") && line.contains("\"succeeded\":"),
            false => line.contains(" in the last second: ") && line.contains("succeeded"),
        });
        crate::support::worker::until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)")
            .await;
        let output = dev.stop();
        let is_line = |line: &&str| line.starts_with("job ") || line.contains("\"event\":\"job\"");
        let lines = output.lines().filter(is_line).count();
        assert!(lines < 1000, "{lines} lines for 2,003 jobs");
        let more = |line: &str| {
            let digits = line.trim_start_matches(|c: char| !c.is_ascii_digit());
            digits
                .split(|c: char| !c.is_ascii_digit())
                .next()?
                .parse::<usize>()
                .ok()
        };
        let counted: usize = output
            .lines()
            .filter(|line| {
                line.contains(" in the last second: ") || line.contains("\"event\":\"jobs\"")
            })
            .filter_map(|line| match json {
                true => serde_json::from_str::<Value>(line).unwrap()["more"]
                    .as_u64()?
                    .try_into()
                    .ok(),
                false => more(line),
            })
            .sum();
        // The job that was tried again ended twice.
        assert_eq!(lines + counted, 2003, "{output}");
    }
}
