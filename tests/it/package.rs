//! The .deb is installed into a Debian that contains nothing else, and the host in it runs a job.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rouse::postgres::{Server, Settings};

use crate::support::worker::{TIMEOUT, guests_dir};
use crate::support::{
    CommandOutput, Host, built, free_port, postgres_settings, rouse_binary, scratch, skip,
};

const UNIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../host/package/rouse.service");

/// The highest accepted rating of the unit by `systemd-analyze security`, from 0.0 (best) to 10.0, in tenths.
const EXPOSURE_MAX: u32 = 15;

/// The file that `cargo xtask test` has made for this test. `None`, with a printed reason, where it could not.
fn prepared(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("ROUSE_TEST_PACKAGE").map_or_else(
        || built("rouse").with_file_name("../test-package"),
        PathBuf::from,
    );
    let file = folder.join(name);
    let why = fs::read_to_string(file.with_extension("why"));
    if why.is_err() && file.is_file() {
        return Some(file);
    }
    let why = why.unwrap_or_else(|_| "`cargo xtask test package` makes it".to_owned());
    skip(&format!("there is no {}: {why}", file.display()));
    None
}

/// A Debian system for this test only; removed when dropped.
struct Debian {
    root: PathBuf,
}

impl Debian {
    fn unpack(archive: &Path) -> Self {
        let root = scratch("debian");
        let mut tar = Command::new("tar");
        tar.arg("-xpf").arg(archive).arg("-C").arg(&root);
        CommandOutput::run(&mut tar).exits(0);
        Self { root }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// A command in this Debian, as root, with /proc. Its mount ends with it, and its process id is that of the
    /// command.
    fn command(&self, args: &[&str]) -> Command {
        let script = r#"mount -t proc proc "$0/proc" && exec chroot "$0" "$@""#;
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", script])
            .arg(&self.root)
            .args(args)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    /// A command as rouse.service would run it: its user, and the variables of its unit and of its file.
    fn as_service(&self, args: &[&str]) -> Command {
        let as_user = [
            "setpriv",
            "--reuid=rouse",
            "--regid=rouse",
            "--clear-groups",
            "--no-new-privs",
        ];
        let mut command = self.command(&[&as_user[..], args].concat());
        let unit = self.read("/usr/lib/systemd/system/rouse.service");
        for file in values(&unit, "EnvironmentFile=") {
            let text = self.read(file);
            command.envs(text.lines().filter_map(|line| line.split_once('=')));
        }
        command.envs(values(&unit, "Environment=").filter_map(|pair| pair.split_once('=')));
        command
    }
}

impl Drop for Debian {
    fn drop(&mut self) {
        // The next run removes the remaining files.
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// The values that a unit sets for a key.
fn values<'a>(unit: &'a str, key: &str) -> impl Iterator<Item = &'a str> {
    unit.lines().filter_map(move |line| line.strip_prefix(key))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_installed_package_runs_a_job_and_leaves_nothing_when_it_is_purged() {
    let (Some(package), Some(archive)) = (prepared("rouse.deb"), prepared("debian.tar")) else {
        return;
    };
    let debian = Debian::unpack(&archive);
    let run = |args: &[&str]| CommandOutput::run(&mut debian.command(args));
    fs::copy(&package, debian.path("/rouse.deb")).unwrap();
    run(&["dpkg", "--install", "/rouse.deb"]).exits(0);
    run(&["rouse", "--version"])
        .exits(0)
        .prints(env!("CARGO_PKG_VERSION"));
    let mode = |path| {
        fs::metadata(debian.path(path))
            .unwrap()
            .permissions()
            .mode()
            & 0o7777
    };
    assert_eq!(mode("/etc/rouse/environment"), 0o600);
    assert_eq!(mode("/var/lib/rouse/handlers"), 0o755);
    // An upgrade keeps the permissions that the operator has set.
    run(&["chmod", "0751", "/var/lib/rouse/handlers"]).exits(0);
    run(&["dpkg", "--install", "/rouse.deb"]).exits(0);
    assert_eq!(mode("/var/lib/rouse/handlers"), 0o751);
    run(&["chmod", "0755", "/var/lib/rouse/handlers"]).exits(0);

    // The package is configured as an operator would configure it.
    let settings = Settings {
        port: Some(free_port()),
        ..postgres_settings(scratch("package").join("pg"))
    };
    let server = tokio::task::spawn_blocking(move || Server::start(&settings));
    let server = server.await.unwrap().unwrap();
    let url = server.tcp_url("postgres").unwrap();
    fs::write(
        debian.path("/etc/rouse/environment"),
        format!("DATABASE_URL={url}\n"),
    )
    .unwrap();
    let handler = "/var/lib/rouse/handlers/greet.wasm";
    fs::copy(guests_dir().join("greet.wasm"), debian.path(handler)).unwrap();
    CommandOutput::run(&mut debian.as_service(&["rouse", "migrate"])).exits(0);

    // The service starts as systemd would start it.
    let unit = debian.read("/usr/lib/systemd/system/rouse.service");
    let start: Vec<_> = values(&unit, "ExecStart=")
        .next()
        .unwrap()
        .split(' ')
        .collect();
    run(&[
        "install",
        "-d",
        "-o",
        "rouse",
        "-g",
        "rouse",
        "-m",
        "0700",
        "/var/cache/rouse",
        "/var/lib/rouse/state",
    ])
    .exits(0);
    run(&["touch", "/var/lib/rouse/state/worker.key"]).exits(0);
    let host = Host::spawn(debian.as_service(&[&start[..], &["--http", "off"]].concat()));
    host.line(TIMEOUT, |line| line.contains("demo.greet"));

    let ran = CommandOutput::run(&mut debian.as_service(&[
        "rouse",
        "enqueue",
        "demo.greet",
        r#"{"name": "Ada"}"#,
    ]));
    ran.exits(0);
    let client = crate::support::connect(&server.url("postgres")).await;
    let result = async {
        loop {
            let sql = "SELECT rouse.result(id)::text FROM rouse.finished";
            if let Some(row) = client.query_opt(sql, &[]).await.unwrap() {
                return row.get::<_, Option<String>>(0);
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    let result = tokio::time::timeout(TIMEOUT, result).await;
    let result = result.unwrap_or_else(|_| panic!("no job has ended:\n{}", host.output()));
    assert_eq!(result.as_deref(), Some(r#"{"text": "Hello, Ada!"}"#));

    host.stop();
    fs::remove_file(debian.path(handler)).unwrap();
    run(&["dpkg", "--purge", "rouse"]).exits(0);
    for path in [
        "/usr/bin/rouse",
        "/etc/rouse",
        "/var/lib/rouse",
        "/var/cache/rouse",
    ] {
        assert!(!debian.path(path).exists(), "{path} is left");
    }
    tokio::task::spawn_blocking(move || drop(server))
        .await
        .unwrap();
}

/// `systemd-analyze` with these arguments, on the unit with the binary that is tested; `None` if there is no systemd.
fn analyze(args: &[&str]) -> Option<CommandOutput> {
    let version = Command::new("systemd-analyze").arg("--version").output();
    if !version.is_ok_and(|output| output.status.success()) {
        skip("there is no systemd-analyze on this machine (apt-get install systemd)");
        return None;
    }
    let unit = fs::read_to_string(UNIT).unwrap();
    let unit = unit.replace("/usr/bin/rouse", rouse_binary().to_str().unwrap());
    let file = scratch("unit").join("rouse.service");
    fs::write(&file, unit).unwrap();
    Some(CommandOutput::run(
        Command::new("systemd-analyze").args(args).arg(&file),
    ))
}

#[test]
fn systemd_accepts_the_unit_without_a_warning() {
    let Some(ran) = analyze(&["verify", "--man=no", "--recursive-errors=no"]) else {
        return;
    };
    ran.exits(0);
    let of_ours = |line: &&str| line.contains("rouse.service");
    let warnings: Vec<_> = ran.stderr.lines().filter(of_ours).collect();
    assert_eq!(warnings, Vec::<&str>::new());
}

#[test]
fn the_unit_scores_as_hardened() {
    let threshold = format!("--threshold={EXPOSURE_MAX}");
    if let Some(ran) = analyze(&["security", "--offline=true", "--no-pager", &threshold]) {
        ran.exits(0);
    }
}
